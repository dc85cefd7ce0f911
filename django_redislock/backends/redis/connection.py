"""Connections to a Redis or Valkey server that are made by redis-py and then driven by us.

TLS, passwords, sockets and the handshake stay redis-py's business. After it, commands are packed
once and replies are read by hiredis directly: the client's own call path costs several times the
server's work, and it retries behind the caller's back (rules R5, R15).

They speak RESP3, in which the server may ring a waiter on the same connection that carries its
commands. Or RESP2, for proxies that know no other: there a connection that is subscribed carries
nothing but rings, so that waiters need a second one.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import hiredis

from django_redislock import clock
from django_redislock.backends.redis.errors import NotSent, ReplyError
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio.connection import Connection as AsyncConnection
    from redis.connection import Connection

NOTHING = object()
Push = hiredis.PushNotification  # What the server sends unasked.
# What the server says by itself. A channel of a cluster ends when its slot goes to another node.
_RUNG = {b"message", b"smessage"}
_SUBSCRIBED = {b"subscribe", b"ssubscribe"}
_UNSUBSCRIBED = b"sunsubscribe"
_MSG_MORE: int = getattr(socket, "MSG_MORE", 0)
CHUNK = 8192
_BATCH = 500  # Commands sent before their replies are read; more could fill both buffers.
_SHORTEST = 0.001  # Seconds that are left of a time limit that is over.


class Wire:
    """One blocking connection. Used by one thread at a time; see Pool."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_more",
        "_reader",
        "_seconds",
        "_socket",
        "_unasked",
        "_unread",
        "_unsubscribed",
        "bells",
        "channels",
        "opened_at",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection  # Kept: it closes the socket when it is collected.
        self._socket: socket.socket = connection._sock  # type: ignore[assignment] # connected
        # TLS has no such flag, nor have all systems; then it is sent at once.
        self._more = 0 if isinstance(self._socket, ssl.SSLSocket) else _MSG_MORE
        self._reader = _reader()
        self.bells: deque[bytes] = deque()  # Rings that came while a reply was awaited.
        self._seconds = -1.0
        self._unasked: type[list[Any]] = Push  # What the server sends by itself.
        self.opened_at = clock.now()
        self._unread = 0  # Replies to tell() that are still to come.
        self._unsubscribed = False  # Whether a channel has ended, see _is_deaf().
        self.channels: dict[str, str] = {}  # Where it is rung, by the prefix of the locks.

    def send(self, command: bytes, seconds: float) -> None:
        """Send packed commands."""
        self._limit(seconds)
        self._socket.sendall(command)

    def tell(self, command: bytes) -> None:
        """Send one packed command whose reply will be dropped: with the next one, or shortly.

        The kernel keeps it for the next one, and sends it by itself after a moment (about 0.2 s).
        So a lease that is released at once has cost one message less, and one that is kept is
        confirmed also by a process that is busy or stopped.
        """
        self._socket.sendall(command, self._more)
        self._unread += 1

    def ask(self, command: bytes, seconds: float) -> Any:
        """Send packed commands and return the first reply; see reply().

        Raises:
            NotSent: The server has not got the last of them.
        """
        if seconds != self._seconds:
            self._limit(seconds)
        sock, reader = self._socket, self._reader
        try:
            sock.sendall(command)
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise NotSent(str(error)) from error
        if self._unread:
            return self.reply(seconds)
        # The usual case without detours: one read brings one whole reply.
        data = sock.recv(CHUNK)
        reader.feed(data)
        item = reader.gets()
        if item is NOTHING or not data:
            return self.reply(seconds)
        if type(item) is Push:
            self._pushed(item)
            return self.reply(seconds)
        return item

    def ask_all(self, commands: Sequence[bytes], seconds: float) -> list[Any]:
        """Send many packed commands in one go, and return their replies; see reply()."""
        if len(commands) == 1:
            return [self.ask(commands[0], seconds)]
        replies = []
        for start in range(0, len(commands), _BATCH):
            begun, batch = clock.now(), commands[start : start + _BATCH]
            self.send(b"".join(batch), seconds)
            replies += [self.reply(rest(seconds, begun)) for _ in batch]
        return replies

    def reply(self, seconds: float) -> Any:
        """The next reply; an error reply is returned, not raised."""
        self._limit(seconds)
        while True:
            item = self._item()
            if isinstance(item, self._unasked):
                self._pushed(item)
            elif self._unread:
                self._unread -= 1
            else:
                return item

    def subscribe(self, channel: str, seconds: float) -> None:
        """Be rung on *channel* from now on, too. In RESP2 it then does nothing else."""
        self.send(_subscription(channel), seconds)
        self._unasked = _rings_of(self._connection)
        while True:
            item = self._item()
            if isinstance(item, self._unasked):
                self._pushed(item)
                if item[0] in _SUBSCRIBED:
                    return
            elif self._unread:
                self._unread -= 1
            else:
                raise item if isinstance(item, ReplyError) else ConnectionError("out of step")

    def bell(self, seconds: float) -> bytes | None:
        """The next ring, or None if there is none within *seconds*, or there will be none."""
        if self.bells:
            return self.bells.popleft()
        if seconds <= 0 or self._is_deaf():
            return None
        self._limit(seconds)
        try:
            item = self._item()
        except TimeoutError:
            return None
        if isinstance(item, self._unasked):
            self._pushed(item)
            if self._is_deaf():
                return None
        elif self._unread:
            self._unread -= 1
        else:
            raise ConnectionError("out of step")
        return self.bells.popleft() if self.bells else b""

    def close(self) -> None:
        """Close it. In a forked child only the child's copy is closed, without a shutdown."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    @property
    def is_open(self) -> bool:
        """Whether nobody has closed it here; the server may have."""
        return self._socket.fileno() >= 0

    def cut(self) -> None:
        """From any thread: what is under way on it fails, and so does whatever comes next."""
        # Its user closes it: a number of a socket that is closed here may be another's by then.
        sock = self._socket
        with suppress(OSError):
            if isinstance(sock, ssl.SSLSocket):  # Its own would touch what its user may be reading.
                super(ssl.SSLSocket, sock).shutdown(socket.SHUT_RDWR)
            else:
                sock.shutdown(socket.SHUT_RDWR)

    def _item(self) -> Any:
        reader = self._reader
        while (item := reader.gets()) is NOTHING:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
        return item

    def _pushed(self, item: list[Any]) -> None:
        if item[0] in _RUNG:
            self.bells.append(item[2])
        else:
            _note(item, self.channels)
            self._unsubscribed |= item[0] == _UNSUBSCRIBED

    def _is_deaf(self) -> bool:
        """Whether a channel has ended since this was asked last, so that it is better to look.

        It may have ended before the question that told the server to ring us there.
        """
        was, self._unsubscribed = self._unsubscribed, False
        return was

    def _limit(self, seconds: float) -> None:
        # Only when it changes: it is a system call.
        if seconds != self._seconds:
            self._socket.settimeout(seconds)
            self._seconds = seconds


class AsyncWire(asyncio.BufferedProtocol):
    """One connection shared by all tasks of one event loop.

    Replies come in the order of the commands, so any number of tasks may have one under way; a
    cancelled task's reply is read and dropped, which keeps the others in step. Rings carry the
    id of the lease they are for.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        writer = connection._writer
        assert writer is not None
        # Ours from here on; redis-py would warn about an open connection when it is collected.
        connection._writer = connection._reader = None
        self._writer = writer  # Kept: it would close the transport when it is collected.
        self._transport: Any = writer.transport
        self._loop = asyncio.get_running_loop()
        self._reader = _reader()
        self._rings = _rings_of(connection)
        self._unasked: type[list[Any]] = Push  # What the server sends by itself.
        # A view: what comes by TLS is written into slices of it, and a slice of bytes is a copy.
        self._buffer = memoryview(bytearray(CHUNK))
        # What replies are still to come, and until when; a reply to tell() is for nobody.
        self._awaited: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._subscribing: dict[str, asyncio.Future[Any]] = {}  # By the prefix of the locks.
        self._bells: dict[str, deque[bytes]] = {}
        self._listeners: dict[str, asyncio.Future[None]] = {}
        self.opened_at = clock.now()
        self.closed: Exception | None = None
        self.owner: object = None  # What is kept as long as the loop has this open; see Loops.
        self.channels: dict[str, str] = {}  # Where it is rung, by the prefix of the locks.
        self._transport.set_protocol(self)

    def send(self, command: bytes, seconds: float) -> asyncio.Future[Any]:
        """Send one packed command; the future is its reply, or raises when the wire is lost.

        Replies come in order, so one that is late makes the whole connection late: it is given up
        if the reply has not come after so many seconds.
        """
        future = self._loop.create_future()
        if self.closed:
            future.set_exception(self.closed)
        else:
            deadline = self._loop.time() + seconds
            self._awaited.append((future, deadline))
            if deadline < self._alarm_at:
                self._set_alarm(deadline)
            self._transport.write(command)
        return future

    def tell(self, command: bytes) -> None:
        """Send one packed command whose reply will be dropped."""
        if self.closed:
            raise self.closed
        self._awaited.append((None, math.inf))
        self._transport.write(command)

    async def subscribe(self, channel: str, seconds: float) -> None:
        """Be rung on *channel* from now on, too, or on the like that another task asked for.

        In RESP2 it then does nothing else.
        """
        self._unasked = self._rings
        prefix = prefix_in(channel)
        subscribing = self._subscribing.get(prefix)
        if subscribing is None:
            subscribing = self._subscribing[prefix] = self.send(_subscription(channel), seconds)
            # Whoever awaits it may be cancelled; its exception is theirs, not the loop's.
            subscribing.add_done_callback(retrieve)
        await asyncio.wait([subscribing], timeout=seconds)
        if not subscribing.done():
            self.close(TimeoutError("the server did not answer in time"))
        if self._subscribing.get(prefix) is subscribing:
            del self._subscribing[prefix]
        reply = await subscribing
        if isinstance(reply, ReplyError):
            raise reply

    def subscribe_again(self, channel: str, seconds: float) -> None:
        """Find out whether a connection is alive that is rung on *channel*: else it closes."""
        self.send(_subscription(channel), seconds).add_done_callback(retrieve)

    def expect_bell(self, id: str) -> None:  # noqa: A002
        """Keep the rings for *id* until forget_bell()."""
        self._bells.setdefault(id, deque())

    def forget_bell(self, id: str) -> None:  # noqa: A002
        """Drop what comes for *id*."""
        self._bells.pop(id, None)

    async def bell(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """See Wire.bell(), for the rings for *id*."""
        if self.closed:
            raise self.closed
        rings = self._bells[id]
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
        """Close it at once; what is under way fails with *error*."""
        self._lose(error or ConnectionError("the connection was closed"))
        self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether it is neither closed nor lost, nor its loop closed."""
        return self.closed is None and not self._loop.is_closed()

    def cut(self) -> None:
        """From any thread: what is under way on it fails, and so does whatever comes next."""
        with suppress(RuntimeError):  # Its loop is closed, and with it the connection.
            self._loop.call_soon_threadsafe(self.close)

    def forsake(self) -> None:
        """In a forked child: free the copy of the socket without telling the server or the loop."""
        self.closed = ConnectionError("the connection belongs to the parent process")
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, sock.fileno())
            os.close(null)

    # --- asyncio.BufferedProtocol: a plain one is given a new buffer of 256 KB for each reply ---

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type] # any buffer
        while (item := self._reader.gets()) is not NOTHING:
            if isinstance(item, self._unasked):
                self._pushed(item)
            else:
                self._answered(item)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(exc or ConnectionError("the server closed the connection"))

    def _answered(self, item: Any) -> None:
        # Popped last: an exception of a signal handler must not hide a future from _lose().
        future, _ = self._awaited[0]
        if future is not None and not future.done():
            future.set_result(item)
        self._awaited.popleft()

    def _pushed(self, item: list[Any]) -> None:
        _note(item, self.channels)
        if item[0] in _SUBSCRIBED:
            self._answered(None)  # It comes in the order of the commands, like a reply.
        elif item[0] == _UNSUBSCRIBED:
            for rings in self._bells.values():
                rings.append(b"")  # Whom it concerns finds out by asking.
            for listener in self._listeners.values():
                _wake(listener)
        elif item[0] in _RUNG:
            id = id_of(item[2])  # noqa: A001
            if id in self._bells:
                self._bells[id].append(item[2])
                if waiting := self._listeners.get(id):
                    _wake(waiting)

    def _lose(self, error: Exception) -> None:
        if self.closed:
            return
        self.closed = error
        if self._alarm is not None:
            self._alarm.cancel()
        for future in (*(future for future, _ in self._awaited), *self._listeners.values()):
            if future is not None and not future.done():
                future.set_exception(error)
        self._awaited.clear()

    # One alarm for all that is awaited. It is not taken back when a reply comes: most go off once
    # in a while, and find that nothing is late.

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


def packed(*command: str | bytes | int) -> bytes:
    """A command as the server reads it."""
    # No int is handed to hiredis: printing one runs pending signal handlers, and if one of them
    # raises (Ctrl-C, Celery's soft time limit), hiredis 3.5 reads through a null pointer.
    safe = tuple([b"%d" % item if item.__class__ is int else item for item in command])
    # The stubs of hiredis speak of a tuple of one.
    data: bytes = hiredis.pack_command(safe)  # type: ignore[arg-type]
    return data


def _subscription(channel: str) -> bytes:
    # One with a hash tag is of a cluster, see lua/_queue.lua.
    return packed("SSUBSCRIBE" if "{" in channel else "SUBSCRIBE", channel)


def _rings_of(connection: Connection | AsyncConnection) -> type[list[Any]]:
    """What rings come as on a connection that is subscribed."""
    return Push if connection.get_protocol() == 3 else list


def _note(item: list[Any], channels: dict[str, str]) -> None:
    """Note what a push says about where a connection is rung, in Wire.channels."""
    if item[0] in _SUBSCRIBED:
        channel = item[1].decode()
        channels[prefix_in(channel)] = channel
    elif item[0] == _UNSUBSCRIBED:
        channel = item[1].decode()
        if channels.get(prefix_in(channel)) == channel:
            del channels[prefix_in(channel)]


def rest(within: float, begun: float) -> float:
    """What is left of a time limit; all that an operation takes is one try."""
    left = within - (clock.now() - begun)
    # Hardly less counts as no less, since to set the limit of a socket is a system call.
    return within if left > 0.9 * within else max(left, _SHORTEST)


def id_of(ring: bytes) -> str:
    """The id of the lease that a ring is for; "" if it is for none."""
    return ring.partition(b" ")[2].partition(b" ")[0].decode(errors="replace")


def retrieve(future: asyncio.Future[Any]) -> None:
    """Keep the loop from warning of an exception that nobody awaits any more."""
    if not future.cancelled():
        future.exception()


def _wake(listener: asyncio.Future[None]) -> None:
    if not listener.done():
        listener.set_result(None)


def _reader() -> hiredis.Reader:
    return hiredis.Reader(replyError=ReplyError, notEnoughData=NOTHING)
