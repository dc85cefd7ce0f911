"""Makes connections to the master, and ends them when it is no longer the master."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from redis import exceptions as redis_errors

from django_redislock.backends.redis.dialing import Dialer, check_version
from django_redislock.backends.redis.errors import AtServers, at_servers
from django_redislock.backends.sentinel.listening import Listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.sentinel.sentinels import Master, Sentinels

AnyConnection = TypeVar("AnyConnection", "Connection", "AsyncConnection")


def check_master(hello: Any) -> None:
    """Judge a server by its answer to HELLO.

    Raises:
        redis.ConnectionError: It is no master, or not yet.
        TooOld: It lacks what the scripts need.
    """
    check_version(hello)
    if not isinstance(hello, dict) or hello.get(b"role") != b"master":
        raise redis_errors.ConnectionError("it says that it is no master")


class MasterDialer:
    """Makes connections to the master; each time it asks the sentinels which server that is.

    After a failover, even a planned one, a former master may not know for seconds that it is no
    longer the master. So once this process knows, it breaks off all connections to it.
    """

    def __init__(self, sentinels: Sentinels, dialer_to: Callable[[str], Dialer]) -> None:
        """Dial nobody yet.

        Args:
            sentinels: They name the master.
            dialer_to: Makes the dialer of a server, whose address is given as in a URL.
        """
        self.sentinels = sentinels
        self._dialer_to = dialer_to
        any_server = dialer_to("127.0.0.1")
        self.timeout, self.protocol = any_server.timeout, any_server.protocol
        self._start()

    def _start(self) -> None:
        # Reentrant: a signal handler may take it while its thread has it, and do the same again.
        self._lock = threading.RLock()
        self._listener: Listener | None = None
        self._master: Master | None = None
        self._dialer: Dialer | None = None  # To that master.
        self._learned_at = time.monotonic()
        self._connections: WeakSet[Connection | AsyncConnection] = WeakSet()  # To that master.

    def after_fork(self) -> None:
        """In a forked child: begin anew, without the parent's connections and its listener."""
        self.sentinels.after_fork()
        if self._listener is not None:
            self._listener.abandon()
        self._start()

    def dial(self, seconds: float) -> Connection:
        """A new blocking connection to the master, or redis-py's exception."""
        asked = time.monotonic()
        master = self.sentinels.master(seconds / 2)
        dialer = self.learn(master, asked)
        try:
            connection = dialer.dial(max(seconds - (time.monotonic() - asked), seconds / 2))
        except redis_errors.RedisError as error:
            raise _at(master, error) from error
        return self._admitted(connection, dialer)

    async def adial(self, seconds: float) -> AsyncConnection:
        """See dial(); cancel it when late."""
        asked = time.monotonic()
        master = await self.sentinels.amaster(seconds / 2)
        dialer = self.learn(master, asked)
        try:
            connection = await dialer.adial(seconds / 2)
        except redis_errors.RedisError as error:
            raise _at(master, error) from error
        return self._admitted(connection, dialer)

    def learn(self, master: Master, asked: float) -> Dialer:
        """Take *master* for the master: a sentinel said so to a question *asked* at that time.

        Raises:
            redis.ConnectionError: Another master has become known since that question was asked.
        """
        former: list[Connection | AsyncConnection] = []
        with self._lock:
            if self._master is None or self._dialer is None or self._master[:2] != master[:2]:
                if asked < self._learned_at:
                    raise redis_errors.ConnectionError("the master has changed meanwhile")
                self._dialer = self._dialer_to(master.address)
                self._learned_at = time.monotonic()
                former = list(self._connections)
                self._connections.clear()
            self._master = master
            dialer = self._dialer
        for connection in former:
            connection.cut()
        return dialer

    def _admitted(self, connection: AnyConnection, dialer: Dialer) -> AnyConnection:
        """Note a new connection, or close it if its server is no longer the master."""
        with self._lock:
            is_master = dialer is self._dialer
            if is_master:
                self._connections.add(connection)
                if self._listener is None:
                    listener = Listener(self.sentinels, self.learn, self._is_needed)
                    if listener.start():  # It first calls _is_needed(), so it waits for our lock.
                        self._listener = listener
        if not is_master:
            connection.close()
            raise redis_errors.ConnectionError("the master has changed meanwhile")
        return connection

    def _is_needed(self, listener: Listener) -> bool:
        """Whether the listener has to go on: there is a connection that it may have to end."""
        with self._lock:
            if listener is self._listener and not any(
                connection.is_open for connection in self._connections
            ):
                self._listener = None
            return listener is self._listener


def _at(master: Master, error: redis_errors.RedisError) -> AtServers:
    """The *error* of a dial with the address, which a timeout, say, does not name."""
    return at_servers("", {f"{master.address}, which the sentinels call the master": error})
