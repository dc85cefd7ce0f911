"""One Redis or Valkey server, as one process uses it."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from django_redislock import clock, process
from django_redislock.backends.redis.calling import Caller, FirstSteps, turned_away
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    described,
    is_transient,
    is_wrong_server,
    reason_of,
)
from django_redislock.backends.redis.loops import Loops
from django_redislock.backends.redis.pool import ConnectionPool
from django_redislock.backends.redis.protocol import packed
from django_redislock.backends.redis.renewing import RenewingConnection
from django_redislock.backends.redis.sessions import AsyncSession, Session
from django_redislock.backends.redis.shared_bell import SharedBells
from django_redislock.backends.watchdog import Watchdog
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.backends.base import Backend
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import Call, Outcome

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
        connection = form.connection if form is not None else None
        return Session(self._caller, self._pool, connection)

    def async_session(self, form: Form | None = None) -> AsyncSession:
        """A performer of one flow in an event loop, which awaits."""
        session = AsyncSession(self._caller, self._loops, self._bells, self._pool)
        if form is not None and form.connection is not None:
            session.go_on(form.connection, form.id)
        return session

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once for the watchdog; see RenewingConnection."""
        return self._renewing_connection.call(calls)

    def _otherwise(self, calls: Sequence[Call]) -> list[Outcome] | None:
        """Run scripts on an idle connection, or on that of an event loop; None without any."""
        connection = self._pool.take_idle()
        if connection is None:
            return self._loops.call_all(self.async_session, calls)
        session = Session(self._caller, self._pool, connection)
        try:
            return session.call_all(calls)
        finally:
            session.close()

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
