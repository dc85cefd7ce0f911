"""Connections to a Redis or Valkey server that are made by redis-py and then driven by us.

TLS, passwords, sockets and the handshake stay redis-py's business. After it, commands are packed
once and replies are read by hiredis directly: the client's own call path costs several times the
server's work, and it retries behind the caller's back (rules R5, R15).

All connections speak RESP3, in which the server may ring a waiter on the same connection that
carries its commands.
"""

from __future__ import annotations

import asyncio

# Or socket.getaddrinfo() does so at the first connection: a process that is forked meanwhile by
# another thread would wait for the end of that import for ever.
import encodings.idna  # noqa: F401
import math
import os
import socket
import ssl
import threading
import time
from collections import deque
from concurrent.futures import Future
from importlib.util import find_spec
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import ref

try:
    import hiredis
except ModuleNotFoundError as error:
    text = "RedisBackend needs hiredis: pip install 'redis[hiredis]'."
    raise ImportError(text, name="hiredis") from error
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import parse_url as async_parse_url
from redis.connection import Connection, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What a server says that is not, or not now, the one to ask. After a failover its address may
# lead to another one, which only a new connection reaches.
_WRONG_SERVER = frozenset(
    {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "NOREPLICAS", "READONLY", "UNBLOCKED"}
)
_WRONG_SERVER_TEXT = "WAIT cannot be used with replica"

# Error codes after which trying again may help. All others are refusals: rights, types, memory.
# MOVED is one: it comes from a cluster, which is no place for locks of one server.
_TRANSIENT = _WRONG_SERVER - {"MOVED"} | {"BUSY", "TRYAGAIN"}
_TRANSIENT_TEXT = ("max number of clients", "ERR max number of clients reached", _WRONG_SERVER_TEXT)

DIALS_BY_NAME = 16  # That may be under way at once, each in a thread of its own.

OLDEST_VERSION = (7, 0)  # Of Redis; every Valkey is newer.

_NOTHING = object()
_MSG_MORE: int = getattr(socket, "MSG_MORE", 0)
_CHUNK = 8192


class Exhausted(Exception):
    """No connection became free in time."""


class Crowded(Exhausted):
    """There is a connection, but none that a waiter may keep."""


class TooOld(redis_errors.RedisError):
    """The server lacks what the scripts need."""


class ReplyError(redis_errors.ResponseError):
    """An error reply of the server; its first word is the code."""

    @property
    def code(self) -> str:
        text = str(self).removeprefix("EXECABORT Transaction discarded because of: ")
        return text.partition(" ")[0]


