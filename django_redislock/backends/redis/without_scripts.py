"""The operations where scripting is forbidden: ``SET NX PX`` and optimistic transactions.

The keys hold the same as with scripts, so both kinds of client exclude each other. What is
missing is the queue: a release wakes nobody, and waiters come back by bounded backoff. And what
is not ours is read as a whole, where a script answers only its beginning.
"""

from __future__ import annotations

import hashlib
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.rules.flows import Call
    from django_redislock.rules.keys import Keys

DAY_MS = 86_400_000
REMEMBERED = 40  # Entries of past leases.
MOST_FINISHED = (
    10_000  # Task runs of one lock that are remembered, and locks of tasks in the index.
)
CLAIM_MS = 1000
NOTED_MS = 1500  # See lua/_past.lua.
RESENT_MS = 10_000  # Longer than any acquire is resent for.
SIGHT = 8192  # Bytes of a value that are answered.
ATTEMPTS = 32  # Transactions lost to others before the server counts as not answering.


# As read() in lua/_queue.lua.
_OURS = re.compile(rb".{32}[hck][r-]\d{5}[0-9a-fA-F]{16}\|\d+\|\d+\|\d+\|\d+\|[^|]*\|", re.DOTALL)
_SIZES = {
    "string": "STRLEN",
    "list": "LLEN",
    "set": "SCARD",
    "zset": "ZCARD",
    "hash": "HLEN",
    "stream": "XLEN",
}


class Ask(Protocol):
    """Runs one command and returns its reply, or raises its error, a ReplyError."""

    def __call__(self, *command: str | bytes | int) -> Any: ...


Commands = list[tuple[str | bytes | int, ...]]
# What an operation decided after reading: the commands of the transaction, and its answer.
Decision = tuple[Commands, Any]


def perform(step: Call, keys: Keys, ask: Ask) -> Any:
    """Run an operation, and return what its script would."""
    args = [arg.encode() if isinstance(arg, str) else arg for arg in step.args]
    decide = _OPERATIONS[step.script.name]
    for _ in range(ATTEMPTS):
        ask("WATCH", keys.lock, keys.fence, keys.done, keys.forced, keys.runs)
        in_transaction = False
        try:
            commands, answer = decide(keys, ask, args)
            if not commands:
                ask("UNWATCH")
                return answer
            ask("MULTI")
            in_transaction = True
            for command in commands:
                ask(*command)
            if ask("EXEC") is not None:
                return answer
        except ReplyError:
            # A connection in the middle of a transaction would swallow the next flow's commands.
            # A refused EXEC has ended it; what matters is why.
            with suppress(ReplyError):
                ask("DISCARD" if in_transaction else "UNWATCH")
            raise
    raise ConnectionError("the lock changed hands during every try of a transaction")


