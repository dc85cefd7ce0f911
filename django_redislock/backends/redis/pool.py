"""The blocking connections of one process, lent one by one.

Nothing here takes a mutex. A signal handler may use a lock while its own thread is in the midst of
a pool, and so may a destructor that the garbage collector runs: either would wait for that mutex
for ever. Each change is a single step of a list, set or queue that cannot be interrupted, and all
is consistent after each of them.
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

    rings: deque[bytes]  # Those that nobody has heard yet.
    room: Any  # See Room.

    def close(self) -> None: ...
    def cut(self) -> None: ...
    def abandon(self) -> None: ...


Lent = TypeVar("Lent", bound=Lendable)


class Room:
    """Room for one connection in a pool: taken to dial it, and then kept by it."""

    __slots__ = ("__weakref__", "connection")

    def __init__(self) -> None:
        self.connection: ReferenceType[Lendable] | None = None


class Pool(Generic[Lent]):
    """The blocking connections of one backend: never more than *limit*, each used by one thread.

    The last one returned is the first one lent. If all are in use, threads queue up, and the one
    that has waited longest gets the next that comes free. A waiter for a lock keeps its connection
    while it sleeps, so that the server can ring it. A few are kept back from waiters, or sleeping
    waiters could starve the releases that would wake them.
    """

    KEPT_BACK = 2
    BESIDE = 1  # Connections outside the pool: the watchdog's.
    LOOK_EVERY = 0.5  # Seconds after which one in the queue makes sure that it was not forgotten.

    def __init__(self, dial: Callable[[float], Lent], limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._few = limit - self.KEPT_BACK  # Waiters may have all, if no more exist.
        self._idle: list[Lent] = []
        # The room of those that exist or are being dialed. Not a count: a connection that an
        # exception of a signal handler made us lose makes room again when it is collected.
        self._taken: set[ReferenceType[Room]] = set()
        self._waiting: deque[Inbox[Lent | Room]] = deque()  # The first to come is first.
        self._retired = False
        self._abandoned = False  # In a forked child: whether it was the parent's.

    def use(self, work: Callable[[Lent], Result], seconds: float) -> Result:
        """Lend a connection for *work* alone; see take(). It is dropped if anything is raised."""
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
            seconds: How long a new one may take to connect; half of it, if that had to wait for
                room.
            patience: How long to wait for one that comes free; by default *seconds*.
            to_wait: Whether it may be kept for long, by a waiter.

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
            return None  # It is their turn.
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        # After taking it: of several threads that come at the same time, the last ones see it.
        if to_wait and len(self._taken) > self._few and self._is_crowded():
            self.give(connection)
            return None
        return connection

    def give(self, connection: Lent) -> None:
        """Return a connection that is in step: all its replies were read, or are known to come."""
        if connection.rings:
            connection.rings.clear()  # Their waiter is gone.
        self._idle.append(connection)
        if self._retired:
            self.close()
        elif self._waiting:
            self._serve()

    def drop(self, connection: Lent) -> None:
        """Close a broken or interrupted connection, and the idle ones, which may be as dead."""
        self._end(connection)
        self.close()

    def disown(self, connection: Lent) -> None:
        """End a connection whose return was interrupted, as by an exception of a signal handler.

        It may be idle, or lent to another thread by now. So it is shut down, and not given back
        twice.
        """
        connection.cut()
        self._leave(connection.room)

    def close(self) -> None:
        """Close the idle connections."""
        # One by one: a signal handler that comes in between finds the others, or their room. The
        # oldest first: connections that come back meanwhile stay.
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # Others took them.
                self._end(self._idle.pop(0))

    def retire(self) -> None:
        """Keep no idle connection from now on."""
        self._retired = True
        self.close()

    def abandon(self) -> None:
        """In a forked child: close its copies.

        Those that are lent too: while a copy is open, the server does not learn that a waiter of
        the parent has died.
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
                # An exception of a signal handler may have kept another thread from serving it.
                if turn not in self._waiting and turn.empty():
                    self._waiting.appendleft(turn)
                self._serve()
        finally:
            with suppress(ValueError):
                self._waiting.remove(turn)
        with suppress(Empty):
            return turn.get(timeout=0)
        del turn  # And with it a connection that is put there just now.
        raise Exhausted(
            f"all {self._limit + self.BESIDE} connections are in use, and this process may open no"
            " more; raise OPTIONS['max_connections']"
        )

    def _serve(self) -> None:
        """Give free connections, and room, to the threads that have waited longest."""
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
        # If several threads take the last one at the same time, none gets it, and all try again.
        return room if len(self._taken) <= self._limit else None

    def _leave(self, room: Room | None) -> None:
        """Have the room be free again."""
        if room is not None:
            self._taken.discard(ref(room))
            self._serve()

    def _end(self, connection: Lent) -> None:
        connection.close()
        self._leave(connection.room)

    def _is_crowded(self) -> bool:
        """Whether less is left than is kept back from waiters."""
        return len(self._idle) + self._limit - len(self._taken) < self.KEPT_BACK

    def _has_room(self) -> bool:
        return len(self._taken) < self._limit


class ConnectionPool(Pool["Connection"]):
    """The pool of one server's connections; it tells the shared bells of one that was lost."""

    BESIDE = 2  # The watchdog's, and that of a shared bell.

    def __init__(self, dial: Callable[[float], Connection], limit: int, bells: SharedBells) -> None:
        super().__init__(dial, limit)
        self.bells = bells

    def drop(self, connection: Connection) -> None:
        super().drop(connection)
        self.bells.lost(connection)

    def abandon(self) -> None:
        super().abandon()
        self.bells.abandon()
