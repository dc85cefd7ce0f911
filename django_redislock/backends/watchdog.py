"""Renews each lease of this process every third of its ttl, until it is released or lost."""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from queue import Empty
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import ref

from django_redislock import logs, process
from django_redislock.backends.drivers import Inbox
from django_redislock.exceptions import LockLost
from django_redislock.rules import flows
from django_redislock.rules.flows import CONFIRM_WITHIN
from django_redislock.rules.lease_state import token_of
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ReferenceType

    from django_redislock.backends.base import Backend
    from django_redislock.lease import Lease
    from django_redislock.rules.lease_state import Renewal
    from django_redislock.rules.steps import Call, Outcome, Refused, Unanswered

logger = logs.logger("django_redislock.watchdog")

GRAIN = 1 / 64  # Seconds: leases due within the same grain are renewed in one batch.
SOONEST_RETRY = 0.02  # Seconds after a renewal that was not answered.
TRIES_TO_CONFIRM = 4  # Each try to confirm a grant gets the time left, divided by this.
SHORTEST_TRY = 0.05  # Seconds.
MOST_NEW = 1000  # New leases after which the thread wakes, and drops those that are over.
# Seconds for which the thread expects new leases that are as short as earlier ones.
EXPECTED_FOR = 60.0


class Renewer(Protocol):
    """A server, or several, on which a watchdog renews."""

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once, on the watchdog's own connection, or any that there is."""

    def prepare_watchdog(self) -> None:
        """Begin to dial that connection: an unconfirmed grant leaves little time for it."""

    def close_watchdog(self) -> None:
        """Close that connection; no lease is left to renew."""


class _Due(NamedTuple):
    """When one lease is due."""

    when: float
    number: int  # So that leases are never compared.
    token: str
    lease: ReferenceType[Lease]


class _Queue:
    """The leases that need about the same time for one try, in the order in which they are due."""

    __slots__ = ("entries", "time_for_one_try", "used_at")

    def __init__(self, time_for_one_try: float) -> None:
        self.entries: list[_Due] = []  # A heap.
        self.time_for_one_try = time_for_one_try
        self.used_at = -math.inf


