"""One Redis or Valkey server, as one process uses it."""

from __future__ import annotations

from collections import deque
from contextlib import closing, contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, process
from django_redislock.backends.base import Backend
from django_redislock.backends.redis.calling import (
    Caller,
    FirstSteps,
    needs_another_way,
    outcome_in_batch,
    trouble_of,
    turned_away,
)
from django_redislock.backends.redis.checking import (
    check_timeout,
    checked_dialer,
    checked_options,
)
from django_redislock.backends.redis.connection import packed, rest
from django_redislock.backends.redis.dialing import PROTOCOLS, begin_to_dial
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    described,
    is_transient,
    is_wrong_server,
    reason_of,
)
from django_redislock.backends.redis.pool import ConnectionPool, Loops
from django_redislock.backends.redis.sessions import AsyncSession, Session
from django_redislock.backends.redis.shared_bell import SharedBells
from django_redislock.backends.watchdog import Watchdog
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from django_redislock.backends.base import TakesCommands
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.conf import Conf
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import Call, Outcome


# --- the connection on which a watchdog renews ----------------------------------------------------

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


Result = TypeVar("Result")

PATIENCE = 2.0  # Seconds that plain commands may take at least: no lease runs meanwhile.


class Server:
    """The connections of one process to one server, for the locks of one backend.

    RedisBackend is one; a cluster has several, its nodes. Each has a watchdog of its own, so a
    server that hangs delays the renewal of no lease on another.
    """

    def __init__(self, backend: Backend, dialer: Dialing, most_connections: int) -> None:
        """Dial nobody yet.

        Args:
            backend: The backend of the locks.
            dialer: Makes the connections.
            most_connections: How many there may be for sync code, the watchdog's included.
        """
        self._prefix = backend.prefix
        self._within = backend.within
        self._dialer = dialer
        self._caller = Caller(backend.alias, backend.prefix, backend.process)
        most = most_connections - ConnectionPool.BESIDE
        resp3 = dialer.protocol == 3
        self._pool = ConnectionPool(dialer.dial, most, SharedBells(dialer.dial, for_all=not resp3))
        self._loops = Loops(dialer)
        self._bells = self._loops if resp3 else Loops(dialer)  # On which waiters are rung.
        self._renewing_connection = RenewingConnection(dialer, self._caller, self._otherwise)
        self.watchdog = Watchdog(backend, self)
        # As attributes, which are called without a detour; see Backend.begin().
        first_steps = FirstSteps(
            self._caller, self._pool, self._loops, backend.waiting, ring_apart=not resp3
        )
        self.begin, self.abegin = first_steps.begin, first_steps.abegin

    def retire(self) -> None:
        """Keep no connection that is not in use from now on; see Backend.retire()."""
        self.watchdog.retire()
        self._pool.retire()

    def abandon(self) -> None:
        """In a forked child: close its copies of connections. The parent goes on using its own."""
        self._dialer.after_fork()
        self._pool.abandon()
        self.close_watchdog()
        for loops in {self._loops, self._bells}:
            loops.abandon()

    @property
    def scripts_need(self) -> str:
        """What to do so that the server allows scripts; "" if it does, as far as we know."""
        return self._caller.scripts_need

    def session(self, form: Form | None = None) -> Session:
        """A performer of one flow, which blocks its thread; see Backend.session()."""
        return Session(self._caller, self._pool, _connection_of(form))

    def async_session(self, form: Form | None = None) -> AsyncSession:
        """A performer of one flow in an event loop, which awaits."""
        session = AsyncSession(self._caller, self._loops, self._bells, self._pool)
        if form is not None and (connection := _connection_of(form)) is not None:
            session.go_on(connection, form.id)
        return session

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once for the watchdog; see RenewingConnection."""
        return self._renewing_connection.call(calls)

    def _otherwise(self, calls: Sequence[Call]) -> list[Outcome] | None:
        """Run scripts on an idle connection, or on that of an event loop; None without any."""
        connection = self._pool.take_idle()
        if connection is None:
            return self._loops.call_all(self.async_session, calls)
        with closing(Session(self._caller, self._pool, connection)) as session:
            return session.call_all(calls)

    def prepare_watchdog(self) -> None:
        """Begin to dial that connection, if there is none."""
        self._renewing_connection.prepare(self._within)

    def close_watchdog(self) -> None:
        """Close that connection."""
        self._renewing_connection.close()

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once. They must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or turned all of them away.
        """
        outcomes: list[Outcome] = []

        def call(connection: Connection) -> None:
            outcomes.clear()
            outcomes.extend(self._caller.call(connection, calls, clock.now()))
            if error := turned_away(outcomes):
                raise copy(error)  # So that a new connection is tried.

        try:
            self._with_connection(call, self._within)
        except LockUnavailable:
            # On a cluster, a slot without a node must not fail the calls for other slots.
            if not any(isinstance(outcome, Answer) for outcome in outcomes):
                raise
        return outcomes

    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Run plain commands in one round trip; an error reply is returned, not raised.

        They may be run twice, so they must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or is the wrong one.
        """

        within = max(self._within, PATIENCE)

        def execute(connection: Connection) -> list[Any]:
            replies = connection.execute_all([packed(*command) for command in commands], within)
            for reply in replies:
                if is_wrong_server(reply):
                    raise copy(reply)
            return replies

        return self._with_connection(execute, within)

    def _with_connection(
        self, work: Callable[[Connection], Result], within: float, *, last: bool = False
    ) -> Result:
        """Do *work* with a connection, and once more with a new one if that may help."""
        try:
            return self._pool.use(work, within)
        except CLIENT_ERRORS as error:
            process.forget_frames(error)
            if last or not is_transient(error):
                raise LockUnavailable(self._prefix, described(error), reason_of(error)) from error
        return self._with_connection(work, within, last=True)


def _connection_of(form: Form | None) -> Any:
    """The connection of a form, which does not keep it: the form may last as long as its lease."""
    if form is None:
        return None
    connection, form.connection = form.connection, None
    return connection


# --- locks on one Redis or Valkey server ----------------------------------------------------------


class RedisBackend(Server, Backend):
    """Locks on one Redis (7.0 or newer) or Valkey server.

    OPTIONS are redis-py's connection options (username, password, ssl_*, socket_timeout, …), and
    ``max_connections``: how many connections a process may open for sync code, its watchdog
    included (default 128). Async code uses one connection per event loop, and with ``protocol`` 2
    another one to be rung on.
    """

    location_is = "'redis://host:6379/0'"  # What LOCATION looks like, for messages.

    def __init__(self, conf: Conf) -> None:
        where = f"REDISLOCK[{conf.alias!r}]"
        options, self._most_connections = checked_options(conf.options, f"{where}['OPTIONS']")
        if not conf.location:
            raise ImproperlyConfigured(
                f"{where} has no LOCATION, so no server is named. Add"
                f" 'LOCATION': {self.location_is}."
            )
        self._dialer = self._make_dialer(conf.location, options, where)
        # That of the URL, if there is one: redis-py lets the URL win.
        self._timeout = self._dialer.timeout
        check_timeout(self._timeout, f"{where}['LOCATION']: socket_timeout")
        Backend.__init__(self, conf)

    def _make_dialer(
        self, location: str | tuple[str, ...], options: dict[str, Any], where: str
    ) -> Dialing:
        """How this backend comes to its connections.

        Raises:
            ImproperlyConfigured: Names the setting and says what to do.
        """
        if not isinstance(location, str):
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] must be one URL: {type(self).__name__} uses one server. A"
                " list of sentinels is for django_redislock.backends.SentinelBackend, one of nodes"
                " of a cluster for ClusterBackend, one of independent servers for QuorumBackend."
            )
        of_url, of_options = f"{where}['LOCATION']", f"{where}['OPTIONS']"
        return checked_dialer(location, options, of_url, of_options, protocols=PROTOCOLS)

    def _start(self) -> None:
        super()._start()
        Server.__init__(self, self, self._dialer, self._most_connections)
        self.watch = self.watchdog.watch  # type: ignore[method-assign] # a hop less

    def after_fork(self) -> None:
        self.abandon()
        super().after_fork()

    def operation_timeout(self, ttl: float) -> float:
        return self._timeout or super().operation_timeout(ttl)

    @contextmanager
    def servers(self) -> Iterator[Mapping[str, TakesCommands]]:
        yield {self.conf.address: self}
