"""What a lock needs at least, by plain commands, for servers that forbid scripts.

The lock key holds the same as with scripts (lua/_lease.lua), so that both kinds of client exclude
each other. There is no queue: a release wakes nobody, and waiters come back by bounded backoff.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.replies import AcquireArgs, ConcludeArgs

if TYPE_CHECKING:
    from django_redislock.rules.keys import Keys
    from django_redislock.rules.steps import Call

UNAVAILABLE = "tasks under a lock and lists, details and force release of locks"

ATTEMPTS = 32  # Transactions lost to others before the server counts as not answering.
EXACT = 2.0**53  # The same as in lua/_grant.lua.
SIGHT = 8192  # The same as in lua/_lease.lua.

_UNCONFIRMED = re.compile(rb".{32}c[r-]\d{5}[0-9a-fA-F]{16}\|\d+\|\d+\|\d+\|(\d+)\|", re.DOTALL)

Execute = Callable[..., Any]  # Runs one command and returns its reply, or raises it, a ReplyError.
# What follows from what was read: the commands of a transaction, and the answer.
Decision = tuple[list[tuple[str | bytes | int, ...]], Any]


def perform(step: Call, keys: Keys, execute: Execute) -> Any:
    """Run an operation, and return what its script would."""
    args = [arg.encode() if isinstance(arg, str) else arg for arg in step.args]
    operation: Callable[..., Decision] = _OPERATIONS.get(step.script.name, _refuse)
    for _ in range(ATTEMPTS):
        execute("WATCH", keys.lock)  # All that is decided here is decided by this key.
        undo = "UNWATCH"
        try:
            commands, answer = operation(keys, execute, *args)
            if not commands:
                execute("UNWATCH")
                return answer
            execute("MULTI")
            undo = "DISCARD"
            for command in commands:
                execute(*command)
            if execute("EXEC") is not None:
                return answer
        except ReplyError:
            # A connection in the middle of a transaction would swallow the next flow's commands.
            # A refused EXEC has ended it; what matters is why.
            with suppress(ReplyError):
                execute(undo)
            raise
    raise ConnectionError("the lock changed hands during every try of a transaction")


def _acquire(keys: Keys, execute: Execute, *args: Any) -> Decision:
    request: Any = AcquireArgs(*args)  # Texts are bytes here.
    if request.markers:
        _refuse()
    token, ttl = request.token, request.ttl
    value, left, us = _read(keys, execute)
    if _is_held_by(value, token):
        # It may be late, and the lease have been made longer since. Not so an unconfirmed grant.
        only_longer = () if value[32:33] == b"c" else ("GT",)
        confirm = ("SETRANGE", keys.lock, 32, "h")
        listed = ("ZADD", keys.held, "GT", us // 1000 + ttl, keys.lock)
        return [("PEXPIRE", keys.lock, ttl, *only_longer), confirm, listed], value.split(b"|")[1]
    if left == -1:
        return [], [b"endless"]
    if not _is_over(value, left, us):
        execute("PEXPIRE", keys.queue, 1, "GT")  # See lua/_absence.lua.
        return [], [b"busy", left, value, us // 1000]
    last = float(execute("ZSCORE", keys.fence, "last") or 0)
    fence = b"%d" % (int(last) + 1 if us <= last < EXACT else us)
    head = token + b"h" + request.renews + b"00000" + request.id
    lease = b"|".join([head, fence, b"%d" % (us // 1000), b"%d" % ttl, b"0", b"", request.owner])
    return [
        *([("DEL", keys.lock)] if value else []),  # An unconfirmed grant that has lapsed.
        ("SET", keys.lock, lease, "NX", "PX", ttl),
        # The mark is all names' own, and not watched: others may have raised it further meanwhile.
        ("ZADD", keys.fence, "GT", fence, "last"),
        ("ZADD", keys.held, us // 1000 + ttl, keys.lock),
        ("ZREMRANGEBYSCORE", keys.held, "-inf", us // 1000 - 60_000),  # Leases that expired.
    ], fence


def _renew(keys: Keys, execute: Execute, token: bytes, ttl: int, count: bytes) -> Decision:
    value, _, us = _read(keys, execute)
    if not _is_held_by(value, token):
        return [], _absence(keys, execute, value, token)
    head, fence, since, granted, rest = value.split(b"|", 4)
    newest = value[32:33] == b"c" or count[1:] > value[34:39]
    # Else it was sent twice, or was overtaken by another one that may have asked for more.
    only_longer = () if newest else ("GT",)
    first = (b"h" + count if newest else head[32:39]) + head[39:]
    longest = b"%d" % max(ttl, int(granted))
    return [
        ("PEXPIRE", keys.lock, ttl, *only_longer),
        ("SETRANGE", keys.lock, 32, b"|".join([first, fence, since, longest, rest])),
        ("ZADD", keys.held, *only_longer, us // 1000 + ttl, keys.lock),
    ], b"renewed"


def _release(keys: Keys, execute: Execute, token: bytes, min_hold: int = 0) -> Decision:
    value, _, us = _read(keys, execute)
    if not _is_held_by(value, token):
        # A resend finds that the first try has started the cooling.
        cooling = value[:32] == token
        return [], b"released" if cooling else _absence(keys, execute, value, token)
    left = min(int(value.split(b"|")[2]) + min_hold - us // 1000, min_hold)
    if left <= 0:
        return [("DEL", keys.lock), ("ZREM", keys.held, keys.lock)], b"released"
    return [
        ("PEXPIRE", keys.lock, left),
        ("SETRANGE", keys.lock, 32, "k"),
        ("ZADD", keys.held, us // 1000 + left, keys.lock),
    ], b"released"


def _conclude(keys: Keys, execute: Execute, *args: Any) -> Decision:
    request: Any = ConcludeArgs(*args)
    if request.once or request.recognised_for:
        _refuse()  # A task's: scripts have been forbidden since it began.
    return _release(keys, execute, request.token, request.min_hold)


def _leave(keys: Keys, execute: Execute, token: bytes) -> Decision:
    commands, _ = _release(keys, execute, token)
    return commands, int(bool(commands))


def _look(keys: Keys, execute: Execute) -> Decision:
    value, left, us = _read(keys, execute)
    if _is_over(value, left, us):
        value, left = b"", -2
    return [], [value, left, 0, us // 1000, b"", b""]


def _refuse(*args: Any) -> Decision:
    raise ReplyError(f"{UNAVAILABLE} need EVAL, which the server forbids; allow +eval and +evalsha")


_OPERATIONS: dict[str, Callable[..., Decision]] = {
    scripts.ACQUIRE.name: _acquire,
    scripts.RENEW.name: _renew,
    scripts.RELEASE.name: _release,
    scripts.CONCLUDE.name: _conclude,
    scripts.LEAVE.name: _leave,
    scripts.LOOK.name: _look,
}


def _read(keys: Keys, execute: Execute) -> tuple[bytes, int, int]:
    """The lock, the milliseconds until it ends (-1 never, -2 it is free), server time in us."""
    value = execute("GETRANGE", keys.lock, 0, SIGHT - 1)
    left, (seconds, us) = execute("PTTL", keys.lock), execute("TIME")
    return value, left, int(seconds) * 1_000_000 + int(us)


def _is_over(value: bytes, left: int, us: int) -> bool:
    """Whether there is no lease any more, or one that nobody has confirmed in time."""
    unconfirmed = _UNCONFIRMED.match(value)
    return left == -2 or (unconfirmed is not None and int(unconfirmed[1]) <= us // 1000)


def _is_held_by(value: bytes, token: bytes) -> bool:
    return value[:32] == token and value[32:33] != b"k"


def _absence(keys: Keys, execute: Execute, value: bytes, token: bytes) -> bytes:
    execute("PEXPIRE", keys.forced, 1, "GT")  # See lua/_absence.lua.
    if execute("GETRANGE", keys.forced, 16, 47) == token:
        return b"forced"
    return b"taken" if value and value[:32] != token else b"gone"
