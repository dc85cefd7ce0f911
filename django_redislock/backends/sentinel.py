"""Locks on the master that sentinels watch, and on its successor.

redis-py's own Sentinel asks through clients that retry behind the caller's back and have no common
time limit (rule R5). And it trusts the first sentinel that answers. So we use only its connections.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from redis import exceptions as redis_errors
from redis.connection import parse_url

from django_redislock import humanize, logs, process
from django_redislock.backends.redis.checking import checked_dialer
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.dialing import Dialer, check_version
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    AtServers,
    ReplyError,
    all_described,
    at_servers,
    described,
    is_transient,
)
from django_redislock.backends.redis.server import RedisBackend
from django_redislock.findings import Finding, problem
from django_redislock.humanize import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection


# --- asks sentinels for the master that they watch ------------------------------------------------

OPTIONS = "OPTIONS['sentinel_kwargs']"  # For connections to sentinels.
ASKED_LAST_FOR = 10.0  # Seconds since a sentinel did not answer.


class NoMaster(redis_errors.RedisError):
    """A sentinel knows no master of that name."""


class NoSentinel(redis_errors.RedisError):
    """The server that answers is no sentinel."""


class Master(NamedTuple):
    """The master, as a sentinel names it."""

    host: str
    port: int
    epoch: int  # Grows with each failover.

    @property
    def address(self) -> str:
        """As it stands in a URL."""
        return humanize.address(self.host, self.port)


def check_sentinel(hello: Any) -> None:
    """Judge a server by its answer to HELLO.

    Raises:
        NoSentinel: It is a server that keeps data.
    """
    if not isinstance(hello, dict) or hello.get(b"mode") != b"sentinel":
        raise NoSentinel(
            "this is no sentinel; LOCATION names the sentinels, mostly on port 26379, and they name"
            " the servers"
        )


class Sentinels:
    """The sentinels that watch one master, which they call a service."""

    def __init__(self, service: str, dialers: Mapping[str, Dialer]) -> None:
        """Ask nobody yet.

        Args:
            service: Their name for the master.
            dialers: How to reach each of them, by its address.
        """
        self.service = service
        # In random order: else all processes would ask the first in LOCATION.
        self._dialers = dict(random.sample(list(dialers.items()), len(dialers)))
        self._question = (
            packed("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),
            packed("SENTINEL", "MASTER", service),
        )
        self._agreed: Master | None = None  # The master that a majority has named last.
        self._unanswered: dict[str, float] = {}  # When, by address.

    def after_fork(self) -> None:
        """In a forked child: none of the parent's dials is under way."""
        for dialer in self._dialers.values():
            dialer.after_fork()

    def master(self, seconds: float) -> Master:
        """Ask until a majority names the same master, each with its share of the time.

        Raises:
            AtServers: No sentinel has named a master.
            redis.ConnectionError: Those that answer do not agree, or contradict the last majority;
                later they may.
        """
        inquiry, share = _Inquiry(len(self._dialers)), seconds / len(self._dialers)
        for address, dialer in self._in_turn(inquiry):
            try:
                with closing(dialer.dial(share / 2)) as connection:
                    inquiry.answers.append(self.master_named_on(connection, share / 2))
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                self._note(inquiry, address, error)
        return self._result(inquiry)

    async def amaster(self, seconds: float) -> Master:
        """See master(), without blocking the event loop."""
        inquiry, share = _Inquiry(len(self._dialers)), seconds / len(self._dialers)
        for address, dialer in self._in_turn(inquiry):
            try:
                async with asyncio.timeout(share):
                    with closing(await dialer.adial(share)) as connection:
                        sending = [connection.send(command, share) for command in self._question]
                        inquiry.answers.append(self._read(*await asyncio.gather(*sending)))
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                self._note(inquiry, address, error)
        return self._result(inquiry)

    def master_named_on(self, connection: Connection, seconds: float) -> Master:
        """The master, as the sentinel at the other end of *connection* names it.

        Raises:
            NoMaster: The sentinel knows no master of that name.
        """
        return self._read(*connection.execute_all(self._question, seconds))

    def contradicts_majority(self, master: Master) -> bool:
        """Whether a majority has named another server last, or none has named any."""
        return self._agreed is None or master[:2] != self._agreed[:2]

    def _knows(self, master: Master | None) -> bool:
        """Whether a majority has named *master* last: then the silent ones need not be asked."""
        return master is not None and not self.contradicts_majority(master)

    def open_connections(self, seconds: float) -> Iterator[Connection]:
        """A connection to one sentinel after the other. One that cannot be dialed is skipped."""
        for address, dialer in self._in_turn(None):
            try:
                connection = dialer.dial(seconds)
            except CLIENT_ERRORS:
                self._unanswered[address] = time.monotonic()
                continue
            with closing(connection):
                yield connection

    def execute_on_each(
        self, seconds: float, *commands: tuple[str, ...]
    ) -> dict[str, list[Any] | Exception]:
        """The answers of each sentinel, by address; an error is returned, too."""
        said: dict[str, list[Any] | Exception] = {}
        for address, dialer in sorted(self._dialers.items()):
            try:
                with closing(dialer.dial(seconds / 2)) as connection:
                    packed_commands = [packed(*command) for command in commands]
                    said[address] = connection.execute_all(packed_commands, seconds / 2)
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                said[address] = error
        return said

    def _in_turn(self, inquiry: _Inquiry | None) -> Iterator[tuple[str, Dialer]]:
        """Sentinels to ask until the *inquiry* is over; the lately silent ones come last."""
        late = time.monotonic() - ASKED_LAST_FOR
        silent = {address for address, when in list(self._unanswered.items()) if when > late}
        for address, dialer in sorted(self._dialers.items(), key=lambda one: one[0] in silent):
            if inquiry and (inquiry.agreed or (address in silent and self._knows(inquiry.newest))):
                return
            yield address, dialer

    def _read(self, address: Any, state: Any) -> Master:
        if address is None:
            raise NoMaster(f"knows no {self.service!r}; check OPTIONS['service_name']")
        for reply in (address, state):
            if isinstance(reply, ReplyError):
                raise copy(reply)
        # Take the address from its own reply: during a failover only that reply has the new one.
        return Master(address[0].decode(), int(address[1]), int(state[b"config-epoch"]))

    def _note(self, inquiry: _Inquiry, address: str, error: Exception) -> None:
        inquiry.errors[address] = error
        if is_transient(error):
            self._unanswered[address] = time.monotonic()

    def _result(self, inquiry: _Inquiry) -> Master:
        if not inquiry.answers:
            raise at_servers("no sentinel names a master: ", inquiry.errors, OPTIONS)
        if inquiry.agreed is not None:
            self._agreed = inquiry.agreed
            return inquiry.agreed
        newest, agreed = inquiry.newest, self._agreed
        if newest is None:
            named = ", ".join(sorted({master.address for master in inquiry.answers}))
            raise redis_errors.ConnectionError(f"the sentinels name different masters: {named}")
        if agreed and newest.epoch <= agreed.epoch and self.contradicts_majority(newest):
            raise redis_errors.ConnectionError(
                f"the sentinels that answer name {newest.address}, but most of them have named"
                f" {agreed.address} last"
            )
        return newest


class _Inquiry:
    """The answers to one question."""

    def __init__(self, sentinels: int) -> None:
        self._majority = sentinels // 2 + 1
        self.answers: list[Master] = []
        self.errors: dict[str, Exception] = {}

    @property
    def agreed(self) -> Master | None:
        """The master that a majority of all sentinels names; two callers never get unlike ones."""
        for place, votes in Counter(master[:2] for master in self.answers).items():
            if votes >= self._majority:
                return Master(*place, max(one.epoch for one in self.answers if one[:2] == place))
        return None

    @property
    def newest(self) -> Master | None:
        """The master after the last failover; None if it is unknown, or the answers do not agree.

        A sentinel that was away may still name the former one.
        """
        last = max((master.epoch for master in self.answers), default=None)
        newest = {master for master in self.answers if master.epoch == last}
        return newest.pop() if len(newest) == 1 else None


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
            process.start(thread)
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
