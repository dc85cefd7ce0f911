"""The servers of a quorum, as one process sees them."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from contextlib import suppress
from copy import copy
from itertools import repeat
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from django_redislock import clock, process
from django_redislock.backends.redis.async_connection import AsyncConnection, retrieve
from django_redislock.backends.redis.calling import lacks_script, trouble_of
from django_redislock.backends.redis.connection import CHUNK, NOTHING, Connection, Push, packed
from django_redislock.backends.redis.dialing import begin_to_dial
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.backends.redis.pool import Loops
from django_redislock.rules.keys import fence_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    import redis.asyncio

    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Trouble


# --- connections to the servers of a quorum, on which an answer need not be awaited ---------------

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class QuorumConnection(Connection):
    """A blocking connection that never blocks: its ensemble waits for several at once.

    A question may be left before all of its replies have come. The server answers in order, so the
    connection knows these replies when they come, and drops them.
    """

    __slots__ = ("_awaited", "_dropped", "_unsent", "known", "replies")

    def __init__(self, redis_connection: redis.Connection) -> None:
        super().__init__(redis_connection)
        self._unsent = b""
        self._awaited = 0  # How many replies the last question has.
        self.replies: list[Any] = []  # The replies to it that have come.
        # For each reply to drop when it comes: when its question was sent.
        self._dropped: deque[float] = deque()
        # Scripts that the server was told on this connection. After a restart it knows none of
        # them, and the reply that says so may be among the dropped ones.
        self.known: set[Script] = set()

    def fileno(self) -> int:
        """The descriptor of its socket, by which a selector knows it."""
        return self._socket.fileno()

    def post(self, commands: bytes, replies: int, seconds: float) -> bool:
        """Send packed commands that will have so many replies; see flush().

        Raises:
            TimeoutError: The answer to a question before this one is late; see is_late().
        """
        self._limit(0.0)
        if self.is_late(seconds):
            raise TimeoutError("the server did not answer in time")
        self._awaited, self.replies = replies, []
        self._unsent += commands
        return self.flush()

    def is_late(self, seconds: float) -> bool:
        """Whether a question that was left is not answered after so many seconds."""
        if self._dropped:
            self.collect()
        return bool(self._dropped) and clock.now() - self._dropped[0] > seconds

    def flush(self) -> bool:
        """Send the rest, as far as that takes no time. Returns whether all is sent."""
        with suppress(*_NOT_NOW):
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return self.is_sent

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to send."""
        return not self._unsent

    @property
    def is_answered(self) -> bool:
        """Whether all replies to the last question have come."""
        return len(self.replies) == self._awaited

    def collect(self) -> None:
        """Read the replies that have come.

        Raises:
            ConnectionError: The server closed the connection.
        """
        more = True
        while more:
            try:
                data = self._socket.recv(CHUNK)
            except _NOT_NOW:
                break
            if not data:
                raise ConnectionError("the server closed the connection")
            self._reader.feed(data)
            # TLS may keep more than the operating system knows of.
            more = len(data) == CHUNK or isinstance(self._socket, ssl.SSLSocket)
        while (item := self._reader.gets()) is not NOTHING:
            if item.__class__ is Push:
                continue
            if self._dropped:
                self._dropped.popleft()
                if item.__class__ is ReplyError and lacks_script(item):
                    self.known.clear()
            elif self.is_answered:
                raise ConnectionError("out of step")
            else:
                self.replies.append(item)

    def leave(self, sent: float) -> None:
        """Drop the missing replies to the last question, which was *sent* at that time."""
        if missing := self._awaited - len(self.replies):
            self._dropped.extend(repeat(sent, missing))
            self._awaited = len(self.replies)


