"""The blocking connections of one process: lent one by one, or listened to together."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import ref

from django_redislock import clock
from django_redislock.backends.redis.connection import id_of, rest
from django_redislock.backends.redis.errors import Crowded, Exhausted
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from django_redislock.backends.redis.connection import Wire

Result = TypeVar("Result")


class Lendable(Protocol):
    """What a pool lends."""

    bells: deque[bytes]  # What it was rung that nobody has heard yet.

    def close(self) -> None: ...
    def cut(self) -> None: ...


Lent = TypeVar("Lent", bound=Lendable)


class Pool(Generic[Lent]):
    """The blocking connections of one backend: never more than *limit*, each used by one thread.

    The last one returned is the first one lent. A waiter keeps its connection while it sleeps,
    so that the server can ring it; a few are kept back from waiters, or sleeping waiters could
    starve the releases that would wake them.
    """

    KEPT_BACK = 2
    BESIDE = 1  # Connections of a process that are not lent: its watchdog's.

    def __init__(self, dial: Callable[[float], Lent], limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._idle: list[Lent] = []
        # Those that exist, not a count: one that an exception of a signal handler made us lose
        # gives its place back when it is collected.
        self._wires: set[ref[Lent]] = set()
        self._dialing = 0
        self._waiting = 0
        self._retired = False
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def use(self, work: Callable[[Lent], Result], seconds: float) -> Result:
        """Lend a connection for *work* alone; see take(). It is dropped if anything is raised."""
        wire = None
        try:
            wire = self.take(seconds)
            result = work(wire)
        except BaseException:
            if wire is not None:
                self.drop(wire)
            raise
        self.give(wire)
        return result

    def take(self, seconds: float, *, to_wait: bool = False) -> Lent:
        """Lend a connection.

        Args:
            seconds: How long to wait for one that is returned, and for a new one to connect.
            to_wait: Whether it may be kept for long, by a waiter.

        Raises:
            Exhausted: All are in use and none was returned within *seconds*.
            Crowded: Waiters have so many that the rest is needed for those who do not wait.
        """
        wire = self.take_idle(to_wait=to_wait)
        if wire is not None:
            return wire
        if to_wait and self._is_crowded():
            raise Crowded("waiters use all connections that may be kept for long")
        return self._take(seconds)

    def take_idle(self, *, to_wait: bool = False) -> Lent | None:
        """As take(), if that takes no time; else None."""
        if to_wait and self._is_crowded():
            return None
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give(self, wire: Lent) -> None:
        """Return a connection that is in step: all its replies were read, or are known to come."""
        if wire.bells:
            wire.bells.clear()  # Nobody waits for them any more.
        self._idle.append(wire)
        if self._retired:
            self.close()
        elif self._waiting:
            with self._lock:
                self._changed.notify_all()

    def drop(self, wire: Lent) -> None:
        """Close a broken or interrupted connection, and the idle ones, which may be as dead."""
        wire.close()
        self._wires.discard(ref(wire))
        with self._lock:
            self._changed.notify_all()
        self.close()

    def disown(self, wire: Lent) -> None:
        """End a connection whose return was interrupted, as by an exception of a signal handler.

        Nobody knows whether it is idle, or lent to another thread by now; so it is not given back
        again, or it might be lent to two.
        """
        wire.cut()
        self._wires.discard(ref(wire))

    def close(self) -> None:
        """Close the idle connections."""
        # One by one: take() pops from the same list without the lock.
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                break
            wire.close()
            self._wires.discard(ref(wire))
            with self._lock:
                self._changed.notify_all()

    def retire(self) -> None:
        """Keep no idle connection from now on."""
        self._retired = True
        self.close()

    def forsake(self) -> None:
        """In a forked child: close its copies.

        Those that are lent too: while a copy is open, the server does not learn that a waiter of
        the parent has died.
        """
        self._make_locks()  # A thread that is gone may hold those of the parent.
        for reference in list(self._wires):
            if (wire := reference()) is not None:
                wire.close()

    def _take(self, seconds: float) -> Lent:
        begun = clock.now()
        with self._lock:
            self._waiting += 1
            try:
                while True:
                    if not self._changed.wait_for(self._has_room, rest(seconds, begun)):
                        raise Exhausted(
                            f"this process uses all of its {self._limit + self.BESIDE} connections;"
                            " raise OPTIONS['max_connections']"
                        )
                    try:
                        return self._idle.pop()
                    except IndexError:
                        pass  # take() of another thread, which needs no lock, was faster.
                    if self._free() > 0:
                        self._dialing += 1
                        break
            finally:
                self._waiting -= 1
        try:
            wire = self._dial(rest(seconds, begun))
            self._wires.add(ref(wire, self._wires.discard))
            return wire
        finally:
            with self._lock:
                self._dialing -= 1
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return bool(self._idle) or self._free() > 0

    def _is_crowded(self) -> bool:
        return len(self._idle) + self._free() <= self.KEPT_BACK

    def _free(self) -> int:
        return self._limit - len(self._wires) - self._dialing


class WirePool(Pool["Wire"]):
    """The pool of one server's connections, on which waiters are rung."""

    BESIDE = 2  # That of a SharedBell, too.

    def __init__(
        self, dial: Callable[[float], Wire], limit: int, *, shares_bells: bool = False
    ) -> None:
        """Dial nobody yet.

        Args:
            dial: Makes a connection within so many seconds.
            limit: How many may be lent.
            shares_bells: No connection is kept by a waiter, as in RESP2 it could do nothing else.
        """
        self.shares_bells = shares_bells
        self._bells: dict[str, SharedBell] = {}  # By the prefix of the locks they are for.
        self._lost_at = -math.inf  # Of the connections that are older, more may be lost by now.
        super().__init__(dial, limit)

    def _make_locks(self) -> None:
        super()._make_locks()
        self._bell_lock = threading.Lock()

    @property
    def lacks_bell(self) -> bool:
        """Whether one has to be opened for whoever begins to wait now."""
        return self.shares_bells and all(bell.closed for bell in list(self._bells.values()))

    def shared_bell(self, channel: str, seconds: float) -> SharedBell:
        """The bell of waiters without a connection of their own, for locks of the same prefix.

        If there is none, a new one opens on *channel* within so many seconds.
        """
        prefix = prefix_in(channel)
        with self._bell_lock:
            bell = self._bells.get(prefix)
            if bell is None or bell.closed:
                if bell is not None and bell.lost:
                    self._lost_at = clock.now()
                bell = self._bells[prefix] = SharedBell(self._dial, channel, seconds)
            return bell

    def drop(self, wire: Wire) -> None:
        super().drop(wire)
        # The next connection may lead to another server, after a failover behind one address. So
        # who shares a bell comes back, and opens another one; but once for all that are lost.
        if wire.opened_at > self._lost_at:
            self._lost_at = clock.now()
            for bell in list(self._bells.values()):
                bell.cut()

    def forsake(self) -> None:
        super().forsake()
        for bell in self._bells.values():
            bell.forsake()


