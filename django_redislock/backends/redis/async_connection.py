"""A connection of an event loop, made by redis-py and then driven by us; see connection.py."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends.redis.connection import (
    CHUNK,
    NOTHING,
    RUNG,
    SUBSCRIBED,
    UNSUBSCRIBED,
    Push,
    free_copy,
    id_of,
    new_reader,
    note,
    rings_as,
    subscription,
)
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.deferred_work import catch_up, put_off
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection shared by all tasks of one event loop.

    Replies come in the order of the commands, so any number of tasks may wait for one. The reply
    for a cancelled task is read and dropped, so the others stay in step. A ring carries the id of
    its lease.
    """

    def __init__(self, redis_connection: redis.asyncio.Connection) -> None:
        writer = redis_connection._writer
        assert writer is not None
        # Ours from here on. Else redis-py would warn about an open connection at its collection.
        redis_connection._writer = redis_connection._reader = None
        self._writer = writer  # Kept: it would close the transport when it is collected.
        self._transport: Any = writer.transport
        self._loop = asyncio.get_running_loop()
        self._reader = new_reader(int(redis_connection.db or 0))
        self._rings = rings_as(redis_connection.protocol)
        self._push_type: type[list[Any]] = Push  # Of messages that are no replies.
        # A view: TLS writes into slices of it, and a slice of a bytearray would be a copy.
        self._buffer = memoryview(bytearray(CHUNK))
        # For each reply that is still to come: its future, or None after tell(), and its deadline.
        self._awaited: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._subscribing: dict[str, asyncio.Future[Any]] = {}  # By the prefix of the locks.
        # Rings by lease id. Those for an id that has no entry are dropped.
        self.rings: dict[str, deque[bytes]] = {}
        self._listeners: dict[str, asyncio.Future[None]] = {}
        self.opened_at = clock.now()
        # Why it is closed. Only copies are raised: this one refers to no frames, which refer to it.
        self.closed: Exception | None = None
        self.owner: object = None  # Lives as long as the loop has this open; see Loops.
        self.channels: dict[str, str] = {}  # Where it is rung, by the prefix of the locks.
        self._transport.set_protocol(self)

    def send(self, command: bytes, seconds: float) -> asyncio.Future[Any]:
        """Send one packed command; the future is its reply, or raises when the connection is lost.

        Replies come in order, so a late one delays all others. If the reply has not come after so
        many seconds, the connection is given up.
        """
        future = self._loop.create_future()
        if self.closed:
            future.set_exception(copy(self.closed))
        else:
            deadline = self._loop.time() + seconds
            self._awaited.append((future, deadline))
            if deadline < self._alarm_at:
                self._set_alarm(deadline)
            self._transport.write(command)
            if put_off:
                catch_up()
        return future

    def send_all(self, commands: Sequence[bytes], seconds: float) -> asyncio.Future[list[Any]]:
        """Send packed commands in one go; the future is all their replies. See send()."""
        if self.closed:
            raise copy(self.closed)
        replies = [self._loop.create_future() for _ in commands[1:]]
        self._awaited.extend((reply, math.inf) for reply in replies)
        return asyncio.gather(*replies, self.send(b"".join(commands), seconds))

    def tell(self, command: bytes) -> None:
        """Send one packed command whose reply will be dropped."""
        if self.closed:
            raise copy(self.closed)
        self._awaited.append((None, math.inf))
        self._transport.write(command)

    async def subscribe(self, channel: str, seconds: float) -> None:
        """Be rung on *channel* from now on, too, or on the channel of a task that came first.

        In RESP2 the connection then does nothing else.
        """
        self._push_type = self._rings
        prefix = prefix_in(channel)
        subscribing = self._subscribing.get(prefix)
        if subscribing is None:
            subscribing = self._subscribing[prefix] = self.send(subscription(channel), seconds)
            # If the task that awaits it is cancelled, the loop must not report its exception.
            subscribing.add_done_callback(retrieve)
        await asyncio.wait([subscribing], timeout=seconds)
        if not subscribing.done():
            self.close(TimeoutError("the server did not answer in time"))
        if self._subscribing.get(prefix) is subscribing:
            del self._subscribing[prefix]
        reply = await subscribing
        if isinstance(reply, ReplyError):
            raise copy(reply)

    def subscribe_again(self, channel: str, seconds: float) -> None:
        """Test a connection that is subscribed to *channel*: without an answer it closes."""
        self.send(subscription(channel), seconds).add_done_callback(retrieve)

    async def next_ring(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """See Connection.next_ring(). There must be an entry for *id* in *rings*."""
        if self.closed:
            raise copy(self.closed)
        rings = self.rings[id]
        if not rings and seconds > 0:
            listener = self._listeners[id] = self._loop.create_future()
            alarm = self._loop.call_later(seconds, _wake, listener)
            try:
                await listener
            finally:
                alarm.cancel()
                del self._listeners[id]
        return rings.popleft() if rings else None

    def close(self, error: Exception | None = None) -> None:
        """Close it at once. Commands without a reply fail with *error*."""
        self._lose(error or ConnectionError("the connection was closed"))
        self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether it is neither closed nor lost, nor its loop closed."""
        return self.closed is None and not self._loop.is_closed()

    def cut(self) -> None:
        """Break it off, from any thread: its users get an error, now or at the next use."""
        with suppress(RuntimeError):  # Its loop is closed, and with it the connection.
            self._loop.call_soon_threadsafe(self.close)

    def abandon(self) -> None:
        """In a forked child: free the copy of the socket without telling the server or the loop."""
        self.closed = ConnectionError("the connection belongs to the parent process")
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            free_copy(sock)

    # --- asyncio.BufferedProtocol: a plain one is given a new buffer of 256 KB for each reply ---

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        reader, push_type = self._reader, self._push_type
        reader.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type] # any buffer
        while (item := reader.gets()) is not NOTHING:
            if isinstance(item, push_type):
                self._pushed(item)
                if item[0] not in SUBSCRIBED:
                    continue
                item = None  # It comes in the order of the commands, like a reply.
            # Popped last: an exception of a signal handler must not hide a future from _lose().
            future, _ = self._awaited[0]
            if future is not None and not future.done():
                future.set_result(item)
            self._awaited.popleft()

    def connection_lost(self, exc: Exception | None) -> None:
        error = exc or ConnectionError("the server closed the connection")
        self._lose(error.with_traceback(None))
        # TLS would keep this one, which keeps TLS.
        self._transport.set_protocol(asyncio.BufferedProtocol())

    def _pushed(self, item: list[Any]) -> None:
        if item[0] in RUNG:
            id = id_of(item[2])  # noqa: A001
            if id in self.rings:
                self.rings[id].append(item[2])
                if waiting := self._listeners.get(id):
                    _wake(waiting)
            return
        note(item, self.channels)
        if item[0] == UNSUBSCRIBED:
            for rings in self.rings.values():
                rings.append(b"")  # Each waiter looks whether it was its channel.
            for listener in self._listeners.values():
                _wake(listener)

    def _lose(self, error: Exception) -> None:
        if self.closed:
            return
        self.closed = error
        self.owner = None  # The two refer to each other.
        if self._alarm is not None:
            self._alarm.cancel()
        for future in (*(future for future, _ in self._awaited), *self._listeners.values()):
            if future is not None and not future.done():
                future.set_exception(copy(error))
        self._awaited.clear()

    # One alarm serves all replies. No reply stops it: it goes off now and then, and finds nothing
    # late.

    def _set_alarm(self, when: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_at(when, self._find_late)

    def _find_late(self) -> None:
        first = min((deadline for _, deadline in self._awaited), default=math.inf)
        if first <= self._alarm_at:
            self.close(TimeoutError("the server did not answer in time"))
        elif first < math.inf:
            self._set_alarm(first)
        else:
            self._alarm, self._alarm_at = None, math.inf


def retrieve(future: asyncio.Future[Any]) -> None:
    """Keep the loop from reporting an exception that no task awaits any more."""
    if not future.cancelled():
        future.exception()


def _wake(listener: asyncio.Future[None]) -> None:
    if not listener.done():
        listener.set_result(None)
