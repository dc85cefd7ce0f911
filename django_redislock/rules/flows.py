"""The rules of the lock, written once, without I/O and without a clock.

A flow is a generator. It yields a step (call a script, wait for the bell, pause), is sent the
answer, and returns its result. ``drivers.run`` performs flows on a server and blocks;
``drivers.arun`` awaits. The in-memory backend performs the same flows without a server. A flow
learns the time from an argument and from every answer, in seconds of one monotonic clock.

An interrupt thrown in at a ``yield`` leaves the effect of the step on the server unknown. The flow
then undoes the step before the interrupt leaves it (rule R4).
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from django_redislock.exceptions import LockLost, LockTimeout, LockUnavailable
from django_redislock.humanize import duration, visible
from django_redislock.rules import scripts
from django_redislock.rules.lease_state import (
    CONFIRMS,
    DRIFT_RATE,
    Granted,
    Renewal,
    drift,
    granted_by,
    lost_because,
)
from django_redislock.rules.options import ONE_TRY, REPLACED_WITHIN
from django_redislock.rules.replies import (
    GIVEN,
    AcquireArgs,
    BusyReply,
    DoneReply,
    EarlyReply,
    EndlessReply,
    FinishedReply,
    GrantedRing,
    LookRing,
    LostReply,
    OwnReply,
    QueuedReply,
    ReplacedReply,
    SplitReply,
    in_seconds,
    read_ring,
    read_try,
)
from django_redislock.rules.steps import (
    Answer,
    Bell,
    Call,
    Flow,
    Listen,
    NotDone,
    NotOurs,
    Pause,
    Refused,
    Tell,
    Unanswered,
)
from django_redislock.rules.stored import (
    NO_MARKERS,
    RATED,
    Holding,
    Owner,
    rated,
    read_done,
    read_holding,
    renewal_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.deadlocks import Lookout
    from django_redislock.exceptions import LostReason, UnavailableReason
    from django_redislock.rules.forms import Attempt
    from django_redislock.rules.steps import Trouble

CONFIRM_WITHIN = 1.0  # Seconds, after a hand-over; the same as in lua/_lease.lua.
LOOK_EVERY = 2.0  # Seconds after which a waiter looks by itself: it may have missed the bell.
CIRCLE_AFTER = 1.0  # Seconds after which a waiter looks whether it waits in a circle.
UNDO_WITHIN = 1.0  # Seconds that undoing an interrupted acquire may take.

NOT_TAKEN_UP = "its baton was taken up before, or not in time, or an operator released it"

# Waiting without a queue (no scripting, or a quorum): pauses in seconds, doubled each time.
SHORTEST_PAUSE = 0.001
LONGEST_PAUSE = 0.128


# --- what a flow may end with ---------------------------------------------------------------


class FirstInLine(NamedTuple):
    """The pause is first in the queue. It begins when the lease in its way is over."""

    ends_in: float  # Seconds until that lease must have ended.


class Busy(NamedTuple):
    """The lock was not free before the wait ran out."""

    holding: Holding
    expires_in: float
    server_time: float  # When the server said so, in seconds since the epoch.
    name: str  # The lock that was not free, if several were wanted.

    def __str__(self) -> str:
        if self.of_rate:
            return f"a rate, and its next start is due in {duration(self.expires_in)}"
        if self.reason is not None:
            return ": ".join(filter(None, (f"paused by {self.holder}", self.reason)))
        return f"{'cooling, taken' if self.cooling else 'busy, held'} by {self.holder}"

    @property
    def holder(self) -> str:
        """The owner that holds it, or held it last if it cools, as ``host:pid task-id``."""
        return self.holding.holder

    @property
    def of_rate(self) -> bool:
        """Whether no start was due under a rate. *expires_in* says when one is."""
        return self.holding.state == RATED

    @property
    def cooling(self) -> bool:
        """Whether nobody holds it: its owner is done, and min_hold keeps it busy."""
        return self.holding.state == "cooling"

    def timeout(self, alias: str) -> LockTimeout:
        """The error for an acquire that waits no longer."""
        known = self.holder, self.expires_in, self.cooling, alias, self.reason, self.of_rate
        return LockTimeout(self.name, *known)

    @property
    def reason(self) -> str | None:
        """Why an operator keeps it from everybody; "" without a reason, None without a pause."""
        owner = self.holding.owner
        return visible(owner.reason) if owner.operator else None

    @property
    def ago(self) -> float | None:
        """Seconds since it was granted; None if nobody knows."""
        return _since(self.holding.since, self.server_time)


class Done(NamedTuple):
    """A `once` of this name is done."""

    by: str  # The owner that did it, as ``host:pid task-id``.
    ago: float | None  # Seconds; None if nobody knows.


class Replaced(NamedTuple):
    """A newer call of the same job has replaced this one."""

    by: str  # Its owner, as ``host:pid task-id``; "" if nobody knows.
    ago: float | None = None  # See Done.


class Finished(NamedTuple):
    """The task run for which the lock was wanted has succeeded already."""

    ago: float | None  # Seconds; None if nobody knows.
    by: str = ""  # See Done; "" if nobody knows.


class RunMarker(NamedTuple):
    """The done marker that a run leaves when it succeeds."""

    id: str  # Of the run, as in lua/_task_of.lua; "" unless a broker delivered it.
    recognised_for: float  # Seconds after its success in which no duplicate of it runs.
    called: str = ""  # When its call was made, in ms since the epoch, if a newer one replaces it.
    is_again: bool = False  # Whether it may have been delivered before.


def unavailable(name: str, trouble: Trouble) -> LockUnavailable:
    """The error for a *trouble* with the lock *name*."""
    return LockUnavailable(name, trouble.problem, trouble.reason)


# --- the flows ------------------------------------------------------------------------------


def acquire(
    attempt: Attempt,
    now: float,
    take_over: Callable[[Granted], object] | None = None,
    lookout: Lookout | None = None,
) -> Flow[Granted | Busy | Done | Finished | Replaced]:
    """Ask for the lock until it is ours or the wait is over.

    Args:
        attempt: What to ask for.
        now: When it begins.
        take_over: Called with the grant. An interrupt before it returns undoes the grant.
        lookout: Checks whether a wait can ever end.

    Raises:
        LockUnavailable: The server refused, or did not answer for too long.
        LockLost: The handed-over lease that the attempt takes up is over.
        LockMisuse: The wait would never end.
    """
    try:
        outcome = yield from _acquire(attempt, now, lookout)
        if take_over is not None and isinstance(outcome, Granted):
            take_over(outcome)
        return outcome
    except Refused as refused:
        raise unavailable(attempt.name, refused) from refused.__cause__
    except (GeneratorExit, LockUnavailable, LockLost):
        raise
    except BaseException as error:
        yield from undo_attempt(attempt)
        if isinstance(error, Unanswered):
            raise unavailable(attempt.name, error) from error.__cause__
        raise


def pause(attempt: Attempt, now: float) -> Flow[Granted | FirstInLine | Busy]:
    """Keep the lock from everybody for an operator, by an *attempt* with ``is_pause``.

    Raises:
        LockUnavailable: The server refused, or did not answer.
    """
    return acquire(attempt, now)  # type: ignore[return-value] # no other acquire is first in line


def _acquire(  # noqa: PLR0912, PLR0915 - one branch per answer of the server
    attempt: Attempt, now: float, lookout: Lookout | None = None
) -> Flow[Granted | Busy | Done | Finished | Replaced]:
    give_up = now + attempt.terms.wait
    # All tries end in time for an undo, so that the call takes two operation timeouts at most
    # besides its wait (R5).
    one_try = attempt.terms.one_try
    tries_end = give_up + 2 * one_try
    mode, left = attempt.mode, attempt.terms.wait
    ticket, came_back = b"0", False
    failures, silent_since, pause = 0, now, SHORTEST_PAUSE
    # Whether the server may keep something of this acquire when it refuses a try. If it refuses the
    # WAIT behind a grant, it has carried out the grant.
    traces = attempt.replicas > 0
    late = False  # Whether a try that was not answered may arrive after one that was.
    while True:
        try:
            if tries_end - now < one_try / 4:  # The process stood still, which does not count.
                tries_end = now + 2 * one_try
            within = min(one_try, tries_end - now)
            due = now + within
            answer: Answer = yield attempt.call(mode, ticket, left, within)
            now = answer.now
            if granted := _granted_by(answer, attempt):
                return granted
            reply = read_try(answer.value)
            # After a split vote it asks again, even with no time left to wait. Else all that asked
            # at the same moment would find the lock busy, and nobody would have it.
            asks_again = mode == "queue" or (
                isinstance(reply, SplitReply)
                and pause < LONGEST_PAUSE
                and now + pause <= tries_end - one_try / 2
            )
            left = give_up - now
            if outcome := _end_without_lock(reply, attempt.name, left, asks_again=asks_again):
                if late:  # Meanwhile it may have been granted the lock, or have queued up.
                    yield from undo_attempt(attempt)
                return outcome
            match reply:
                case bytes():
                    yield from _renounce(attempt, answer)
                case QueuedReply() as queued if attempt.is_pause:
                    return FirstInLine(in_seconds(queued.left_ms))  # type: ignore[return-value] # see pause()
                case QueuedReply() as queued:
                    # A waiter that confirms too late is passed over. It may go back to its old
                    # place in the queue once; from then on it joins at the end. Else a waiter that
                    # is always late would cost the others a second each time.
                    came_back = came_back or bool(queued.newly and ticket != b"0")
                    ticket = b"0" if came_back else queued.ticket
                    failures, traces = 0, True
                    if attempt.blocked_by is None:
                        attempt.blocked_by = queued.owner
                    if attempt.terms.replace_within is not None and queued.replaced_ms:
                        # An earlier call may have left the holder more time than this one does.
                        ends = answer.sent + in_seconds(queued.replaced_ms) + REPLACED_WITHIN
                        give_up = max(give_up, ends)
                        tries_end = max(tries_end, give_up + 2 * one_try)
                    due = give_up
                    rung = yield from _await_bell(attempt, queued, answer, give_up, lookout)
                    if isinstance(rung, Granted):
                        return rung
                    now = rung
                case BusyReply() as busy:
                    # Not queued (no scripting, or a quorum): bounded backoff.
                    failures = 0
                    if attempt.blocked_by is None and not isinstance(busy, SplitReply):
                        attempt.blocked_by = busy.owner
                    seconds = pause * random.uniform(0.5, 1.0)
                    if mode == "queue":
                        seconds = max(min(seconds, give_up - now), 0.0)
                    now = yield Pause(seconds)
                    pause = min(pause * 2, LONGEST_PAUSE)
                case EarlyReply() as early:  # There was no bell to be rung by.
                    failures = 0
                    now = yield Pause(min(in_seconds(early.left_ms), LOOK_EVERY))
                case LostReply() as lost:
                    raise LockLost(attempt.name, lost_because(lost.why.decode()), NOT_TAKEN_UP)
                case EndlessReply():
                    raise Refused(
                        "its key has no expiry, so it would never become free; find out who wrote"
                        " it, then delete it"
                    )
                case other:
                    raise Refused(f"the server gave an answer that is not ours: {other!r}")
        except Unanswered as unanswered:
            # Send the same token again once, even with no time left to wait, unless an answer was
            # so late that a try would have hardly any time. A step that took longer than it may
            # takes no time from the next try: the process stood still, or many servers were asked.
            now, late = unanswered.now, late or not isinstance(unanswered, NotDone)
            traces = traces or late
            tries_end += max(now - due, 0.0)
            failures += 1
            if failures == 1:
                silent_since = unanswered.sent
            if failures > 1 or tries_end - now < one_try / 4:
                until = min(give_up, silent_since + attempt.terms.unavailable_after)
                if now >= until and traces:
                    raise
                if now >= until:  # There is nothing to undo.
                    raise unavailable(attempt.name, unanswered) from unanswered.__cause__
                seconds = _backoff(failures) * random.uniform(0.5, 1.0)
                now = yield Pause(min(seconds, until - now))
        except NotOurs:
            raise
        except Refused:
            if traces:
                yield from undo_attempt(attempt)
            raise
        left = max(give_up - now, 0.0)
        if not left and mode == "queue":
            mode, pause = "last", SHORTEST_PAUSE


def _end_without_lock(
    reply: Any, name: str, patience: float, *, asks_again: bool
) -> Busy | Done | Finished | Replaced | None:
    """The outcome of an acquire, if the reply to a try ends it without a grant.

    Args:
        reply: To the try.
        name: The lock.
        patience: Seconds until the wait is over.
        asks_again: Whether it asks again for a lock that another owner has.
    """
    match reply:
        case BusyReply() as busy if not asks_again or isinstance(busy, OwnReply):
            left, now = in_seconds(busy.left_ms), in_seconds(busy.server_ms)
            return Busy(read_holding(busy.value), left, now, name)
        case EarlyReply() as early if not asks_again or in_seconds(early.left_ms) > patience:
            left, now = in_seconds(early.left_ms), in_seconds(early.server_ms)
            return Busy(rated(early.owner), left, now, name)
        case DoneReply() as done:
            at, owner = read_done(done.marker)
            return Done(str(owner), _since(at, in_seconds(done.server_ms)))
        case FinishedReply() as finished:
            return Finished(in_seconds(finished.ago_ms))
        case ReplacedReply() as replaced:
            return Replaced(str(Owner.unpack(replaced.newer.decode(errors="replace"))))
    return None


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else max(0.0, now - at)


def as_try(call: Call) -> Call:
    """The same acquire, but one that does not queue up if the lock is not free."""
    mode = AcquireArgs._fields.index("mode")  # In the arguments of a rate too.
    args = *call.args[:mode], "try", *call.args[mode + 1 :]
    return call._replace(args=args, listening="")


def _granted_by(answer: Answer, attempt: Attempt) -> Granted | None:
    """The grant in the answer to a try; None without one, or if too few replicas have it (R11)."""
    if answer.replicas < attempt.replicas:
        return None
    return granted_by(answer.value, answer.sent, answer.now, attempt.terms.certain)


def _renounce(attempt: Attempt, answer: Answer) -> Flow[NoReturn]:
    """Give back a grant that came too late (R3), or is on too few replicas (R11)."""
    problem = "the grant arrived later than the ttl"
    reason: UnavailableReason = "timeout"
    if answer.replicas < attempt.replicas:
        problem = (
            f"{answer.replicas} of the {attempt.replicas} replicas that REPLICAS_ACK asks for"
            " acknowledged the grant; connect so many, or lower it"
        )
        reason = "replicas"
    if not (yield from undo_attempt(attempt, answer.value.partition(b" ")[0])):
        # The undo may still be on its way. On a quorum, whose servers are told no fence, it would
        # end the next grant to this token.
        raise LockUnavailable(attempt.name, problem, reason)
    raise Unanswered(problem, answer.sent, answer.now, reason)


def listens_until(
    now: float, left_ms: bytes | str | int, give_up: float, look_every: float = LOOK_EVERY
) -> float:
    """Until when a waiter listens for the bell, before it looks at the lock by itself.

    It listens until just after the current lease must have ended, or until its wait is over.
    """
    return min(now + min(in_seconds(left_ms) + 0.001, look_every), give_up)


def _await_bell(
    attempt: Attempt,
    queued: QueuedReply,
    look: Answer,
    give_up: float,
    lookout: Lookout | None,
) -> Flow[Granted | float]:
    """Sleep until the lock is handed over to us, or until it is time to look.

    Args:
        attempt: What is asked for.
        queued: The reply to the last look.
        look: The same reply, with the times at which the look was sent and the reply came.
        give_up: When the wait is over.
        lookout: Checks meanwhile whether the wait can ever end.

    Returns:
        The grant, or the time at which to look.
    """
    now, look_every = look.now, attempt.look_every
    until = listens_until(now, queued.left_ms, give_up, look_every)
    while True:
        due = math.inf if lookout is None else lookout.due
        bell: Bell = yield Listen(attempt.id, min(until, due) - now)
        now = bell.now
        if not bell.words:
            if lookout is None or not due <= now < until:
                return now
            now = yield from lookout.look(queued.ticket, now)
            continue
        match read_ring(bell.words):
            case None:
                return now  # Of a newer version, perhaps.
            case LookRing(left_ms=left_ms):
                until = listens_until(now, left_ms, give_up, look_every)
            case GrantedRing() as ring:
                if attempt.replicas or attempt.markers != NO_MARKERS:
                    return now  # A ring tells nothing of replicas and done markers.
                granted = take_up(ring, queued, look.sent, now, attempt.terms.first_ttl)
                if granted is None:
                    return now
                # A renewal confirms the lease, and nobody awaits its answer. A renewal never
                # grants, so the release may overtake it on another connection.
                yield attempt.confirmation(granted.permit)
                return granted


def take_up(
    ring: GrantedRing, queued: QueuedReply, looked_at: float, now: float, ttl: float
) -> Granted | None:
    """The lease that a ring hands over; None if it is safer to look.

    The answer to our last look and the ring tell the server's time: that of the answer, and that of
    the grant. Their difference, added to the time at which we sent the look, is the earliest time
    of the grant on our clock. So a ring that lay unread while this process was stopped is known to
    be old. Only CONFIRM_WITHIN is certain until the watchdog has an answer. If the confirmation
    arrives, the lease has its whole ttl.

    Args:
        ring: What the bell said.
        queued: The reply to our last look.
        looked_at: When we sent that look.
        now: When the ring was read.
        ttl: Seconds that were asked for.
    """
    waited = ring.server_time - queued.server_time
    at = min(looked_at + max(waited, 0.0), now)
    within = min(CONFIRM_WITHIN, ttl)
    if waited < 0 or now >= at + within / 2:
        return None
    # Two clocks were compared over the whole wait, so the drift over that time counts, too.
    deadline = at + within - drift(within + waited)
    ends = deadline + (ttl - within) * (1 - DRIFT_RATE)
    return Granted(int(ring.fence), deadline, at, ends, int(ring.permit))


def confirmation(name: str, token: str, ttl: float, renews: bool, permit: int = 1) -> Tell:
    """The step that confirms a lease that was taken up."""
    return Tell(scripts.RENEW, name, _renewal_args(token, ttl, CONFIRMS, renews), permit)


def _backoff(failures: int) -> float:
    """Seconds before one more try: short at first, at most 1.28."""
    return float(0.02 * 2 ** min(failures, 6))


def undo_attempt(attempt: Attempt, fence: bytes = b"") -> Flow[bool]:
    """Leave nothing behind of an attempt; see undone()."""
    return undone(attempt.leaving(fence))


def undo(
    name: str, token: str, operation_timeout: float, permit: int = 1, limit: int = 1
) -> Flow[bool]:
    """Leave nothing behind of an acquire; see leaving() and undone()."""
    return undone(leaving(name, token, operation_timeout, permit, limit))


def leaving(
    name: str,
    token: str,
    operation_timeout: float,
    permit: int = 1,
    limit: int = 1,
    fence: bytes = b"",
) -> Call:
    """The step that undoes an acquire.

    Args:
        name: The lock.
        token: That of the acquire.
        operation_timeout: Seconds.
        permit: The permit that it may have, if that is known.
        limit: How many permits there are, if it may have any of them. Then *permit* does not count.
        fence: That of the grant, if the acquire goes on with its token: an undo that comes late, or
            once more, must not end the next grant.
    """
    args = (token, fence, limit) if limit > 1 else (token, fence) if fence else (token,)
    within = undo_within(operation_timeout)
    permit = 1 if limit > 1 else permit
    return Call(scripts.LEAVE, name, args, within, shielded=True, permit=permit)


def undo_within(operation_timeout: float) -> float:
    """Seconds for one try to undo an acquire."""
    return min(UNDO_WITHIN, operation_timeout / 2) / 2


def undone(leave: Call) -> Flow[bool]:
    """Leave nothing behind of an acquire whose outcome nobody will know (R4).

    Returns whether the first try was answered; then none is still on its way. If no try was
    answered, a lease that is left behind ends by itself after one ttl.
    """
    # Twice: the interrupted step may have waited on a dead connection, and then the first try does
    # no more than give that up.
    for first in (True, False):
        try:
            yield leave
        except Unanswered:
            continue
        except Refused:
            break
        return first
    return False


class HandOver(NamedTuple):
    """The end of a lease, and the next lease, which the bearer of the baton may take up."""

    name: str
    token: str
    next_token: str  # Nobody keeps it: the next lease is taken up by its id.
    next_id: str
    within: float  # Seconds in which it can be taken up.
    owner: Owner
    operation_timeout: float
    permit: int = 1
    retention: str = ""  # See forms.Release.


def hand_over(over: HandOver) -> Flow[LostReason | None]:
    """End a lease by handing it over. Returns None, or why it was lost before.

    Raises:
        LockUnavailable: The server refused, or did not answer.
    """
    new = over.next_token, over.next_id, milliseconds(over.within), over.owner.packed
    args = over.token, *new, over.retention
    within = ONE_TRY * over.operation_timeout
    call = Call(scripts.HAND_OVER, over.name, args, within, permit=over.permit)
    answer = yield from answer_to(call)
    return None if answer.value == GIVEN else lost_because(answer.value.decode())


def take_back(over: HandOver) -> Flow[None]:
    """Undo a hand-over whose baton reaches nobody. The lock is then free, or the next waiter's."""
    # In this order: a late hand-over would pass the lease from the first token to the second.
    for token in (over.token, over.next_token):
        yield from undo(over.name, token, over.operation_timeout, over.permit)


