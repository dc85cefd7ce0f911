"""How connections to a server come to be: redis-py makes them, within a time that we set."""

from __future__ import annotations

import asyncio

# Else socket.getaddrinfo() imports it at the first connection. If another thread forked meanwhile,
# the child would wait for the end of that import for ever.
import encodings.idna  # noqa: F401
import math
import os
import ssl
import sys
import time
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache, partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import redis.asyncio
from redis import exceptions as redis_errors
from redis.asyncio.connection import parse_url as async_parse_url
from redis.connection import parse_url
from redis.credentials import CredentialProvider

from django_redislock import process
from django_redislock.backends.drivers import Inbox, start_in_thread
from django_redislock.backends.redis.async_connection import AsyncConnection
from django_redislock.backends.redis.connection import Connection, packed
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    LoginError,
    NoResp3,
    Refusal,
    TlsRefusal,
    TooOld,
    check_tls,
    described,
    is_transient,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

DIALS_APART = 16  # At most under way at once, each in a thread of its own.

# Seconds for which new connections of event loops share certificates: to read those of the system
# takes 40 ms. Not for good, since the certificate of a client may be replaced any day.
TLS_SHARED_FOR = 60.0
# Seconds after which they are read again if a dial is refused: they may have been replaced.
TLS_READ_AFTER = 1.0

OLDEST_VERSION = (7, 0)  # Of Redis; every Valkey is newer.

PROTOCOLS = (2, 3)  # Versions of RESP.

DIALING = "redislock-dial"  # The name of a thread.

# Options of redis-py that are not the user's to choose.
_OURS: dict[str, Any] = {
    "decode_responses": False,
    "health_check_interval": 0,
    "retry": None,
    "retry_on_timeout": False,
    "retry_on_error": [],
}


class Dialing(Protocol):
    """Makes the connections of a backend, which itself does not know where its server is."""

    timeout: float | None  # Seconds that a server may take for one operation, if that is set.
    protocol: int  # Of its connections, 2 or 3; see protocol.py.

    def dial(self, seconds: float) -> Connection:
        """A new blocking connection, or redis-py's exception."""

    async def adial(self, seconds: float) -> AsyncConnection:
        """A new connection of the running loop, or redis-py's exception; cancel it when late."""

    def after_fork(self) -> None:
        """In a forked child: the dials of the parent are not ours."""


def begin_to_dial(dialer: Dialing, seconds: float) -> Future[Connection]:
    """A new blocking connection, made by a thread of its own within so many seconds.

    So no caller has to wait for so long, and a late connection is there for the next try.
    """
    return start_in_thread(partial(dialer.dial, seconds), DIALING)


