"""One connection to each server of a quorum, all of them asked at the same time.

A thread has an ensemble of its own for a flow. An asyncio task's ensemble has the connections of
its event loop. Both share their code, see sync_and_async.py.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from abc import ABC, abstractmethod
from collections import deque
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django_redislock import clock
from django_redislock.backends.drivers import Waits, aperform, perform
from django_redislock.backends.quorum.servers import (
    AsyncQuorumConnection,
    QuorumConnection,
    QuorumServer,
    dialing_time,
    is_worth_more_time,
    is_worth_waiting,
    majority_of,
    to_dial,
)
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.errors import CLIENT_ERRORS, is_wrong_server
from django_redislock.deferred_work import catch_up

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from django_redislock.backends.quorum.voting import Question, Replies
    from django_redislock.rules.steps import Trouble


# --- how long to wait for the servers of a quorum -------------------------------------------------

PARTS = 4


class Patience:
    """Seconds to wait for servers. They do not pass while this thread or event loop stands still.

    A thread that stands still hears no answer, not even a fast one, and cannot complete a
    connection. So the time is spent in parts. A part that takes longer than it was meant to does
    not count as longer.
    """

    __slots__ = ("_left", "_longest", "_part", "_started")

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._longest = seconds / PARTS
        self._started = clock.now()
        self._part = 0.0

    def part(self) -> float:
        """Seconds to wait now that the last part is over; 0 to look once more without waiting."""
        now = clock.now()
        self._left -= min(now - self._started, self._part)
        self._started = now
        self._part = max(0.0, min(self._left, self._longest))
        return self._part


Result = TypeVar("Result")
OneConnection = TypeVar("OneConnection", QuorumConnection, AsyncQuorumConnection)


class _Ensemble(ABC, Generic[OneConnection]):
    """The text that blocking and awaiting ensembles share.

    Each question is sent to all servers before any reply is read. The reply that comes first is
    read first. A reply that is no longer needed is dropped later, so the slowest server delays no
    flow.
    """

    def __init__(self, servers: Sequence[QuorumServer]) -> None:
        self._servers = servers
        self._connections: dict[QuorumServer, OneConnection] = {}

    def _connecting(self, fit: set[QuorumServer], within: float) -> Waits[None]:
        """Dial the servers without a fit connection.

        Waits for the servers that may answer, or for a majority; see dialing_time(). A connection
        that comes later is for the next flow.

        Args:
            fit: The servers with a fit connection; see _fit().
            within: Seconds that an answer may take.
        """
        of = len(self._servers)
        lacking = [server for server in self._servers if server not in fit]
        dials = self._dial(to_dial(lacking, of), within)
        patience = Patience(dialing_time(within))
        while dials:
            awaited = list(dials.values())
            waits = is_worth_waiting(awaited, len(self._fit(within)), of)
            seconds = patience.part() if waits else 0.0
            done = yield partial(self._some_of, dials, seconds)
            for dial in done:
                self._adopt(dials.pop(dial), dial, within)
            if not done and not seconds:
                if waits:
                    for server in awaited:
                        server.failed(TimeoutError("Timeout connecting to server"))
                return

    def _voting(self, votes: Generator[Question, Replies, Result]) -> Waits[Result]:
        """Ask the questions of a vote, and return its result."""
        try:
            question = next(votes)
            while True:
                replies = yield from self._replies_to(question)
                question = votes.send(replies)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _replies_to(self, question: Question) -> Waits[Replies]:
        """The replies of the servers, as far as they are needed and come in time."""
        of, started, patience = len(self._servers), clock.now(), Patience(question.within)
        is_enough, is_patient = question.is_enough, False
        said: Replies = {}
        awaited: set[QuorumServer] = set()
        fit = self._fit(question.within)
        # If a server owes an answer to an earlier question, it is asked only if it is needed.
        asked = fit if len(fit) >= majority_of(of) else set(self._connections)
        for server in question.among:
            if server not in asked:
                said[server] = server.as_trouble(started)
                continue
            connection, commands = self._connections[server], question.commands
            if not question.scripts <= connection.known:
                commands = question.in_full()
                connection.known |= question.scripts
            try:
                self._post(server, connection, commands)
            except CLIENT_ERRORS as error:
                said[server] = self._fail(server, error, started)
            else:
                awaited.add(server)
        catch_up()
        while awaited and not (is_enough and is_enough(said)):
            seconds = patience.part()
            heard: Replies = yield partial(self._hear, awaited, started, seconds)
            for server, found in heard.items():
                awaited.remove(server)
                said[server] = found
                if found.__class__ is list:
                    server.is_trusted = True
                    if any(map(is_wrong_server, found)):
                        self._close(server)  # Only a new connection may lead to the right one.
            if heard or seconds:
                continue
            answers = sum(found.__class__ is list for found in said.values())
            if is_patient or not is_worth_more_time(answers, len(awaited), of):
                late = TimeoutError("the server did not answer in time")
                for server in awaited:
                    server.failed(late)
                    said[server] = trouble_of(late, started)
                break
            is_patient, patience = True, Patience(question.within)
        self._leave(awaited, started)
        return said

    def _fit(self, within: float) -> set[QuorumServer]:
        """The servers with a fit connection: no answer on it is late."""
        fit = set()
        for server, connection in [*self._connections.items()]:
            try:
                if not connection.is_late(within):
                    fit.add(server)
            except CLIENT_ERRORS:
                self._close(server)
        return fit

    def _fail(self, server: QuorumServer, error: BaseException, sent: float) -> Trouble:
        """Give a connection up."""
        self._close(server)
        trouble = trouble_of(error, sent)
        if isinstance(error, TimeoutError):
            server.failed(error)
        return trouble

    def _close(self, server: QuorumServer) -> None:
        connection = self._connections.pop(server, None)
        if connection is not None:
            connection.close()

    @abstractmethod
    def _dial(self, servers: Sequence[QuorumServer], within: float) -> dict[Any, QuorumServer]:
        """Dial these. Returns the servers by their dials, earlier dials under way included."""

    @abstractmethod
    def _some_of(self, dials: Mapping[Any, QuorumServer], seconds: float) -> Any:
        """Wait for some of the dials to end, and return the dials that have ended."""

    @abstractmethod
    def _adopt(self, server: QuorumServer, dial: Any, within: float) -> None:
        """Take a new connection, if it was made and is still wanted."""

    @abstractmethod
    def _post(
        self, server: QuorumServer, connection: OneConnection, commands: Sequence[bytes]
    ) -> None:
        """Send a question."""

    @abstractmethod
    def _hear(self, awaited: Collection[QuorumServer], started: float, seconds: float) -> Any:
        """Wait for replies, and return those of the servers whose replies have all come."""

    @abstractmethod
    def _leave(self, awaited: Collection[QuorumServer], started: float) -> None:
        """Stop waiting for the replies of these servers to a question of that time."""


class Ensemble(_Ensemble[QuorumConnection]):
    """Used by one thread at a time."""

    rings: deque[bytes] = deque()  # Nobody is rung here; see Pool.
    room: object = None  # See Pool.

    def __init__(self, servers: Sequence[QuorumServer]) -> None:
        super().__init__(servers)
        self._dials: dict[QuorumServer, futures.Future[Any]] = {}  # Under way.
        # Looked up here: gevent and eventlet leave only selectors that let other greenlets run. If
        # there is a choice, not epoll's, which a forked child would share.
        selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)
        self._selector: selectors.BaseSelector = selector()

    def connect(self, within: float) -> bool:
        """Connect to the servers that answer in time; a reply may take *within* seconds.

        Returns:
            Whether there is a connection to a majority.
        """
        fit = self._fit(within)
        if len(fit) < len(self._servers):
            perform(self._connecting(fit, within))
        return len(self._connections) >= majority_of(len(self._servers))

    def vote(self, votes: Generator[Question, Replies, Result]) -> Result:
        """Ask the questions of a vote, and return its result."""
        return perform(self._voting(votes))

    def close(self) -> None:
        """Close all connections. In a forked child only the child's copies are closed."""
        for server in [*self._connections]:
            self._close(server)
        self._dials.clear()  # Their connections are closed when they are collected.

    def abandon(self) -> None:
        """In a forked child: close its copies."""
        self.close()

    def cut(self) -> None:
        """Break all off, from any thread: the question under way fails, and every later one."""
        for connection in [*self._connections.values()]:
            connection.cut()

    def _dial(self, servers: Sequence[QuorumServer], within: float) -> dict[Any, QuorumServer]:
        for server in servers:
            if server not in self._dials:
                self._dials[server] = server.dial()
        return {dial: server for server, dial in self._dials.items()}

    def _some_of(self, dials: Mapping[Any, QuorumServer], seconds: float) -> Any:
        return futures.wait(dials, seconds, futures.FIRST_COMPLETED).done

    def _adopt(self, server: QuorumServer, dial: Any, within: float) -> None:
        del self._dials[server]
        if dial.exception() is not None:
            return
        connection: QuorumConnection = dial.result()
        if server in self._fit(within):
            connection.close()  # The late answer has come meanwhile.
            return
        self._close(server)
        self._connections[server] = connection
        self._selector.register(connection, selectors.EVENT_READ, server)

    def _post(
        self, server: QuorumServer, connection: QuorumConnection, commands: Sequence[bytes]
    ) -> None:
        if not connection.post(b"".join(commands), len(commands), math.inf):
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection, both, server)

    def _hear(self, awaited: Collection[QuorumServer], started: float, seconds: float) -> Replies:
        """Send and read as much as takes no time."""
        heard: Replies = {}
        for key, _ in self._selector.select(seconds):
            server: QuorumServer = key.data
            connection = self._connections[server]
            found: list[Any] | Trouble = connection.replies
            try:
                if not connection.is_sent and connection.flush():
                    self._selector.modify(connection, selectors.EVENT_READ, server)
                connection.collect()
            except CLIENT_ERRORS as error:
                found = self._fail(server, error, started)
            else:
                if not connection.is_answered:
                    continue
            if server in awaited:
                heard[server] = found
        return heard

    def _leave(self, awaited: Collection[QuorumServer], started: float) -> None:
        for server in awaited:
            self._connections[server].leave(started)

    def _close(self, server: QuorumServer) -> None:
        if (connection := self._connections.get(server)) is not None:
            with suppress(KeyError):  # An exception of a signal handler came before register().
                self._selector.unregister(connection)
        super()._close(server)


