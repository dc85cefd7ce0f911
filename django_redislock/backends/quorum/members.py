"""The servers of a quorum, as one process sees them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from django_redislock import clock
from django_redislock.backends.redis.calling import trouble
from django_redislock.backends.redis.connection import retrieve
from django_redislock.backends.redis.loops import Loops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.redis.connection import AsyncWire, Wire
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.rules.steps import Trouble

DIAL_AGAIN_AFTER = 1.0  # Seconds since a server did not answer.
DIAL_WITHIN = 2.0  # Seconds; nobody need wait for so long.


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
        self._dials: set[asyncio.Task[AsyncWire]] = set()  # An event loop keeps no task alive.

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's connections is ours."""
        self.dialer.after_fork()
        self.loops.forsake()
        self._inherited = self.loops, self._dials  # Not to be collected before their loop.
        self._start()

    @property
    def may_be_dialed(self) -> bool:
        """Whether it is time to dial it: at once, unless it did not answer a moment ago."""
        return self.is_trusted or clock.now() >= self._dial_at

    def dial(self) -> Future[Wire]:
        """A new connection, made by a thread of its own."""
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        outcome: Future[Wire] = Future()

        def work() -> None:
            try:
                outcome.set_result(self.dialer.dial(DIAL_WITHIN))
            except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                outcome.set_exception(error)

        try:
            threading.Thread(target=work, name="redislock-dial", daemon=True).start()
        except RuntimeError:  # No more threads, or the interpreter is shutting down.
            work()
        return outcome

    def adial(self) -> asyncio.Task[AsyncWire]:
        """The connection of the running loop, as soon as it is there."""
        self._dial_at = clock.now() + DIAL_AGAIN_AFTER
        task = asyncio.ensure_future(self.loops.wire(DIAL_WITHIN))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        task.add_done_callback(retrieve)
        return task

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


def is_worth_waiting(awaited: Sequence[Member], connected: int, of: int) -> bool:
    """Whether connections that are on their way are waited for: as long as one is that of a server
    which has not failed before, or there is no majority without them.

    Args:
        awaited: The servers of those connections.
        connected: How many servers there is a connection to.
        of: How many servers there are.
    """
    return connected < majority_of(of) or any(member.is_trusted for member in awaited)


def note_late(awaited: Sequence[Member]) -> None:
    """Note that the time for connections to these servers is over."""
    for member in awaited:
        member.failed(TimeoutError("Timeout connecting to server"))


def majority_of(servers: int) -> int:
    """How many of so many servers any other majority has one in common with."""
    return servers // 2 + 1