class AsyncQuorumConnection(AsyncConnection):
    """A connection of an event loop that is not given up because an answer is late."""

    def __init__(self, redis_connection: redis.asyncio.Connection) -> None:
        super().__init__(redis_connection)
        self.known: set[Script] = set()  # See QuorumConnection.
        # The last reply to each question, and when it was sent.
        self._questions: deque[tuple[asyncio.Future[Any], float]] = deque()

    def post(self, commands: Sequence[bytes]) -> list[asyncio.Future[Any]]:
        """Send packed commands; see send(). Their replies need not be awaited."""
        replies = [self._loop.create_future() for _ in commands[1:]]
        for reply in replies:
            if self.closed:
                reply.set_exception(copy(self.closed))
            else:
                self._awaited.append((reply, math.inf))
        replies.append(self.send(b"".join(commands), math.inf))
        for reply in replies:
            reply.add_done_callback(self._heard)
        self._questions.append((replies[-1], clock.now()))
        return replies

    def is_late(self, seconds: float) -> bool:
        """Whether a question is not answered after so many seconds."""
        questions = self._questions
        while questions and questions[0][0].done():
            questions.popleft()
        return bool(questions) and clock.now() - questions[0][1] > seconds

    def _heard(self, reply: asyncio.Future[Any]) -> None:
        retrieve(reply)
        if not reply.cancelled() and reply.exception() is None:
            item = reply.result()
            if item.__class__ is ReplyError and lacks_script(item):
                self.known.clear()


DIAL_AGAIN_AFTER = 1.0  # Seconds since a server did not answer.
DIAL_WITHIN = 2.0  # Seconds; no flow has to wait for so long.
# How long to wait for connections, see dialing_time(). One that comes later is for the next try.
DIALING = 4  # Times as long as an answer may take,
LONGEST_DIALING = 0.375  # or so many seconds if that is less.


class QuorumServer:
    """One server of a quorum.

    A server that did not answer is dialed again now and then. As long as there is a majority
    without it, no flow waits for it.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self.dialer = dialer
        self._start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _start(self) -> None:
        self.loops = Loops(self.dialer)
        self.is_trusted = True  # Whether it is waited for.
        self._dial_at = clock.now()
        self._error: BaseException = ConnectionError("it was not reached yet")
        # Under way, by the ids of their loops. Weak: the timer that ends a dial refers to the dial,
        # and the dial to its loop, which may be dropped.
        self._dials: WeakValueDictionary[int, asyncio.Task[AsyncConnection]] = WeakValueDictionary()

    def after_fork(self) -> None:
        """In a forked child: begin anew, without the parent's connections."""
        self.dialer.after_fork()
        self.loops.abandon()
        process.inherited += self._dials.values()
        self._start()

    @property
    def may_be_dialed(self) -> bool:
        """Whether it is time to dial it: at once, unless it did not answer a moment ago."""
        return self.is_trusted or clock.now() >= self._dial_at

    def dial(self) -> Future[Connection]:
        """A new connection, made in a thread of its own. If it is late, the next flow has it."""
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        outcome = begin_to_dial(self.dialer, DIAL_WITHIN)
        outcome.add_done_callback(self._dialed)
        return outcome

    def current(self) -> AsyncQuorumConnection | None:
        """The open connection of the running loop, if there is one."""
        connection = self.loops.current()
        assert connection is None or isinstance(connection, AsyncQuorumConnection)
        return connection

    def adial(self, seconds: float) -> asyncio.Task[AsyncConnection]:
        """The connection of the running loop, as soon as it is there; see dial().

        If there is one, but an answer on it is late after so many seconds, it makes a new one.
        """
        loop = asyncio.get_running_loop()
        if (under_way := self._dials.get(id(loop))) is not None:
            return under_way
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        if (connection := self.current()) is not None:
            task = loop.create_task(self._succeed(connection, seconds))
        else:
            task = loop.create_task(self.loops.connection(DIAL_WITHIN))
        self._dials[id(loop)] = task
        task.add_done_callback(lambda _: self._dials.pop(id(loop), None))
        task.add_done_callback(self._dialed)
        return task

    async def _succeed(self, former: AsyncQuorumConnection, seconds: float) -> AsyncConnection:
        """A new connection in place of *former*, unless the late answer on that comes first."""
        async with asyncio.timeout(DIAL_WITHIN):
            new = await self.dialer.adial(DIAL_WITHIN)
        if former.is_open and not former.is_late(seconds):
            new.close()
            return former
        self.loops.replace(new)
        return new

    def _dialed(self, dial: Future[Connection] | asyncio.Task[AsyncConnection]) -> None:
        if dial.cancelled():
            return
        if (error := dial.exception()) is not None:
            self.failed(error)
        else:
            self.is_trusted = True

    def failed(self, error: BaseException) -> None:
        """Note that it cannot be reached, or does not answer."""
        self._error = error
        if self.is_trusted:
            self.is_trusted = False
            self._dial_at = clock.now() + DIAL_AGAIN_AFTER

    def as_trouble(self, sent: float) -> Trouble:
        """The trouble for a flow that could not ask this server."""
        return trouble_of(self._error, sent, was_sent=False)


