"""The connections of the event loops: one for each, dialed once for all of its tasks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from django_redislock.backends.redis.connection import retrieve

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from django_redislock.backends.redis.connection import AsyncWire
    from django_redislock.backends.redis.dialing import Dialing


class Loops:
    """The event loops of one process, each with its connection."""

    def __init__(self, dialer: Dialing) -> None:
        self._dialer = dialer
        self._loop_wires: dict[asyncio.AbstractEventLoop, _LoopWire] = {}

    def open_wire(self) -> AsyncWire | None:
        """The open connection of the running loop, if there is one."""
        loop_wire = self._loop_wires.get(asyncio.get_running_loop())
        return loop_wire.open_wire if loop_wire is not None else None

    async def wire(self, seconds: float) -> AsyncWire:
        """The open connection of the running loop, or a new one within so many seconds."""
        loop = asyncio.get_running_loop()
        loop_wire = self._loop_wires.get(loop)
        if loop_wire is None:
            # A connection refers to its loop, so those of loops that did not end well stay here.
            # Loops of other threads come and go meanwhile.
            for other in list(self._loop_wires):
                if other.is_closed():
                    self._loop_wires.pop(other, None)
            loop_wire = _LoopWire(self._dialer, partial(self._loop_wires.pop, loop, None))
            self._loop_wires[loop] = loop_wire
            await loop_wire.close_with_loop()
        return await loop_wire.get(seconds)

    def replace(self, wire: AsyncWire) -> None:
        """Give the running loop another connection; the one it has is closed."""
        loop_wire = self._loop_wires[asyncio.get_running_loop()]
        former, loop_wire.wire = loop_wire.wire, wire
        if former is not None:
            former.close()

    def forsake(self) -> None:
        """In a forked child: free its copies of the parent's connections."""
        for loop_wire in self._loop_wires.values():
            if loop_wire.wire is not None:
                loop_wire.wire.forsake()


class _LoopWire:
    """The connection of one event loop, closed with it."""

    def __init__(self, dialer: Dialing, forget: Callable[[], object]) -> None:
        self.wire: AsyncWire | None = None
        self._dialer = dialer
        self._forget = forget
        self._dial: _Dial | None = None
        self._closer: AsyncGenerator[None, None] | None = None

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
        self.wire = await self._dialer.adial(seconds)
        return self.wire

    async def close_with_loop(self) -> None:
        # asyncio.run() closes the asynchronous generators of its loop at the end, and with this
        # one our connection; otherwise nobody would tell us that the loop is going away.
        self._closer = self._close_at_end()
        await anext(self._closer)

    async def _close_at_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
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
