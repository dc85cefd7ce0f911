"""The least that a lock needs, by plain commands, for servers that forbid scripts.

The lock key holds the same as with scripts (lua/_lease.lua), so both kinds of client exclude each
other. There is no queue: a release wakes no waiter, and waiters come back by bounded backoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.replies import (
    ENDLESS,
    FORCED,
    FREE,
    RELEASED,
    RENEWED,
    AcquireArgs,
    BusyReply,
    EndlessReply,
    LookReply,
)
from django_redislock.rules.stored import (
    COOLING,
    FORCED_VALUE_AT,
    HELD,
    PAUSE,
    TOKEN_LENGTH,
    UNCONFIRMED,
    LockValue,
    read_lock_value,
    read_renewal_count,
    token_in,
)

if TYPE_CHECKING:
    from django_redislock.rules.keys import Keys
    from django_redislock.rules.steps import Call

UNAVAILABLE = "tasks under a lock, hand-overs, and lists, details, pause and force release of locks"

ATTEMPTS = 32  # Transactions lost to others before the server counts as not answering.
EXACT = 2.0**53  # The same as in lua/_grant.lua.
SIGHT = 8192  # The same as in lua/_lease.lua.

Execute = Callable[..., Any]  # Runs one command and returns its reply, or raises it, a ReplyError.
# The commands of a transaction, and the answer, decided by the keys that were read.
Decision = tuple[list[tuple[str | bytes | int, ...]], Any]


class NeedsScripts(ReplyError):
    """The operation is not one of those that plain commands can do."""


def perform(step: Call, keys: Keys, execute: Execute) -> Any:
    """Run an operation, and return what its script would."""
    args: list[Any] = [arg.encode() if isinstance(arg, str) else arg for arg in step.args]
    operation: Callable[..., Decision] = _OPERATIONS.get(step.script.name, _refuse)
    permits = [keys]
    if len(args) > _ARGS.get(step.script.name, len(args)):  # Any permit will do, of so many.
        permits = [keys.of_permit(number) for number in range(1, args.pop() + 1)]
    for _ in range(ATTEMPTS):
        # Every decision here depends on these keys.
        execute("WATCH", *[permit.lock for permit in permits])
        undo = "UNWATCH"
        try:
            chosen = _chosen(permits, execute, args[0]) if permits[1:] else 0
            commands, answer = operation(permits[chosen], execute, *args)
            if permits[1:] and isinstance(answer, bytes):
                answer += b" %d" % (chosen + 1)
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
            # In the middle of a transaction, a connection would swallow the next flow's commands.
            # A refused EXEC has ended the transaction; then its own error matters.
            with suppress(ReplyError):
                execute(undo)
            raise
    raise ConnectionError("the lock changed hands during every try of a transaction")


def _chosen(permits: list[Keys], execute: Execute, token: bytes) -> int:
    """The number, from 0 on, of the permit to ask for: the rules of lua/acquire_permit.lua."""
    values: list[bytes | None] = execute("MGET", *[permit.lock for permit in permits])
    mine = (number for number, value in enumerate(values) if _lease_of(token, value or b""))
    if (number := next(mine, None)) is not None:
        return number
    if token_in(values[0] or b"").startswith(PAUSE.encode()):
        return 0
    ends: dict[int, float] = {}
    for number, permit in enumerate(permits):
        if values[number] is None and not execute("EXISTS", permit.lock):
            return number
    for number, permit in enumerate(permits):
        if values[number] is not None:
            value, left, us = _read(permit, execute)
            if _is_over(value, left, us):
                return number
            ends[number] = math.inf if left == ENDLESS else left
    return min(ends, key=lambda number: ends[number], default=0)


def _acquire(keys: Keys, execute: Execute, *args: Any) -> Decision:
    request: Any = AcquireArgs(*args)  # Texts are bytes here.
    if request.markers or request.mode == b"pause":
        _refuse()
    ttl = request.ttl
    value, left, us = _read(keys, execute)
    if mine := _lease_of(request.token, value):
        # A late resend must not shorten a longer lease. An unconfirmed grant is never longer.
        only_longer = () if mine.state == UNCONFIRMED else ("GT",)
        confirm = ("SETRANGE", keys.lock, TOKEN_LENGTH, HELD)
        listed = ("ZADD", keys.held, "GT", us // 1000 + ttl, keys.lock)
        return [("PEXPIRE", keys.lock, ttl, *only_longer), confirm, listed], mine.fence
    if left == ENDLESS:
        return [], [*EndlessReply(b"endless")]
    if not _is_over(value, left, us):
        execute("PEXPIRE", keys.queue, 1, "GT")  # See lua/_absence.lua.
        return [], [*BusyReply(b"busy", left, value, us // 1000)]
    last = float(execute("ZSCORE", keys.fence, "last") or 0)
    fence = b"%d" % (int(last) + 1 if us <= last < EXACT else us)
    lease = LockValue(
        token=request.token,
        state=HELD,
        renewals=request.renews + b"00000",
        id=request.id,
        fence=fence,
        since=b"%d" % (us // 1000),
        ttl=b"%d" % ttl,
        owner=request.owner,
    )
    return [
        *([("DEL", keys.lock)] if value else []),  # An unconfirmed grant that has lapsed.
        ("SET", keys.lock, lease.packed, "NX", "PX", ttl),
        # All names share the last fence, and it is not watched: others may have raised it by now.
        ("ZADD", keys.fence, "GT", fence, "last"),
        ("ZADD", keys.held, us // 1000 + ttl, keys.lock),
        ("ZREMRANGEBYSCORE", keys.held, "-inf", us // 1000 - 60_000),  # Leases that expired.
    ], fence


def _renew(keys: Keys, execute: Execute, token: bytes, ttl: int, count: bytes) -> Decision:
    value, _, us = _read(keys, execute)
    lease = _lease_of(token, value)
    if lease is None:
        return [], _absence(keys, execute, value, token)
    is_later = read_renewal_count(count) > read_renewal_count(lease.renewals)
    newest = lease.state == UNCONFIRMED or is_later
    # Else it was sent twice, or a later renewal has overtaken it, and may have asked for more.
    only_longer = () if newest else ("GT",)
    if newest:
        lease = lease._replace(state=HELD, renewals=count)
    lease = lease._replace(ttl=b"%d" % max(ttl, int(lease.ttl)))
    return [
        ("PEXPIRE", keys.lock, ttl, *only_longer),
        ("SETRANGE", keys.lock, TOKEN_LENGTH, lease.packed[TOKEN_LENGTH:]),
        ("ZADD", keys.held, *only_longer, us // 1000 + ttl, keys.lock),
    ], RENEWED


def _release(
    keys: Keys, execute: Execute, token: bytes, min_hold: int = 0, fence: bytes = b""
) -> Decision:
    value, _, us = _read(keys, execute)
    lease = _lease_of(token, value)
    if lease is None or fence not in {b"", lease.fence}:
        # A resend finds that the first try has started the cooling.
        cooling = token_in(value) == token
        return [], RELEASED if cooling else _absence(keys, execute, value, token)
    left = min(int(lease.since) + min_hold - us // 1000, min_hold)
    if left <= 0:
        return [("DEL", keys.lock), ("ZREM", keys.held, keys.lock)], RELEASED
    return [
        ("PEXPIRE", keys.lock, left),
        ("SETRANGE", keys.lock, TOKEN_LENGTH, COOLING),
        ("ZADD", keys.held, us // 1000 + left, keys.lock),
    ], RELEASED


def _conclude(keys: Keys, execute: Execute, *args: Any) -> Decision:
    token, _, min_hold, once, _, _, _, recognised_for, _ = args
    if once or recognised_for:
        _refuse()  # Scripts were forbidden after the lease began.
    return _release(keys, execute, token, min_hold)


def _leave(keys: Keys, execute: Execute, token: bytes, fence: bytes = b"") -> Decision:
    commands, _ = _release(keys, execute, token, fence=fence)
    return commands, int(bool(commands))


def _look(keys: Keys, execute: Execute) -> Decision:
    value, left, us = _read(keys, execute)
    if _is_over(value, left, us):
        value, left = b"", FREE
    return [], [*LookReply(value, left, 0, b"%d" % (us // 1000), b"", b"")]


def _refuse(*args: Any) -> Decision:
    raise NeedsScripts(f"{UNAVAILABLE} need EVAL, which the server forbids")


_OPERATIONS: dict[str, Callable[..., Decision]] = {
    scripts.ACQUIRE.name: _acquire,
    scripts.ACQUIRE_PERMIT.name: _acquire,
    scripts.RENEW.name: _renew,
    scripts.RELEASE.name: _release,
    scripts.CONCLUDE.name: _conclude,
    scripts.LEAVE.name: _leave,
    scripts.LOOK.name: _look,
}

# How many arguments these take. One more is the number of permits.
_ARGS = {scripts.ACQUIRE_PERMIT.name: len(AcquireArgs._fields), scripts.LEAVE.name: 2}


def _read(keys: Keys, execute: Execute) -> tuple[bytes, int, int]:
    """The lock, the ms until it ends (or ENDLESS, or FREE), and server time in us."""
    value = execute("GETRANGE", keys.lock, 0, SIGHT - 1)
    left, (seconds, us) = execute("PTTL", keys.lock), execute("TIME")
    return value, left, int(seconds) * 1_000_000 + int(us)


def _is_over(value: bytes, left: int, us: int) -> bool:
    """Whether there is no lease any more, or one that was not confirmed in time."""
    lock = read_lock_value(value)
    is_late = lock and lock.state == UNCONFIRMED and int(lock.confirm_by) <= us // 1000
    return left == FREE or bool(is_late)


def _lease_of(token: bytes, value: bytes) -> LockValue | None:
    """The lease that *token* has; None if it has none, or has released it."""
    lock = read_lock_value(value)
    return lock if lock and lock.token == token and lock.state != COOLING else None


def _absence(keys: Keys, execute: Execute, value: bytes, token: bytes) -> bytes:
    execute("PEXPIRE", keys.forced, 1, "GT")  # See lua/_absence.lua.
    end = FORCED_VALUE_AT + TOKEN_LENGTH - 1
    if execute("GETRANGE", keys.forced, FORCED_VALUE_AT, end) == token:
        return FORCED
    return b"taken" if value and token_in(value) != token else b"gone"