# What trouble with a server looks like. Whatever else is raised in between comes from outside: a
# signal handler, Celery's soft time limit, a cancellation.
TROUBLE = (OSError, EOFError, redis_errors.RedisError, hiredis.HiredisError, Exhausted)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help (R13)."""
    if isinstance(error, Exhausted):
        return True
    if isinstance(error, ReplyError):
        return error.code in _TRANSIENT or any(text in str(error) for text in _TRANSIENT_TEXT)
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        return False
    if isinstance(error, redis_errors.ReadOnlyError | redis_errors.MasterDownError) or any(
        text in str(error) for text in _TRANSIENT_TEXT
    ):
        return True
    if isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError):
        return not _is_tls_refusal(error)
    return isinstance(error, OSError | EOFError | TimeoutError) and not _is_tls_refusal(error)


def is_wrong_server(error: BaseException) -> bool:
    """Whether only a new connection may lead to a server that can do it."""
    return isinstance(error, ReplyError) and (
        error.code in _WRONG_SERVER or _WRONG_SERVER_TEXT in str(error)
    )


def _is_tls_refusal(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        error = error.__cause__ or error.__context__
    return False


# What we decide ourselves, whatever OPTIONS says.
_OURS: dict[str, Any] = {
    "protocol": 3,
    "decode_responses": False,
    "health_check_interval": 0,
    "retry": None,
    "retry_on_timeout": False,
    "retry_on_error": [],
}


class Dialer:
    """Makes connections to one server, sync and async, from a URL and client options."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Check them, without dialing.

        Raises:
            ValueError, TypeError: redis-py does not understand the URL or an option.
        """
        common = {**_quiet(), **options}
        self._sync = {**common, **parse_url(url), **_OURS, "command_packer": _Packer()}  # type: ignore[no-untyped-call]
        self._async = {**common, **async_parse_url(url), **_OURS}
        self._sync_class = self._sync.pop("connection_class", Connection)
        self._async_class = self._async.pop("connection_class", AsyncConnection)
        self._sync_class(**self._sync)
        self.timeout: float | None = self._sync.get("socket_timeout")
        self._by_name = "path" not in self._sync and not _is_address(self._sync.get("host"))
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: none of the parent's dials is under way."""
        self._places = threading.Semaphore(DIALS_BY_NAME)

    def dial(self, seconds: float) -> Wire:
        """A new blocking connection, or redis-py's exception."""
        if not self._by_name:
            return self._dial(seconds)
        # Looking up a name knows no time limit, and each of its addresses is tried for the full
        # time. So a thread does it, which is left alone once the time is over: nobody then refers
        # to its connection, which closes it.
        until = time.monotonic() + seconds
        outcome: Future[Wire] = Future()
        places = self._places

        def work() -> None:
            try:
                outcome.set_result(self._dial(seconds))
            except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                outcome.set_exception(error)
            finally:
                places.release()

        if not places.acquire(timeout=seconds):
            raise _dial_timeout()
        try:
            threading.Thread(target=work, name="redislock-dial", daemon=True).start()
        except RuntimeError:  # No more threads, or the interpreter is shutting down.
            work()
        try:
            return outcome.result(max(until - time.monotonic(), 0))
        except TimeoutError as error:
            raise _dial_timeout() from error

    def _dial(self, seconds: float) -> Wire:
        connection = self._sync_class(**{**self._sync, **_limits(seconds, self._sync)})
        try:
            connection.connect()
            _check_version(connection.handshake_metadata)
        except (TooOld, redis_errors.ResponseError) as error:
            connection.disconnect()
            _check_hello(error)
            raise
        return Wire(connection)

    async def adial(self) -> AsyncWire:
        """A new connection of the running loop, or redis-py's exception; cancel it when late."""
        connection = self._async_class(**{**self._async, **_NO_LIMITS})
        # The first reply of the handshake is the server's HELLO, which this client does not keep.
        replies: list[Any] = []
        read = connection.read_response

        async def noting(*args: Any, **kwargs: Any) -> Any:
            replies.append(await read(*args, **kwargs))
            return replies[-1]

        connection.read_response = noting
        try:
            await connection.connect()
            _check_version(replies[0])
            return AsyncWire(connection)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, TooOld | redis_errors.ResponseError):
                _check_hello(error)
            raise
        finally:
            del connection.read_response


def _check_version(hello: Any) -> None:
    """Judge the server by its answer to HELLO, which every connection begins with anyway."""
    if not isinstance(hello, dict) or hello.get(b"server") != b"redis":
        return
    version = hello.get(b"version", b"").decode(errors="replace")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST_VERSION:
        raise TooOld(f"the server is Redis {version}; locks need Redis 7.0 or newer, or Valkey")


def _check_hello(error: Exception) -> None:
    """Say what it means that a server does not know HELLO, which came with Redis 6."""
    if "unknown command" in str(error) and "HELLO" in str(error):
        raise TooOld(
            "the server is older than Redis 6; locks need Redis 7.0 or newer, or Valkey"
        ) from error


class _Packer:
    """Packs redis-py's own commands, those of the handshake; see packed()."""

    def pack(self, command: str, *args: str | bytes | int) -> list[bytes]:
        return [packed(*command.split(), *args)]


def _limits(seconds: float, kwargs: Mapping[str, Any]) -> dict[str, float]:
    # Half for the connection, half for the one or two round trips of the handshake, each of
    # which redis-py times by itself.
    round_trips = 2 if kwargs.get("db") else 1
    return {
        "socket_connect_timeout": seconds / 2,
        "socket_timeout": seconds / 2 / round_trips,
    }


_NO_LIMITS = {"socket_connect_timeout": None, "socket_timeout": None}


def _is_address(host: str | None) -> bool:
    try:
        ip_address(host or "")
    except ValueError:
        return False
    return True


