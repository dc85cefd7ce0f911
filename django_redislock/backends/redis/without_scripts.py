"""The least that a lock needs, by plain commands, for servers that forbid scripts.

The lock key holds the same as with scripts (lua/_lease.lua), so both kinds of client exclude each
other. There is no queue: a release wakes no waiter, and waiters come back by bounded backoff.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

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

UNAVAILABLE = (
    "tasks under a lock, hand-overs, rates, and lists, details, pause and force release of locks"
)

ATTEMPTS = 32  # Transactions lost to others before the server counts as not answering.
EXACT = 2.0**53  # The same as in lua/_grant.lua.
SIGHT = 8192  # The same as in lua/_lease.lua.

Command = tuple[str | bytes | int, ...]
# Sends commands in one go, and returns their replies, among them any ReplyError.
Ask = Callable[..., list[Any]]
# The commands that change something, and the answer.
Decision = tuple[list[Command], Any]


class NeedsScripts(ReplyError):
    """The operation is not one of those that plain commands can do."""


def told(reply: Any) -> Any:
    """The reply; an error is raised."""
    if isinstance(reply, ReplyError):
        raise copy(reply)  # Else the frame and the error would refer to each other.
    return reply


class Seen(NamedTuple):
    """What an operation on a permit decides by: replies, each of which may be an error."""

    time: Any
    last: Any  # The last fence.
    value: Any  # Of the lock.
    left: Any  # The ms until it ends; or ENDLESS, or FREE.
    forced: Any  # The token of the lease that an operator released last.

    @property
    def us(self) -> int:
        """Server time."""
        seconds, us = told(self.time)
        return int(seconds) * 1_000_000 + int(us)

    @property
    def is_over(self) -> bool:
        """Whether there is no lease any more, or one that was not confirmed in time."""
        lock = read_lock_value(told(self.value))
        is_late = lock and lock.state == UNCONFIRMED and int(lock.confirm_by) <= self.us // 1000
        return told(self.left) == FREE or bool(is_late)

    def lease_of(self, token: bytes) -> LockValue | None:
        """The lease that *token* has; None if it has none, or has released it."""
        lock = read_lock_value(told(self.value))
        return lock if lock and lock.token == token and lock.state != COOLING else None


def perform(step: Call, keys: Keys, ask: Ask) -> Any:
    """Run an operation in two round trips, and return what its script would.

    If another client changes the lock between them, it begins anew.
    """
    args: list[Any] = [arg.encode() if isinstance(arg, str) else arg for arg in step.args]
    operation: Callable[..., Decision] = _OPERATIONS.get(step.script.name, _refuse)
    permits = [keys]
    if len(args) > _ARGS.get(step.script.name, len(args)):  # Any permit will do, of so many.
        permits = [keys.of_permit(number) for number in range(1, args.pop() + 1)]
    for _ in range(ATTEMPTS):
        try:
            seen = _see(permits, ask)
            chosen = _chosen(seen, args[0]) if permits[1:] else 0
            commands, answer = operation(permits[chosen], seen[chosen], *args)
        except ReplyError:
            # In the middle of a transaction, a connection would swallow the next flow's commands.
            ask(("DISCARD",), ("UNWATCH",))
            raise
        if permits[1:] and isinstance(answer, bytes):
            answer += b" %d" % (chosen + 1)
        if not commands:
            ask(("DISCARD",))
            return answer
        # A refused command has ended the transaction; then its own error matters.
        *_, done = map(told, ask(*commands, ("EXEC",)))
        if done is not None:
            return answer
    raise ConnectionError("the lock changed hands during every try of a transaction")


def _see(permits: list[Keys], ask: Ask) -> list[Seen]:
    """What is known of each permit, at the beginning of a transaction."""
    end = FORCED_VALUE_AT + TOKEN_LENGTH - 1
    watched, time, last, *of_permits, begun = ask(
        ("WATCH", *[permit.lock for permit in permits]),
        ("TIME",),
        ("ZSCORE", permits[0].fence, "last"),
        *[("GETRANGE", permit.lock, 0, SIGHT - 1) for permit in permits],
        *[("PTTL", permit.lock) for permit in permits],
        *[("GETRANGE", permit.forced, FORCED_VALUE_AT, end) for permit in permits],
        ("MULTI",),
    )
    for reply in (watched, begun):
        told(reply)
    count = len(permits)
    return [Seen(time, last, *of_permits[number::count]) for number in range(count)]


def _chosen(seen: list[Seen], token: bytes) -> int:
    """The number, from 0 on, of the permit to ask for: the rules of lua/acquire_permit.lua."""
    strings = {number: one for number, one in enumerate(seen) if isinstance(one.value, bytes)}
    for number, one in strings.items():
        if one.lease_of(token):
            return number
    if 0 in strings and token_in(strings[0].value).startswith(PAUSE.encode()):
        return 0
    free = (number for number, one in strings.items() if one.left == FREE)
    over = (number for number, one in strings.items() if one.is_over)
    ends = {number: one.left for number, one in strings.items() if one.left != ENDLESS}
    return next(chain(free, over, sorted(ends, key=ends.__getitem__)), 0)


def _acquire(keys: Keys, seen: Seen, *args: Any) -> Decision:
    request: Any = AcquireArgs(*args)  # Texts are bytes here.
    if request.markers or request.mode == b"pause":
        _refuse()
    ttl = request.ttl
    us = seen.us
    if mine := seen.lease_of(request.token):
        # A late resend must not shorten a longer lease. An unconfirmed grant is never longer.
        only_longer = () if mine.state == UNCONFIRMED else ("GT",)
        confirm = ("SETRANGE", keys.lock, TOKEN_LENGTH, HELD)
        listed = ("ZADD", keys.held, "GT", us // 1000 + ttl, keys.lock)
        return [("PEXPIRE", keys.lock, ttl, *only_longer), confirm, listed], mine.fence
    if told(seen.left) == ENDLESS:
        return [], [*EndlessReply(b"endless")]
    if not seen.is_over:
        unchanged = ("PEXPIRE", keys.queue, 1, "GT")  # See lua/_absence.lua.
        return [unchanged], [*BusyReply(b"busy", seen.left, seen.value, us // 1000)]
    last = float(told(seen.last) or 0)
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
        *([("DEL", keys.lock)] if seen.value else []),  # An unconfirmed grant that has lapsed.
        ("SET", keys.lock, lease.packed, "NX", "PX", ttl),
        # All names share the last fence, and it is not watched: others may have raised it by now.
        ("ZADD", keys.fence, "GT", fence, "last"),
        ("ZADD", keys.held, us // 1000 + ttl, keys.lock),
        ("ZREMRANGEBYSCORE", keys.held, "-inf", us // 1000 - 60_000),  # Leases that expired.
    ], fence


def _renew(keys: Keys, seen: Seen, token: bytes, ttl: int, count: bytes) -> Decision:
    lease, us = seen.lease_of(token), seen.us
    if lease is None:
        return _absence(keys, seen, token)
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
    keys: Keys, seen: Seen, token: bytes, min_hold: int = 0, fence: bytes = b""
) -> Decision:
    lease, us = seen.lease_of(token), seen.us
    if lease is None or fence not in {b"", lease.fence}:
        # A resend finds that the first try has started the cooling.
        cooling = token_in(seen.value) == token
        return ([], RELEASED) if cooling else _absence(keys, seen, token)
    left = min(int(lease.since) + min_hold - us // 1000, min_hold)
    if left <= 0:
        return [("DEL", keys.lock), ("ZREM", keys.held, keys.lock)], RELEASED
    return [
        ("PEXPIRE", keys.lock, left),
        ("SETRANGE", keys.lock, TOKEN_LENGTH, COOLING),
        ("ZADD", keys.held, us // 1000 + left, keys.lock),
    ], RELEASED


def _conclude(keys: Keys, seen: Seen, *args: Any) -> Decision:
    token, _, min_hold, once, _, _, _, recognised_for, _ = args
    if once or recognised_for:
        _refuse()  # Scripts were forbidden after the lease began.
    return _release(keys, seen, token, min_hold)


def _leave(keys: Keys, seen: Seen, token: bytes, fence: bytes = b"") -> Decision:
    commands, answer = _release(keys, seen, token, fence=fence)
    return commands, int(answer == RELEASED and bool(commands))


def _look(_: Keys, seen: Seen) -> Decision:
    value, left = (b"", FREE) if seen.is_over else (seen.value, seen.left)
    return [], [*LookReply(value, left, 0, b"%d" % (seen.us // 1000), b"", b"")]


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


def _absence(keys: Keys, seen: Seen, token: bytes) -> Decision:
    unchanged = ("PEXPIRE", keys.forced, 1, "GT")  # See lua/_absence.lua.
    taken = seen.value and token_in(seen.value) != token
    forced = told(seen.forced) == token
    return [unchanged], FORCED if forced else b"taken" if taken else b"gone"
