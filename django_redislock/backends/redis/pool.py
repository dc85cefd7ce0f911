"""The blocking connections of one process, lent one by one.

Nothing here takes a mutex. A signal handler may use a lock while its own thread is in the middle of
this code, and so may a destructor that the garbage collector runs: either would wait for the mutex
for ever. Each change is one step of a list, set or queue, which nothing can interrupt. The pool is
consistent after each step.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from django_redislock import clock, process
from django_redislock.backends.drivers import Inbox
from django_redislock.backends.redis.async_connection import retrieve
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import Crowded, Exhausted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.backends.redis.shared_bell import SharedBells
    from django_redislock.rules.steps import Call, Outcome


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


# --- the connections of the event loops: one for each, dialed once for all of its tasks -----------


class Loops:
    """The event loops of one process, each with its connection.

    If a loop is dropped without close(), the garbage collector finds it later. A connection refers
    to its loop. So it is held weakly here, and goes with the loop.
    """

    def __init__(self, dialer: Dialing) -> None:
        self._dialer = dialer
        # By the id of the loop. No other loop has that id while the entry refers to the first.
        self._loops: dict[int, ReferenceType[_Loop]] = {}
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def turns(self, most: int) -> asyncio.Semaphore:
        """The turns of the running loop's coroutines at blocking connections: *most* at a time."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(most))

    def current(self) -> AsyncConnection | None:
        """The open connection of the running loop, if there is one, and no task is in_turn()."""
        reference = self._loops.get(id(asyncio.get_running_loop()))
        loop = reference() if reference is not None else None
        connection = loop.connection if loop is not None and not loop.turns else None
        return connection if connection is not None and connection.closed is None else None

    async def connection(self, seconds: float) -> AsyncConnection:
        """The open connection of the running loop, or a new one within so many seconds."""
        loop = self._running()
        connection = loop.connection
        if connection is not None and connection.closed is None:
            return connection
        return await loop.dialed(seconds)

    @asynccontextmanager
    async def in_turn(self, seconds: float) -> AsyncIterator[None]:
        """A block in which a task gets ready to send: tasks leave it in the order they came in.

        After so many seconds a task waits for no earlier one any more.
        """
        loop = self._running()  # Kept meanwhile.
        turns = loop.turns
        turn = asyncio.get_running_loop().create_future()
        turns[turn] = False
        try:
            yield
            if next(iter(turns)) is not turn:
                turns[turn] = True
                await asyncio.wait([turn], timeout=seconds)
        finally:
            del turns[turn]
            # All that are ready at once, or they might leave more slowly than others come.
            for other, is_ready in turns.items():
                if other.done() or not is_ready:
                    break
                other.set_result(None)

    def call_all(self, session: Callable[[], Any], calls: Sequence[Call]) -> list[Outcome] | None:
        """Run scripts on the connection of a loop that runs in another thread.

        Args:
            session: Makes a performer of steps in that loop.
            calls: The scripts. They have half of their time.

        Returns:
            Their outcomes; None if no loop with a connection answers.
        """
        loops = [loop for one in list(self._loops.values()) if (loop := one())]
        loops = [loop for loop in loops if loop.may_be_asked]
        for loop in loops:
            work = session().call_all(calls)
            try:
                asked = asyncio.run_coroutine_threadsafe(work, loop.loop)
            except RuntimeError:  # It was closed meanwhile.
                work.close()
                continue
            try:
                found: list[Outcome] = asked.result(calls[0].within / 2 / len(loops))
            except (TimeoutError, CancelledError):  # It is busy, or has ended.
                asked.cancel()
                continue
            return found
        return None

    def replace(self, connection: AsyncConnection) -> None:
        """Give the running loop another connection, and close the one that it has."""
        loop = self._running()
        former = loop.connection
        loop.adopt(connection)
        if former is not None:
            former.close()

    def abandon(self) -> None:
        """In a forked child: free its copies of the parent's connections."""
        for reference in list(self._loops.values()):
            if (loop := reference()) is not None:
                process.inherited.append(loop)
                if loop.connection is not None:
                    loop.connection.abandon()

    def _running(self) -> _Loop:
        """The entry of the running loop; a new one if there is none."""
        running = asyncio.get_running_loop()
        reference = self._loops.get(id(running))
        loop = reference() if reference is not None else None
        if loop is None:
            loop = _Loop(self._dialer, running)
            self._loops[id(running)] = ref(loop, partial(self._forget, id(running)))
            loop.close_at_end()
        return loop

    def _forget(self, loop_id: int, reference: ReferenceType[_Loop]) -> None:
        if self._loops.get(loop_id) is reference:  # Else there is a new one.
            del self._loops[loop_id]