class AsyncEnsemble(_Ensemble[AsyncQuorumConnection]):
    """Used by one task: the connections of its event loop, which are shared by all of its tasks."""

    def __init__(self, servers: Sequence[QuorumServer]) -> None:
        super().__init__(servers)
        # By server, the replies to the last question.
        self._replies: dict[QuorumServer, list[asyncio.Future[Any]]] = {}

    async def connect(self, within: float) -> None:
        """See Ensemble.connect()."""
        current = {server: server.current() for server in self._servers}
        self._connections = {server: one for server, one in current.items() if one is not None}
        if len(self._fit(within)) < len(self._servers):
            for _ in range(2):  # Replies that came while this loop stood still are read.
                await asyncio.sleep(0)
            await aperform(self._connecting(self._fit(within), within))

    async def vote(self, votes: Generator[Question, Replies, Result]) -> Result:
        """See Ensemble.vote()."""
        return await aperform(self._voting(votes))

    def _dial(self, servers: Sequence[QuorumServer], within: float) -> dict[Any, QuorumServer]:
        return {server.adial(within): server for server in servers}

    async def _some_of(self, dials: Mapping[Any, QuorumServer], seconds: float) -> Any:
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(dials, timeout=seconds, return_when=first)
        return done

    def _adopt(self, server: QuorumServer, dial: Any, within: float) -> None:
        if (connection := server.current()) is not None:
            self._connections[server] = connection

    def _post(
        self, server: QuorumServer, connection: AsyncQuorumConnection, commands: Sequence[bytes]
    ) -> None:
        self._replies[server] = connection.post(commands)

    async def _hear(
        self, awaited: Collection[QuorumServer], started: float, seconds: float
    ) -> Replies:
        # Replies come in order: once the last one is there, all have come.
        servers = {self._replies[server][-1]: server for server in awaited}
        done = await self._some_of(servers, seconds)
        return {servers[last]: self._found(servers[last], started) for last in done}

    def _found(self, server: QuorumServer, started: float) -> list[Any] | Trouble:
        replies = self._replies[server]
        if error := next(filter(None, [reply.exception() for reply in replies]), None):
            return trouble_of(error, started)
        return [reply.result() for reply in replies]

    def _leave(self, awaited: Collection[QuorumServer], started: float) -> None:
        """Nothing to do: the connection drops late replies by itself."""