def numbers_in(version: str) -> tuple[int, ...]:
    """The first two numbers of a server's version, for comparisons; empty if it is unknown."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def check_version(hello: Any) -> None:
    """Judge a server by its answer to HELLO, with which RESP3 connections begin anyway.

    Raises:
        TooOld: It lacks what the scripts need.
    """
    if not isinstance(hello, dict) or hello.get(b"server") != b"redis":
        return
    version = hello.get(b"version", b"").decode(errors="replace")
    numbers = numbers_in(version)
    if numbers and numbers < OLDEST_VERSION:
        raise TooOld(f"the server is Redis {version}; locks need Redis 7.0 or newer, or Valkey")


class Dialer:
    """Makes connections to one server, sync and async, from a URL and client options."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        check: Callable[[Any], None] = check_version,
        types: tuple[type[Connection], type[AsyncConnection]] = (Connection, AsyncConnection),
    ) -> None:
        """Check them, without dialing.

        Args:
            url: Where the server is.
            options: Those of redis-py. With "protocol" 2, RESP2 is spoken instead of RESP3.
            check: Refuses a server that is the wrong one, by its answer to HELLO.
            types: Of its connections, the blocking and the asynchronous ones.

        Raises:
            ValueError, TypeError: redis-py does not understand the URL or an option.
        """
        self._check = check
        self._type, self._async_type = types
        common = {**_quiet(), "protocol": 3, **options}
        self._sync = {**common, **parse_url(url), **_OURS, "command_packer": _Packer()}  # type: ignore[no-untyped-call]
        self._async = {**common, **async_parse_url(url), **_OURS}
        for kwargs in (self._sync, self._async):
            if kwargs.get("ssl_certfile") and kwargs.get("ssl_password") is None:
                kwargs["ssl_password"] = ""  # Else OpenSSL may ask on the terminal, and wait.
        self._sync_class = self._sync.pop("connection_class", redis.Connection)
        self._async_class = self._async.pop("connection_class", redis.asyncio.Connection)
        if options.get("credential_provider") is not None:
            credentials = _Credentials(options["credential_provider"])
            self._sync["credential_provider"] = self._async["credential_provider"] = credentials
        database = int(self._sync.get("db") or 0)
        self._sync["parser_class"] = _parser(redis.connection.DefaultParser, database)
        self._async["parser_class"] = _parser(redis.asyncio.connection.DefaultParser, database)
        self._sync_class(**self._sync)
        self.timeout: float | None = self._sync.get("socket_timeout")
        self.protocol: int = self._sync["protocol"]
        self._tls: Any = None  # Of asynchronous connections; nothing without TLS.
        self._tls_until = -math.inf
        by_name = "path" not in self._sync and not _is_address(self._sync.get("host"))
        # Whether a thread of its own has to dial, since that may take any time: to look up a name,
        # which then tries each of its addresses for the full time; and in a forked child to begin
        # TLS, if another thread was inside OpenSSL at the fork, whose locks then stay taken.
        self._apart = by_name or issubclass(self._sync_class, redis.SSLConnection)
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: none of the parent's dials is under way."""
        self._loading: tuple[Any, Future[None]] | None = None
        # No semaphore: if a signal handler dials while its thread does, it would wait for ever.
        self._places: Inbox[_Place] = Inbox()
        for _ in range(DIALS_APART):
            self._places.put(_Place(self._places))

    def dial(self, seconds: float) -> Connection:
        """A new blocking connection, or redis-py's exception."""
        if not self._apart:
            return self._dial(seconds)
        # Once the time is over, the thread is left alone: nothing refers to its connection then, so
        # that is closed.
        until = time.monotonic() + seconds
        try:
            place = [self._places.get(timeout=seconds)]
        except Empty as error:
            raise _dial_timeout() from error

        def dial() -> Connection:
            try:
                return self._dial(seconds)
            finally:
                place.clear()

        outcome = start_in_thread(dial, DIALING)
        try:
            return outcome.result(max(until - time.monotonic(), 0))
        except TimeoutError as error:
            raise _dial_timeout() from error
        finally:
            del outcome  # See process.forget_frames().

    def _dial(self, seconds: float) -> Connection:
        handled = sys.exception()
        redis_connection = self._sync_class(**{**self._sync, **_limits(seconds, self._sync)})
        try:
            redis_connection.connect()
            hello = redis_connection.handshake_metadata
            if self.protocol == 2:
                with _perhaps_unknown():
                    redis_connection.send_command(*_HELLO)
                    hello = _named(redis_connection.read_response())
            self._judge(hello)
            return self._type(redis_connection)
        except BaseException as error:
            redis_connection.disconnect()
            process.forget_frames(error)
            _check_tls(error, handled, self._sync)
            _check_hello(error)
            _check_option(error)
            # redis-py assumes that the answer to HELLO is a map.
            if (
                isinstance(error, AttributeError)
                and error.name == "get"
                and error.obj is redis_connection.handshake_metadata
            ):
                raise NoResp3(_NO_RESP3) from error
            raise
        finally:
            _retire_parser(redis_connection)

    async def adial(self, seconds: float) -> AsyncConnection:
        """A new connection of the running loop, or redis-py's exception; cancel it when late."""
        now = time.monotonic()
        may_be_old = self._tls_until - TLS_SHARED_FOR + TLS_READ_AFTER < now < self._tls_until
        try:
            return await self._adial()
        except TlsRefusal:
            if not may_be_old:
                raise
        self._tls_until = -math.inf
        return await self._adial()

    async def _adial(self) -> AsyncConnection:
        handled = sys.exception()
        try:
            redis_connection = self._async_class(**{**self._async, **_NO_LIMITS})
        except TypeError as error:  # Blocking connections take more options.
            raise redis_errors.RedisError(f"for asynchronous connections: {error}") from error
        if hasattr(redis_connection, "ssl_context"):
            redis_connection.ssl_context = self._shared_tls(redis_connection.ssl_context)
            await self._load(redis_connection.ssl_context)
        # The first reply of the handshake is the server's HELLO, which this client does not keep.
        replies: list[Any] = []
        read = redis_connection.read_response

        async def noting(*args: Any, **kwargs: Any) -> Any:
            replies.append(await read(*args, **kwargs))
            return replies[-1]

        redis_connection.read_response = noting
        try:
            await redis_connection.connect()
            hello = replies[0] if self.protocol == 3 else None
            if self.protocol == 2:
                with _perhaps_unknown():
                    await redis_connection.send_command(*_HELLO)
                    hello = _named(await read())
            self._judge(hello)
            return self._async_type(redis_connection)
        except BaseException as error:
            await redis_connection.disconnect(nowait=True)
            process.forget_frames(error)
            _check_tls(error, handled, self._async)
            said = _said(error)
            _check_hello(said or error)
            _check_option(error)
            if said is None:
                raise
        finally:
            del redis_connection.read_response
            _retire_parser(redis_connection)
        # Not above: the other error would be its context, and it is that one's cause.
        raise copy(said)

    async def _load(self, certificates: Any) -> None:
        """Load them in a thread, since that may take any time. All who ask wait for the same one.

        If it fails, it fails again when a connection uses them, which then raises the error.
        """
        loading = self._loading
        if loading is None or loading[0] is not certificates:
            loading = certificates, start_in_thread(partial(_get, certificates), DIALING)
            self._loading = loading
        await asyncio.shield(asyncio.wrap_future(loading[1]))

    def _shared_tls(self, new: Any) -> Any:
        """The certificates for a connection: those of earlier connections, or the *new* ones."""
        now = time.monotonic()
        if now >= self._tls_until:
            self._tls, self._tls_until = new, now + TLS_SHARED_FOR
        return self._tls

    def _judge(self, hello: Any) -> None:
        if self.protocol == 3 and not isinstance(hello, dict):
            raise NoResp3(_NO_RESP3)
        self._check(hello)


