"""The states of a lease, and all that may change them.

A handed-over lease is *unconfirmed* until an answer of the server *confirms* it: only its first
second is certain. If no answer comes within that second, the lease is *in doubt* until the end that
a confirmation would give. An answered renewal makes a lease last longer; an unanswered one changes
nothing yet. A lease is *lost*, for a reason, when the server says so or when its end has passed,
and it stays lost. It is *ended* when its owner no longer relies on it.

Any code may read a state; only the methods of :class:`LeaseState` change it. They take no mutex: a
signal handler or a destructor may call one while the thread that it interrupts is inside another.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock import process
from django_redislock.exceptions import LockLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.exceptions import LostReason
    from django_redislock.rules.forms import Attempt
    from django_redislock.rules.steps import Answer

# The clocks of two machines run at nearly the same rate. So the owner gives a lease up this much
# before the server does (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
DRIFT_RATE = 0.01
DRIFT_FIXED = 0.002
# Seconds: a renewal that would lengthen a lease by less than this is not sent.
WORTH_RENEWING = 1 / 64
CONFIRMS = 0  # The count of renewals that only confirm a hand-over, see lua/renew.lua.


def drift(seconds: float) -> float:
    """How much two clocks may differ after *seconds*, in seconds."""
    return seconds * DRIFT_RATE + DRIFT_FIXED


class Renewal(NamedTuple):
    """One renewal, as it is asked for."""

    name: str
    token: str
    ttl: float  # Seconds from now; shorter than the lease's ttl if max_hold is over before.
    renewals: int  # The count of this one, see lua/renew.lua.
    renews: bool = False  # Whether one more is to follow, see will_renew().
    lease_ttl: float = 0.0  # The ttl of the lease, once the renewal is carried out.
    permit: int = 1  # The permit of the lock that the lease is.


class Granted(NamedTuple):
    """The lock is ours."""

    fence: int
    deadline: float  # Until when it is certainly ours.
    at: float  # When, by our clock; max_hold counts from here.
    ends: float  # The deadline; of an unconfirmed grant, its deadline once confirmed.
    permit: int = 1


def granted_by(value: Any, sent: float, now: float, certain: float) -> Granted | None:
    """The grant in the answer to a try. None if there is no grant, or it came too late (R3).

    Args:
        value: What the server said.
        sent: When it was asked.
        now: When the answer came.
        certain: Seconds for which a grant is certain, see certain_for().
    """
    until = sent + certain
    if value.__class__ is not bytes or now >= until:
        return None
    fence, _, permit = value.partition(b" ")
    return Granted(int(fence), until, sent, until, int(permit or 1))


def certain_for(ttl: float) -> float:
    """Seconds for which a grant or renewal for *ttl* seconds is certain, from its sending on."""
    return ttl - drift(ttl)


def will_renew(renew: bool, ttl: float, left: float) -> bool:
    """Whether a lease that is now granted or renewed for *ttl* seconds will be renewed again.

    The lock shows this to others. So when a renewal is missed, they see that the owner is in
    trouble.

    Args:
        renew: Whether the watchdog renews the lease at all.
        ttl: Seconds for which it is granted or renewed.
        left: Seconds until max_hold is over; the last renewal is shortened to end then.
    """
    return renew and left - ttl >= WORTH_RENEWING


def lost_because(word: str) -> LostReason:
    """Why a lease is lost, from the word of a script."""
    return word if word in {"forced", "taken", "replaced"} else "expired"  # type: ignore[return-value]


class Alarm:
    """When a lease counts as endangered, and the callback to call then."""

    __slots__ = ("callback", "left")

    def __init__(self, left: float, callback: Callable[[Any], object] | None = None) -> None:
        self.left = left  # The part of the ttl that is left then, 0 to 1.
        self.callback = callback  # None: the log, and the receivers of a signal.


STANDARD_ALARM = Alarm(0.5)


class LeaseState:
    """One lease, from its grant on. Programs have a Lease, which can also ask the server.

    Times are seconds of the clock that deadlines are measured with.

    Attributes:
        name: The lock.
        id: Its public name in logs and listings; the token is secret.
        fence: Greater than that of every earlier lease of this lock.
        owner: The process that holds it, for humans.
        template: The name as it was written.
        permit: The number of its permit; None if the lock has no limit.
        permit_number: The same, but 1 if the lock has no limit.
        granted_at: When it was granted.
        ttl: Seconds it lasts unless renewed.
        auto_renew: Whether the watchdog renews it.
        hold_until: When max_hold is over.
        deadline: Until when it is certainly ours.
        ends: When it ends at the latest: later than the deadline while it is unconfirmed.
        renewals: How many renewals were answered.
        is_unanswered: Whether the last renewal was not answered.
        is_ended: Whether its owner no longer relies on it.
        max_silence: Seconds from the owner's last beat() to the end of max_hold; 0.0 if max_hold
            counts from the grant.
        began_after: Seconds from the grant to when max_hold began: of a part of a joint lock, until
            all parts were held.
        holder: Weak reference to the thread or asyncio task that it was granted to.
        caller: The caller that this thread served, see holder.py; None if it belongs to a task.
        times_held: How often it is held, counting reentrant acquires and open transactions.
        is_of_run: Whether the run of a job has it. Its release then notes the end of the run.
        alarms: The alarms to raise when it is endangered.
        is_handed_over: Whether it ended by a hand-over to the bearer of a baton.
        transactions: How many of *times_held* are open transactions; see handle.Handle._defer().
        min_hold: The greatest min_hold of its acquires that have ended with a success.
        replaced_by: The owner of the newer call that has replaced its run, as text; None if none
            has. It is told as lost then, and on the server it lasts until the run has ended.
        gave_way: Whether the run has ended because of that: it is no success and no failure.
    """

    # These never change for most leases.
    renewals = 0
    is_unanswered = False
    is_ended = False
    max_silence = 0.0
    began_after = 0.0
    times_held = 1
    transactions = 0
    min_hold = 0.0
    is_handed_over = False
    _known_abandoned = False
    lost: LostReason | None = None
    replaced_by: str | None = None
    gave_way = False
    alarms: Sequence[Alarm] = (STANDARD_ALARM,)
    danger: dict[Alarm, object] | None = None  # While a renewal is unanswered: the raised alarms.
    _longer: Sequence[float] = ()  # The ttls, in seconds, of renewals that asked for more.

    def __init__(
        self,
        attempt: Attempt,
        granted: Granted,
        holder: Callable[[], object],
        caller: Any = None,
        backend: Any = None,
    ) -> None:
        terms = attempt.terms
        self.name = attempt.name
        self.id = attempt.id
        self._token = attempt.token
        self.owner = attempt.owner
        self.template = attempt.template
        self.is_of_run = attempt.is_of_run
        self.ttl = terms.ttl
        self.auto_renew = terms.renew
        self.fence, self.deadline, self.granted_at, self.ends, self.permit_number = granted
        self.permit = self.permit_number if attempt.has_limit else None
        self.hold_until = self.granted_at + terms.max_hold
        self.holder = holder
        self.caller = caller
        self._process = process.current
        self._backend = backend  # Of a Lease. Set last, see Lease.__del__().

    # --- what it is -----------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this process, and not to a parent that has forked this one."""
        return self._process is process.this()

    @property
    def is_active(self) -> bool:
        """Whether it is neither ended nor known to be lost; its end may have passed."""
        return not self.is_ended and self.lost is None and self.is_ours

    @property
    def is_lost(self) -> bool:
        """Whether it is known to be lost."""
        return self.lost is not None

    @property
    def is_unconfirmed(self) -> bool:
        """Whether it was handed over, and no answer of the server has confirmed it yet."""
        return self.ends > self.deadline

    def is_held(self, now: float) -> bool:
        """Whether it is certainly ours."""
        return self.is_active and now < self.deadline

    def is_in_doubt(self, now: float) -> bool:
        """Whether only the server knows if it is held."""
        return self.may_be_held(now) and not self.is_held(now)

    def may_be_held(self, now: float) -> bool:
        """Whether it is held, or in doubt."""
        return self.is_active and now < self.ends

    def loss_reason(self, now: float) -> LostReason | None:
        """Why it was lost; None if it was not."""
        if self.replaced_by is not None and (now >= self.ends or self.lost is None):
            return "replaced"
        if now >= self.ends and self.is_active:
            return "unreachable" if self.is_unanswered else "expired"
        return self.lost

    def loss(self, now: float) -> LockLost:
        """The error that says why it is not held any more."""
        reason = self.loss_reason(now) or "expired"
        over = ""
        if not self.is_ours:
            over = "it belongs to the process that this one was forked from"
        elif self.is_ended and self.lost is None:
            over = "it was handed over" if self.is_handed_over else "it was released"
        elif reason == "expired":
            over = self._setting_that_was_over(now)
        return LockLost(self.name, reason, over)

    def _setting_that_was_over(self, now: float) -> str:
        """Which setting ended its renewals, as a clause; "" if none did."""
        if now < self.ends:
            return ""  # The server ended it.
        if not self.auto_renew:
            return f"renew is False, and its ttl of {self.ttl:g} s was over"
        # The last renewal is shortened to end at max_hold, less the drift of the clocks.
        if self.hold_until <= self.ends + drift(self.ttl) + WORTH_RENEWING:
            if self.max_silence:
                return f"its beat() was not called for {self.max_silence:g} s"
            max_hold = self.hold_until - self.granted_at - self.began_after
            return f"its max_hold of {max_hold:g} s was over"
        return ""

    # --- whose it is ----------------------------------------------------------------------------

    def nest(self) -> None:
        """Its holder has acquired it once more."""
        self.times_held += 1

    def unnest(self) -> int:
        """One of its acquires is over. Returns how many are left; the last one ends the lease."""
        left = self.times_held = self.times_held - 1
        if left <= 0:
            self.is_ended = True
        return left

    def succeeded(self, min_hold: float) -> None:
        """One of its acquires has ended with a success: the end of the lease keeps the lock."""
        self.min_hold = max(self.min_hold, min_hold)

    def hold_for_transactions(self) -> bool:
        """Transactions hold it too, until they are over. Returns True."""
        self.times_held += 1
        self.transactions += 1
        return True

    def end_by_hand_over(self) -> None:
        """It is ended; from now on a release by its holder does nothing."""
        self.is_handed_over = self.is_ended = True
        self.times_held += 1  # One for the baton, so that the holder's is never the last.

    def transactions_are_over(self) -> None:
        """The transactions are over and no longer hold it. unnest() was called before."""
        self.transactions -= 1

    @property
    def is_held_by_transactions_only(self) -> bool:
        """Whether nobody but transactions holds it."""
        return 0 < self.transactions == self.times_held

    def newly_abandoned(self) -> bool:
        """Whether its holder ended without a release, and this call is the first to see that."""
        if self._known_abandoned:
            return False
        holder = self.holder()
        # A traceback, say, may refer to a task that has ended. A thread that has ended is gone.
        has_ended = holder is None or (hasattr(holder, "done") and holder.done())
        if not has_ended:
            return False
        self._known_abandoned = True
        return True

    # --- what changes it ------------------------------------------------------------------------

    def allow_silence(self, now: float, max_silence: float) -> bool:
        """Its owner says that it goes on: max_hold is over *max_silence* seconds from now.

        Returns:
            Whether to renew it now. The watchdog would perhaps let it end, since it knows only the
            earlier max_hold.
        """
        if not self.may_be_held(now):
            return False
        self.max_silence = max_silence
        self.hold_until = now + max_silence
        is_tried = self.is_unconfirmed or self.is_unanswered
        return not is_tried and self.deadline - now < min(self.ttl, max_silence) / 2

    def await_others(self) -> bool:
        """It is kept without a bound while other parts of a joint lock are awaited.

        Returns:
            Whether it had a bound. Then the watchdog must look at it now.
        """
        had_bound = not self.auto_renew or self.hold_until < math.inf
        self.auto_renew, self.hold_until = True, math.inf
        return had_bound

    def begin(self, now: float, max_hold: float, renew: bool) -> None:
        """All parts of the joint lock are held: max_hold and renew count from now on."""
        self.began_after = now - self.granted_at
        self.auto_renew = renew
        self.hold_until = now + max_hold
        self._end_by_max_hold(min(self.ttl, max_hold))

    def _end_by_max_hold(self, ttl: float) -> None:
        # A renewal from now on lets it end by then on the server too.
        latest = self.hold_until - drift(ttl)
        if self.ends > latest:
            self.deadline, self.ends = min(self.deadline, latest), latest

    def renewal(self, now: float, ttl: float | None = None) -> Renewal:
        """What to send to renew it, for its own ttl or a longer one.

        Raises:
            LockLost: It is not ours any more, or max_hold is over.
        """
        left = self.hold_until - now
        if not self.may_be_held(now) or left <= 0:
            raise self.loss(now)
        if ttl is not None and ttl > self.ttl:
            vars(self).setdefault("_longer", []).append(ttl)
        # On the server, the renewal with the greatest count sets the ttl, even to a shorter one. So
        # each renewal asks for the longest ttl of all with a smaller count, answered or not: it
        # notes its own ttl before it reads the count, and reads the longest one after that.
        count = self.renewals + 1
        lease_ttl = max((self.ttl, *self._longer))
        ttl = min(lease_ttl, left)
        renews = will_renew(self.auto_renew, ttl, left)
        return Renewal(self.name, self._token, ttl, count, renews, lease_ttl, self.permit_number)

    def renewal_due(self, now: float) -> Renewal | None:
        """What the watchdog sends now; None if a renewal would hardly lengthen the lease.

        Raises:
            LockLost: It is not ours any more.
        """
        if now >= self.hold_until and self.may_be_held(now):
            return None
        renewal = self.renewal(now)
        if not self.auto_renew:
            if not self.is_unconfirmed:
                return None
            # Before the deadline it only confirms, see lua/renew.lua. Later the lease lasts longer
            # than lists know, so it is a renewal, which tells them.
            return renewal if now >= self.deadline else renewal._replace(renewals=CONFIRMS)
        gain = now + renewal.ttl - drift(renewal.ttl) - self.deadline
        return renewal if self.is_unconfirmed or gain >= WORTH_RENEWING else None

    def answered(self, renewal: Renewal, answer: Answer, now: float) -> None:
        """Take in the server's answer to a renewal.

        Raises:
            LockLost: The server says that the lease is over, or its end has passed. Lost stays
                lost, even if the server has renewed it.
        """
        word = answer.value.decode()
        if word != "renewed":
            raise LockLost(self.name, lost_because(word))
        if not self.may_be_held(now):
            raise self.loss(now)
        self.is_unanswered, self.danger = False, None
        self.ttl = max(self.ttl, renewal.lease_ttl)  # Another one may have made it longer.
        # The ttl counts from the sending, not from the answer (R2). But sending may have come late,
        # and a later renewal ends the lease at max_hold: hence min(). The answer to a later renewal
        # may have come before this one: hence max().
        ttl = min(renewal.ttl, self.hold_until - answer.sent)
        self.deadline = self.ends = max(self.deadline, answer.sent + ttl - drift(ttl))
        self._end_by_max_hold(ttl)  # Another thread may have called begin() meanwhile.
        self.renewals += renewal.renewals > CONFIRMS

    def unanswered(self) -> bool:
        """A renewal was not answered. Returns whether it is the first since the last answer."""
        first, self.is_unanswered = not self.is_unanswered, True
        if self.danger is None:
            self.danger = {}
        return first

    def warn(self, alarm: Alarm) -> None:
        """Raise *alarm*, too, when the lease is endangered from now on."""
        alarms: list[Alarm] = vars(self).setdefault("alarms", [STANDARD_ALARM])
        alarms.append(alarm)

    def alarm_at(self, alarm: Alarm) -> float:
        """When *alarm* is due, unless the lease is renewed before: left * ttl before its end.

        math.inf if no renewal is unanswered. The end of a lease without renewals is no danger.
        """
        if self.danger is None or not self.auto_renew or not self.is_active:
            return math.inf
        return self.ends - alarm.left * self.ttl

    def must_raise(self, alarm: Alarm, now: float) -> bool:
        """Whether *alarm* is due, and this caller must raise it: one caller in each danger."""
        danger, told_by = self.danger, object()
        if danger is None or not self.alarm_at(alarm) <= now < self.ends:
            return False
        return danger.setdefault(alarm, told_by) is told_by  # One step of the dict.

    def replace(self, until: float, by: str) -> bool:
        """A newer call has replaced its run, which must have ended by *until*.

        It is renewed for so long at most. Returns True to the first caller that tells of its loss.
        """
        if not self.is_active:
            return False
        self.hold_until = min(self.hold_until, until)
        self._end_by_max_hold(0.0)
        self.replaced_by = by
        told_by = object()
        return vars(self).setdefault("_told_by", told_by) is told_by  # One step of the dict.

    def lose(self, reason: LostReason, *, at_release: bool = False) -> bool:
        """It is lost. Returns True to the first caller that says so, False to all others."""
        # If the release overtakes a renewal, the answer to the renewal says nothing.
        if not self.is_ours or (self.is_ended and not at_release):
            return False
        if self.lost is None:
            self.lost = reason if self.replaced_by is None else "replaced"
        told_by = object()
        return vars(self).setdefault("_told_by", told_by) is told_by  # One step of the dict.


# The secret of a lease, for this package alone: programs have its id.
token_of: Callable[[LeaseState], str] = attrgetter("_token")
