"""Many who take one lock in turn while something goes wrong, and what became of their turns."""

import threading
import time
from itertools import pairwise

from django_redislock import LockError, distributed_lock
from django_redislock.rules import flows
from tests.support.others import queued
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread


class Lockers:
    """Callers that take one lock in turn until they are told to stop."""

    def __init__(self, name, callers):
        self.turns = []  # The fence of a lease, and from when to when it was held.
        self.errors = []
        self._over = threading.Event()
        self._at_work = [
            in_thread(lambda caller=caller: self._work(name, caller)) for caller in callers
        ]

    def _work(self, name, caller):
        while not self._over.is_set():
            try:
                with caller.block(distributed_lock(name)) as lease:
                    begun = time.monotonic()
                    time.sleep(0.002)
                    until = time.monotonic()
                    if lease.held:
                        self.turns.append((lease.fence, begun, until))
            except LockError as error:
                self.errors.append(repr(error))

    def since(self, when):
        """How many turns have begun since."""
        return sum(begun > when for _, begun, _ in self.turns)

    def stop(self):
        self._over.set()
        for one in self._at_work:
            one.result(HUNG)

    @property
    def seconds_idle(self):
        """How long nobody had the lock, but for the short times between two turns."""
        turns = sorted(self.turns, key=lambda turn: turn[1])
        waits = [begun - until for (_, _, until), (_, begun, _) in pairwise(turns)]
        return sum(wait for wait in waits if wait > flows.CONFIRM_WITHIN / 10)

    def check(self):
        """No two leases at the same time, and each has a greater fence than the one before."""
        turns = sorted(self.turns, key=lambda turn: turn[1])
        for (fence, _, until), (next_fence, begun, _) in pairwise(turns):
            assert until <= begun, "two leases were held at the same time"
            assert fence < next_fence


def line_up(locks, name, callers):
    """Have callers wait for a lock, one after the other."""
    waiting = []
    for number, caller in enumerate(callers, 1):
        lock = distributed_lock(name)
        waiting.append((lock, caller, caller.begin(lock)))
        wait_until(lambda number=number: queued(locks, name) == number)
    return waiting


def served_in_turn(waiting):
    """Have those of line_up() be served, each after the one before."""
    for number, (lock, caller, acquired) in enumerate(waiting):
        assert acquired.result(HUNG)
        assert not any(one.done() for _, _, one in waiting[number + 1 :])
        caller.release(lock)
