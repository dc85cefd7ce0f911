"""Waiting threads without connections of their own are rung on one that they share.

Nothing here takes a mutex; see pool.py.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING

from django_redislock import clock, process
from django_redislock.backends.drivers import Inbox
from django_redislock.backends.redis.connection import id_of
from django_redislock.backends.redis.errors import Exhausted
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.backends.redis.connection import Connection


class SharedBells:
    """The shared bells of one server: on a cluster one for each prefix of locks, else one."""

    def __init__(self, dial: Callable[[float], Connection], *, for_all: bool = False) -> None:
        """Dial nobody yet.

        Args:
            dial: Makes a connection within so many seconds.
            for_all: Whether every waiter shares one. In RESP2 all do: there a connection that is
                subscribed can do nothing else.
        """
        self.for_all = for_all
        self._dial = dial
        self._bells: dict[str, SharedBell] = {}  # By the prefix of the locks they are for.
        self._lost_at = -math.inf  # Connections older than this may be lost, too.

    @property
    def lacks_one(self) -> bool:
        """Whether a waiter that comes now has to open one."""
        return self.for_all and all(bell.closed for bell in list(self._bells.values()))

    def open(self, channel: str, seconds: float) -> SharedBell:
        """The open bell for locks of the same prefix.

        If there is none, a new one opens on *channel* within so many seconds.
        """
        prefix = prefix_in(channel)
        bell = self._bells.get(prefix)
        if bell is None:
            bell = self._bells.setdefault(prefix, SharedBell(self._dial, channel, seconds))
        while bell.closed:
            former, new = bell, SharedBell(self._dial, channel, seconds)
            # If several threads see it closed, all come to the same new one.
            bell = self._bells[prefix] = former.followed_by(new)
            if bell is new and former.lost:
                self._lost_at = clock.now()
        bell.open()
        return bell

    def lost(self, connection: Connection) -> None:
        """Cut all bells, since a connection was lost.

        After a failover behind one address the next connection may lead to another server. So the
        waiters come back, and open another bell. If more connections are lost, once is enough.
        """
        if connection.opened_at > self._lost_at:
            self._lost_at = clock.now()
            for bell in list(self._bells.values()):
                bell.cut()

    def abandon(self) -> None:
        """In a forked child: close its copies of the connections."""
        for bell in self._bells.values():
            bell.abandon()


class SharedBell:
    """One connection on which all waiters without a connection of their own are rung.

    A thread reads it, and hands each ring to its waiter. The thread ends when no waiter is left.
    """

    CHECK_EVERY = 2.0  # Seconds without a ring after which the connection is tested.

    def __init__(self, dial: Callable[[float], Connection], channel: str, seconds: float) -> None:
        """Make it; open() opens it, within so many seconds for each of the two steps."""
        self.channel = channel
        self.closed = False
        self.lost = False  # Whether it is closed because it could not be opened, or was lost.
        self._rings: dict[str, Inbox[bytes | None]] = {}  # By lease id; None: it is closed.
        self._connection: Connection | None = None
        self._opened: Future[None] = Future()
        self._opens_until = clock.now() + 2 * seconds
        self._next: dict[str, SharedBell] = {}
        # A list, so that only the thread that takes it out starts it.
        self._unstarted = [
            threading.Thread(
                target=self._run, args=(dial, seconds), name="redislock-bell", daemon=True
            )
        ]

    def open(self) -> None:
        """Begin to open it, unless that has begun.

        Raises:
            Exhausted: There is no thread to read it.
        """
        with suppress(IndexError):
            thread = self._unstarted.pop()
            try:
                process.start(thread)
            except RuntimeError as error:
                self.lost = True
                self.cut()
                raise Exhausted(f"no thread to listen for rings: {error}") from error

    def followed_by(self, other: SharedBell) -> SharedBell:
        """The bell in its place once it is closed: *other*, unless there is one already."""
        return self._next.setdefault("", other)

    def expect(self, id: str, seconds: float) -> None:  # noqa: A002
        """Keep the rings for *id* until forget(); wait until the connection is open."""
        self._rings[id] = Inbox()
        self.open()
        try:
            self._opened.result(seconds)
        except TimeoutError:
            if clock.now() > self._opens_until:
                # An exception of a signal handler ended the thread that was to open the bell.
                self.lost = True
                self.cut()
            raise
        self._check_open()

    def forget(self, id: str) -> None:  # noqa: A002
        """Drop further rings for *id*."""
        self._rings.pop(id, None)

    def next_ring(self, id: str, seconds: float) -> bytes | None:  # noqa: A002
        """The next ring for *id*, or None if there is none within *seconds*."""
        self._check_open()
        try:
            ring = self._rings[id].get(timeout=max(seconds, 0))
        except Empty:
            return None
        self._check_open()
        return ring

    def cut(self) -> None:
        """Break it off, from any thread: its waiters are told that the connection was lost."""
        self.closed = True
        if self._connection is not None:
            self._connection.cut()

    def abandon(self) -> None:
        """In a forked child: close its copy of the connection."""
        self.closed = True
        if self._connection is not None:
            self._connection.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionError("the connection was lost")

    def _run(self, dial: Callable[[float], Connection], seconds: float) -> None:
        try:
            self._connection = dial(seconds)
            self._check_open()  # It may have been cut meanwhile.
            self._connection.subscribe(self.channel, seconds)
            self._opened.set_result(None)
            self._read(self._connection)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            self.lost = True
            if not self._opened.done():
                self._opened.set_exception(error.with_traceback(None))
        finally:
            # Close it before others may open a new one, or there would be one too many.
            if self._connection is not None:
                self._connection.close()
            self.closed = True
            for rings in list(self._rings.values()):
                rings.put(None)

    def _read(self, connection: Connection) -> None:
        while True:
            ring = connection.next_ring(self.CHECK_EVERY)
            if ring is None:
                # A node of a cluster ends a channel when its slot has moved.
                if not (self._rings and connection.channels):
                    return
                # Test it: no other command is sent on it, so nobody would notice its end.
                connection.subscribe(self.channel, self.CHECK_EVERY)
            elif ring and (rings := self._rings.get(id_of(ring))) is not None:
                rings.put(ring)
