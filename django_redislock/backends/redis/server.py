"""One Redis or Valkey server, as one process uses it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from django_redislock import clock, process
from django_redislock.backends import drivers
from django_redislock.backends.drivers import Begun
from django_redislock.backends.redis.calling import Caller, trouble, turned_away
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import (
    TROUBLE,
    NotSent,
    ReplyError,
    described,
    is_transient,
    is_wrong_server,
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
    from django_redislock.rules.steps import Call, Outcome

Result = TypeVar("Result")

PATIENCE = 2.0  # Seconds that plain commands may take at least: no lease runs meanwhile.


class Server:
    """The connections of one process to one server, for the locks of one backend.

    RedisBackend is one; a cluster has several, its nodes. Each has a watchdog of its own, so that
    one that hangs delays the renewal of no lease on another.
    """

    def __init__(self, backend: Backend, dialer: Dialing, most_connections: int) -> None:
        """Dial nobody yet.

        Args:
            backend: Whose locks they are.
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
        self._renewing_connection = RenewingConnection(dialer, self._caller)
        self.watchdog = Watchdog(backend, self)

    def retire(self) -> None:
        """Keep no connection that is not in use from now on; see Backend.retire()."""
        self.watchdog.retire()
        self._pool.retire()

    def abandon(self) -> None:
        """In a forked child: close its copies of connections, which the parent goes on using."""
        self._dialer.after_fork()
        self._pool.abandon()
        self.close_watchdog()
        for loops in {self._loops, self._bells}:
            loops.abandon()

    @property
    def scripting(self) -> bool:
        """Whether the server allows scripts, as far as we know."""
        return self._caller.scripting

    def session(self) -> Session:
        """What performs the steps of one flow there, blocking its thread."""
        return Session(self._caller, self._pool)

    def async_session(self) -> AsyncSession:
        """What performs them without blocking the event loop."""
        return AsyncSession(self._caller, self._loops, self._bells, self._pool)

    def ask(self, step: Call) -> Begun:
        """Do the first step of a flow on an idle connection: few steps for the usual answer."""
        pool, caller, listens = self._pool, self._caller, bool(step.listening)
        at_once = caller.scripting and not step.replicas
        connection = pool.take_idle(to_wait=listens) if at_once else None
        channel = caller.channel_on(connection, step.name) if connection is not None else ""
        if connection is None or (listens and not channel):
            return drivers.ask(step, Session(caller, pool, connection))
        began_in, sent = process.current, clock.now()
        try:
            reply = connection.ask(caller.packed(step, channel), step.within)
        except TROUBLE as error:
            pool.drop(connection)
            was_sent = not isinstance(error, NotSent)
            return Begun(began_in, step, trouble(error, sent, was_sent=was_sent))
        except BaseException:
            pool.drop(connection)
            raise
        if reply.__class__ is ReplyError:  # Nothing was done.
            left = rest(step.within, sent)
            return drivers.ask(step, Session(caller, pool, connection), left)
        answer = Answer(reply, sent, clock.now())
        if reply.__class__ is not bytes:
            return Begun(began_in, step, answer, Session(caller, pool, connection))
        pool.give(connection)
        return Begun(began_in, step, answer)

    async def aask(self, step: Call) -> Begun:
        """See ask(), without blocking the event loop."""
        caller, id = self._caller, step.listening  # noqa: A001
        at_once = caller.scripting and not step.replicas
        connection = self._loops.current() if at_once else None
        channel = caller.channel_on(connection, step.name) if connection is not None else ""
        if connection is None or (id and not channel):
            return await drivers.aask(step, self.async_session())
        began_in, sent = process.current, clock.now()
        if id:
            connection.rings.setdefault(id, deque())
        reply = None
        try:
            reply = await connection.send(caller.packed(step, channel), step.within)
        except TROUBLE as error:
            return Begun(began_in, step, trouble(error, sent))
        finally:
            if id and (reply is None or reply.__class__ is bytes):
                connection.rings.pop(id, None)
        if reply.__class__ is bytes:
            return Begun(began_in, step, Answer(reply, sent, clock.now()))
        session = AsyncSession(caller, self._loops, self._bells, self._pool, connection, id)
        if reply.__class__ is ReplyError:
            return await drivers.aask(step, session, rest(step.within, sent))
        return Begun(began_in, step, Answer(reply, sent, clock.now()), session)

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once for the watchdog, on a connection of its own."""
        return self._renewing_connection.call(calls)

    def prepare_watchdog(self) -> None:
        """Begin to dial that connection, if there is none."""
        self._renewing_connection.prepare(self._within)

    def close_watchdog(self) -> None:
        """Close that connection."""
        self._renewing_connection.close()

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts at once, which are safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or turned all of them away.
        """
        outcomes: list[Outcome] = []

        def call(connection: Connection) -> None:
            outcomes.clear()
            outcomes.extend(self._caller.call(connection, calls, clock.now()))
            if error := turned_away(outcomes):
                raise error  # So that a new connection is tried.

        try:
            self._with_connection(call, self._within)
        except LockUnavailable:
            # Of a cluster, a slot that is kept by no node harms no call for another one.
            if not any(isinstance(outcome, Answer) for outcome in outcomes):
                raise
        return outcomes

    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Run plain commands in one round trip; an error reply is returned, not raised.

        They may be run twice, as they must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or is the wrong one.
        """

        within = max(self._within, PATIENCE)

        def ask(connection: Connection) -> list[Any]:
            replies = connection.ask_all([packed(*command) for command in commands], within)
            for reply in replies:
                if is_wrong_server(reply):
                    raise reply
            return replies

        return self._with_connection(ask, within)

    def _with_connection(
        self, work: Callable[[Connection], Result], within: float, *, last: bool = False
    ) -> Result:
        """Do *work* with a connection, and once more with a new one if that may help."""
        try:
            return self._pool.use(work, within)
        except TROUBLE as error:
            if last or not is_transient(error):
                raise LockUnavailable(self._prefix, described(error)) from error
        return self._with_connection(work, within, last=True)