class SharedBell:
    """One connection on which all waiters are rung that found none for themselves.

    A thread reads it, hands each ring to the waiter it is for, and ends when none is left.
    """

    CHECK_EVERY = 2.0  # Seconds after which a connection on which nothing came is tested.

    def __init__(self, dial: Callable[[float], Wire], channel: str, seconds: float) -> None:
        """Begin to open it, within so many seconds.

        Raises:
            Exhausted: There is no thread to read it.
        """
        self.channel = channel
        self.closed = False
        self.lost = False  # Whether it is closed because it could not be opened, or was lost.
        self._rings: dict[str, SimpleQueue[bytes | None]] = {}  # By lease id; None: it is closed.
        self._wire: Wire | None = None
        self._opened: Future[None] = Future()
        thread = threading.Thread(
            target=self._run, args=(dial, seconds), name="redislock-bell", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise Exhausted(f"no thread to listen for rings: {error}") from error

    def expect(self, id: str, seconds: float) -> None:  # noqa: A002
        """Keep the rings for *id* until forget(); wait until the connection is open."""
        self._rings[id] = SimpleQueue()
        self._opened.result(seconds)
        self._check_open()

    def forget(self, id: str) -> None:  # noqa: A002
        """Drop what comes for *id*. Takes no lock: a thread that a fork ended may hold it."""
        self._rings.pop(id, None)

    def bell(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """The next ring for *id*, or None if there is none within *seconds*."""
        self._check_open()
        try:
            ring = self._rings[id].get(timeout=max(seconds, 0))
        except Empty:
            return None
        self._check_open()
        return ring

    def cut(self) -> None:
        """From any thread: those who wait for a ring are told that the connection was lost."""
        self.closed = True
        if self._wire is not None:
            self._wire.cut()

    def forsake(self) -> None:
        """In a forked child: close its copy of the connection."""
        self.closed = True
        if self._wire is not None:
            self._wire.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionError("the connection was lost")

    def _run(self, dial: Callable[[float], Wire], seconds: float) -> None:
        try:
            self._wire = dial(seconds)
            self._check_open()  # It may have been cut meanwhile.
            self._wire.subscribe(self.channel, seconds)
            self._opened.set_result(None)
            self._read(self._wire)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            self.lost = True
            if not self._opened.done():
                self._opened.set_exception(error)
        finally:
            # Before others may open a new one, or for a moment there would be one too many.
            if self._wire is not None:
                self._wire.close()
            self.closed = True
            for rings in list(self._rings.values()):
                rings.put(None)

    def _read(self, wire: Wire) -> None:
        while True:
            ring = wire.bell(self.CHECK_EVERY)
            if ring is None:
                if not (self._rings and wire.channels):  # Of a cluster, its slot may have moved.
                    return
                # Nobody asks anything on this connection, so that nobody would notice its end.
                wire.subscribe(self.channel, self.CHECK_EVERY)
            elif ring and (rings := self._rings.get(id_of(ring))) is not None:
                rings.put(ring)