class Watchdog:
    """One thread for all leases of this process in one backend, sync and async alike.

    The first lease starts it. It holds leases weakly, and sleeps until the next one is due. No
    exception ends it (R7). On a cluster each node has one, so a node that hangs delays no other; a
    lease goes to another watchdog with its slot.

    Signal handlers and destructors acquire, too, and may interrupt any thread anywhere. So nothing
    here takes a mutex: an acquire leaves its lease in a list, and the thread takes it in when it
    wakes. A release does nothing here: the thread sees by itself which leases are over.
    """

    def __init__(self, backend: Backend, renewer: Renewer) -> None:
        self._backend = backend
        self._renewer = renewer
        # Other threads leave these: leases, with the times when they are due; a ring, to wake it.
        self._new: deque[tuple[float, ReferenceType[Lease]]] = deque()
        self._bell: Inbox[None] = Inbox()
        # When the thread looks at the leases next; only the thread sets it. -inf: it is about to
        # look. inf: it has none to wait for, or there is no thread.
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._running = threading.Lock()  # Held by the thread; no other thread waits for it.
        self._retired = False
        # The thread's own.
        self._queues: dict[float, _Queue] = {}  # By the time for one try.
        self._last: dict[str, _Due] = {}  # By token: the only entry of a lease that counts.
        self._numbers = count()
        self._most_entries = 64  # With more, the entries of leases that are over are dropped.
        # Of the leases that were over when they were taken in: when the first is due. Nothing is
        # done then. But if the thread sleeps until then, acquires as long as that need not wake it.
        self._first_over = math.inf

    def watch(self, lease: Lease, due: float | None = None) -> None:
        """Leave a lease for the thread, and wake the thread if it would look too late.

        Args:
            lease: If it was left before, only this time counts.
            due: When to look after it, or earlier if it ends. By default, as for a new lease.
        """
        if due is not None:
            due = min(due, lease.ends)
        # Without jitter: a later lease is then due later, and an idle watchdog is not woken by
        # every acquire.
        elif lease.ends > lease.deadline:  # It is unconfirmed.
            self._renewer.prepare_watchdog()
            due = lease.deadline - min(CONFIRM_WITHIN, lease.ttl) * 2 / 3
        elif lease.auto_renew:
            due = min(lease.granted_at + lease.ttl / 3, lease.deadline)
        else:
            due = lease.deadline
        due = (due // GRAIN + 1) * GRAIN
        new = self._new
        new.append((due, ref(lease)))
        if due < self._wakes_at or len(new) % MOST_NEW == 0:
            self._wake(lease.name)

    def retire(self) -> None:
        """End the thread when the last lease is over."""
        self._retired = True
        self._bell.put(None)
        if self._thread is None:
            self._renewer.close_watchdog()

    def _wake(self, name: str) -> None:
        self._bell.put(None)
        if self._thread is None:
            self._start_thread(name)

    def _start_thread(self, name: str) -> None:
        thread = threading.Thread(
            target=self._run, name=f"redislock-watchdog-{self._backend.alias}", daemon=True
        )
        try:
            self._thread = thread  # First: a signal handler may leave a lease before the start.
            process.start(thread)
        except RuntimeError:
            # No more threads, or the interpreter is shutting down. The lease is good until its
            # deadline. The next lease tries to start the thread again.
            self._thread = None
            logger.exception(
                "Cannot start the thread that renews lock %r",
                name,
                extra=logs.of(lock=name, alias=self._backend.alias),
            )
        except BaseException:  # A signal handler raised it: the thread may run or not.
            self._thread = None
            raise

    def _run(self) -> None:
        # Of several threads that were started at once, one goes on.
        while self._running.acquire(blocking=False):
            self._thread = threading.current_thread()
            try:
                while self._round():
                    pass
                self._renewer.close_watchdog()
            finally:
                self._thread, self._wakes_at = None, math.inf
                self._running.release()
            if not self._new:  # The next acquire starts another thread.
                return

    def _round(self) -> bool:
        """Renew the leases that are due next. Returns False if none will ever be due.

        A method of its own, so that no local variable keeps leases while the thread sleeps: a lease
        without any other reference must not be renewed.
        """
        due = self._wait_until_due()
        if due is None:
            return False
        try:
            self._renew(due)
        except Exception:
            # A bug of ours must not cost the other leases their renewal. Nor must a handler of the
            # project's that raises; it gets this record, too.
            for lease in due:
                self.watch(lease, self._backend.clock() + SOONEST_RETRY)
            extra = logs.of(alias=self._backend.alias)
            with suppress(Exception):
                logger.exception("The watchdog met an error; it goes on", extra=extra)
        return True

    def _wait_until_due(self) -> list[Lease] | None:
        while True:
            self._wakes_at = -math.inf
            self._take_in()
            now = self._backend.clock()
            if leases := self._due(now):
                return leases
            if self._first_over <= now:
                self._first_over = math.inf
            dues = [queue.entries[0].when for queue in self._waiting(now)]
            if self._retired and not dues and not self._new:
                return None
            self._wakes_at = wakes_at = min([*dues, self._first_over])
            if not self._new:  # The next acquire knows when the thread wakes.
                self._sleep(wakes_at - now)

    def _sleep(self, seconds: float) -> None:
        """Sleep for so many seconds, or until the bell rings."""
        try:
            self._bell.get(timeout=None if seconds == math.inf else seconds)
        except Empty:
            return

    def _take_in(self) -> None:
        """Take in the new leases, but for those that are over."""
        while self._new:
            when, lease = self._new.popleft()
            self._put(when, lease)
        if sum(len(queue.entries) for queue in self._queues.values()) > self._most_entries:
            self._sort_out()

    def _put(self, when: float, reference: ReferenceType[Lease]) -> None:
        lease = reference()
        if lease is None or not lease.is_active:
            self._first_over = min(self._first_over, when)
            return
        token = token_of(lease)
        due = self._last[token] = _Due(when, next(self._numbers), token, reference)
        within = 2.0 ** math.floor(math.log2(self._time_for_one_try(lease, when)))
        if within not in self._queues:
            self._queues[within] = _Queue(within)
        queue = self._queues[within]
        queue.used_at = when
        heapq.heappush(queue.entries, due)

    def _sort_out(self) -> None:
        """Drop entries that do not count, since they may be due much later."""
        left = 0
        for queue in self._queues.values():
            queue.entries = [one for one in queue.entries if self._counts(one)]
            heapq.heapify(queue.entries)
            left += len(queue.entries)
        self._last = {one.token: one for queue in self._queues.values() for one in queue.entries}
        self._most_entries = 2 * left + 64

    def _counts(self, due: _Due) -> bool:
        """Whether its lease is not over, and is not due at another time by now."""
        lease = due.lease()
        return self._last.get(due.token) is due and lease is not None and lease.is_active

    def _waiting(self, now: float) -> list[_Queue]:
        """The queues with entries, each with one that counts at its head."""
        for key, queue in list(self._queues.items()):
            while queue.entries and not self._counts(queue.entries[0]):
                self._pop(queue)
            if not queue.entries and queue.used_at + EXPECTED_FOR < now:
                del self._queues[key]
        return [queue for queue in self._queues.values() if queue.entries]

    def _due(self, now: float) -> list[Lease]:
        leases = []
        for queue in self._waiting(now):
            while queue.entries and queue.entries[0].when <= now:
                counts, lease = self._counts(queue.entries[0]), self._pop(queue).lease()
                if counts and lease is not None:
                    leases.append(lease)
        return leases

    def _pop(self, queue: _Queue) -> _Due:
        due = heapq.heappop(queue.entries)
        if self._last.get(due.token) is due:
            del self._last[due.token]
        return due

    def _renew(self, leases: list[Lease]) -> None:
        batch: list[tuple[Lease, Renewal]] = []
        now = self._backend.clock()
        for lease in leases:
            if not lease.is_active:
                continue
            if self._left_to_another(lease, now):
                continue
            if lease.is_unanswered:
                self._backend.look_after(lease)
            try:
                renewal = lease.renewal_due(now)
            except LockLost as lost:
                self._backend.lost(lease, lost.reason)
                continue
            if renewal is None:
                # Nothing to renew: max_hold is near, or renew() was just called.
                self.watch(lease, self._next_time(lease, now))
                continue
            if lease.newly_abandoned():
                logger.warning(
                    "The thread or asyncio task that acquired lock %r has ended without releasing"
                    " it. It is renewed as long as its handle is kept: release it elsewhere, or"
                    " bound it with max_hold.",
                    lease.name,
                    extra=logs.of(lease),
                )
            batch.append((lease, renewal))
        if batch:
            self._send(batch)

    def _send(self, batch: list[tuple[Lease, Renewal]]) -> None:
        now = self._backend.clock()
        within = min(self._time_for_one_try(lease, now) for lease, _ in batch)
        is_first = not any(lease.is_unanswered for lease, _ in batch)
        within = min(within, self._time_before_others(now, expecting=is_first))
        calls = [flows.renewal_call(renewal, within) for _, renewal in batch]
        answers = self._renewer.renew_many(calls)
        now = self._backend.clock()
        for (lease, renewal), answer in zip(batch, answers, strict=True):
            if not lease.is_active:
                continue
            if not isinstance(answer, Answer):
                if self._left_to_another(lease, now):
                    continue
                self._note_failure(lease, answer, now)
                continue
            try:
                lease.answered(renewal, answer, now)
            except LockLost as lost:
                self._backend.lost(lease, lost.reason)
            else:
                self.watch(lease, self._next_time(lease, now, random.uniform(0.9, 1.0)))

    def _left_to_another(self, lease: Lease, now: float) -> bool:
        """Leave a lease to another watchdog if that has its slot by now. Returns whether it has."""
        watchdog = self._backend.watchdog_of(lease.name)
        if watchdog is not self:
            watchdog.watch(lease, now)
        return watchdog is not self

    def _next_time(self, lease: Lease, now: float, jitter: float = 1.0) -> float:
        return now + lease.ttl / 3 * jitter if lease.auto_renew else lease.deadline

    def _time_for_one_try(self, lease: Lease, now: float) -> float:
        # Short enough for more than one try before the lease ends, with any operation timeout in
        # the settings. An unconfirmed grant must be confirmed before its deadline.
        if lease.is_unconfirmed and now < lease.deadline:
            return max((lease.deadline - now) / TRIES_TO_CONFIRM, SHORTEST_TRY)
        return min(self._backend.operation_timeout(lease.ttl), lease.ttl / 3) / 2

    def _time_before_others(self, now: float, *, expecting: bool) -> float:
        """Seconds until another lease needs the thread, or else might have no try left.

        A due lease can wait for as long as one try may take.

        Args:
            now: The time.
            expecting: Whether to think of leases that may be acquired meanwhile, as short as
                earlier ones. Only for a first try: a later one must succeed on a slow way, too.
        """
        ends = [one.entries[0].when + one.time_for_one_try - now for one in self._waiting(now)]
        if expecting:
            # A lease acquired now is due after ttl / 3: at least twice the time for a try.
            ends += [3 * queue.time_for_one_try for queue in self._queues.values()]
        return max(min(ends, default=math.inf), SHORTEST_TRY)

    def _note_failure(self, lease: Lease, answer: Unanswered | Refused, now: float) -> None:
        self._backend.renewal_failures += 1
        if lease.unanswered():
            logger.warning(
                "Could not renew lock %r yet: %s",
                lease.name,
                answer.problem,
                extra=logs.of(lease, reason=answer.reason),
            )
        self._backend.look_after(lease)
        pause = max(SOONEST_RETRY, min(lease.ttl / 10, 1.0))
        if lease.is_unconfirmed and now < lease.deadline:
            pause = SOONEST_RETRY
        self.watch(lease, min([now + pause, *self._alarms_after(now + SOONEST_RETRY, lease)]))

    def _alarms_after(self, soonest: float, lease: Lease) -> list[float]:
        """When its alarms are due, if the renewal at *soonest* is not answered either."""
        times = [lease.alarm_at(alarm) for alarm in tuple(lease.alarms)]
        return [at for at in times if at >= soonest]
