"""What every backend does the same way: perform flows, keep leases alive, know its leases."""

from __future__ import annotations

import math
import secrets
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, logs, process, signals
from django_redislock.backends import drivers
from django_redislock.lease import Leases
from django_redislock.process import tell_after_fork
from django_redislock.rules import flows, scripts
from django_redislock.rules.keys import BUCKETS, IN_BUCKETS, index_key, permit_of
from django_redislock.rules.lease_state import STANDARD_ALARM
from django_redislock.rules.names import Permit
from django_redislock.rules.options import MOST_COMBINATIONS, ONE_TRY, operation_timeout, terms_of
from django_redislock.rules.replies import LookReply, NamesReply
from django_redislock.rules.steps import Answer, Call, together
from django_redislock.rules.stored import retention_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from django_redislock.backends.watchdog import Watchdog
    from django_redislock.conf import Conf
    from django_redislock.exceptions import LostReason
    from django_redislock.findings import Finding
    from django_redislock.lease import Lease
    from django_redislock.rules.forms import Form
    from django_redislock.rules.options import Options, Terms
    from django_redislock.rules.steps import Flow, Outcome, Performer

logger = logs.logger("django_redislock")

Result = TypeVar("Result")

LISTED_AT_ONCE = 10_000  # Names in an index.
FEWEST_IN_A_BUCKET = 16  # Locks whose records are kept, even if the settings say fewer.


class Indexed(NamedTuple):
    """Some of the locks in an index, each permit for itself."""

    permits: list[Permit]
    total: int  # How many there are.
    silent: Sequence[str] = ()  # The servers that did not answer: their locks are missing in both.


NO_PERMITS = Indexed([], 0)


