"""The connection on which a watchdog renews."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from django_redislock import clock
from django_redislock.backends.redis.calling import (
    needs_another_way,
    outcome_in_batch,
    trouble_of,
    turned_away,
)
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.dialing import begin_to_dial
from django_redislock.backends.redis.errors import CLIENT_ERRORS
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from django_redislock.backends.redis.calling import Caller
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.rules.steps import Call, Outcome

# Seconds that a dial may take: twice as long as a try, within these bounds. If the try itself is
# longer, the dial may take as long.
SHORTEST_DIAL = 0.5
LONGEST_DIAL = 2.0
LATE_FOR = 10.0  # Seconds for which a late answer is kept, in case the same call comes again.
AT_ONCE = 0.001  # Seconds for reading answers that have come already.


class _Question(NamedTuple):
    """A call that was sent."""

    call: Call  # Without its time, so that the same call of the next try is equal.
    sent: float


class RenewingConnection:
    """A connection for renewals, used by one thread.

    If a server is far away or busy, an answer may take longer than one try. Then the connection
    stays. Calls without an answer are not sent again, and a late answer counts from the time at
    which its call was sent. Meanwhile a new connection is dialed. If that is there before the
    answer, the old connection was dead. Without one that works, another way is used.
    """

    def __init__(
        self,
        dialer: Dialing,
        caller: Caller,
        otherwise: Callable[[Sequence[Call]], list[Outcome] | None],
    ) -> None:
        """Dial nobody yet.

        Args:
            dialer: Makes the connection.
            caller: Runs scripts on it.
            otherwise: Runs scripts on a connection that exists already; None if there is none.
        """
        self._dialer = dialer
        self._caller = caller
        self._otherwise = otherwise
        self._connection: Connection | None = None
        self._dial: Future[Connection] | None = None  # Under way; a late one serves the next try.
        self._questions: deque[_Question] = deque()  # In the order in which answers will come.
        self._late: dict[Call, Answer] = {}  # Answers that came after their try.

    def prepare(self, within: float) -> None:
        """Begin to dial, unless there is a connection or a dial; from any thread.

        Args:
            within: Seconds that one try may take.
        """
        if self._connection is None:
            self._begin_to_dial(within)

    def call(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run scripts in one go. They must be safe to repeat, and mean the same if repeated."""
        started, was_sent = clock.now(), False
        within = calls[0].within  # All have the same.
        try:
            self._read_what_has_come()
            if self._needs_another_way():
                self._begin_to_dial(within)
                if (outcomes := self._otherwise(calls)) is not None:
                    return outcomes
            connection = self._connected(rest(within, started))
            was_sent = True
            if self._caller.scripting or self._questions:
                outcomes = self._exchange(connection, calls, started, within)
            else:
                outcomes = self._caller.call(connection, calls, started)
        except Exception as error:  # noqa: BLE001 - told apart by trouble_of()
            self._drop()
            trouble: list[Outcome] = [trouble_of(error, started, was_sent=was_sent)] * len(calls)
            return (None if was_sent else self._otherwise(calls)) or trouble
        if turned_away(outcomes):
            self._drop()
        return outcomes

    def close(self) -> None:
        """Close it. In a forked child only the child's copy is closed."""
        self._drop()
        # The dial is not cancelled: a thread of the parent may have held its mutex at the fork. Its
        # connection is closed when it is collected.
        self._dial = None

    def _needs_another_way(self) -> bool:
        """Whether the last try has left no connection that answers, nor a dial that may bring one.

        A dial that is late counts only while there is no connection: an answer may be late, too.
        """
        dial = self._dial
        if dial is None or _is_made(dial) or (self._connection and not self._questions):
            return False
        return self._connection is None or dial.done()

    def _connected(self, within: float) -> Connection:
        """The connection, or a new one in place of a dead one. Raises redis-py's exceptions."""
        if self._connection is not None and not self._questions:
            self._dial = None
            return self._connection
        dial = self._begin_to_dial(within)
        if self._connection is None or _is_made(dial):
            if not dial.done():
                with suppress(Exception):  # It is raised below.
                    dial.exception(within)
            if not dial.done():
                raise TimeoutError("Timeout connecting to server")
            self._dial = None
            try:
                connection = dial.result()
            finally:
                del dial  # See process.forget_frames().
            self._drop()
            self._connection = connection
        return self._connection

    def _exchange(
        self, connection: Connection, calls: Sequence[Call], started: float, within: float
    ) -> list[Outcome]:
        wanted = [call._replace(within=0.0) for call in calls]
        outcomes: dict[Call, Outcome] = {
            call: self._late.pop(call) for call in wanted if call in self._late
        }
        under_way = {question.call: question.sent for question in self._questions}
        new = [call for call in wanted if call not in under_way and call not in outcomes]
        if new:
            sent = clock.now()
            connection.send(b"".join(self._caller.commands(new)), rest(within, started))
            self._questions.extend(_Question(call, sent) for call in new)
            under_way |= dict.fromkeys(new, sent)
        missing = under_way.keys() & set(wanted)
        with suppress(TimeoutError):
            while missing:
                call, outcome = self._read(connection, rest(within, started))
                if call in missing:
                    outcomes[call] = outcome
                    missing.remove(call)
                else:
                    self._note_late(call, outcome)
        late = TimeoutError("the server did not answer in time")
        outcomes |= {call: trouble_of(late, under_way[call]) for call in missing}
        if missing:
            self._begin_to_dial(within)
        elif not self._questions and any(map(_was_not_run, outcomes.values())):
            return self._caller.call(connection, calls, started)
        return [outcomes[call] for call in wanted]

    def _read(self, connection: Connection, seconds: float) -> tuple[Call, Outcome]:
        """The next answer, behind its call."""
        reply = connection.reply(seconds)
        question = self._questions.popleft()
        return question.call, outcome_in_batch(reply, question.sent)

    def _read_what_has_come(self) -> None:
        """Keep the answers that have come since."""
        now = clock.now()
        self._late = {
            call: answer for call, answer in self._late.items() if now < answer.now + LATE_FOR
        }
        try:
            while self._connection is not None and self._questions:
                self._note_late(*self._read(self._connection, AT_ONCE))
        except TimeoutError:
            return
        except CLIENT_ERRORS:
            self._drop()

    def _note_late(self, call: Call, outcome: Outcome) -> None:
        if isinstance(outcome, Answer):
            self._late[call] = outcome

    def _begin_to_dial(self, within: float) -> Future[Connection]:
        dial = self._dial
        if dial is None or (dial.done() and dial.exception() is not None):
            seconds = max(within, SHORTEST_DIAL, min(2 * within, LONGEST_DIAL))
            dial = self._dial = begin_to_dial(self._dialer, seconds)
        return dial

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._questions.clear()
        if connection is not None:
            connection.close()


def _is_made(dial: Future[Connection]) -> bool:
    return dial.done() and dial.exception() is None


def _was_not_run(outcome: Outcome) -> bool:
    return not isinstance(outcome, Answer) and needs_another_way(outcome.__cause__)
