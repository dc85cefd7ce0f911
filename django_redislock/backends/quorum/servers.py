"""The servers of a quorum, as one process sees them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from django_redislock import clock, process
from django_redislock.backends.quorum.connections import AsyncQuorumConnection
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.dialing import begin_to_dial
from django_redislock.backends.redis.loops import Loops

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.rules.steps import Trouble

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
