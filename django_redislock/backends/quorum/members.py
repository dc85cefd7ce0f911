"""The servers of a quorum, as one process sees them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from django_redislock import clock
from django_redislock.backends.quorum.lines import AsyncLine
from django_redislock.backends.redis.calling import trouble
from django_redislock.backends.redis.dialing import begin_to_dial
from django_redislock.backends.redis.loops import Loops

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.rules.steps import Trouble

DIAL_AGAIN_AFTER = 1.0  # Seconds since a server did not answer.
DIAL_WITHIN = 2.0  # Seconds; nobody need wait for so long.
# How long connections are waited for, see dialing_time(). One that comes later is for the next try.
DIALING = 4  # Times as long as an answer may take,
LONGEST_DIALING = 0.375  # or so many seconds if that is less.


class Member:
    """One server of a quorum.

    A server that did not answer is dialed again now and then, but nobody waits for it, as long as
    there is a majority without it.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self.dialer = dialer
        self._start()

    def _start(self) -> None:
        self.loops = Loops(self.dialer)
        self.is_trusted = True  # Whether it is waited for.
        self._dial_at = clock.now()
        self._error: BaseException = ConnectionError("it was not reached yet")
        # Under way, by the ids of their loops. The timer that ends one keeps it, and so its loop
        # does, which may be dropped.
        self._dials: WeakValueDictionary[int, asyncio.Task[AsyncConnection]] = WeakValueDictionary()

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's connections is ours."""
        self.dialer.after_fork()
        self.loops.abandon()
        # Not to be collected before their loop.
        self._inherited = self.loops, list(self._dials.values())
        self._start()

    @property
    def may_be_dialed(self) -> bool:
        """Whether it is time to dial it: at once, unless it did not answer a moment ago."""
        return self.is_trusted or clock.now() >= self._dial_at

    def dial(self) -> Future[Connection]:
        """A new connection, made by a thread of its own; also who comes late may have it."""
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        outcome = begin_to_dial(self.dialer, DIAL_WITHIN)
        outcome.add_done_callback(self._dialed)
        return outcome

    def adial(self, seconds: float) -> asyncio.Task[AsyncConnection]:
        """The connection of the running loop, as soon as it is there; see dial().

        If there is one, but an answer on it is late after so many seconds, a new one.
        """
        loop = asyncio.get_running_loop()
        if (under_way := self._dials.get(id(loop))) is not None:
            return under_way
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        line = self.loops.current()
        if isinstance(line, AsyncLine):
            task = loop.create_task(self._succeed(line, seconds))
        else:
            task = loop.create_task(self.loops.connection(DIAL_WITHIN))
        self._dials[id(loop)] = task
        task.add_done_callback(lambda _: self._dials.pop(id(loop), None))
        task.add_done_callback(self._dialed)
        return task

    async def _succeed(self, line: AsyncLine, seconds: float) -> AsyncConnection:
        """A new connection in place of one, unless the answer that is late there comes before."""
        async with asyncio.timeout(DIAL_WITHIN):
            new = await self.dialer.adial(DIAL_WITHIN)
        if line.is_open and not line.is_late(seconds):
            new.close()
            return line
        self.loops.replace(new)
        return new

    def _dialed(self, dial: Future[Connection] | asyncio.Task[AsyncConnection]) -> None:
        if dial.cancelled():
            return
        if (error := dial.exception()) is not None:
            self.failed(error)
        else:
            self.connected()

    def connected(self) -> None:
        """It can be reached."""
        self.is_trusted = True

    def failed(self, error: BaseException) -> None:
        """It cannot be reached, or does not answer."""
        self._error = error
        if self.is_trusted:
            self.is_trusted = False
            self._dial_at = clock.now() + DIAL_AGAIN_AFTER

    def trouble(self, sent: float) -> Trouble:
        """What it means to a flow that it could not be asked."""
        return trouble(self._error, sent, was_sent=False)


def dialing_time(within: float) -> float:
    """Seconds that connections are waited for, by who has so many for an answer.

    Apart from these, as no lease runs meanwhile: to connect takes several round trips.
    """
    return max(within, min(LONGEST_DIALING, DIALING * within))


def to_dial(lacking: dict[int, Member], of: int) -> Iterable[int]:
    """Which servers to dial: those that may be, or all if there would be no majority with these.

    Args:
        lacking: Those to whom there is no connection that is fit.
        of: How many servers there are.
    """
    due = [server for server, member in lacking.items() if member.may_be_dialed]
    return due if of - len(lacking) + len(due) >= majority_of(of) else lacking


def is_worth_waiting(awaited: Iterable[Member], connected: int, of: int) -> bool:
    """Whether connections that are on their way are waited for: as long as one is that of a server
    which has not failed before, or there is no majority without them.

    Args:
        awaited: The servers of those connections.
        connected: How many servers there is a connection to.
        of: How many servers there are.
    """
    return connected < majority_of(of) or any(member.is_trusted for member in awaited)


def is_worth_more_time(answers: int, awaited: int, of: int) -> bool:
    """Whether answers that are late are waited for once more as long.

    The time is short since those that are not needed cost each lease a part of it. Without a
    majority there is no lease.

    Args:
        answers: How many have come.
        awaited: How many have not.
        of: How many servers there are.
    """
    return answers < majority_of(of) <= answers + awaited


def note_late(awaited: Iterable[Member]) -> None:
    """Note that the time for connections to these servers is over."""
    for member in awaited:
        member.failed(TimeoutError("Timeout connecting to server"))


def majority_of(servers: int) -> int:
    """How many of so many servers any other majority has one in common with."""
    return servers // 2 + 1
