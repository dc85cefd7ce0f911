"""Renews every lease of this process each third of its ttl, until it is released or lost."""

from __future__ import annotations

import heapq
import logging
import math
import random
import threading
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from django_redislock.exceptions import LockLost
from django_redislock.rules import flows
from django_redislock.rules.flows import CLAIM
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import ReferenceType

    from django_redislock.exceptions import LostReason
    from django_redislock.lease import Lease
    from django_redislock.rules.grant import Grant, Renewal
    from django_redislock.rules.steps import Call, Outcome, Refused, Unanswered

logger = logging.getLogger("django_redislock.watchdog")

GRAIN = 1 / 64  # Seconds: leases due within the same grain are renewed in one batch.
SOONEST_RETRY = 0.02  # Seconds after a renewal that was not answered.
TRIES_PER_CLAIM = 4  # Of what is left of a claim, each try to confirm it gets this part.
SHORTEST_TRY = 0.05  # Seconds.


class Watched(Protocol):
    """Whose leases they are: a backend."""

    alias: str
    clock: Callable[[], float]

    def operation_timeout(self, ttl: float) -> float: ...
    def lost(self, lease: Lease, reason: LostReason) -> None: ...
    def watchdog_of(self, name: str) -> Watchdog: ...


class Renewer(Protocol):
    """Where they are renewed."""

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once, on a connection of its own."""

    def close_watchdog(self) -> None:
        """Close that connection; no lease is left to renew."""


class Watchdog:
    """One thread for all leases of this process in one place, sync and async alike.

    It is started by the first lease, holds leases weakly, and sleeps until the next one is due.
    No exception ends it (R7). A place is a backend; on a cluster it is one of its nodes, so that a
    node that hangs delays no other, and leases go over to another watchdog with their slot.
    """

    def __init__(self, backend: Watched, renewer: Renewer) -> None:
        self._backend = backend
        self._renewer = renewer
        # Leases by when they are due, in grains. A released lease takes itself out, and its slot
        # if that is empty then, in constant time. The heap tells which slot comes next; it may
        # still have some that are gone.
        self._slots: dict[int, dict[str, ReferenceType[Lease]]] = {}
        self._slot_of: dict[str, int] = {}  # By token.
        self._order: list[int] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._retired = False

    def watch(self, lease: Lease) -> None:
        """Look after a new lease."""
        grant = lease.grant
        # Without jitter: a later lease is then due later, and an idle watchdog is not woken by
        # every acquire.
        if grant.is_claimed:
            first = grant.deadline - min(CLAIM, grant.ttl) * 2 / 3
        elif grant.auto_renew:
            first = min(grant.granted_at + grant.ttl / 3, grant.deadline)
        else:
            first = grant.deadline
        with self._lock:
            self._put(lease, first)

    def forget(self, lease: Lease) -> None:
        """The lease is over."""
        token = lease.grant.token
        with self._lock:
            slot = self._slot_of.pop(token, 0)
            leases = self._slots.get(slot)
            if leases is not None:
                leases.pop(token, None)
                if not leases:
                    del self._slots[slot]

    def put_back(self, lease: Lease, due: float) -> None:
        """Look after a lease again, due at *due*, that this watchdog or another has taken out."""
        with self._lock:
            if lease.grant.is_active:
                self._put(lease, min(due, lease.grant.ends))

    def retire(self) -> None:
        """End the thread when the last lease is over."""
        with self._lock:
            self._retired = True
            self._changed.notify()
            running = self._thread is not None
        if not running:
            self._renewer.close_watchdog()

    def _put(self, lease: Lease, due: float) -> None:
        token, slot = lease.grant.token, int(due / GRAIN) + 1
        self._slot_of[token] = slot
        leases = self._slots.get(slot)
        if leases is None:
            leases = self._slots[slot] = {}
            if len(self._order) > 2 * len(self._slots) + 64:
                self._order = sorted(self._slots)  # Drop those that are gone.
            else:
                heapq.heappush(self._order, slot)
        leases[token] = ref(lease)
        if self._thread is None:
            self._start_thread(lease.name)
        elif slot * GRAIN < self._wakes_at:
            self._wakes_at = slot * GRAIN
            self._changed.notify()

    def _start_thread(self, name: str) -> None:
        thread = threading.Thread(
            target=self._run, name=f"redislock-watchdog-{self._backend.alias}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # No more threads, or the interpreter is shutting down. The lease is good until its
            # deadline, and the next one tries again.
            logger.exception("Cannot start the thread that renews lock %r", name)
        else:
            self._thread = thread

    def _run(self) -> None:
        with self._lock:
            # A signal handler's exception in start() hides a thread from who started it.
            if self._thread not in {None, threading.current_thread()}:
                return
            self._thread = threading.current_thread()
        while self._round():
            pass
        self._renewer.close_watchdog()

    def _round(self) -> bool:
        """Renew what is due next; False if nothing will ever be.

        A method of its own, so that no local variable keeps the leases while it sleeps: one that
        nobody else refers to must not be renewed.
        """
        with self._lock:
            due = self._wait_until_due()
        if due is None:
            return False
        try:
            self._renew(due)
        except Exception:
            # A bug of ours must not cost the other leases their renewal.
            logger.exception("The watchdog met an error; it goes on")
            self._put_off(due)
        return True

    def _wait_until_due(self) -> list[Lease] | None:
        while True:
            now = self._backend.clock()
            leases: list[Lease] = []
            while self._order and self._order[0] * GRAIN <= now:
                for token, found in self._slots.pop(heapq.heappop(self._order), {}).items():
                    self._slot_of.pop(token, None)
                    if (lease := found()) is not None:
                        leases.append(lease)
            if leases:
                return leases
            if self._retired and not self._slots:
                self._thread = None
                return None
            self._wakes_at = self._order[0] * GRAIN if self._order else math.inf
            self._changed.wait(self._wakes_at - now if self._order else None)
            self._wakes_at = -math.inf  # Awake: nobody needs to notify us.

    def _renew(self, leases: list[Lease]) -> None:
        batch: list[tuple[Lease, Renewal]] = []
        now = self._backend.clock()
        for lease in leases:
            grant = lease.grant
            if not grant.is_active:
                continue
            if self._has_handed_over(lease, now):
                continue
            try:
                renewal = grant.renewal_due(now)
            except LockLost as lost:
                self._backend.lost(lease, lost.reason)
                continue
            if renewal is None:
                # What is left until max_hold is hardly longer than what the lease has already. Or
                # it was renewed by hand just now, and then the next renewal is ours again.
                self.put_back(lease, self._next_time(grant, now))
                continue
            if grant.newly_abandoned():
                logger.warning(
                    "The thread or asyncio task that acquired lock %r has ended without releasing"
                    " it. It is renewed as long as its handle is kept: release it elsewhere, or"
                    " bound it with max_hold.",
                    lease.name,
                )
            batch.append((lease, renewal))
        if batch:
            self._send(batch)

    def _send(self, batch: list[tuple[Lease, Renewal]]) -> None:
        now = self._backend.clock()
        within = min(self._time_for_one_try(lease.grant, now) for lease, _ in batch)
        calls = [flows.renewal_call(renewal, within) for _, renewal in batch]
        answers = self._renewer.renew_many(calls)
        now = self._backend.clock()
        for (lease, renewal), answer in zip(batch, answers, strict=True):
            grant = lease.grant
            if not grant.is_active:
                continue
            if not isinstance(answer, Answer):
                if self._has_handed_over(lease, now):
                    continue
                self._note_failure(lease, answer, now)
                continue
            try:
                grant.answered(renewal, answer, now)
            except LockLost as lost:
                self._backend.lost(lease, lost.reason)
            else:
                self.put_back(lease, self._next_time(grant, now, random.uniform(0.9, 1.0)))

    def _has_handed_over(self, lease: Lease, now: float) -> bool:
        """Whether it is another watchdog's, which then has it."""
        watchdog = self._backend.watchdog_of(lease.name)
        if watchdog is not self:
            watchdog.put_back(lease, now)
        return watchdog is not self

    def _next_time(self, grant: Grant, now: float, jitter: float = 1.0) -> float:
        return now + grant.ttl / 3 * jitter if grant.auto_renew else grant.deadline

    def _time_for_one_try(self, grant: Grant, now: float) -> float:
        # Short enough for more than one try before the lease ends, whatever operation timeout the
        # settings ask for; or before its claim ends, after which it counts as held only if it is
        # confirmed.
        if grant.is_claimed and now < grant.deadline:
            return max((grant.deadline - now) / TRIES_PER_CLAIM, SHORTEST_TRY)
        return min(self._backend.operation_timeout(grant.ttl), grant.ttl / 3) / 2

    def _note_failure(self, lease: Lease, answer: Unanswered | Refused, now: float) -> None:
        grant = lease.grant
        if grant.unanswered():
            logger.warning("Could not renew lock %r yet: %s", lease.name, answer.problem)
        pause = max(SOONEST_RETRY, min(grant.ttl / 10, 1.0))
        if grant.is_claimed and now < grant.deadline:
            pause = SOONEST_RETRY
        self.put_back(lease, now + pause)

    def _put_off(self, leases: list[Lease]) -> None:
        now = self._backend.clock()
        for lease in leases:
            self.forget(lease)  # It may have been put back already.
            self.put_back(lease, now + SOONEST_RETRY)
