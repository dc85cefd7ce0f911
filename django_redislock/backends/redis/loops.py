"""The connections of the event loops: one for each, dialed once for all of its tasks."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from django_redislock.backends.redis.connection import retrieve

if TYPE_CHECKING:
    from django_redislock.backends.redis.connection import AsyncWire
    from django_redislock.backends.redis.dialing import Dialing


class Loops:
    """The event loops of one process, each with its connection.

    A loop that is dropped without close() goes when the garbage collector finds it. A connection
    refers to its loop, so it is held weakly here, and goes with it.
    """

    def __init__(self, dialer: Dialing) -> None:
        self._dialer = dialer
        # By the id of the loop, which no other has as long as the first one is referred to.
        self._loop_wires: dict[int, ReferenceType[_LoopWire]] = {}

    def open_wire(self) -> AsyncWire | None:
        """The open connection of the running loop, if there is one."""
        reference = self._loop_wires.get(id(asyncio.get_running_loop()))
        loop_wire = reference() if reference is not None else None
        return loop_wire.open_wire if loop_wire is not None else None

    async def wire(self, seconds: float) -> AsyncWire:
        """The open connection of the running loop, or a new one within so many seconds."""
        return await self._of_running_loop().get(seconds)

    def replace(self, wire: AsyncWire) -> None:
        """Give the running loop another connection; the one it has is closed."""
        loop_wire = self._of_running_loop()
        former = loop_wire.wire
        loop_wire.keep(wire)
        if former is not None:
            former.close()

    def forsake(self) -> None:
        """In a forked child: free its copies of the parent's connections."""
        every = [reference() for reference in list(self._loop_wires.values())]
        # A transport must not be collected before its loop.
        self._inherited = [loop_wire for loop_wire in every if loop_wire is not None]
        for loop_wire in self._inherited:
            if loop_wire.wire is not None:
                loop_wire.wire.forsake()

    def _of_running_loop(self) -> _LoopWire:
        loop = asyncio.get_running_loop()
        reference = self._loop_wires.get(id(loop))
        loop_wire = reference() if reference is not None else None
        if loop_wire is None:
            loop_wire = _LoopWire(self._dialer, loop)
            self._loop_wires[id(loop)] = ref(loop_wire, partial(self._forget, id(loop)))
            loop_wire.close_with_loop()
        return loop_wire

    def _forget(self, loop_id: int, reference: ReferenceType[_LoopWire]) -> None:
        if self._loop_wires.get(loop_id) is reference:  # Else there is a new one.
            del self._loop_wires[loop_id]


class _LoopWire:
    """The connection of one event loop, closed with it.

    The connection refers to this, and the loop to the connection as long as that is open.
    """

    def __init__(self, dialer: Dialing, loop: asyncio.AbstractEventLoop) -> None:
        self.wire: AsyncWire | None = None
        self._dialer = dialer
        self._loop = loop
        self._dial: _Dial | None = None

    @property
    def open_wire(self) -> AsyncWire | None:
        """The connection, unless it is lost or not there yet."""
        return self.wire if self.wire is not None and not self.wire.closed else None

    async def get(self, seconds: float) -> AsyncWire:
        if wire := self.open_wire:
            return wire
        if self._dial is None or self._dial.is_over():
            self._dial = _Dial(asyncio.create_task(self._connect(seconds)))
        return await self._dial.result(seconds)

    async def _connect(self, seconds: float) -> AsyncWire:
        wire = await self._dialer.adial(seconds)
        self.keep(wire)
        return wire

    def keep(self, wire: AsyncWire) -> None:
        """Have a new connection, and be kept by it."""
        self.wire, wire.owner = wire, self

    def close_with_loop(self) -> None:
        """Have the connection closed when asyncio.run() ends the loop, or somebody as it does.

        They close the asynchronous generators that the loop was told of, and nobody else is told.
        A real one would be called back also if the loop was dropped, which is too late.
        """
        told = sys.get_asyncgen_hooks().firstiter
        if told is not None:
            told(self)  # type: ignore[arg-type] # All that is asked of it is aclose().

    async def aclose(self) -> None:
        """Close the connection: the loop comes to its end."""
        if self._dial is not None:
            self._dial.task.cancel()
        if self.wire is not None:
            self.wire.close()


class _Dial:
    """A connection in the making, for all tasks that ask for it meanwhile.

    It may take as long as the task with the most time has, and no longer, or new ones could wait on
    a dead one for ever. Each leaves when its own time is over, and the last one ends it.
    """

    def __init__(self, task: asyncio.Task[AsyncWire]) -> None:
        self.task = task
        self._callers = 0
        self._begun = self._until = task.get_loop().time()
        task.add_done_callback(retrieve)

    def is_over(self) -> bool:
        return self.task.done() or self.task.cancelling() > 0

    async def result(self, seconds: float) -> AsyncWire:
        self._until = max(self._until, self._begun + seconds)
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
        return self.task.result()
