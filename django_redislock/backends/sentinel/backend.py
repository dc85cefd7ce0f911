"""Locks on the master that sentinels watch, and on its successor."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from redis import exceptions as redis_errors
from redis.connection import parse_url

from django_redislock import logs
from django_redislock.backends.redis.checking import checked_dialer
from django_redislock.backends.redis.dialing import Dialer, check_version
from django_redislock.backends.redis.errors import (
    AtServers,
    ReplyError,
    all_described,
    at_servers,
    described,
)
from django_redislock.backends.redis.server import RedisBackend
from django_redislock.backends.sentinel.sentinels import OPTIONS, Sentinels, check_sentinel
from django_redislock.findings import Finding, problem
from django_redislock.humanize import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.sentinel.sentinels import Master


# --- whether sentinels can have a replica take over, and a master that is cut off stops granting
#

FEWEST_SENTINELS = 3


def isolation(replication: Any) -> Finding:
    """Whether a master that is cut off stops, by its answer to INFO replication."""
    # The server tells this number only if min-replicas-to-write is set.
    if not isinstance(replication, ReplyError) and b"min_slaves_good_slaves" in replication:
        return Finding("isolation", "ok", "a master without its replicas grants nothing")
    return problem(
        "W033",
        "a master that is cut off goes on granting to clients that reach it, beside its successor",
        "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers; or REPLICAS_ACK.",
    )


def agreement(sentinels: Sentinels, number: int, within: float) -> Finding:
    """Whether the sentinels, so many in LOCATION, are enough, and agree."""
    service = sentinels.service
    said = sentinels.execute_on_each(
        within, ("SENTINEL", "MASTER", service), ("SENTINEL", "CKQUORUM", service)
    )
    silent = {place: one for place, one in said.items() if isinstance(one, Exception)}
    answers = [replies for replies in said.values() if not isinstance(replies, Exception)]
    states = [state for state, _ in answers if isinstance(state, dict)]
    masters = {b"%s:%s" % (state[b"ip"], state[b"port"]) for state in states}
    refusals = [quorum for _, quorum in answers if isinstance(quorum, ReplyError)]
    named = ", ".join(sorted(master.decode() for master in masters))
    if refusals or len(masters) > 1:
        return problem(
            "E032",
            f"they could not agree on a failover: {refusals[0]}"
            if refusals
            else f"they name different masters: {named}",
            "Let all of them run, and see what SENTINEL CKQUORUM and their logs say.",
        )
    if silent:
        return problem(
            "W032",
            f"{len(silent)} of {number} cannot be asked: {all_described(silent, OPTIONS)}",
            f"Start them, or put LOCATION and {OPTIONS} right.",
        )
    if number < FEWEST_SENTINELS or number % 2 == 0:
        return problem(
            "W032",
            f"LOCATION names {number}; a majority must be alive for a failover",
            "Run three or five, on machines that do not fail together, and name all of them.",
        )
    return Finding("sentinels", "ok", f"all {number} answer, and call {named} the master")


# --- listens for the news that another server has become the master -------------------------------

logger = logs.logger("django_redislock")


class Listener:
    """A thread that listens to one of the sentinels, and to the next if that one falls silent.

    A connection may be unused for a long time, or its user may wait for an answer that never comes.
    Such a user asks no sentinel. When the old master is back, the user would meet it again.
    """

    CHANNEL = "+switch-master"
    ASK_EVERY = 2.0  # Seconds without news after which it asks.
    PATIENCE = 1.0  # Seconds that a sentinel has for an answer.

    def __init__(
        self,
        sentinels: Sentinels,
        learn: Callable[[Master, float], object],
        is_needed: Callable[[Listener], bool],
    ) -> None:
        """Begin with start().

        Args:
            sentinels: They tell of a new master.
            learn: Called with the master, and the time of the question.
            is_needed: Whether to go on; called now and then.
        """
        self._sentinels = sentinels
        self._learn = learn
        self._is_needed = is_needed
        self._connection: Connection | None = None

    def start(self) -> bool:
        """Listen in a thread of its own, as long as it is needed.

        Returns:
            Whether the thread runs. There may be no more threads, or the interpreter shuts down.
        """
        thread = threading.Thread(target=self._run, name="redislock-sentinel", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def abandon(self) -> None:
        """In a forked child: close its copy of the connection."""
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        while self._is_needed(self):
            for connection in self._sentinels.open_connections(self.PATIENCE):
                self._connection = connection
                try:
                    self._listen(connection)
                except Exception as error:  # noqa: BLE001 - nothing may end it but its own end
                    logger.debug("A sentinel was no longer listened to: %s", described(error))
                if not self._is_needed(self):
                    return
            time.sleep(self.PATIENCE)  # None of them answers.

    def _listen(self, connection: Connection) -> None:
        connection.subscribe(self.CHANNEL, self.PATIENCE)
        while self._is_needed(self):
            # After subscribing, and again: a message may be lost, and a connection half open.
            asked = time.monotonic()
            master = self._sentinels.master_named_on(connection, self.PATIENCE)
            with suppress(redis_errors.ConnectionError):  # The process has later news.
                # A failover; or this one was away, or told anew: REMOVE, MONITOR.
                if self._sentinels.contradicts_majority(master):
                    master = self._sentinels.master(self.PATIENCE)
                self._learn(master, asked)
            connection.next_ring(self.ASK_EVERY)


# --- makes connections to the master, and ends them when it is no longer the master ---------------

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


# Client options that say where a server is, each with advice.
_NOT_FOR_SERVERS = dict.fromkeys(
    ("host", "port", "path"), "the sentinels say where the servers are; leave it out"
)
_NOT_FOR_SENTINELS = {
    **dict.fromkeys(
        ("host", "port", "path"), "LOCATION says where the sentinels are; leave it out"
    ),
    "db": "a sentinel has no databases; that of the locks is OPTIONS['db']",
    "ssl": "write rediss:// in LOCATION",
}


class SentinelBackend(RedisBackend):
    """Locks on the master that Redis or Valkey sentinels watch; when it fails, on its successor.

    LOCATION is a list of the addresses of the sentinels. OPTIONS are those of RedisBackend, for the
    servers, and ``service_name`` (the name that sentinels have for the master), ``sentinel_kwargs``
    (redis-py's connection options for the sentinels) and ``ssl`` (whether servers are reached by
    TLS; for sentinels write ``rediss://``).
    """

    location_is = "['redis://host-1:26379', 'redis://host-2:26379', 'redis://host-3:26379']"
    supports_failover = True
    _dialer: MasterDialer

    @property
    def sentinels(self) -> Sentinels:
        """The sentinels, which name the master."""
        return self._dialer.sentinels

    def examine(self) -> Iterator[Finding]:
        (replication,) = self.commands(("INFO", "replication"))
        yield agreement(self.sentinels, len(self.conf.location), self.within)
        yield isolation(replication)

    def _make_dialer(
        self, location: str | tuple[str, ...], options: dict[str, Any], where: str
    ) -> MasterDialer:
        of_options = f"{where}['OPTIONS']"
        service = options.pop("service_name", None)
        if not isinstance(service, str) or not service:
            raise ImproperlyConfigured(
                f"{of_options}['service_name'] must be what the sentinels call the master, as in"
                f" 'sentinel monitor mymaster ...', not {service!r}."
            )
        sentinels = self._sentinels(service, location, options.pop("sentinel_kwargs", {}), where)
        tls = options.pop("ssl", False)
        if not isinstance(tls, bool):
            raise ImproperlyConfigured(f"{of_options}['ssl'] must be True or False, not {tls!r}.")
        _check_options(options, _NOT_FOR_SERVERS, of_options)
        scheme = "rediss" if tls else "redis"

        def dialer_to(address: str) -> Dialer:
            of_url = "The address of the master that the sentinels name"
            return checked_dialer(
                f"{scheme}://{address}", options, of_url, of_options, check_master
            )

        return MasterDialer(sentinels, dialer_to)

    def _sentinels(
        self, service: str, location: str | tuple[str, ...], options: Any, where: str
    ) -> Sentinels:
        of_options = f"{where}['OPTIONS']['sentinel_kwargs']"
        if isinstance(location, str):
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] must be a list of the addresses of the sentinels, such as"
                f" {self.location_is}."
            )
        if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
            raise ImproperlyConfigured(
                f"{of_options} must be a dictionary of client options for the sentinels, such as"
                " {'password': ...}."
            )
        _check_options(options, _NOT_FOR_SENTINELS, of_options)
        dialers: dict[str, Dialer] = {}
        for number, url in enumerate(location):
            of_url = f"{where}['LOCATION'][{number}]"
            dialer = checked_dialer(url, options, of_url, of_options, check_sentinel)
            place = _address(url, of_url)
            if place in dialers:
                raise ImproperlyConfigured(f"{of_url} names {place} twice; name each once.")
            dialers[place] = dialer
        return Sentinels(service, dialers)


def _check_options(options: dict[str, Any], refused: dict[str, str], of_options: str) -> None:
    for name, cure in refused.items():
        if name in options:
            raise ImproperlyConfigured(f"{of_options}[{name!r}]: {cure}.")


def _address(url: str, of_url: str) -> str:
    """The host and port in the URL of a sentinel."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.port is None:
        raise ImproperlyConfigured(
            f"{of_url} names no port. That of a sentinel is mostly 26379, as in redis://host:26379."
        )
    if "db" in parse_url(url):  # type: ignore[no-untyped-call]
        raise ImproperlyConfigured(
            f"{of_url} names a database, which a sentinel does not have; that of the locks is"
            " OPTIONS['db']."
        )
    return address_of(url)