class _Loop:
    """One event loop and its connection, which is closed with it.

    The connection refers to this entry. The loop refers to the connection while that is open.
    """

    def __init__(self, dialer: Dialing, loop: asyncio.AbstractEventLoop) -> None:
        self.connection: AsyncConnection | None = None
        # Of the tasks that are not ready to send yet, and of those after them: which are ready.
        self.turns: dict[asyncio.Future[None], bool] = {}
        self._dialer = dialer
        self.loop = loop  # Kept, so that no other has its id.
        self._dial: _Dial | None = None

    @property
    def may_be_asked(self) -> bool:
        """Whether another thread may use its connection: there is one, and somebody to do so."""
        return bool(self.connection and self.connection.is_open and self.loop.is_running())

    async def dialed(self, seconds: float) -> AsyncConnection:
        """A new connection within so many seconds; all tasks that ask meanwhile get the same."""
        if self._dial is None or self._dial.is_over():
            self._dial = _Dial(asyncio.create_task(self._connect(seconds)))
        return await self._dial.result(seconds)

    async def _connect(self, seconds: float) -> AsyncConnection:
        try:
            connection = await self._dialer.adial(seconds)
        except BaseException:
            if self._dial is not None and self._dial.task is asyncio.current_task():
                self._dial = None  # It keeps the error, which refers to this frame.
            raise
        self.adopt(connection)
        return connection

    def adopt(self, connection: AsyncConnection) -> None:
        """Take a new connection, which refers to this entry from now on."""
        self.connection, connection.owner = connection, self

    def close_at_end(self) -> None:
        """Have the connection closed at the end of the loop, by asyncio.run() or as it does.

        asyncio.run() closes only the asynchronous generators that the loop knows. So this poses as
        one. A real generator would be called at the drop of a loop, too, which is too late.
        """
        told = sys.get_asyncgen_hooks().firstiter
        if told is not None:
            told(self)  # type: ignore[arg-type] # The loop calls only its aclose().

    async def aclose(self) -> None:
        """Close the connection: the loop comes to its end."""
        if self._dial is not None:
            self._dial.task.cancel()
        if self.connection is not None:
            self.connection.close()


class _Dial:
    """A connection in the making, for all tasks that ask for it meanwhile.

    A dial lasts as long as the task with the most time has. A longer one could keep new tasks
    waiting for ever if it is dead. Each task leaves when its time is over; the last ends the dial.
    """

    def __init__(self, task: asyncio.Task[AsyncConnection]) -> None:
        self.task = task
        self._callers = 0
        self._started = self._until = task.get_loop().time()
        task.add_done_callback(retrieve)

    def is_over(self) -> bool:
        return self.task.done() or self.task.cancelling() > 0

    async def result(self, seconds: float) -> AsyncConnection:
        self._until = max(self._until, self._started + seconds)
        left = self._until - self.task.get_loop().time()
        self._callers += 1
        try:
            await asyncio.wait([self.task], timeout=max(min(seconds, left), 0))
        finally:
            self._callers -= 1
            if not self._callers:
                self.task.cancel()
        if not self.task.done() or self.task.cancelled():
            raise TimeoutError("the server did not answer in time")
        if error := self.task.exception():
            raise copy(error) from error
        return self.task.result()