def _dial_timeout() -> redis_errors.TimeoutError:
    return redis_errors.TimeoutError("Timeout connecting to server")


def _quiet() -> dict[str, Any]:
    """Options without which clients send more at a handshake than they have to.

    They differ by version: telling the server one's name takes two round trips, and newer
    clients ask it to announce maintenance on RESP3 connections.
    """
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        options: dict[str, Any] = {}
    else:
        options = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
    if find_spec("redis.driver_info"):
        return {**options, "driver_info": None}
    return {**options, "lib_name": None, "lib_version": None}


class Wire:
    """One blocking connection. Used by one thread at a time; see Pool."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_more",
        "_reader",
        "_seconds",
        "_socket",
        "_unread",
        "bells",
        "channel",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection  # Kept: it closes the socket when it is collected.
        self._socket: socket.socket = connection._sock  # type: ignore[assignment] # connected
        # TLS has no such flag, nor have all systems; then it is sent at once.
        self._more = 0 if isinstance(self._socket, ssl.SSLSocket) else _MSG_MORE
        self._reader = _reader()
        self.bells: deque[bytes] = deque()  # Rings that came while a reply was awaited.
        self._seconds = -1.0
        self._unread = 0  # Replies to tell() that are still to come.
        self.channel = ""  # Where this connection is rung, once it has subscribed.

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
        """Send packed commands and return the first reply; see reply()."""
        if seconds != self._seconds:
            self._limit(seconds)
        sock, reader = self._socket, self._reader
        sock.sendall(command)
        if self._unread:
            return self.reply(seconds)
        # The usual case without detours: one read brings one whole reply.
        data = sock.recv(_CHUNK)
        reader.feed(data)
        item = reader.gets()
        if item is _NOTHING or not data:
            return self.reply(seconds)
        if type(item) is hiredis.PushNotification:
            self._pushed(item)
            return self.reply(seconds)
        return item

    def reply(self, seconds: float) -> Any:
        """The next reply; an error reply is returned, not raised."""
        self._limit(seconds)
        while True:
            item = self._item()
            if isinstance(item, hiredis.PushNotification):
                self._pushed(item)
            elif self._unread:
                self._unread -= 1
            else:
                return item

    def subscribe(self, channel: str, seconds: float) -> None:
        """Be rung on *channel* from now on."""
        self.send(packed("SUBSCRIBE", channel), seconds)
        while True:
            item = self._item()
            if isinstance(item, hiredis.PushNotification):
                if item[0] == b"subscribe":
                    self.channel = channel
                    return
                self._pushed(item)
            elif self._unread:
                self._unread -= 1
            else:
                raise item if isinstance(item, ReplyError) else ConnectionError("out of step")

    def bell(self, seconds: float) -> bytes | None:
        """The next ring, or None if there is none within *seconds*."""
        if self.bells:
            return self.bells.popleft()
        if seconds <= 0:
            return None
        self._limit(seconds)
        try:
            item = self._item()
        except TimeoutError:
            return None
        if isinstance(item, hiredis.PushNotification):
            self._pushed(item)
        elif self._unread:
            self._unread -= 1
        else:
            raise ConnectionError("out of step")
        return self.bells.popleft() if self.bells else b""

    def close(self) -> None:
        """Close it. In a forked child only the child's copy is closed, without a shutdown."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    def _item(self) -> Any:
        reader = self._reader
        while (item := reader.gets()) is _NOTHING:
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionError("the server closed the connection")
            reader.feed(data)
        return item

    def _pushed(self, item: list[Any]) -> None:
        if item[0] == b"message":
            self.bells.append(item[2])

    def _limit(self, seconds: float) -> None:
        # Only when it changes: it is a system call.
        if seconds != self._seconds:
            self._socket.settimeout(seconds)
            self._seconds = seconds