class TakesCommands(Protocol):
    """A server that runs plain commands for the doctor."""

    @property
    def scripts_need(self) -> str:
        """What to do so that it allows scripts; "" if it does, as far as this process knows."""

    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Run commands in one round trip; an error reply is returned, not raised.

        Raises:
            LockUnavailable: The server did not answer, or is the wrong one.
        """


class Backend(ABC):
    """One alias of REDISLOCK: a place where locks are kept, shared by all threads and loops.

    A subclass implements session(), async_session() and call_many(), and makes its watchdog in
    _start(). With several watchdogs, it overrides watchdog_of() and retire() instead.
    """

    # What a backend can do. The doctor, checks and tasks look at these flags, never at its class.
    supports_processes = True  # Its locks keep out other processes, not only other threads.
    supports_failover = False  # If a server fails, a replica takes over.
    supports_majority = False  # A majority of its servers decides, so some may stay away.

    supports_queues = True  # Waiters queue up, and so can see whether they wait in a circle.
    supports_rates = True  # It counts the starts under a Rate.
    supports_batons = True  # A lease can be handed over to the bearer of a baton.
    supports_records = True  # What becomes of runs and calls is kept, not only who holds a lock.

    clock: Callable[[], float] = staticmethod(clock.now)
    in_buckets = False  # Whether names are spread over buckets, see rules/keys.py.
    in_parts = False  # Whether there are several servers, and a look says where a lock is.
    watchdog: Watchdog  # Of all leases; on a cluster each node has its own instead.

    def __init__(self, conf: Conf) -> None:
        self.conf = conf
        self.alias = conf.alias
        self.prefix = conf.key_prefix + (IN_BUCKETS if self.in_buckets else "")
        self.retention = retention_of(
            conf.records_for, self._records_in_an_index, conf.timeline
        )  # As scripts take it.
        # Combines options with the settings of this alias.
        self.terms = lru_cache(maxsize=MOST_COMBINATIONS)(self._terms_of)
        self._start()
        tell_after_fork.add(self)

    @property
    def _records_in_an_index(self) -> int:
        """How many locks may have records in one index."""
        most = self.conf.records
        # Names are not spread quite evenly.
        return max(math.ceil(most / BUCKETS), FEWEST_IN_A_BUCKET) if self.in_buckets else most

    @property
    def most_records(self) -> int:
        """How many locks may have records of runs on the server; on a cluster about so many."""
        return self._records_in_an_index * (BUCKETS if self.in_buckets else 1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.alias!r}>"

    def _start(self) -> None:
        """Make all that belongs to this process alone. Called again in a forked child."""
        self.process = secrets.token_hex(8)
        self.leases = Leases()
        # Whether each name had a limit when it was asked for last; see Handle._first_try().
        self.has_limit: dict[str, bool] = {}
        self.waiting: set[str] = set()  # The ids of the acquires that wait now.
        self.renewal_failures = 0  # How many tries to renew a lease were not answered, or refused.

    def after_fork(self) -> None:
        """In a forked child: begin anew, without the parent's connections, threads and leases."""
        self._start()

    def retire(self) -> None:
        """Take no new locks from now on. Held locks are still renewed and released here."""
        self.watchdog.retire()

    def watchdog_of(self, name: str) -> Watchdog:
        """The watchdog of the leases of *name* at this time: one for all, unless overridden."""
        return self.watchdog

    def watch(self, lease: Lease) -> None:
        """Have the watchdog look after a new lease. A sole watchdog puts its method in place."""
        self.watchdog_of(lease.name).watch(lease)

    def check_records(self, option: str) -> None:
        """Refuse an *option* of a job that needs records of runs, if none are kept here.

        Raises:
            ImproperlyConfigured: It needs another alias. The message has the line to write.
        """
        if not self.supports_records:
            raise ImproperlyConfigured(
                f"{option} needs records of runs, and REDISLOCK[{self.alias!r}] is a quorum, which"
                ' keeps locks only. Write using="runs" there, and add to REDISLOCK an alias with'
                " one server: 'runs': {'LOCATION': 'redis://host:6379/0'}."
            )

    def _terms_of(self, options: Options) -> Terms:
        if options.once:
            self.check_records(f"once={options.once:g}")
        if options.replace:
            self.check_records('on_conflict="replace"')
        return terms_of(options, self.conf, self.operation_timeout)

    def operation_timeout(self, ttl: float) -> float:
        """The operation timeout in seconds: how long a server may take for one operation."""
        return operation_timeout(ttl)

    # --- performing -------------------------------------------------------------------------

    @abstractmethod
    def session(self, form: Form | None = None) -> Performer:
        """A performer of one flow, which blocks its thread.

        Args:
            form: The first step. If it has a connection, that performs the other steps, too.
        """

    @abstractmethod
    def async_session(self, form: Form | None = None) -> Performer:
        """A performer of one flow, which does not block the event loop."""

    def begin(self, form: Form, /) -> None:  # noqa: B027 - a flow can do without
        """Do the first step of a flow, if it is cheap; see forms.py."""

    async def abegin(self, form: Form, /) -> None:  # noqa: B027
        """See begin(), without blocking the event loop."""

    def run(self, flow: Flow[Result], form: Form | None = None) -> Result:
        """Perform a flow, blocking this thread; begin() may have done its first step."""
        return drivers.run(flow, self.session(form), form)

    # Returns the coroutine itself: `async def` would add another.
    def arun(self, flow: Flow[Result], form: Form | None = None) -> Coroutine[Any, Any, Result]:
        """See run(), without blocking the event loop."""
        return drivers.arun(flow, self.async_session(form), form)

    @abstractmethod
    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once. They must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer.
        """

    def results_of(self, calls: Sequence[Call]) -> list[Any]:
        """Run many scripts at once, and return their replies.

        Raises:
            LockUnavailable: The server refused, or did not answer.
        """
        values = []
        for outcome, call in zip(self.call_many(calls), calls, strict=True):
            if not isinstance(outcome, Answer):
                raise flows.unavailable(call.name, outcome) from outcome.__cause__
            values.append(outcome.value)
        return values

    # --- losing leases ------------------------------------------------------------------------

    def lost(self, lease: Lease, reason: LostReason, *, at_release: bool = False) -> None:
        """Note that *lease* is lost, and tell its callbacks and receivers, in another thread."""
        if not lease.lose(reason, at_release=at_release):
            return
        over = lease.loss(self.clock()).over
        try:
            logger.error(
                "Lost the lease %s of lock %r (%s); the code under it may still run",
                lease.id,
                lease.name,
                f"{lease.lost_reason}: {over}" if over else lease.lost_reason,
                extra=logs.of(
                    lease,
                    reason=lease.lost_reason,
                    held_for=round(self.clock() - lease.granted_at, 3),
                ),
            )
        finally:  # A handler of the project's may raise.
            self._tell_loss(lease)

    def replaced(self, lease: Lease, until: float, by: str) -> None:
        """Note that a newer call has replaced the run of *lease*, and tell it as lost() does.

        Args:
            lease: It lasts on the server until its run has ended.
            until: When it must have ended.
            by: The owner of the newer call.
        """
        if not lease.replace(until, by):
            return
        try:
            logger.info(
                "The run under lock %r is replaced by %s, and has %.1f s to end",
                lease.name,
                by,
                max(until - self.clock(), 0.0),
                extra=logs.of(lease, reason="replaced"),
            )
        finally:
            self._tell_loss(lease)

    def _tell_loss(self, lease: Lease) -> None:
        if lease.has_callbacks or signals.lock_lost.receivers:
            _in_thread("redislock-lost", self._tell_lost, lease)

    def _tell_lost(self, lease: Lease) -> None:
        held_for = self.clock() - lease.granted_at
        lease.run_callbacks()
        news = {"lease": lease, "reason": lease.lost_reason, "held_for": held_for}
        signals.lock_lost.send_robust(sender=type(lease), template=lease.template, **news)

    def look_after(self, lease: Lease) -> None:
        """Raise the alarms of *lease* if it is endangered: once in a danger, in another thread."""
        now = self.clock()
        raised = [alarm for alarm in tuple(lease.alarms) if lease.must_raise(alarm, now)]
        is_told = STANDARD_ALARM in raised
        if is_told and not signals.lease_endangered.receivers:
            raised.remove(STANDARD_ALARM)
        try:
            if is_told:
                logger.warning(
                    "Lock %r is endangered: its lease ends in %.1f s unless a renewal is answered",
                    lease.name,
                    lease.ends - now,
                    extra=logs.of(lease, held_for=round(now - lease.granted_at, 3)),
                )
        finally:  # A handler of the project's may raise.
            for alarm in raised:
                _in_thread("redislock-endangered", lease.raise_alarm, alarm)

    def note_expiry(self, lease: Lease) -> None:
        """Note that *lease* is lost if its end has passed."""
        if reason := lease.loss_reason(self.clock()):
            self.lost(lease, reason)

    # --- being examined -----------------------------------------------------------------------

    def examine(self) -> Iterator[Finding]:
        """Whatever may endanger the locks here, besides the state of each of servers().

        `manage.py locks doctor` prints it; `manage.py check --deploy` reports each with an id.

        Raises:
            LockUnavailable: No server answers, so there is nothing more to examine.
        """
        return iter(())

    @contextmanager
    def servers(self) -> Iterator[Mapping[str, TakesCommands]]:
        """The servers of this alias by address, for the block; none, unless overridden."""
        yield {}

    def keeps(self, server: TakesCommands, name: str) -> bool:
        """Whether *server*, one of servers(), keeps the lock *name*."""
        return True

    # --- looking ------------------------------------------------------------------------------

    def held_permits(self, limit: int, offset: int = 0, *, latest_first: bool = False) -> Indexed:
        """The held locks by expiry, the next to end first.

        They are read from an index, without a scan of the keyspace. Some may have become free.
        """
        return self._indexed("held", limit, offset, latest_first=latest_first)

    def ran_permits(self, limit: int, *, latest_first: bool = True) -> Indexed:
        """The locks of jobs by their last run: all permits of a name are one."""
        if not self.supports_records:
            return NO_PERMITS
        return self._indexed("ran", limit, 0, latest_first=latest_first)

    def announced_permits(self, limit: int) -> Indexed:
        """The locks with a call that unique_queued has announced, the first to end first."""
        if not self.supports_records:
            return NO_PERMITS
        return self._indexed("calls", limit, 0, latest_first=False)

    def _indexed(self, which: str, limit: int, offset: int, *, latest_first: bool) -> Indexed:
        permits: list[Permit] = []
        total = 0
        for page in self._pages(which, offset, offset + limit, latest_first=latest_first):
            permits += [found for key in page.keys if (found := self.permit_in(key))]
            total = page.total
        return Indexed(permits, total)

    def _pages(
        self, which: str, start: int, end: int, *, latest_first: bool
    ) -> Iterator[NamesReply]:
        """An index in parts: while a server lists a part, it serves no other client."""
        while True:
            part = max(0, min(LISTED_AT_ONCE, end - start))
            args = which, start, part, int(latest_first)
            call = Call(scripts.NAMES, index_key(self.prefix), args, self.within)
            page = NamesReply(*self.results_of([call])[0])
            yield page
            start += part
            if start >= min(end, page.total):
                return

    def permit_in(self, lock_key: bytes) -> Permit | None:
        """The lock, or the permit, of a key in an index; None if the key is not one of ours."""
        found = permit_of(self.prefix, lock_key.decode(errors="replace"))
        return found and Permit(*found)

    @property
    def within(self) -> float:
        """Seconds that one try of an operation without a ttl of its own may take."""
        return ONE_TRY * self.operation_timeout(self.conf.ttl)

    def look(self, name: str, permit: int = 1) -> Call:
        """The step that looks at a lock, or at one of its permits; see seen()."""
        return Call(scripts.LOOK, name, (), self.within, permit=permit)

    def is_taken(self, wanted: Sequence[tuple[str, int | None]]) -> Flow[bool]:
        """Whether one of these names has no free permit. One round trip looks at all permits.

        Args:
            wanted: The names, each with its limit if it has one.
        """
        permits = [Permit(name, k) for name, limit in wanted for k in range(1, (limit or 1) + 1)]
        looks = [flows.result_of(self.look(*permit)) for permit in permits]
        values = [(yield from looks[0])] if len(looks) == 1 else (yield from together(looks))
        seen = zip(permits, values, strict=True)
        free = {one.name for one, value in seen if self.seen(one.name, value).is_free}
        return any(name not in free for name, _ in wanted)

    def look_many(self, permits: Sequence[Permit]) -> list[LookReply]:
        """The state of many locks, in few round trips."""
        values = self.results_of([self.look(*one) for one in permits]) if permits else []
        return [self.seen(one.name, value) for one, value in zip(permits, values, strict=True)]

    def seen(self, name: str, value: list[Any]) -> LookReply:
        """Read the answer of the look script about the lock *name*."""
        return LookReply(*value)


def _in_thread(name: str, tell: Callable[[Any], object], about: object) -> None:
    """Call *tell* in a thread. If it hangs, it stops neither the other callbacks nor the exit."""
    thread = threading.Thread(target=tell, args=(about,), name=name, daemon=True)
    try:
        process.start(thread)
    except RuntimeError:  # No more threads, or the interpreter is shutting down.
        tell(about)
