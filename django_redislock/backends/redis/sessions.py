"""What a flow asks for, done on the connections of one backend."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from django_redislock.backends.redis.connection import packed, retrieve
from django_redislock.backends.redis.errors import (
    TROUBLE,
    Crowded,
    ReplyError,
    is_wrong_server,
)
from django_redislock.rules.flows import CLAIM, Answer, Bell, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from django_redislock.backends.redis.backend import RedisBackend
    from django_redislock.backends.redis.connection import AsyncWire, Wire
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.backends.redis.pool import SharedBell
    from django_redislock.rules.flows import Call, Listen, Pause, Tell

SHORTEST = 0.001  # Seconds that are left of a time limit that is over.


class Session:
    """One flow's use of the blocking connections: one, kept from the first step to the last.

    A waiter that finds no connection to keep has one for each command, and shares a bell.
    """

    __slots__ = ("_backend", "_bell", "_id", "_wire")

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._wire: Wire | None = None
        self._bell: SharedBell | None = None
        self._id = ""

    def call(self, step: Call) -> Answer:
        backend = self._backend
        sent = backend.clock()
        wire = self._wire
        try:
            if step.listening and self._bell is None and backend.scripting:
                self._become_rung(step)
                wire = self._wire
            if wire is None:
                left = step.within - (backend.clock() - sent)
                wire = self._wire = backend._pool.take(max(left, SHORTEST))
            left = step.within - (backend.clock() - sent)
            if left < 0.9 * step.within:  # It took long to get here; all is one try.
                step = step._replace(within=max(left, SHORTEST))
            return backend.exchange(wire, step, self._bell.channel if self._bell else wire.channel)
        except ReplyError as error:
            if is_wrong_server(error):
                self._drop()
            backend.raise_outcome(error, sent)  # The connection is in step.
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, sent)
        except BaseException:
            self._drop()
            raise

    def tell(self, step: Tell) -> None:
        backend = self._backend
        sent = backend.clock()
        try:
            if self._wire is None:
                self._wire = backend._pool.take(CLAIM / 2)
            self._wire.tell(backend.pack(step, self._wire.channel))
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, sent)
        except BaseException:
            self._drop()
            raise

    def listen(self, step: Listen) -> Bell:
        backend = self._backend
        now = backend.clock()
        until = now + step.seconds
        try:
            if self._bell is not None:
                if self._wire is not None:
                    backend._pool.give(self._wire)  # Others need it meanwhile.
                    self._wire = None
                ring = self._bell.bell(step.id, step.seconds)
                return Bell(ring.decode().split() if ring else [], backend.clock())
            wire = self._wire
            if wire is None:
                raise Unanswered("the connection was lost", now, now)
            while True:
                ring = wire.bell(until - now)
                now = backend.clock()
                if ring is None:
                    return Bell([], now)
                words = ring.decode().split()
                if len(words) > 1 and words[1] == step.id:
                    return Bell(words, now)
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, now)
        except BaseException:
            self._drop()
            raise

    def pause(self, step: Pause) -> float:
        self.close()  # Others may need the connection meanwhile.
        time.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        wire = self._wire
        if wire is not None:
            if wire.bells:
                wire.bells.clear()  # Nobody waits for them any more.
            self._backend._pool.give(wire)
            self._wire = None
        if self._bell is not None:
            self._leave_bell(self._bell)

    def _become_rung(self, step: Call) -> None:
        """Have a connection on which the server rings us, our own or that of a shared bell."""
        backend = self._backend
        begun = backend.clock()
        try:
            if self._wire is None:
                self._wire = backend._pool.take(step.within, to_wait=True)
            if not self._wire.channel:
                rest = backend.rest_of(step, begun)
                self._wire.subscribe(backend.new_channel(), rest.within)
        except Crowded:
            self._id = step.listening
            self._bell = backend.shared_bell(step.within)
            self._bell.expect(self._id, backend.rest_of(step, begun).within)

    def _drop(self) -> None:
        if self._wire is not None:
            self._backend._pool.drop(self._wire)
            self._wire = None
        if self._bell is not None:
            self._leave_bell(self._bell)

    def _leave_bell(self, bell: SharedBell) -> None:
        bell.forget(self._id)
        self._bell = None


class AsyncSession:
    """One flow's use of its event loop's connection."""

    __slots__ = ("_backend", "_id", "_wire")

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._wire: AsyncWire | None = None
        self._id = ""

    async def call(self, step: Call) -> Answer:
        if step.shielded:
            return await self._call_shielded(step)
        backend = self._backend
        sent = backend.clock()
        try:
            if not backend.scripting:
                return await _call_in_thread(backend, step)
            wire = self._wire = self._wire or backend.open_wire()
            if wire is None or wire.closed or step.listening:
                wire = await self._take(step)
                step = backend.rest_of(step, sent)
            for in_full in (False, True):
                sent = backend.clock()
                command = backend.pack(step, wire.channel, in_full=in_full)
                answered, acknowledged = wire.send(command, step.within), 0
                if step.replicas:
                    replicas = wire.send(packed(*wait_for_replicas(step)), step.within)
                    reply, acknowledged = await asyncio.gather(answered, replicas)
                else:
                    reply = await answered
                if not isinstance(reply, ReplyError):
                    break
                step = backend.rest_of(step, sent)
                if backend.forbids_scripting(reply):
                    return await _call_in_thread(backend, step)
                if in_full or not lacks_script(reply):
                    raise reply
            return Answer(reply, sent, backend.clock(), count_of(acknowledged))
        except TROUBLE as error:
            if is_wrong_server(error) and self._wire is not None:
                self._wire.close()
            backend.raise_outcome(error, sent)

    async def _take(self, step: Call) -> AsyncWire:
        backend = self._backend
        begun = backend.clock()
        wire = self._wire
        if wire is None or wire.closed:
            wire = self._wire = backend.open_wire() or await backend.wire(step.within)
        if step.listening:
            if not wire.channel:
                rest = backend.rest_of(step, begun)
                await wire.subscribe(backend.new_channel(), rest.within)
            self._id = step.listening
            wire.expect_bell(step.listening)
        return wire

    async def tell(self, step: Tell) -> None:
        wire = self._wire
        assert wire is not None
        sent = self._backend.clock()
        try:
            wire.tell(self._backend.pack(step, wire.channel))
        except TROUBLE as error:
            self._backend.raise_outcome(error, sent)

    async def listen(self, step: Listen) -> Bell:
        backend = self._backend
        now = backend.clock()
        try:
            assert self._wire is not None
            ring = await self._wire.bell(step.id, step.seconds)
        except TROUBLE as error:
            backend.raise_outcome(error, now)
        return Bell(ring.decode().split() if ring else [], backend.clock())

    async def pause(self, step: Pause) -> float:
        await asyncio.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        if self._wire is not None and self._id:
            self._wire.forget_bell(self._id)

    async def _call_shielded(self, step: Call) -> Answer:
        # An undo runs to its end, which is bounded, however often its task is cancelled.
        task = asyncio.ensure_future(self.call(step._replace(shielded=False)))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise
            except (Unanswered, Refused):
                break
        return task.result()


def lacks_script(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and reply.code == "NOSCRIPT"


def wait_for_replicas(step: Call) -> tuple[str | int, ...]:
    # The rest is for the way there and back.
    return "WAIT", step.replicas, max(1, int(step.within * 750))


def count_of(acknowledged: Any) -> int:
    if isinstance(acknowledged, ReplyError):
        raise ReplyError(f"{acknowledged} (which REPLICAS_ACK needs)")
    return int(acknowledged)


async def _call_in_thread(backend: RedisBackend, step: Call) -> Answer:
    # Without scripting an operation is several commands between WATCH and EXEC, which cannot
    # share a connection with other tasks. A cancelled one is awaited, which is bounded: undoing
    # it must not begin before it has ended.
    begun = backend.clock()
    call = asyncio.ensure_future(asyncio.to_thread(_call_blocking, backend, step, begun))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _call_blocking(backend: RedisBackend, step: Call, begun: float) -> Answer:
    session = Session(backend)
    try:
        # It may have waited for a thread.
        return session.call(backend.rest_of(step._replace(listening=""), begun))
    finally:
        session.close()


class LoopWire:
    """The connection of one event loop: dialed once for all tasks that want it, closed with it."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self.wire: AsyncWire | None = None
        self._forget = forget
        self._dial: _Dial | None = None
        self._closer: AsyncGenerator[None, None] | None = None

    async def get(self, dialer: Dialer, seconds: float) -> AsyncWire:
        if self._dial is None or self._dial.is_over():
            self._dial = _Dial(asyncio.create_task(self._connect(dialer)))
        return await self._dial.result(seconds)

    async def _connect(self, dialer: Dialer) -> AsyncWire:
        self.wire = await dialer.adial()
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

    It may take as long as the most patient of them has, and no longer, or new ones could wait on
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
