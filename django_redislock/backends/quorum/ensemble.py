"""One connection to each server of a quorum, all of them asked at the same time."""

from __future__ import annotations

import select
from collections import deque
from concurrent import futures
from typing import TYPE_CHECKING

from django_redislock import clock
from django_redislock.backends.quorum.lines import Line
from django_redislock.backends.quorum.members import is_worth_waiting, note_late
from django_redislock.backends.redis.calling import trouble
from django_redislock.backends.redis.errors import TROUBLE, is_wrong_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.quorum.members import Member
    from django_redislock.backends.quorum.voting import Replies, Round
    from django_redislock.backends.redis.connection import Wire
    from django_redislock.rules.steps import Trouble

CONNECT = 2 / 3  # Of the time for an answer, so much is for connections, if there are none.


class Ensemble:
    """Connections to all servers of a quorum, used by one thread at a time.

    Each question is sent to all before any answer is read, and what comes first is read first. An
    answer that is not needed any more is read and dropped later, so that the slowest server delays
    nobody.
    """

    bells: deque[bytes] = deque()  # Nobody is rung here; see Pool.

    def __init__(self, members: Sequence[Member]) -> None:
        self._seats = [_Seat(member) for member in members]
        self._by_number: dict[int, int] = {}  # The servers by the file numbers of their lines.
        self._poll = select.poll()

    def ask(self, question: Round) -> Replies:
        """What the servers say, as far as it is needed and comes in time."""
        begun = clock.now()
        if len(self._by_number) < len(self._seats):
            self._connect(begun + question.within * CONNECT)
        until = begun + question.within
        is_enough = question.is_enough
        said: Replies = {}
        awaited = self._post(question, said, begun)
        while awaited and not (is_enough and is_enough(said)):
            left = until - clock.now()
            # Once also when the time is over: this process may have stood still meanwhile.
            events = self._poll.poll(max(left, 0.0) * 1000)
            for number, _ in events:
                self._hear(self._by_number[number], said, awaited, begun)
            if not events and left <= 0:
                late = TimeoutError("the server did not answer in time")
                for server in awaited:
                    said[server] = self._fail(server, late, begun)
                return said
        for server in awaited:
            self._line(server).leave(begun)
        return said

    def close(self) -> None:
        """Close all connections. In a forked child only the child's copies are closed."""
        for server, seat in enumerate(self._seats):
            self._close(server)
            dial, seat.dial = seat.dial, None
            if dial is not None:
                dial.add_done_callback(_discard)

    def cut(self) -> None:
        """From any thread: what is under way fails, and so does whatever comes next."""
        for seat in self._seats:
            if seat.line is not None:
                seat.line.cut()

    def _post(self, question: Round, said: Replies, begun: float) -> set[int]:
        """Send a question. Returns whose answers are to come."""
        scripts, replies = question.scripts, len(question.commands)
        data = b"".join(question.commands)
        awaited = set()
        for server in question.among:
            seat = self._seats[server]
            if seat.line is None:
                said[server] = seat.member.trouble(begun)
                continue
            line, commands = seat.line, data
            if not scripts <= line.known:
                commands = b"".join(question.in_full())
                line.known |= scripts
            try:
                is_sent = line.post(commands, replies, question.within)
            except TROUBLE as error:
                said[server] = self._fail(server, error, begun)
                continue
            awaited.add(server)
            if not is_sent:
                self._poll.modify(line, select.POLLIN | select.POLLOUT)
        return awaited

    def _hear(self, server: int, said: Replies, awaited: set[int], begun: float) -> None:
        """Send and read as much as takes no time."""
        line = self._line(server)
        try:
            if not line.is_sent and line.flush():
                self._poll.modify(line, select.POLLIN)
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
            if any(map(is_wrong_server, line.replies)):
                self._close(server)  # Only a new connection may lead to the right one.

    def _line(self, server: int) -> Line:
        line = self._seats[server].line
        assert line is not None
        return line

    def _connect(self, until: float) -> None:
        """Dial whom there is no connection to. Wait for those who may answer, or for a majority."""
        dials = {}
        for server, seat in enumerate(self._seats):
            if seat.line is None and seat.dial is None and seat.member.may_be_dialed:
                seat.dial = seat.member.dial()
            if seat.dial is not None:
                dials[seat.dial] = server
        waits = True
        while dials and waits:
            left = until - clock.now()
            awaited = [self._seats[server].member for server in dials.values()]
            if left <= 0:
                note_late(awaited)
            connected, of = len(self._by_number), len(self._seats)
            waits = left > 0 and is_worth_waiting(awaited, connected, of)
            done, _ = futures.wait(dials, left if waits else 0.0, futures.FIRST_COMPLETED)
            for dial in done:
                self._adopt(dials.pop(dial), dial)

    def _adopt(self, server: int, dial: futures.Future[Wire]) -> None:
        seat = self._seats[server]
        seat.dial = None
        error = dial.exception()
        if error is not None:
            seat.member.failed(error)
            return
        line = dial.result()
        assert isinstance(line, Line)
        seat.member.connected()
        seat.line = line
        self._by_number[line.fileno()] = server
        self._poll.register(line.fileno(), select.POLLIN)

    def _fail(self, server: int, error: BaseException, sent: float) -> Trouble:
        """Give a connection up."""
        if isinstance(error, TimeoutError):
            self._seats[server].member.failed(error)
        self._close(server)
        return trouble(error, sent)

    def _close(self, server: int) -> None:
        line, self._seats[server].line = self._seats[server].line, None
        if line is not None:
            number = line.fileno()
            if self._by_number.pop(number, None) is not None:
                self._poll.unregister(number)
            line.close()


def _discard(dial: futures.Future[Wire]) -> None:
    """Nobody waits for that connection any more."""
    if dial.exception() is None:
        dial.result().close()


class _Seat:
    """The place of one server."""

    __slots__ = ("dial", "line", "member")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.line: Line | None = None
        self.dial: futures.Future[Wire] | None = None  # Under way.
