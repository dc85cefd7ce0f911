"""A blocking connection, made by redis-py and then driven by us.

redis-py does TLS, passwords, sockets and the handshake. After that we pack each command once, and
hiredis reads the replies directly: redis-py's own call path costs several times the server's work,
and it retries behind the caller's back (rules R5, R15).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import hiredis

from django_redislock import clock, process
from django_redislock.backends.redis.errors import NotSent, ReplyError
from django_redislock.deferred_work import catch_up, put_off
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis


# --- RESP, as both kinds of connection speak it: commands, replies, and pushes of the server ------

# Connections speak RESP3: there the server may ring a waiter on the same connection that carries
# its commands. For proxies without RESP3 they speak RESP2: there a connection that is subscribed
# carries nothing but rings, so waiters need a second one.

NOTHING = object()  # No whole reply has come yet.
CHUNK = 8192  # Bytes that are read at once.
Push = hiredis.PushNotification  # What the server sends unasked.
# The first word of a push. A channel of a cluster ends when its slot goes to another node.
RUNG = {b"message", b"smessage"}
SUBSCRIBED = {b"subscribe", b"ssubscribe"}
UNSUBSCRIBED = b"sunsubscribe"


def new_reader(database: int) -> hiredis.Reader:
    """A parser of replies of a connection that uses the *database* of that number."""
    error = partial(ReplyError, database=database)
    return hiredis.Reader(replyError=error, notEnoughData=NOTHING)


def rings_as(protocol: int | str) -> type[list[Any]]:
    """The type of a ring on a connection that is subscribed, by its version of RESP."""
    return Push if protocol == 3 else list


def packed(*command: str | bytes | int) -> bytes:
    """A command as the server reads it."""
    # hiredis gets no int: to print one, it runs pending signal handlers. If one of them raises
    # (Ctrl-C, Celery's soft time limit), hiredis 3.5 reads through a null pointer.
    if int in map(type, command):
        command = tuple([b"%d" % item if item.__class__ is int else item for item in command])
    # The stubs of hiredis speak of a tuple of one.
    data: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return data


def subscription(channel: str) -> bytes:
    """The command that subscribes to *channel*."""
    # A channel with a hash tag is on a cluster, see lua/_queue.lua.
    return packed("SSUBSCRIBE" if "{" in channel else "SUBSCRIBE", channel)


def note(item: list[Any], channels: dict[str, str]) -> None:
    """Note in *channels* where a connection is rung, as a push says."""
    if item[0] in SUBSCRIBED:
        channel = item[1].decode()
        channels[prefix_in(channel)] = channel
    elif item[0] == UNSUBSCRIBED:
        channel = item[1].decode()
        if channels.get(prefix_in(channel)) == channel:
            del channels[prefix_in(channel)]


def id_of(ring: bytes) -> str:
    """The id of the lease that a ring is for; "" if it is for none."""
    return ring.partition(b" ")[2].partition(b" ")[0].decode(errors="replace")


def free_copy(sock: socket.socket) -> None:
    """In a forked child: free the copy of a socket, but not its number.

    A signal handler may have forked in the middle of a write to that number. No new connection may
    have the number before that write is over.
    """
    if sock.fileno() >= 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, sock.fileno())
        os.close(null)


_MSG_MORE: int = getattr(socket, "MSG_MORE", 0)
_BATCH = 500  # Commands sent before their replies are read; more could fill both buffers.
_SHORTEST = 0.001  # Seconds that are left of a time limit that is over.


class Connection:
    """One blocking connection. Used by one thread at a time; see Pool."""

    __slots__ = (
        "__weakref__",
        "_is_plain",
        "_more",
        "_push_type",
        "_reader",
        "_redis_connection",
        "_seconds",
        "_socket",
        "_unread",
        "_unsubscribed",
        "channels",
        "opened_at",
        "rings",
        "room",
    )

    def __init__(self, redis_connection: redis.Connection) -> None:
        self._redis_connection = redis_connection  # Kept: else it would close the socket.
        self._socket: socket.socket = redis_connection._sock  # type: ignore[assignment] # connected
        # The garbage collector may find the socket before redis_connection, which closes it. Then
        # Python would warn about an open socket. This is called before either is collected.
        finalize(self, self._socket.close).atexit = False
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        # Whether bytes may be written to the socket as to any file.
        self._is_plain = not is_tls and os.name == "posix"
        # TLS and some systems have no such flag; then a command is sent at once.
        self._more = 0 if is_tls else _MSG_MORE
        self._reader = new_reader(int(redis_connection.db or 0))
        self.rings: deque[bytes] = deque()  # Rings that came while a reply was awaited.
        self.room: object = None  # What it takes in a pool.
        self._seconds = -1.0
        self._push_type: type[list[Any]] = Push  # Of messages that are no replies.
        self.opened_at = clock.now()
        self._unread = 0  # Replies to tell() that are still to come.
        self._unsubscribed = False  # Whether a channel has ended, see _is_deaf().
        self.channels: dict[str, str] = {}  # Where it is rung, by the prefix of the locks.

    def send(self, command: bytes, seconds: float) -> None:
        """Send packed commands."""
        self._limit(seconds)
        self._socket.sendall(command)

    def tell(self, command: bytes) -> None:
        """Send one packed command with the next one, or shortly; its reply will be dropped.

        The kernel holds the command back for the next one, for about 0.2 s at most. So a lease that
        is released at once costs one message less. A lease that is kept is confirmed even if its
        process is busy or stopped.
        """
        self._socket.sendall(command, self._more)
        self._unread += 1

    def execute(self, command: bytes, seconds: float) -> Any:
        """Send packed commands and return the first reply; see reply().

        Raises:
            NotSent: The last command did not reach the server.
        """
        if seconds != self._seconds:
            self._limit(seconds)
        sock, reader, sent = self._socket, self._reader, 0
        try:
            if self._is_plain:
                # Mostly there is room. sendall() would ask the system first.
                try:
                    sent = os.write(sock.fileno(), command)
                except BlockingIOError:
                    sent = 0
            if sent < len(command):
                sock.sendall(command[sent:])
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise NotSent(str(error)) from error
        if put_off:
            catch_up()
        while True:  # Most often one read brings one whole reply.
            data = sock.recv(CHUNK)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
            while (item := reader.gets()) is not NOTHING:
                if type(item) is Push:
                    self._pushed(item)
                elif self._unread:
                    self._unread -= 1
                else:
                    return item

    def execute_all(self, commands: Sequence[bytes], seconds: float) -> list[Any]:
        """Send many packed commands in one go, and return their replies; see reply()."""
        if len(commands) == 1:
            (command,) = commands
            return [self.execute(command, seconds)]
        replies = []
        for start in range(0, len(commands), _BATCH):
            started, batch = clock.now(), commands[start : start + _BATCH]
            self.send(b"".join(batch), seconds)
            replies += [self.reply(rest(seconds, started)) for _ in batch]
        return replies

    def reply(self, seconds: float) -> Any:
        """The next reply; an error reply is returned, not raised."""
        self._limit(seconds)
        while True:
            item = self._item()
            if isinstance(item, self._push_type):
                self._pushed(item)
            elif self._unread:
                self._unread -= 1
            else:
                return item

    def subscribe(self, channel: str, seconds: float) -> None:
        """Be rung on *channel* from now on, too. In RESP2 the connection does nothing else then."""
        self.send(subscription(channel), seconds)
        self._push_type = rings_as(self._redis_connection.protocol)
        while True:
            item = self._item()
            if isinstance(item, self._push_type):
                self._pushed(item)
                if item[0] in SUBSCRIBED:
                    return
            elif self._unread:
                self._unread -= 1
            else:
                raise item if isinstance(item, ReplyError) else ConnectionError("out of step")

    def next_ring(self, seconds: float) -> bytes | None:
        """The next ring, or b"" for other messages; None if nothing comes in *seconds*, or ever."""
        if self.rings:
            return self.rings.popleft()
        if seconds <= 0 or self._is_deaf():
            return None
        self._limit(seconds)
        try:
            item = self._item()
        except TimeoutError as error:
            process.pass_on_interrupt(error)
            return None
        if isinstance(item, self._push_type):
            self._pushed(item)
            if self._is_deaf():
                return None
        elif self._unread:
            self._unread -= 1
        else:
            raise ConnectionError("out of step")
        return self.rings.popleft() if self.rings else b""

    def close(self) -> None:
        """Close it. In a forked child only the child's copy is closed, without a shutdown."""
        try:
            self._redis_connection.disconnect()  # type: ignore[no-untyped-call]
        finally:
            self._socket.close()  # Even if a signal handler has interrupted redis-py.

    def abandon(self) -> None:
        """In a forked child: free the copy of the socket, which interrupted code may still use."""
        free_copy(self._socket)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed here; the server may have closed it."""
        return self._socket.fileno() >= 0

    def cut(self) -> None:
        """Break it off, from any thread: its user gets an error, now or at the next use."""
        # Not close(): another socket might get its number while its user still reads from it.
        sock = self._socket
        with suppress(OSError):
            # The shutdown() of TLS touches buffers that the user of the socket may be reading.
            if isinstance(sock, ssl.SSLSocket):
                super(ssl.SSLSocket, sock).shutdown(socket.SHUT_RDWR)
            else:
                sock.shutdown(socket.SHUT_RDWR)

    def _item(self) -> Any:
        reader = self._reader
        while (item := reader.gets()) is NOTHING:
            if put_off:
                catch_up()
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
        return item

    def _pushed(self, item: list[Any]) -> None:
        if item[0] in RUNG:
            self.rings.append(item[2])
        else:
            note(item, self.channels)
            self._unsubscribed |= item[0] == UNSUBSCRIBED

    def _is_deaf(self) -> bool:
        """Whether a channel has ended since the last call. Then the waiter has to look.

        The channel may have ended before we asked the server to ring us there.
        """
        was, self._unsubscribed = self._unsubscribed, False
        return was

    def _limit(self, seconds: float) -> None:
        # Only when it changes: it is a system call.
        if seconds != self._seconds:
            self._socket.settimeout(seconds)
            self._seconds = seconds


def rest(within: float, started: float) -> float:
    """Seconds that are left of a time limit, which is for a whole try."""
    left = within - (clock.now() - started)
    # Almost all of it counts as all of it: see _limit().
    return within if left > 0.9 * within else max(left, _SHORTEST)