def _retire_parser(redis_connection: Any) -> None:
    """Free what redis-py reads replies by, which we do ourselves from here on.

    It refers to itself. So its 64 KB, and the event loop, would stay until a garbage collection.
    """
    vars(redis_connection._parser).clear()


class _Place(ref["Inbox[_Place]"]):
    """A place for one dial in a thread. When it is dropped, it is free for the next dial.

    So no place is lost if an exception of a signal handler comes before the dial.
    """

    __slots__ = ()

    def __del__(self) -> None:
        places = self()
        if places is not None:
            places.put(_Place(places))


_NO_RESP3 = (
    "the server does not speak RESP3, so it is older than Redis 6, or there is a proxy before it."
    " Locks need Redis 7.0 or newer, or Valkey; for such a proxy set OPTIONS['protocol'] to 2"
)

# The handshake of RESP2 has no HELLO, so it does not tell the server's version.
_HELLO = ("HELLO", 2)


def _get(certificates: Any) -> None:
    with suppress(Exception):  # It fails again when a connection uses them.
        certificates.get()


def _named(reply: Any) -> dict[Any, Any]:
    """The map that RESP2 spells as a list; empty if a proxy says anything else."""
    return dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}


def _said(error: BaseException) -> redis_errors.RedisError | None:
    """The refusal of a server of which redis-py has made a ConnectionError.

    Its asynchronous connection to a unix socket does so with each error of the handshake.
    """
    cause = isinstance(error, redis_errors.ConnectionError) and error.__cause__
    return cause if isinstance(cause, redis_errors.RedisError) else None


