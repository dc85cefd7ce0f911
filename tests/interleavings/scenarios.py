"""What threads do at the same time, and what must be true when all are done.

Each scenario is a class: an object of it is the world of one try, `threads` are what runs in it.
"""

from collections import deque
from contextlib import suppress
from queue import Empty
from types import SimpleNamespace
from weakref import ref

from django_redislock import clock, distributed_lock
from django_redislock.backends.drivers import Inbox
from django_redislock.backends.redis.errors import Crowded, Exhausted
from django_redislock.backends.redis.pool import Pool, Room
from django_redislock.backends.registry import backends
from django_redislock.backends.watchdog import Watchdog

PATIENCE = 60.0  # Seconds of a clock that only goes on when no thread can: that is for ever.


class Scenario:
    """A world of one try, and what threads do in it."""

    share = 1  # Of so many tries it gets one: a long way is led slowly.

    def __init__(self):
        self.wrong = []

    def holds(self):
        """Whether all is as it must be, when all threads are done."""
        return not self.wrong


# --- a pool ---------------------------------------------------------------------------------------


class Wire:
    """What the pool lends: no socket, but it notes whether two threads use it."""

    def __init__(self):
        self.rings = deque()
        self.room = None
        self.is_open = True
        self.users = 0

    def close(self):
        self.is_open = False

    cut = abandon = close


class PoolOfTwo(Scenario):
    """Three threads, two connections: each is served, by a connection of its own."""

    pool_type = Pool

    def __init__(self):
        super().__init__()
        self.made = []
        self.pool = self.pool_type(self._dial, 2)

    def _dial(self, _seconds):
        wire = Wire()
        self.made.append(wire)
        if len(self._open()) > 2:
            self.wrong.append("a third connection was opened")
        return wire

    def _open(self):
        return [wire for wire in self.made if wire.is_open]

    def borrow(self, give):
        try:
            wire = self.pool.take(PATIENCE)
        except Exhausted:
            self.wrong.append("a thread was forgotten in the queue")
            return
        wire.users += 1
        if wire.users > 1:
            self.wrong.append("two threads use a connection")
        if not wire.is_open:
            self.wrong.append("a closed connection was lent")
        wire.users -= 1
        give(wire)

    def use(self):
        self.borrow(self.pool.give)

    def drop(self):
        self.borrow(self.pool.drop)

    def wait_for_a_lock(self):
        with suppress(Crowded):
            self.pool.give(self.pool.take(PATIENCE, to_wait=True))

    def holds(self):
        idle, room = len(self.pool._idle), len(self.pool._taken)
        return super().holds() and idle == room == len(self._open())


class PoolInUse(PoolOfTwo):
    threads = (PoolOfTwo.use,) * 3


class PoolWithABrokenConnection(PoolOfTwo):
    threads = PoolOfTwo.use, PoolOfTwo.use, PoolOfTwo.drop


class PoolWithAWaiter(PoolOfTwo):
    threads = PoolOfTwo.use, PoolOfTwo.wait_for_a_lock, PoolOfTwo.drop


# --- an inbox -------------------------------------------------------------------------------------


class TwoOfEach(Scenario):
    """Two threads leave something, two wait for it: each gets one."""

    inbox_type = Inbox

    def __init__(self):
        super().__init__()
        self.inbox = self.inbox_type()
        self.got = []

    def put(self):
        self.inbox.put(1)

    def get(self):
        try:
            self.got.append(self.inbox.get(PATIENCE))
        except Empty:
            self.wrong.append("a thread was not woken")

    def holds(self):
        return super().holds() and self.got == [1, 1] and self.inbox.empty()

    threads = put, put, get, get


# --- a watchdog -----------------------------------------------------------------------------------


class Led(Watchdog):
    """Its thread is one of the scenario's, and only notes the leases that are due."""

    def __init__(self):
        backend = SimpleNamespace(
            alias="default", clock=clock.now, operation_timeout=lambda ttl: ttl / 3
        )
        super().__init__(backend, SimpleNamespace(close_watchdog=lambda: None))
        self.starts = 0
        self.seen = []

    def _start_thread(self, name):
        self.starts += 1

    def _renew(self, leases):
        for lease in leases:
            self.seen.append(lease)
            lease.is_active = False

    def run(self):
        self._run()


