"""The operations where scripting is forbidden: ``SET NX PX`` and optimistic transactions.

The keys hold the same as with scripts, so both kinds of client exclude each other. What is
missing is the queue: a release wakes nobody, and waiters come back by bounded backoff.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from django_redislock import scripts
from django_redislock.backends.wires import ReplyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.flows import Call
    from django_redislock.keys import Keys

DAY_MS = 86_400_000
REMEMBERED = 40  # Entries of past leases.
MOST_FINISHED = (
    10_000  # Task runs of one lock that are remembered, and locks of tasks in the index.
)
ATTEMPTS = 32  # Transactions lost to others before the server counts as not answering.


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
    token, id, ttl, _, _, heed, owner = args  # noqa: A001
    value = ask("GET", keys.lock)
    if pointless := heed and _why_pointless(keys, ask, heed):
        mine = value is not None and _is_held_by(value, token)
        return (_free(keys) if mine else []), pointless
    fence, now_us = ask("GET", keys.fence), _clock(ask)
    if value is not None:
        if _is_held_by(value, token):
            commands: Commands = [("PEXPIRE", keys.lock, ttl), ("SETRANGE", keys.lock, 32, "h")]
            return commands, value.split(b"|")[1]
        left = ask("PTTL", keys.lock)
        if left == -1:
            return [], [b"endless"]
        if value[32:33] == b"c" and value.count(b"|") >= 6:
            left = min(left, int(value.split(b"|")[4]) - now_us // 1000)
        if left > 0:
            return [], [b"busy", left, value]
    next_fence = b"%d" % max(now_us, _number(fence) + 1)
    head = token + b"h000000" + id
    since = b"%d" % (now_us // 1000)
    lease = b"|".join([head, next_fence, since, b"%d" % ttl, b"0", b"", owner])
    set_lock: tuple[str | bytes | int, ...] = ("SET", keys.lock, lease, "NX", "PX", ttl)
    return [
        # A lapsed claim is still in its place.
        *([("DEL", keys.lock)] if value is not None else []),
        ("SET", keys.fence, next_fence, "PX", ttl + DAY_MS),
        set_lock,
        ("ZADD", keys.held, now_us // 1000 + ttl, keys.lock),
    ], next_fence


def _renew(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    token, ttl, renewals = args
    value = ask("GET", keys.lock)
    if value is None or not _is_held_by(value, token):
        return [], _absence(keys, ask, value, token)
    return [
        ("PEXPIRE", keys.lock, ttl),
        ("SETRANGE", keys.lock, 32, b"h" + renewals),
        ("ZADD", keys.held, _clock(ask) // 1000 + ttl, keys.lock),
        *(_remember(keys, value, b"", b"") if renewals == b"000001" else []),
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
        commands += _remember(keys, value, b"%d" % now, ended)
    if remembered > 0:
        lasted = now - int(value.split(b"|")[2])
        what = "success" if ended == b"done" else "failure"
        commands += _note(keys, what, now, lasted, b"", owner)
        if ended == b"done" and run:
            commands += _finish_run(keys, run, now, remembered)
    return commands, b"released"


def _leave(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    value = ask("GET", keys.lock)
    mine = value is not None and _is_held_by(value, args[0])
    return (_free(keys) if mine else []), int(mine)


def _force_release(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    value = ask("GET", keys.lock)
    if value is None:
        return [], [b"gone", b""]
    ours = value.count(b"|") >= 6
    digest = hashlib.sha1(value, usedforsecurity=False).hexdigest()[:16].encode()
    if (value[39:55] if ours else digest) != args[0]:
        return [], [b"taken", value]
    commands = _free(keys)
    if ours:
        left = max(ask("PTTL", keys.lock), 0) + 60_000
        commands.append(("SET", keys.forced, value[:32], "PX", left))
        commands += _remember(keys, value, b"%d" % (_clock(ask) // 1000), b"forced")
    return commands, [b"released", value]


def _look(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    value, left, now = ask("GET", keys.lock) or b"", ask("PTTL", keys.lock), _clock(ask) // 1000
    return [], [value, left, 0, now]


def _inspect(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    return [], [_clock(ask) // 1000, [], ask("LRANGE", keys.past, 0, -1)]


def _skip(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    why, owner = args
    skips = int(ask("HGET", keys.runs, "skips") or 0) + 1
    return _note(keys, "skip", _clock(ask) // 1000, 0, why, owner), skips


def _finish(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    what, lasted, owner, run, remembered = args
    now = _clock(ask) // 1000
    commands = _note(keys, what.decode(), now, lasted, b"", owner)
    if what == b"success" and run:
        commands += _finish_run(keys, run, now, remembered)
    return commands, 1


def _finished(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    pointless = _why_pointless(keys, ask, b"0" + args[0])
    return [], pointless[1] if pointless else -1


def _runs(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    *notes, skips = ask("HMGET", keys.runs, "success", "failure", "skip", "skips")
    return [], [_clock(ask) // 1000, *(note or b"" for note in notes), int(skips or 0)]


def _announce(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    id, ttl = args  # noqa: A001
    now = _clock(ask) // 1000
    expiry, _, waiting = (ask("HGET", keys.runs, "queued") or b"").partition(b"|")
    if _number(expiry) > now and waiting != id:
        return [], waiting
    return [
        ("HSET", keys.runs, "queued", b"%d|" % (now + ttl) + id),
        ("PEXPIRE", keys.runs, max(30 * DAY_MS, ttl)),
    ], b""


def _retract(keys: Keys, ask: Ask, args: list[Any]) -> Decision:
    waiting = (ask("HGET", keys.runs, "queued") or b"").partition(b"|")[2]
    mine = waiting == args[0]
    return ([("HDEL", keys.runs, "queued")] if mine else []), int(mine)


_OPERATIONS: dict[str, Callable[[Keys, Ask, list[Any]], Decision]] = {
    scripts.ACQUIRE.name: _acquire,
    scripts.RENEW.name: _renew,
    scripts.RELEASE.name: _release,
    scripts.CONCLUDE.name: _conclude,
    scripts.LEAVE.name: _leave,
    scripts.FORCE_RELEASE.name: _force_release,
    scripts.LOOK.name: _look,
    scripts.INSPECT.name: _inspect,
    scripts.SKIP.name: _skip,
    scripts.FINISH.name: _finish,
    scripts.FINISHED.name: _finished,
    scripts.RUNS.name: _runs,
    scripts.ANNOUNCE.name: _announce,
    scripts.RETRACT.name: _retract,
}


def _free(keys: Keys) -> Commands:
    return [("DEL", keys.lock), ("ZREM", keys.held, keys.lock)]


def _remember(keys: Keys, value: bytes, until: bytes, ended: bytes) -> Commands:
    head, fence, since, _, _, _, owner = value.split(b"|", 6)
    return [
        ("RPUSH", keys.past, b"|".join([head[39:], fence, since, until, ended, owner])),
        ("LTRIM", keys.past, -REMEMBERED, -1),
        ("PEXPIRE", keys.past, 2 * DAY_MS),
    ]


def _why_pointless(keys: Keys, ask: Ask, heed: bytes) -> list[Any]:
    run = heed[1:]
    if run and (finished := ask("ZSCORE", keys.finished, run)) is not None:
        return [b"finished", _clock(ask) // 1000 - int(float(finished))]
    done = ask("GET", keys.done) if heed[:1] == b"1" else None
    return [] if done is None else [b"done", done]


def _finish_run(keys: Keys, run: bytes, now: int, remembered: int) -> Commands:
    return [
        ("ZADD", keys.finished, now, run),
        ("ZREMRANGEBYSCORE", keys.finished, "-inf", now - remembered),
        ("ZREMRANGEBYRANK", keys.finished, 0, -MOST_FINISHED - 1),
        ("PEXPIRE", keys.finished, remembered),
    ]


def _note(keys: Keys, what: str, ms: int, lasted: int, why: bytes, owner: bytes) -> Commands:
    skips: tuple[str | bytes | int, ...] = ("HDEL", keys.runs, "skips")
    if what == "skip":
        skips = ("HINCRBY", keys.runs, "skips", 1)
    return [
        ("HSET", keys.runs, what, b"%d|%d|%b|%b" % (ms, lasted, why, owner)),
        *([] if what == "failure" else [skips]),
        ("PEXPIRE", keys.runs, 30 * DAY_MS),
        ("ZADD", keys.ran, ms, keys.lock),
        ("ZREMRANGEBYRANK", keys.ran, 0, -MOST_FINISHED - 1),
    ]


def _is_held_by(value: bytes, token: bytes) -> bool:
    return value[:32] == token and value[32:33] != b"k"


def _absence(keys: Keys, ask: Ask, value: bytes | None, token: bytes) -> bytes:
    if ask("GET", keys.forced) == token:
        return b"forced"
    return b"taken" if value is not None and value[:32] != token else b"gone"


def _clock(ask: Ask) -> int:
    seconds, us = ask("TIME")
    return int(seconds) * 1_000_000 + int(us)


def _number(data: bytes | None) -> int:
    return int(data) if data is not None and data.isdigit() else 0
