"""Connections to the servers of a quorum, on which an answer need not be awaited."""

from __future__ import annotations

import math
import ssl
from collections import deque
from contextlib import suppress
from copy import copy
from itertools import repeat
from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends.redis.async_connection import AsyncConnection, retrieve
from django_redislock.backends.redis.calling import lacks_script
from django_redislock.backends.redis.connection import Connection
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.backends.redis.protocol import CHUNK, NOTHING, Push

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    import redis.asyncio

    from django_redislock.rules.scripts import Script

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