class Watched:
    """As much of a lease as a watchdog looks at before it is due."""

    name = "lottery"

    def __init__(self):
        now = clock.now()
        self._token, self.ttl = str(id(self)), 3.0
        self.granted_at, self.deadline, self.ends = now, now + 3, now + 3
        self.auto_renew, self.is_active, self.is_unconfirmed = True, True, False


class WatchdogThatEnds(Scenario):
    """A lease comes while the thread of a watchdog starts, sleeps and ends: it is not forgotten."""

    watched = 1
    watchdog_type = Led

    def __init__(self):
        super().__init__()
        self.watchdog = self.watchdog_type()
        self.watchdog.retire()  # So it ends whenever it has nothing to do.
        self.leases = [Watched() for _ in range(self.watched)]

    def watch(self, which):
        self.watchdog.watch(self.leases[which])

    def first(self):
        self.watch(0)

    def last(self):
        self.watch(1)

    def run(self):
        self.watchdog.run()

    def holds(self):
        unseen = {*self.leases} - {*self.watchdog.seen}
        left = {reference() for _, reference in self.watchdog._new}
        # What is left is taken in by a thread that was asked for, and is not one of these.
        return super().holds() and (unseen == left if self.watchdog.starts else not unseen)

    threads = first, run


class WatchdogOfTwo(WatchdogThatEnds):
    """The same with two leases, which come at the same time."""

    watched = 2
    threads = WatchdogThatEnds.first, WatchdogThatEnds.last, WatchdogThatEnds.run


# --- a handle that threads share ------------------------------------------------------------------


class SharedHandle(Scenario):
    """Three threads use one handle: one at a time is in the block, with a lease of its own."""

    share = 20

    def __init__(self):
        super().__init__()
        # The watchdog has a scenario of its own; here its thread could not be led.
        backends["default"].watch = lambda lease, due=None: None
        self.lock = distributed_lock("lottery", wait=PATIENCE)
        self.inside = 0
        self.fences = []

    def enter(self):
        with self.lock as lease:
            self.inside += 1
            if self.inside > 1:
                self.wrong.append("two threads are in the block")
            if self.lock.lease is not lease:
                self.wrong.append("a thread sees the lease of another")
            self.fences.append(lease.fence)
            self.inside -= 1
        if self.lock.lease is not None:
            self.wrong.append("a lease is left")

    def holds(self):
        return super().holds() and self.fences == sorted({*self.fences}) and len(self.fences) == 3

    threads = (enter,) * 3


SCENARIOS = (
    PoolInUse,
    PoolWithABrokenConnection,
    PoolWithAWaiter,
    TwoOfEach,
    WatchdogThatEnds,
    WatchdogOfTwo,
    SharedHandle,
)


# --- what must be found ---------------------------------------------------------------------------


class LooksThenTakes(Pool[Wire]):
    """Of two threads that look at the same time, both take the last room."""

    def _new_room(self):
        if not self._has_room():
            return None
        room = Room()
        self._taken.add(ref(room, self._taken.discard))
        return room


class GivesBackOnly(Pool[Wire]):
    """A connection that is returned is not handed to a thread that waits."""

    def give(self, connection):
        self._idle.append(connection)

    def _serve(self):
        pass


class RingsOnce(Inbox[int]):
    """What is left does not ring for the next thread: two items may be one ring."""

    def get(self, timeout=None):
        while True:
            if not self._bell.acquire(timeout=-1 if timeout is None else timeout):
                raise Empty
            with suppress(IndexError):
                return self._items.popleft()


class EndsAtOnce(Led):
    """Its thread does not look whether a lease came while it ended."""

    def _run(self):
        if self._running.acquire(blocking=False):
            self._thread = self
            while self._round():
                pass
            self._running.release()
            self._thread = None


class LookingPool(PoolInUse):
    pool_type = LooksThenTakes


class ForgettingPool(PoolInUse):
    pool_type = GivesBackOnly


class ForgettingInbox(TwoOfEach):
    inbox_type = RingsOnce


class ForgettingWatchdog(WatchdogThatEnds):
    watchdog_type = EndsAtOnce


CONTROLS = LookingPool, ForgettingPool, ForgettingInbox, ForgettingWatchdog
