"""The connections of the event loops: one for each, dialed once for all of its tasks."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from django_redislock import process
from django_redislock.backends.redis.async_connection import retrieve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.rules.steps import Call, Outcome


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
