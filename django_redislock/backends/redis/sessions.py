"""Performs the steps of one flow on a connection: see rules.steps.Performer."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import closing
from contextvars import copy_context
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import RedisError

from django_redislock import clock, process
from django_redislock.backends import drivers
from django_redislock.backends.redis.async_connection import retrieve
from django_redislock.backends.redis.calling import trouble_of, turned_away
from django_redislock.backends.redis.connection import id_of, rest
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    Crowded,
    Exhausted,
    NotSent,
    ReplyError,
    TooLate,
    is_wrong_server,
)
from django_redislock.rules.flows import CONFIRM_WITHIN, as_try
from django_redislock.rules.replies import is_busy
from django_redislock.rules.steps import Answer, Bell, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.calling import Caller
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.pool import ConnectionPool, Loops
    from django_redislock.backends.redis.shared_bell import SharedBell
    from django_redislock.rules.steps import Call, Listen, Outcome, Tell

Result = TypeVar("Result")

# Part of a try's time: after it, a new connection leaves commands to the next try. With less
# time, one would soon be sent again on another connection, where it might overtake itself.
LATEST = 0.75
TOO_LATE = "a connection was made, but too late for the command"


class Session(drivers.Blocking):
    """One flow's use of the blocking connections: one, kept from the first step to the last.

    If a waiter finds no connection to keep, it borrows one for each command, and shares a bell.
    """

    __slots__ = ("_bell", "_caller", "_connection", "_id", "_pool")

    def __init__(
        self, caller: Caller, pool: ConnectionPool, connection: Connection | None = None
    ) -> None:
        self._caller = caller
        self._pool = pool
        self._connection = connection
        self._bell: SharedBell | None = None
        self._id = ""

    def call(self, step: Call) -> Answer:
        started = sent = clock.now()
        was_sent = False
        if self._bell is not None and step.listening not in ("", self._id):
            self._leave_bell()  # It was for the lock that the flow wanted before.
        listens = bool(step.listening) and self._bell is None and self._caller.scripting
        if step.listening and self._bell is None and not listens:
            step = as_try(step)  # It must not queue where it is not rung, if scripts work by then.
        if listens and not self._id and self._pool.bells.lacks_one:
            # Most locks are free, so try without a bell, which takes several round trips to open.
            # But a waiter that lost its bell opens another at once: until then the server skips it.
            answer = self.call(as_try(step))
            if not (is_busy(answer.value) and self._caller.scripting):
                return answer
        is_new = self._connection is None
        try:
            if listens:
                step = self._become_rung(step, started)
            connection = self._connection
            if connection is None:
                within = rest(step.within, started)
                patience = step.patience + step.within / 2
                connection = self._connection = self._pool.take(within, patience=patience)
                # The rest of *within* is for the server, which must not seem to be silent only
                # because we asked late.
                started = min(started + step.patience, clock.now())
            if is_new and clock.now() - started > LATEST * step.within:
                raise TooLate(TOO_LATE)
            channel = (
                self._bell.channel if self._bell else self._caller.channel_on(connection, step.name)
            )
            sent, was_sent = clock.now(), True
            outcome = self._caller.call_one(connection, step, started, channel)
        except CLIENT_ERRORS as error:
            # After a mere refusal, as of SUBSCRIBE, the connection is in step.
            if not isinstance(error, ReplyError | TooLate) or is_wrong_server(error):
                self._drop()
            # With replicas, perhaps only the WAIT was not sent.
            was_sent = was_sent and (step.replicas > 0 or not isinstance(error, NotSent))
            raise trouble_of(error, sent, was_sent=was_sent) from error
        except BaseException:
            self._drop()
            raise
        if isinstance(outcome, Answer):
            return outcome
        raise copy(outcome) from outcome.__cause__  # The connection is in step.

    def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        started = sent = clock.now()
        was_sent, first = False, calls[0]
        try:
            if self._connection is None:
                patience = first.patience + first.within / 2
                self._connection = self._pool.take(first.within, patience=patience)
                now = clock.now()
                started = min(started + first.patience, now)  # See call().
                if now - started > LATEST * first.within:
                    raise TooLate(TOO_LATE)
            sent, was_sent = clock.now(), True
            outcomes = self._caller.call(self._connection, calls, started)
            if turned_away(outcomes):
                self._drop()
        except CLIENT_ERRORS as error:
            if not isinstance(error, TooLate):
                self._drop()
            was_sent = was_sent and (first.replicas > 0 or not isinstance(error, NotSent))
            return [trouble_of(error, sent, was_sent=was_sent) for _ in calls]
        except BaseException:
            self._drop()
            raise
        return outcomes

    def tell(self, step: Tell) -> None:
        started = clock.now()
        try:
            if self._connection is None:
                self._connection = self._pool.take(CONFIRM_WITHIN / 2)
            channel = self._caller.channel_on(self._connection, step.name)
            self._connection.tell(self._caller.telling(step, channel))
        except CLIENT_ERRORS as error:
            self._drop()
            raise trouble_of(error, started) from error
        except BaseException:
            self._drop()
            raise

    def listen(self, step: Listen) -> Bell:
        now = clock.now()
        until = now + step.seconds
        try:
            if self._bell is not None:
                self._give()  # Other threads need the connection meanwhile.
                return _bell(self._bell.next_ring(step.id, step.seconds))
            if self._connection is None:
                raise Unanswered("the connection was lost", now, now, "connection")
            while True:
                ring = self._connection.next_ring(until - now)
                if ring is None or id_of(ring) == step.id:
                    return _bell(ring)
                now = clock.now()
        except CLIENT_ERRORS as error:
            self._drop()
            raise trouble_of(error, now) from error
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        self._give()
        if self._bell is not None:
            self._leave_bell()

    def _become_rung(self, step: Call, started: float) -> Call:
        """Get a connection on which the server rings us, our own or that of a shared bell.

        Returns:
            The step. Where we cannot be rung, it does not queue.
        """
        if self._pool.bells.for_all:
            return self._share_bell(step, started)
        try:
            if self._connection is None:
                self._connection = self._pool.take(step.within, to_wait=True)
            if not self._caller.channel_on(self._connection, step.name):
                channel = self._caller.new_channel(step.name)
                self._connection.subscribe(channel, rest(step.within, started))
        except Crowded:
            return self._share_bell(step, started)
        return step

    def _share_bell(self, step: Call, started: float) -> Call:
        self._id = step.listening
        self._bell = self._pool.bells.open(self._caller.new_channel(step.name), step.within)
        try:
            self._bell.expect(self._id, rest(step.within / 2, started))
        except RedisError as error:  # It could not be dialed.
            process.pass_on_interrupt(error)
            if isinstance(error, ReplyError):
                raise
            self._leave_bell()
            return as_try(step)
        return step

    def _give(self) -> None:
        """Give the connection back to the pool."""
        if self._connection is not None:
            connection = self._connection
            try:
                self._pool.give(connection)
                self._connection = None
            except BaseException:
                self._connection = None
                self._pool.disown(connection)
                raise

    def _drop(self) -> None:
        """Give the connection up, since a reply may still come on it."""
        if self._connection is not None:
            self._pool.drop(self._connection)
            self._connection = None
        self._leave_bell()

    def _leave_bell(self) -> None:
        if self._bell is not None:
            self._bell.forget(self._id)
            self._bell = None


class AsyncSession(drivers.Awaiting):
    """One flow's use of its event loop's connection, and of the one on which it is rung.

    Both are the same connection, except in RESP2.
    """

    __slots__ = ("_bells", "_caller", "_connection", "_id", "_loops", "_pool", "_rung")

    def __init__(
        self,
        caller: Caller,
        loops: Loops,
        bells: Loops,
        pool: ConnectionPool,
    ) -> None:
        self._caller = caller
        self._loops = loops
        self._bells = bells
        self._pool = pool
        self._connection: AsyncConnection | None = None
        self._rung: AsyncConnection | None = None
        self._id = ""

    def go_on(self, connection: AsyncConnection, id: str) -> None:  # noqa: A002
        """Go on with the connection of the first step, which listens for *id*, if any."""
        self._connection, self._id = connection, id
        self._rung = connection if id else None

    async def call(self, step: Call) -> Answer:
        started = sent = clock.now()
        was_sent = False
        if step.listening and self._caller.scripting and not self._id and self._lacks_bell(step):
            answer = await self.call(as_try(step))  # See Session.call().
            if not (is_busy(answer.value) and self._caller.scripting):
                return answer
        outcome = None
        try:
            connection = self._loops.current() if self._caller.scripting else None
            if connection is None or (step.listening and self._is_to_subscribe(step, connection)):
                async with self._loops.in_turn(rest(step.within / 2, started)):
                    connection = self._connection = await self._connected(step.within)
                    if connection is not None and step.listening:
                        step = await self._become_rung(step, connection, started)
            else:
                self._connection = connection
                if step.listening:
                    step = await self._become_rung(step, connection, started)
            if connection is not None:
                sent, was_sent = clock.now(), True
                outcome = await self._caller.acall_one(
                    connection, step, started, self._channel(step)
                )
        except CLIENT_ERRORS as error:
            if is_wrong_server(error) and self._connection is not None:
                self._connection.close()
            raise trouble_of(error, sent, was_sent=was_sent) from error
        if outcome is None:
            try:
                return await self._in_thread(partial(_call_late, step, started), step.within)
            except Exhausted as error:
                raise trouble_of(error, started, was_sent=False) from error
        if isinstance(outcome, Answer):
            return outcome
        raise copy(outcome) from outcome.__cause__

    async def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        started = sent = clock.now()
        was_sent, outcomes = False, None
        try:
            connection = self._connection = await self._connected(calls[0].within)
            if connection is not None:
                sent, was_sent = clock.now(), True
                outcomes = await self._caller.acall(connection, calls, started)
                if outcomes is not None and turned_away(outcomes):
                    connection.close()
        except CLIENT_ERRORS as error:
            return [trouble_of(error, sent, was_sent=was_sent) for _ in calls]
        if outcomes is None:  # See call().
            try:
                work = partial(_call_all_late, calls, started)
                return await self._in_thread(work, calls[0].within)
            except Exhausted as error:
                return [trouble_of(error, started, was_sent=False) for _ in calls]
        return outcomes

    async def tell(self, step: Tell) -> None:
        started = clock.now()
        assert self._connection is not None
        try:
            self._connection.tell(self._caller.telling(step, self._channel(step)))
        except CLIENT_ERRORS as error:
            raise trouble_of(error, started) from error

    async def listen(self, step: Listen) -> Bell:
        started = clock.now()
        assert self._rung is not None
        try:
            return _bell(await self._rung.next_ring(step.id, step.seconds))
        except CLIENT_ERRORS as error:
            raise trouble_of(error, started) from error

    def close(self) -> None:
        if self._rung is not None:
            self._rung.rings.pop(self._id, None)

    async def _connected(self, within: float) -> AsyncConnection | None:
        """The connection of the loop, or None if a thread is to do the work on another.

        Without scripts an operation takes several commands between WATCH and EXEC, which cannot
        share a connection with other tasks. And a server that takes no new connection may serve
        those of threads.
        """
        if not self._caller.scripting:
            return None
        try:
            return await self._loops.connection(within)
        except CLIENT_ERRORS as error:
            process.pass_on_interrupt(error)
            if not self._pool.has_idle:
                raise
            return None

    def _is_to_subscribe(self, step: Call, connection: AsyncConnection) -> bool:
        """Whether *connection*, on which waiters are rung, is not subscribed yet."""
        return self._bells is self._loops and not self._caller.channel_on(connection, step.name)

    def _lacks_bell(self, step: Call) -> bool:
        """Whether a connection for rings alone is needed, and not there yet."""
        if self._bells is self._loops:
            return False
        rung = self._bells.current()
        return rung is None or not self._caller.channel_on(rung, step.name)

    async def _become_rung(self, step: Call, connection: AsyncConnection, started: float) -> Call:
        """Get a connection on which the server rings us: *connection*, or one for rings alone.

        Returns:
            The step. Where we cannot be rung, it does not queue.
        """
        rung = connection
        if self._bells is not self._loops:
            try:
                rung = await self._bells.connection(rest(step.within / 2, started))
            except RedisError as error:
                process.pass_on_interrupt(error)
                return as_try(step)
            if rung.opened_at < connection.opened_at:
                # The one for commands was lost meanwhile. After a failover behind one address, the
                # new one may lead to another server.
                rung.close()
                rung = await self._bells.connection(rest(step.within, started))
        channel = self._caller.channel_on(rung, step.name)
        if not channel:
            channel = self._caller.new_channel(step.name)
            await rung.subscribe(channel, rest(step.within, started))
        elif rung is self._rung and rung is not connection:
            # Test it: no command is sent on it, so nobody would notice its end.
            rung.subscribe_again(channel, step.within)
        if self._rung is not None and self._id != step.listening:
            self._rung.rings.pop(self._id, None)  # The flow wanted another lock before.
        self._rung, self._id = rung, step.listening
        rung.rings.setdefault(step.listening, deque())
        return step

    def _channel(self, step: Call | Tell) -> str:
        """The channel on which we are rung; "" if there is none."""
        connection = self._connection if self._bells is self._loops else self._rung
        if connection is None or connection.closed:
            return ""
        return self._caller.channel_on(connection, step.name)

    async def _in_thread(self, work: Callable[[Session], Result], seconds: float) -> Result:
        """Do *work* with a session in a thread; there are no more such threads than connections.

        Raises:
            Exhausted: It was not the turn of this coroutine within so many seconds.
        """
        turns = self._loops.turns(self._pool.limit)
        try:
            async with asyncio.timeout(seconds):
                await turns.acquire()
        except TimeoutError as error:
            raise self._pool.exhausted() from error

        def with_session() -> Result:
            with closing(Session(self._caller, self._pool)) as session:
                return work(session)

        try:
            return await in_thread(with_session)
        finally:
            turns.release()


def _call_late(step: Call, started: float, session: Session) -> Answer:
    """Call in the rest of its time: it may have waited for a thread."""
    if step.listening:
        step = as_try(step)  # See Session.call().
    return session.call(step._replace(within=rest(step.within, started), patience=0.0))


def _call_all_late(calls: Sequence[Call], started: float, session: Session) -> list[Outcome]:
    left = rest(calls[0].within, started)
    return session.call_all([call._replace(within=left) for call in calls])


async def in_thread(work: Callable[[], Result]) -> Result:
    """Do blocking *work* in a thread. Its time is bounded, so a cancellation waits for its end.

    The flow must not begin to undo the work before that.
    """
    context = copy_context()  # Log records tell of the job.
    outcome = drivers.start_in_thread(partial(context.run, work), "redislock-call")
    call, cancelled = await drivers.to_its_end(asyncio.wrap_future(outcome))
    try:
        if cancelled is not None:
            retrieve(call)
            raise cancelled
        return call.result()
    finally:
        del call, cancelled, outcome  # See drivers._first_step().


def _bell(ring: bytes | None) -> Bell:
    return Bell(ring.decode().split() if ring else [], clock.now())
