"""The blocking connections of one process, lent one by one.

Nothing here takes a mutex. A signal handler may use a lock while its own thread is in the middle of
this code, and so may a destructor that the garbage collector runs: either would wait for the mutex
for ever. Each change is one step of a list, set or queue, which nothing can interrupt. The pool is
consistent after each step.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ref

from django_redislock import clock
from django_redislock.backends.inbox import Inbox
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import Crowded, Exhausted

if TYPE_CHECKING:
    from collections.abc import Callable
    from weakref import ReferenceType

    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.shared_bell import SharedBells

Result = TypeVar("Result")


class Lendable(Protocol):
    """What a pool lends."""

    rings: deque[bytes]  # Rings that no waiter has heard yet.
    room: Any  # See Room.

    def close(self) -> None: ...
    def cut(self) -> None: ...
    def abandon(self) -> None: ...


Lent = TypeVar("Lent", bound=Lendable)


class Room:
    """Room for one connection in a pool. The dial takes it, and the connection keeps it."""

    __slots__ = ("__weakref__", "connection")

    def __init__(self) -> None:
        self.connection: ReferenceType[Lendable] | None = None


class Pool(Generic[Lent]):
    """The blocking connections of one backend: never more than *limit*, each used by one thread.

    The last connection returned is the first one lent. If all are in use, threads queue up; the
    next free connection goes to the thread that has waited longest. A waiter for a lock keeps its
    connection while it sleeps, so that the server can ring it. A few connections are kept back from
    waiters: else sleeping waiters could starve the releases that would wake them.
    """

    KEPT_BACK = 2
    BESIDE = 1  # Connections outside the pool: the watchdog's.
    LOOK_EVERY = 0.5  # Seconds after which a thread in the queue checks that it is still there.

    def __init__(self, dial: Callable[[float], Lent], limit: int) -> None:
        self._dial = dial
        self.limit = limit
        self._few = limit - self.KEPT_BACK  # If no more exist, waiters may have all of them.
        self._idle: list[Lent] = []
        # The room of connections that exist or are being dialed. Not a count: if an exception of a
        # signal handler makes us lose a connection, its room is free again once it is collected.
        self._taken: set[ReferenceType[Room]] = set()
        self._waiting: deque[Inbox[Lent | Room]] = deque()  # The longest waiting thread is first.
        self._retired = False
        self._abandoned = False  # In a forked child: whether it was the parent's.

    def use(self, work: Callable[[Lent], Result], seconds: float) -> Result:
        """Lend a connection for *work* alone; see take(). If *work* raises, drop it."""
        connection = None
        try:
            connection = self.take(seconds)
            result = work(connection)
        except BaseException:
            if connection is not None:
                self.drop(connection)
            raise
        self.give(connection)
        return result

    def take(self, seconds: float, *, patience: float | None = None, to_wait: bool = False) -> Lent:
        """Lend a connection.

        Args:
            seconds: How long a new one may take to connect; after a wait for room, at least half.
            patience: How long to wait for one that comes free; by default *seconds*.
            to_wait: Whether a waiter may keep it for long.

        Raises:
            Exhausted: All are in use, and it was not this thread's turn in time.
            Crowded: Waiters have so many that the rest is kept for threads that do not wait.
        """
        connection = self.take_idle(to_wait=to_wait)
        if connection is not None:
            return connection
        room = None if self._waiting else self._new_room()
        if to_wait and (room is None or self._is_crowded()):
            self._leave(room)
            raise Crowded("waiters use all connections that may be kept for long")
        return self._take(room, seconds, seconds if patience is None else patience)

    def take_idle(self, *, to_wait: bool = False) -> Lent | None:
        """As take(), if that takes no time; else None."""
        if self._waiting:
            return None  # It is the turn of waiting threads.
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        # Checked after the take: if several threads come at once, the last ones see the crowd.
        if to_wait and len(self._taken) > self._few and self._is_crowded():
            self.give(connection)
            return None
        return connection

    @property
    def has_idle(self) -> bool:
        """Whether take_idle() finds a connection, most likely."""
        return bool(self._idle)

    def give(self, connection: Lent) -> None:
        """Return a connection that is in step: all its replies were read, or will be dropped."""
        if connection.rings:
            connection.rings.clear()  # Their waiter is gone.
        self._idle.append(connection)
        if self._retired:
            self.close()
        elif self._waiting:
            self._serve()

    def drop(self, connection: Lent) -> None:
        """Close a broken or interrupted connection, and the idle ones, which may be dead, too."""
        self._end(connection)
        self.close()

    def disown(self, connection: Lent) -> None:
        """End a connection whose return was interrupted, as by an exception of a signal handler.

        It may be idle, or lent to another thread by now. So shut it down; do not return it twice.
        """
        connection.cut()
        self._leave(connection.room)

    def close(self) -> None:
        """Close the idle connections."""
        # One by one: a signal handler that comes in between finds the others, or their room. The
        # oldest first: connections that come back meanwhile stay.
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # Other threads took them.
                self._end(self._idle.pop(0))

    def retire(self) -> None:
        """Keep no idle connection from now on."""
        self._retired = True
        self.close()

    def abandon(self) -> None:
        """In a forked child: close its copies of the connections, even of those that are lent.

        While a copy is open, the server does not learn that a waiter of the parent has died.
        """
        self._abandoned = True
        for reference in list(self._taken):
            room = reference()
            connection = room.connection() if room and room.connection else None
            if connection is not None:
                connection.abandon()
        for connection in self._idle:
            connection.close()

    def _take(self, room: Room | None, seconds: float, patience: float) -> Lent:
        started = clock.now()
        if room is None:
            found = self._await_turn(patience)
            if not isinstance(found, Room):
                return found
            room = found
            started = max(started, clock.now() - seconds / 2)
        try:
            connection = self._dial(rest(seconds, started))
            connection.room, room.connection = room, ref(connection)
            return connection
        except BaseException:
            self._leave(room)
            raise

    # --- whose turn it is -----------------------------------------------------------------------

    def _await_turn(self, seconds: float) -> Lent | Room:
        """Wait in the queue for a connection that comes free, or for room for one."""
        turn: Inbox[Lent | Room] = Inbox()
        until = clock.now() + seconds
        try:
            self._waiting.append(turn)
            self._serve()
            while (left := until - clock.now()) > 0 and not self._abandoned:
                with suppress(Empty):
                    return turn.get(timeout=min(left, self.LOOK_EVERY))
                # An exception of a signal handler may have stopped a thread that was to serve it.
                if turn not in self._waiting and turn.empty():
                    self._waiting.appendleft(turn)
                self._serve()
        finally:
            with suppress(ValueError):
                self._waiting.remove(turn)
        with suppress(Empty):
            return turn.get(timeout=0)
        del turn  # A connection that comes there just now is dropped with it.
        raise self.exhausted()

    def exhausted(self) -> Exhausted:
        """The error of a caller for which no connection became free in time."""
        return Exhausted(
            f"all {self.limit + self.BESIDE} connections are in use, and this process may open no"
            " more; raise OPTIONS['max_connections']"
        )

    def _serve(self) -> None:
        """Give free connections and room to the threads that have waited longest."""
        while self._waiting and (self._idle or self._has_room()):
            try:
                found: Lent | Room | None = self._idle.pop()
            except IndexError:
                found = self._new_room()
            if found is None:
                continue  # Another thread was faster.
            try:
                turn = self._waiting.popleft()
            except IndexError:  # No thread waits any more.
                if isinstance(found, Room):
                    self._taken.discard(ref(found))
                else:
                    self.give(found)
            else:
                turn.put(found)

    def _new_room(self) -> Room | None:
        """Take room for one more, if there is any."""
        if not self._has_room():
            return None
        room = Room()
        self._taken.add(ref(room, self._taken.discard))
        # If several threads take the last room at once, none of them gets it, and all try again.
        return room if len(self._taken) <= self.limit else None

    def _leave(self, room: Room | None) -> None:
        """Make the room free again."""
        if room is not None:
            self._taken.discard(ref(room))
            self._serve()

    def _end(self, connection: Lent) -> None:
        connection.close()
        self._leave(connection.room)

    def _is_crowded(self) -> bool:
        """Whether fewer connections are left than are kept back from waiters."""
        return len(self._idle) + self.limit - len(self._taken) < self.KEPT_BACK

    def _has_room(self) -> bool:
        return len(self._taken) < self.limit


class ConnectionPool(Pool["Connection"]):
    """The pool of one server's connections. If one is lost, it tells the shared bells."""

    BESIDE = 2  # The watchdog's connection, and that of a shared bell.

    def __init__(self, dial: Callable[[float], Connection], limit: int, bells: SharedBells) -> None:
        super().__init__(dial, limit)
        self.bells = bells

    def drop(self, connection: Connection) -> None:
        super().drop(connection)
        self.bells.lost(connection)

    def abandon(self) -> None:
        super().abandon()
        self.bells.abandon()