def dialing_time(within: float) -> float:
    """Seconds to wait for connections, if an answer may take *within* seconds.

    This time comes on top: to connect takes several round trips, and no lease runs meanwhile.
    """
    return max(within, min(LONGEST_DIALING, DIALING * within))


def to_dial(lacking: Sequence[QuorumServer], of: int) -> Sequence[QuorumServer]:
    """The servers to dial: those that may be dialed, or all if these would make no majority.

    Args:
        lacking: The servers without a fit connection.
        of: How many servers there are.
    """
    due = [server for server in lacking if server.may_be_dialed]
    return due if of - len(lacking) + len(due) >= majority_of(of) else lacking


def is_worth_waiting(awaited: Iterable[QuorumServer], connected: int, of: int) -> bool:
    """Whether to wait for connections that are on their way.

    It is worth it if one of their servers has not failed before, or if there is no majority without
    them.

    Args:
        awaited: The servers of those connections.
        connected: To how many servers there is a fit connection.
        of: How many servers there are.
    """
    return connected < majority_of(of) or any(server.is_trusted for server in awaited)


def is_worth_more_time(answers: int, awaited: int, of: int) -> bool:
    """Whether to wait for late answers once more as long.

    The first time is short, since a wait for needless answers costs each lease a part of its time.
    But without a majority there is no lease.

    Args:
        answers: How many have come.
        awaited: How many have not.
        of: How many servers there are.
    """
    return answers < majority_of(of) <= answers + awaited


def majority_of(servers: int) -> int:
    """How many of so many servers are more than half: any two majorities have one in common."""
    return servers // 2 + 1


# --- one fence for all servers of a quorum, in one round trip -------------------------------------

LEARN_EVERY = 10.0  # Seconds: the clocks of machines run at about the same rate.
LEAST_MARGIN = 0.001  # Seconds.
MOST_LEAD = 0.1


class Fences:
    """Makes the servers give out the same fence.

    By itself, each server gives out its greatest fence plus one, or its time in microseconds if
    that is greater. But a majority must know the greatest fence of all before the lock counts as
    granted, which takes one more round trip. So each acquire first raises the greatest fence of
    every server, in the same round trip, to a time that none of their clocks has reached yet. Then
    all of them give out the next number.

    This only saves time. If it fails, the answers differ, and the fences are raised afterwards.

    A fence ahead of the clocks is a risk: if all data is lost before the clocks reach it, the next
    fence may be smaller. So a fence is ahead by a tenth of a second at most.
    """

    def __init__(self, prefix: str) -> None:
        self._key = fence_key(prefix)
        self._asked_at = -LEARN_EVERY
        self._ahead: float | None = None  # Seconds from our clock to the furthest of the servers'.

    @property
    def are_unknown(self) -> bool:
        """Whether it is time again to ask the servers for their time."""
        return clock.now() - self._asked_at >= LEARN_EVERY

    def question(self) -> bytes:
        """The command that asks for a server's time."""
        self._asked_at = clock.now()
        return packed("TIME")

    def learn(self, replies: Iterable[Any]) -> None:
        """Read the replies to question(); anything that is no time is left out."""
        times = [
            int(reply[0]) + int(reply[1]) / 1_000_000 for reply in replies if type(reply) is list
        ]
        if times:
            now = clock.now()
            took = now - self._asked_at  # The servers may have read their clocks so long ago.
            # Twice that: the next round trip may take longer.
            margin = max(2 * took, LEAST_MARGIN)
            self._ahead = max(times) - now + min(took + margin, MOST_LEAD)

    def before(self) -> list[bytes]:
        """The commands to send before an acquire."""
        if self._ahead is None:
            return []
        return [self.raised(int((clock.now() + self._ahead) * 1_000_000))]

    def raised(self, fence: int) -> bytes:
        """The command that raises a server's greatest fence to *fence*."""
        return packed("ZADD", self._key, "GT", fence, "last")