class Pool:
    """The blocking connections of one backend: never more than *limit*, each used by one thread.

    The last one returned is the first one lent. A waiter keeps its connection while it sleeps,
    so that the server can ring it; a few are kept back from waiters, or sleeping waiters could
    starve the releases that would wake them.
    """

    KEPT_BACK = 2
    # Connections of a process that are not lent: its watchdog's, and the one of a SharedBell.
    BESIDE = 2

    def __init__(self, dial: Callable[[float], Wire], limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._idle: list[Wire] = []
        # Those that exist, not a count: one that an exception of a signal handler made us lose
        # gives its place back when it is collected.
        self._wires: set[ref[Wire]] = set()
        self._dialing = 0
        self._waiting = 0
        self._retired = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def take(self, seconds: float, *, to_wait: bool = False) -> Wire:
        """Lend a connection.

        Args:
            seconds: How long to wait for one that is returned, and for a new one to connect.
            to_wait: Whether it may be kept for long, by a waiter.

        Raises:
            Exhausted: All are in use and none was returned within *seconds*.
            Crowded: Waiters have so many that the rest is needed for those who do not wait.
        """
        idle = self._idle
        if to_wait and len(idle) + self._free() <= self.KEPT_BACK:
            raise Crowded("waiters use all connections that may be kept for long")
        try:
            return idle.pop()
        except IndexError:
            return self._take(seconds)

    def give(self, wire: Wire) -> None:
        """Return a connection that is in step: all its replies were read, or are known to come."""
        self._idle.append(wire)
        if self._retired:
            self.close()
        elif self._waiting:
            with self._lock:
                self._changed.notify_all()

    def drop(self, wire: Wire) -> None:
        """Close a broken or interrupted connection, and the idle ones, which may be as dead."""
        wire.close()
        self._wires.discard(ref(wire))
        with self._lock:
            self._changed.notify_all()
        self.close()

    def close(self) -> None:
        """Close the idle connections."""
        # One by one: take() pops from the same list without the lock.
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                break
            wire.close()
            self._wires.discard(ref(wire))
            with self._lock:
                self._changed.notify_all()

    def retire(self) -> None:
        """Keep no idle connection from now on."""
        self._retired = True
        self.close()

    def forsake(self) -> None:
        """In a forked child: close its copies. Takes no lock: a thread that is gone may hold it.

        Those that are lent too: while a copy is open, the server does not learn that a waiter of
        the parent has died.
        """
        for reference in list(self._wires):
            if (wire := reference()) is not None:
                wire.close()

    def _take(self, seconds: float) -> Wire:
        until = time.monotonic() + seconds
        with self._lock:
            self._waiting += 1
            try:
                while True:
                    if not self._changed.wait_for(self._has_room, until - time.monotonic()):
                        raise Exhausted(
                            f"this process uses all of its {self._limit + self.BESIDE} connections;"
                            " raise OPTIONS['max_connections']"
                        )
                    try:
                        return self._idle.pop()
                    except IndexError:
                        pass  # take() of another thread, which needs no lock, was faster.
                    if self._free() > 0:
                        self._dialing += 1
                        break
            finally:
                self._waiting -= 1
        try:
            wire = self._dial(seconds)
            self._wires.add(ref(wire, self._wires.discard))
            return wire
        finally:
            with self._lock:
                self._dialing -= 1
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return bool(self._idle) or self._free() > 0

    def _free(self) -> int:
        return self._limit - len(self._wires) - self._dialing


class SharedBell:
    """One connection on which all waiters are rung that found none for themselves.

    A thread reads it, hands each ring to the waiter it is for, and ends when none is left.
    """

    CHECK_EVERY = 2.0  # Seconds after which a connection on which nothing came is tested.

    def __init__(self, dial: Callable[[float], Wire], channel: str, seconds: float) -> None:
        """Begin to open it, within so many seconds.

        Raises:
            Exhausted: There is no thread to read it.
        """
        self.channel = channel
        self.closed = False
        self._rings: dict[str, SimpleQueue[bytes | None]] = {}  # By lease id; None: it is closed.
        self._wire: Wire | None = None
        self._opened: Future[None] = Future()
        thread = threading.Thread(
            target=self._run, args=(dial, seconds), name="redislock-bell", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise Exhausted(f"no thread to listen for rings: {error}") from error

    def expect(self, id: str, seconds: float) -> None:  # noqa: A002
        """Keep the rings for *id* until forget(); wait until the connection is open."""
        self._rings[id] = SimpleQueue()
        self._opened.result(seconds)
        self._check_open()

    def forget(self, id: str) -> None:  # noqa: A002
        """Drop what comes for *id*. Takes no lock: a thread that a fork ended may hold it."""
        self._rings.pop(id, None)

    def bell(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """The next ring for *id*, or None if there is none within *seconds*."""
        self._check_open()
        try:
            ring = self._rings[id].get(timeout=max(seconds, 0))
        except Empty:
            return None
        self._check_open()
        return ring

    def forsake(self) -> None:
        """In a forked child: close its copy of the connection."""
        self.closed = True
        if self._wire is not None:
            self._wire.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionError("the connection was lost")

    def _run(self, dial: Callable[[float], Wire], seconds: float) -> None:
        try:
            self._wire = dial(seconds)
            self._wire.subscribe(self.channel, seconds)
            self._opened.set_result(None)
            self._read(self._wire)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            if not self._opened.done():
                self._opened.set_exception(error)
        finally:
            self.closed = True
            for rings in list(self._rings.values()):
                rings.put(None)
            if self._wire is not None:
                self._wire.close()

    def _read(self, wire: Wire) -> None:
        while True:
            ring = wire.bell(self.CHECK_EVERY)
            if ring is None:
                if not self._rings:
                    return
                # Nobody asks anything on this connection, so that nobody would notice its end.
                wire.ask(packed("PING"), self.CHECK_EVERY)
            elif ring and (rings := self._rings.get(_id_of(ring))) is not None:
                rings.put(ring)


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
        self._buffer = bytearray(_CHUNK)
        # What replies are still to come, and until when; a reply to tell() is for nobody.
        self._awaited: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._subscribing: asyncio.Future[Any] | None = None
        self._bells: dict[str, deque[bytes]] = {}
        self._listeners: dict[str, asyncio.Future[None]] = {}
        self.closed: Exception | None = None
        self.channel = ""
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
        """Be rung from now on, on *channel* or on the one that another task asked for before."""
        if self._subscribing is None:
            self._subscribing = self.send(packed("SUBSCRIBE", channel), seconds)
            # Whoever awaits it may be cancelled; its exception is theirs, not the loop's.
            self._subscribing.add_done_callback(retrieve)
        subscribing = self._subscribing
        await asyncio.wait([subscribing], timeout=seconds)
        if not subscribing.done():
            self.close(TimeoutError("the server did not answer in time"))
        reply = await subscribing
        if isinstance(reply, ReplyError):
            self._subscribing = None
            raise reply
        self.channel = reply

    def expect_bell(self, id: str) -> None:  # noqa: A002
        """Keep the rings for *id* until forget_bell()."""
        self._bells.setdefault(id, deque())

    def forget_bell(self, id: str) -> None:  # noqa: A002
        """Drop what comes for *id*."""
        self._bells.pop(id, None)

    async def bell(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """The next ring for *id*, or None if there is none within *seconds*."""
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

    def forsake(self) -> None:
        """In a forked child: free the copy of the socket without telling the server or the loop."""
        self.closed = ConnectionError("the connection belongs to the parent process")
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, sock.fileno())
            os.close(null)

    # --- asyncio.BufferedProtocol: a plain one is given a new buffer of 256 KB for each reply ---

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type] # any buffer
        while (item := self._reader.gets()) is not _NOTHING:
            if isinstance(item, hiredis.PushNotification):
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
        if item[0] == b"subscribe":
            self._answered(item[1].decode())  # It comes in the order of the commands, like a reply.
        elif item[0] == b"message":
            id = _id_of(item[2])  # noqa: A001
            if id in self._bells:
                self._bells[id].append(item[2])
                if listener := self._listeners.get(id):
                    _wake(listener)

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


def _id_of(ring: bytes) -> str:
    return ring.split(b" ", 2)[1].decode()


def retrieve(future: asyncio.Future[Any]) -> None:
    """Keep the loop from warning of an exception that nobody awaits any more."""
    if not future.cancelled():
        future.exception()


def _wake(listener: asyncio.Future[None]) -> None:
    if not listener.done():
        listener.set_result(None)


def _reader() -> hiredis.Reader:
    return hiredis.Reader(replyError=ReplyError, notEnoughData=_NOTHING)
