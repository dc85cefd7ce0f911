"""One connection to each server of a quorum, all of them asked at the same time."""

from __future__ import annotations

import math
import selectors
from collections import deque
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING

from django_redislock import clock
from django_redislock.backends.quorum.lines import Line
from django_redislock.backends.quorum.members import (
    dialing_time,
    is_worth_more_time,
    is_worth_waiting,
    majority_of,
    note_late,
    to_dial,
)
from django_redislock.backends.quorum.patience import Patience
from django_redislock.backends.redis.calling import trouble
from django_redislock.backends.redis.errors import TROUBLE, is_wrong_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.quorum.members import Member
    from django_redislock.backends.quorum.voting import Replies, Round
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.rules.steps import Trouble


class Ensemble:
    """Connections to all servers of a quorum, used by one thread at a time.

    Each question is sent to all before any answer is read, and what comes first is read first. An
    answer that is not needed any more is read and dropped later, so that the slowest server delays
    nobody.
    """

    rings: deque[bytes] = deque()  # Nobody is rung here; see Pool.

    def __init__(self, members: Sequence[Member]) -> None:
        self._seats = [_Seat(member) for member in members]
        # Looked up here: gevent and eventlet leave only those that let other greenlets run. Not
        # epoll's where there is a choice, which a forked child would share.
        selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)
        self._lines: selectors.BaseSelector = selector()  # With the number of the server.

    def connect(self, within: float) -> None:
        """Dial whom there is no connection to, or one on which an answer is late.

        Waits for those who may answer, or for a majority; see dialing_time(). A connection that
        comes later is for the next one who asks.

        Args:
            within: Seconds that an answer may take.
        """
        of, fit = len(self._seats), self._fit(within)
        if len(fit) == of:
            return
        lacking = {s: seat.member for s, seat in enumerate(self._seats) if s not in fit}
        for server in to_dial(lacking, of):
            seat = self._seats[server]
            seat.dial = seat.dial or seat.member.dial()
        dials = {seat.dial: s for s, seat in enumerate(self._seats) if seat.dial is not None}
        patience = Patience(dialing_time(within))
        while dials:
            awaited = [self._seats[server].member for server in dials.values()]
            waits = is_worth_waiting(awaited, len(self._fit(within)), of)
            seconds = patience.part() if waits else 0.0
            done, _ = futures.wait(dials, seconds, futures.FIRST_COMPLETED)
            for dial in done:
                self._adopt(dials.pop(dial), dial, within)
            if not done and not seconds:
                if waits:
                    note_late(awaited)
                return

    def ask(self, question: Round) -> Replies:
        """What the servers say, as far as it is needed and comes in time."""
        begun, patience = clock.now(), Patience(question.within)
        is_enough, is_patient = question.is_enough, False
        said: Replies = {}
        awaited = self._post(question, said, begun)
        while awaited and not (is_enough and is_enough(said)):
            seconds = patience.part()
            events = self._lines.select(seconds)
            for key, _ in events:
                self._hear(key.data, said, awaited, begun)
            if events or seconds:
                continue
            answers = sum(found.__class__ is list for found in said.values())
            if not is_patient and is_worth_more_time(answers, len(awaited), len(self._seats)):
                is_patient, patience = True, Patience(question.within)
            else:
                late = TimeoutError("the server did not answer in time")
                for server in awaited:
                    self._seats[server].member.failed(late)
                    said[server] = trouble(late, begun)
                break
        for server in awaited:
            self._line(server).leave(begun)
        return said

    def close(self) -> None:
        """Close all connections. In a forked child only the child's copies are closed."""
        for server, seat in enumerate(self._seats):
            self._close(server)
            seat.dial = None  # What comes of it is closed when it is collected.

    def cut(self) -> None:
        """From any thread: what is under way fails, and so does whatever comes next."""
        for seat in self._seats:
            if seat.line is not None:
                seat.line.cut()

    def _post(self, question: Round, said: Replies, begun: float) -> set[int]:
        """Send a question. Returns whose answers are to come."""
        replies = len(question.commands)
        data = b"".join(question.commands)
        left_out = self._left_out(question.within)
        awaited = set()
        for server in question.among:
            seat = self._seats[server]
            if seat.line is None or server in left_out:
                said[server] = seat.member.trouble(begun)
                continue
            line, commands = seat.line, data
            if not question.scripts <= line.known:
                commands = b"".join(question.in_full())
                line.known |= question.scripts
            try:
                is_sent = line.post(commands, replies, math.inf)
            except TROUBLE as error:
                said[server] = self._fail(server, error, begun)
                continue
            awaited.add(server)
            if not is_sent:
                self._lines.modify(line, selectors.EVENT_READ | selectors.EVENT_WRITE, server)
        return awaited

    def _left_out(self, within: float) -> set[int]:
        """Who owes an answer to an earlier question; nobody, if there is no majority without."""
        every, fit = range(len(self._seats)), self._fit(within)
        return set(every) - fit if len(fit) >= majority_of(len(every)) else set()

    def _fit(self, within: float) -> set[int]:
        """To whom there is a connection on which no answer is late."""
        return {server for server in range(len(self._seats)) if self._is_fit(server, within)}

    def _is_fit(self, server: int, within: float) -> bool:
        line = self._seats[server].line
        try:
            return line is not None and not line.is_late(within)
        except TROUBLE:
            self._close(server)
            return False

    def _hear(self, server: int, said: Replies, awaited: set[int], begun: float) -> None:
        """Send and read as much as takes no time."""
        line = self._line(server)
        try:
            if not line.is_sent and line.flush():
                self._lines.modify(line, selectors.EVENT_READ, server)
            line.collect()
        except TROUBLE as error:
            failure = self._fail(server, error, begun)
            if server in awaited:
                awaited.remove(server)
                said[server] = failure
            return
        if server in awaited and line.is_answered:
            awaited.remove(server)
            said[server] = line.replies
            self._seats[server].member.is_trusted = True
            if any(map(is_wrong_server, line.replies)):
                self._close(server)  # Only a new connection may lead to the right one.

    def _line(self, server: int) -> Line:
        line = self._seats[server].line
        assert line is not None
        return line

    def _adopt(self, server: int, dial: futures.Future[Connection], within: float) -> None:
        """Take a new connection, if it is one and is still wanted."""
        seat = self._seats[server]
        seat.dial = None
        if dial.exception() is not None:
            return
        line = dial.result()
        assert isinstance(line, Line)
        if self._is_fit(server, within):
            line.close()  # The late answer has come meanwhile.
            return
        self._close(server)
        seat.line = line
        self._lines.register(line, selectors.EVENT_READ, server)

    def _fail(self, server: int, error: BaseException, sent: float) -> Trouble:
        """Give a connection up."""
        if isinstance(error, TimeoutError):
            self._seats[server].member.failed(error)
        self._close(server)
        return trouble(error, sent)

    def _close(self, server: int) -> None:
        line, self._seats[server].line = self._seats[server].line, None
        if line is not None:
            with suppress(KeyError):  # An exception of a signal handler came before it was there.
                self._lines.unregister(line)
            line.close()


class _Seat:
    """The place of one server."""

    __slots__ = ("dial", "line", "member")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.line: Line | None = None
        self.dial: futures.Future[Connection] | None = None  # Under way.