@contextmanager
def _perhaps_unknown() -> Iterator[None]:
    """Where HELLO is sent to what may be a proxy that does not know it."""
    try:
        yield
    except Refusal as error:
        if error.code == "NOAUTH" or is_transient(error):
            raise
        process.forget_frames(error)


def _check_hello(error: BaseException) -> None:
    """Raise NoResp3 if *error* is the refusal of a server or proxy without RESP3."""
    text = str(error).casefold()
    if isinstance(error, Refusal) and (
        "noproto" in text
        or "unsupported protocol" in text
        or ("hello" in text and ("unknown" in text or "unsupported" in text))
    ):
        raise NoResp3(_NO_RESP3) from error


def _check_option(error: BaseException) -> None:
    """Raise a RedisError if an option of redis-py has a value that it cannot use."""
    if isinstance(error, TypeError | ValueError | ImportError) and not isinstance(error, OSError):
        raise redis_errors.RedisError(f"OPTIONS cannot be used: {error}") from error


def _check_tls(
    error: BaseException, handled: BaseException | None, kwargs: Mapping[str, Any]
) -> None:
    """As check_tls(). If files are to blame, name their options: nobody else does."""
    try:
        check_tls(error, handled)
    except TlsRefusal:
        if unusable := _unusable_files(kwargs):
            raise TlsRefusal(f"{described(error)}: {unusable}") from error
        raise
    if is_transient(error) and (unreadable := _unreadable_file(kwargs)):
        raise redis_errors.ConnectionError(f"{described(error)}: {unreadable}") from error


def _unreadable_file(kwargs: Mapping[str, Any]) -> str:
    """Which option names a file that cannot be read; "" if none does."""
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        file = kwargs.get(option)
        if file and (Path(os.fsdecode(file)).is_dir() or not os.access(file, os.R_OK)):
            return f"{option} is {file!r}, which cannot be read"
    return ""


def _unusable_files(kwargs: Mapping[str, Any]) -> str:
    """Which options name files that can be read, but not used; "" if none does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificate, key, trusted = map(kwargs.get, ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"))
    try:
        if certificate:
            context.load_cert_chain(certificate, key, kwargs["ssl_password"])
    except OSError:
        names = "ssl_certfile and ssl_keyfile are" if key else "ssl_certfile is"
        return f"{names} no certificate with its key, in PEM format, that ssl_password opens"
    try:
        if trusted:
            context.load_verify_locations(trusted)
    except OSError:
        return f"ssl_ca_certs is {trusted!r}, which has no certificate in PEM format"
    return ""


class _Credentials(CredentialProvider):
    """A provider of the user's. Whatever it raises is an error of the connection."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except CLIENT_ERRORS:
            raise
        except Exception as error:
            raise _failed(error) from error

    async def get_credentials_async(self) -> Any:
        try:
            return await self._provider.get_credentials_async()
        except CLIENT_ERRORS:
            raise
        except Exception as error:
            raise _failed(error) from error


def _failed(error: Exception) -> redis_errors.ConnectionError:
    return redis_errors.ConnectionError(str(error) or type(error).__name__)


@cache
def _parser(theirs: type, database: int) -> type:
    """A parser of redis-py. Its own errors would lack the code, which tells what they mean."""
    error = staticmethod(partial(LoginError, database=database))
    return type(theirs.__name__, (theirs,), {"parse_error": error})


class _Packer:
    """Packs redis-py's own commands, those of the handshake; see packed()."""

    def pack(self, command: str, *args: str | bytes | int) -> list[bytes]:
        return [packed(*command.split(), *args)]


def _limits(seconds: float, kwargs: Mapping[str, Any]) -> dict[str, float]:
    # Half for the connection, half for the few round trips of the handshake, each of
    # which redis-py times by itself.
    round_trips = 1 + bool(kwargs.get("db")) + (kwargs["protocol"] == 2)
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
    """Options that keep clients from sending more at a handshake than they have to.

    They differ by version: to tell the server one's name takes two round trips, and newer clients
    ask it to announce maintenance on RESP3 connections.
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