def _acquire(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    token, id, ttl, _, _, heed, renews, owner = args  # noqa: A001
    try:
        value = ask("GET", keys.lock)
    except Exception as error:
        if "WRONGTYPE" in str(error):
            ask("ZADD", keys.held, "+inf", keys.lock)  # So that lists show it.
        raise
    if pointless := heed and _why_pointless(keys, ask, heed):
        mine = value is not None and _is_held_by(value, token)
        return (_free(keys) if mine else []), pointless
    fence, now_us = ask("GET", keys.fence), _clock(ask)
    met: Commands = []
    if value is not None:
        if _is_held_by(value, token):
            _, given, since, *_ = value.split(b"|")
            claimed = value[32:33] == b"c"
            return [
                ("PEXPIRE", keys.lock, ttl, *(() if claimed else ("GT",))),
                ("SETRANGE", keys.lock, 32, "h"),
                *(_begin(keys, ask, b"", id, int(since), owner) if heed else []),
            ], given
        left = ask("PTTL", keys.lock)
        if left == -1:
            return [("ZADD", keys.held, "+inf", keys.lock)], [b"endless"]
        if not _is_ours(value):
            listed = ("ZADD", keys.held, now_us // 1000 + left, keys.lock)
            return [listed], [b"busy", left, value[:SIGHT]]
        met = _remember_met(keys, ask, value, now_us // 1000)
        lapsed = False
        if value[32:33] == b"c":
            lapsed = int(value.split(b"|")[4]) <= now_us // 1000
            left = max(left - CLAIM_MS, 1)
        if left > 0 and not lapsed:
            return met, [b"busy", left, value]
    next_fence = b"%d" % max(now_us, _number(fence) + 1)
    head = token + b"h" + renews + b"00000" + id
    since = b"%d" % (now_us // 1000)
    lease = b"|".join([head, next_fence, since, b"%d" % ttl, b"0", b"", owner])
    set_lock: tuple[str | bytes | int, ...] = ("SET", keys.lock, lease, "NX", "PX", ttl)
    return [
        *met,
        # A lapsed claim is still in its place.
        *([("DEL", keys.lock)] if value is not None else []),
        ("SET", keys.fence, next_fence, "PX", ttl + DAY_MS),
        set_lock,
        ("ZADD", keys.held, now_us // 1000 + ttl, keys.lock),
        *(_begin(keys, ask, b"", id, now_us // 1000, owner) if heed else []),
    ], next_fence


def _renew(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    token, ttl, count = args
    value = ask("GET", keys.lock)
    if value is None or not _is_held_by(value, token):
        return [], _absence(keys, ask, value, token)
    head, fence, since, granted, *rest = value.split(b"|", 6)
    longer = b"|".join([head, fence, since, b"%d" % max(ttl, int(granted)), *rest])
    newest = value[32:33] == b"c" or count[1:] > value[34:39]
    only_longer = () if newest else ("GT",)
    return [
        ("PEXPIRE", keys.lock, ttl, *only_longer),
        ("SETRANGE", keys.lock, 32, (b"h" + count if newest else value[32:39]) + longer[39:]),
        ("ZADD", keys.held, *only_longer, _clock(ask) // 1000 + ttl, keys.lock),
        *(_remember(keys, ask, value, b"", b"") if count[1:] == b"00001" else []),
    ], b"renewed"


def _release(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    (token,) = args
    value = ask("GET", keys.lock)
    if value is None or value[:32] != token:
        return [], _absence(keys, ask, value, token)
    return (_free(keys) if _is_held_by(value, token) else []), b"released"


def _conclude(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    token, min_hold, once, owner, ended, run, remembered = args
    value = ask("GET", keys.lock)
    if value is None or value[:32] != token:
        return [], _absence(keys, ask, value, token)
    if value[32:33] == b"k":
        return [], b"released"
    now = _clock(ask) // 1000
    left = min(int(value.split(b"|")[2]) + min_hold - now, min_hold)
    commands = _free(keys)
    if left > 0:
        commands = [
            ("PEXPIRE", keys.lock, left),
            ("SETRANGE", keys.lock, 32, "k"),
            ("ZADD", keys.held, now + left, keys.lock),
        ]
    if once > 0:
        commands.append(("SET", keys.done, b"%d|" % now + owner, "PX", once))
    if ended:
        commands += _remember(keys, ask, value, b"%d" % now, ended)
    if remembered > 0:
        lasted = now - int(value.split(b"|")[2])
        what = "success" if ended == b"done" else "failure"
        commands.append(("HDEL", keys.runs, "started"))
        commands += _note(keys, what, now, lasted, b"", owner)
        if ended == b"done" and run:
            commands += _finish_run(keys, _task_of(run), now, remembered)
    return commands, b"released"


def _leave(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    value = ask("GET", keys.lock)
    if value is None or not _is_held_by(value, args[0]):
        return [], 0
    never_was = value[34:39] == b"00000"
    return _free(keys) + (_forget(keys, ask, b"", value[39:55]) if never_was else []), 1


def _force_release(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    wanted, request = args
    forced = ask("GETRANGE", keys.forced, 0, SIGHT + 15)
    if forced[:16] == request:
        return [], [b"released", forced[16:]]
    value, id, strange = _sight(keys, ask)  # noqa: A001
    if not id:
        return [], [b"gone", b""]
    if id != wanted:
        return [], [b"taken", value]
    left = max(ask("PTTL", keys.lock), 0) + 60_000
    commands = [*_free(keys), ("SET", keys.forced, request + value, "PX", left)]
    if not strange:
        commands += _remember(keys, ask, value, b"%d" % (_clock(ask) // 1000), b"forced")
    return commands, [b"released", value]


def _look(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    value, id, strange = _sight(keys, ask)  # noqa: A001
    left, now = ask("PTTL", keys.lock), _clock(ask) // 1000
    commands = _remember_met(keys, ask, value, now) if not strange else []
    if not strange and value[32:33] == b"c" and left >= 0:
        left = max(left - CLAIM_MS, 1) if int(value.split(b"|")[4]) > now else -2
    if left == -2:
        value = id = strange = b""  # noqa: A001
        if float(ask("ZSCORE", keys.held, keys.lock) or 0) == math.inf:
            commands.append(("ZREM", keys.held, keys.lock))
    return commands, [value, left, 0, now, id, strange]


def _inspect(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    past = ask("LRANGE", keys.past, -REMEMBERED, -1)
    return [], [_clock(ask) // 1000, [], [entry[:SIGHT] for entry in past]]


def _names(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    which, offset, limit, last_first = args
    index, first = keys.ran, "-inf"
    if which == b"held":
        index, first = keys.held, str(_clock(ask) // 1000 - RESENT_MS)
    bounds = ("+inf", first, "BYSCORE", "REV") if last_first else (first, "+inf", "BYSCORE")
    total = ask("ZCOUNT", index, first, "+inf")
    return [], [total, ask("ZRANGE", index, *bounds, "LIMIT", offset, limit)]


def _skip(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    why, owner = args
    skips = int(ask("HGET", keys.runs, "skips") or 0) + 1
    return _note(keys, "skip", _clock(ask) // 1000, 0, why, owner), skips


def _start(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    permit, id, owner = args  # noqa: A001
    return _begin(keys, ask, permit, id, _clock(ask) // 1000, owner), 1


def _finish(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    what, lasted, owner, run, remembered, permit, id = args  # noqa: A001
    now = _clock(ask) // 1000
    commands = _forget(keys, ask, permit, id)
    if what != b"retried":
        commands += _note(keys, what.decode(), now, lasted, b"", owner)
    if what != b"failure" and run:
        finished = _task_of(run) if what == b"success" else run
        commands += _finish_run(keys, finished, now, remembered)
    return commands, 1


def _finished(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    pointless = _why_pointless(keys, ask, b"0" + args[0])
    return [], pointless[1] if pointless else -1


def _runs(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    fields = ask("HGETALL", keys.runs)
    if isinstance(fields, list):  # Until RESP3, which has maps.
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    notes = [fields.get(what, b"") for what in (b"success", b"failure", b"skip", b"unended")]
    started = sorted(
        name.removeprefix(b"started") + b"|" + entry
        for name, entry in fields.items()
        if name.startswith(b"started")
    )
    now = _clock(ask) // 1000
    return [], [now, *notes, started, int(fields.get(b"skips", 0))]


def _announce(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    id, ttl = args  # noqa: A001
    now = _clock(ask) // 1000
    expiry, _, waiting = (ask("HGET", keys.runs, "queued") or b"").partition(b"|")
    if _number(expiry) > now and waiting != id:
        return [("HSET", keys.runs, "asked", now)], waiting
    return [
        ("HDEL", keys.runs, "asked"),
        ("HSET", keys.runs, "queued", b"%d|" % (now + ttl) + id),
        ("PEXPIRE", keys.runs, max(30 * DAY_MS, ttl)),
    ], b""


def _requeue(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    id, ttl = args  # noqa: A001
    if (ask("HGET", keys.runs, "queued") or b"").partition(b"|")[2] != id:
        return [], -1
    now, asked = _clock(ask) // 1000, ask("HGET", keys.runs, "asked")
    return [
        ("HSET", keys.runs, "queued", b"%d|" % (now + ttl) + id),
        ("PEXPIRE", keys.runs, max(30 * DAY_MS, ttl)),
    ], -1 if asked is None else now - _number(asked)


def _retract(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    waiting = (ask("HGET", keys.runs, "queued") or b"").partition(b"|")[2]
    mine = waiting == args[0]
    return ([("HDEL", keys.runs, "queued", "asked")] if mine else []), int(mine)


_OPERATIONS: dict[str, Callable[[Keys, Ask, list[Any]], Decision]] = {
    scripts.ACQUIRE.name: _acquire,
    scripts.RENEW.name: _renew,
    scripts.RELEASE.name: _release,
    scripts.CONCLUDE.name: _conclude,
    scripts.LEAVE.name: _leave,
    scripts.FORCE_RELEASE.name: _force_release,
    scripts.LOOK.name: _look,
    scripts.INSPECT.name: _inspect,
    scripts.NAMES.name: _names,
    scripts.SKIP.name: _skip,
    scripts.START.name: _start,
    scripts.FINISH.name: _finish,
    scripts.FINISHED.name: _finished,
    scripts.RUNS.name: _runs,
    scripts.ANNOUNCE.name: _announce,
    scripts.REQUEUE.name: _requeue,
    scripts.RETRACT.name: _retract,
}


def _free(keys: Keys) -> Commands:
    return [("DEL", keys.lock), ("ZREM", keys.held, keys.lock)]


def _remember(keys: Keys, ask: Ask, value: bytes, until: bytes, ended: bytes) -> Commands:
    head, fence, since, _, _, _, owner = value.split(b"|", 6)
    id = head[39:]  # noqa: A001
    entry = b"|".join([id, fence, since, until, ended, owner])
    add: Commands = [("RPUSH", keys.past, entry), ("LTRIM", keys.past, -REMEMBERED, -1)]
    if (ask("LINDEX", keys.past, -1) or b"").startswith(id + b"|"):
        if not ended:
            return []
        add = [("LSET", keys.past, -1, entry)]
    return [*add, ("PEXPIRE", keys.past, 2 * DAY_MS)]


def _remember_met(keys: Keys, ask: Ask, value: bytes, now: int) -> Commands:
    """See lua/_past.lua."""
    if not _is_ours(value) or value[34:39] != b"00000":
        return []
    _, _, since, _, claim, _ = value.split(b"|", 5)
    long = value[32:33] == b"h" and now - int(since) >= NOTED_MS
    lapsed = value[32:33] == b"c" and int(claim) <= now
    return _remember(keys, ask, value, b"", b"") if long or lapsed else []


def _why_pointless(keys: Keys, ask: Ask, heed: bytes) -> list[Any]:
    run = heed[1:]
    for id in dict.fromkeys((_task_of(run), run)) if run else ():  # noqa: A001
        if (finished := ask("ZSCORE", keys.finished, id)) is not None:
            return [b"finished", _clock(ask) // 1000 - int(float(finished))]
    done = ask("GET", keys.done) if heed[:1] == b"1" else None
    return [] if done is None else [b"done", done]


def _task_of(run: bytes) -> bytes:
    found = re.fullmatch(rb"(.*):[0-9]+[.][0-9]+", run, re.DOTALL)
    return found[1] if found else run


def _finish_run(keys: Keys, run: bytes, now: int, remembered: int) -> Commands:
    return [
        ("ZADD", keys.finished, now, run),
        ("ZREMRANGEBYSCORE", keys.finished, "-inf", now - remembered),
        ("ZREMRANGEBYRANK", keys.finished, 0, -MOST_FINISHED - 1),
        ("PEXPIRE", keys.finished, remembered),
    ]


def _note(keys: Keys, what: str, ms: int, lasted: int, why: bytes, owner: bytes) -> Commands:
    counts: Commands = []
    if what == "success":
        counts = [("HDEL", keys.runs, "skips")]
    elif what == "skip":
        counts = [("HINCRBY", keys.runs, "skips", 1)]
    return [
        ("HSET", keys.runs, what, b"%d|%d|%b|%b" % (ms, lasted, why, owner)),
        *counts,
        ("PEXPIRE", keys.runs, 30 * DAY_MS),
        ("ZADD", keys.ran, ms, keys.lock),
        ("ZREMRANGEBYRANK", keys.ran, 0, -MOST_FINISHED - 1),
    ]


def _sight(keys: Keys, ask: Ask) -> tuple[bytes, bytes, bytes]:
    """The value or its beginning, its id, and what it is if it is not ours: lua/_sight.lua."""
    kind = ask("TYPE", keys.lock)
    kind = kind if isinstance(kind, str) else kind.decode()
    if kind == "none":
        return b"", b"", b""
    value = ask("GETRANGE", keys.lock, 0, SIGHT - 1) if kind == "string" else b""
    if _is_ours(value) and len(value) < SIGHT:
        return value, value[39:55], b""
    size = ask(_SIZES[kind], keys.lock) if kind in _SIZES else -1
    strange = f"{kind} {size}".encode()
    digest = hashlib.sha1(strange + b"|" + value, usedforsecurity=False).hexdigest()
    return value, digest[:16].encode(), strange


def _is_ours(value: bytes) -> bool:
    return _OURS.match(value) is not None


def _begun(keys: Keys, ask: Ask, permit: bytes, id: bytes) -> tuple[bytes, bool]:  # noqa: A002
    entry: bytes = ask("HGET", keys.runs, b"started" + permit) or b""
    return entry, entry.split(b"|")[2:3] == [id]


def _begin(keys: Keys, ask: Ask, permit: bytes, id: bytes, ms: int, owner: bytes) -> Commands:  # noqa: A002
    before, mine = _begun(keys, ask, permit, id)
    if mine:
        return []
    return [
        *([("HSET", keys.runs, "unended", before)] if before else []),
        *_note(keys, "started" + permit.decode(), ms, 0, id, owner),
    ]


def _forget(keys: Keys, ask: Ask, permit: bytes, id: bytes) -> Commands:  # noqa: A002
    _, mine = _begun(keys, ask, permit, id)
    return [("HDEL", keys.runs, b"started" + permit)] if mine else []


def _is_held_by(value: bytes, token: bytes) -> bool:
    return value[:32] == token and value[32:33] != b"k"


def _absence(keys: Keys, ask: Ask, value: bytes | None, token: bytes) -> bytes:
    if (ask("GET", keys.forced) or b"")[16:48] == token:
        return b"forced"
    return b"taken" if value is not None and value[:32] != token else b"gone"


def _clock(ask: Ask) -> int:
    seconds, us = ask("TIME")
    return int(seconds) * 1_000_000 + int(us)


def _number(data: bytes | None) -> int:
    return int(data) if data is not None and data.isdigit() else 0