def renewal_call(renewal: Renewal, within: float) -> Call:
    """The step that renews a lease. The watchdog sends many of these at once."""
    args = _renewal_args(renewal.token, renewal.ttl, renewal.renewals, renewal.renews)
    return Call(scripts.RENEW, renewal.name, args, within, permit=renewal.permit)


def _renewal_args(token: str, ttl: float, count: int, renews: bool) -> tuple[str | int, ...]:
    return token, milliseconds(ttl), renewal_count(renews, count)


def result_of(call: Call) -> Flow[Any]:
    """Run one harmless or repeatable script, with one resend, and return its reply.

    Raises:
        LockUnavailable: The server refused, or did not answer twice.
    """
    answer = yield from answer_to(call)
    return answer.value


def answer_to_renewal(
    renewal: Renewal, operation_timeout: float, until: float = -math.inf
) -> Flow[Answer]:
    """Ask for a renewal as answer_to(). :meth:`LeaseState.answered` says what the answer means.

    Raises:
        LockUnavailable: The server refused, or did not answer.
    """
    return (yield from answer_to(renewal_call(renewal, ONE_TRY * operation_timeout), until))


def answer_to(call: Call, until: float = -math.inf) -> Flow[Answer]:
    """Ask until the server answers: at least twice, and then until *until*.

    Raises:
        LockUnavailable: The server refused, or did not answer.
    """
    failures, first_sent = 0, math.inf
    while True:
        try:
            if failures > 1:
                yield Pause(min(_backoff(failures), call.within))
            answer: Answer = yield call
            return answer._replace(unanswered_since=first_sent) if failures else answer
        except Refused as refused:
            raise unavailable(call.name, refused) from refused.__cause__
        except Unanswered as unanswered:
            failures += 1
            if not isinstance(unanswered, NotDone):
                first_sent = min(first_sent, unanswered.sent)
            if failures >= 2 and unanswered.now >= until:
                raise unavailable(call.name, unanswered) from unanswered.__cause__


@lru_cache(maxsize=1024)  # Programs use few durations, many times.
def milliseconds(seconds: float) -> int:
    """For the server: rounded up, and at least 1, since PEXPIRE 0 deletes."""
    return max(1, math.ceil(seconds * 1000))
