"""What one flow asks for, done on all servers: see rules.steps.Performer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from django_redislock import clock
from django_redislock.backends import drivers
from django_redislock.backends.quorum.ensemble import CONNECT
from django_redislock.backends.quorum.lines import AsyncLine
from django_redislock.backends.quorum.members import is_worth_waiting, note_late
from django_redislock.backends.quorum.voting import NoMajority
from django_redislock.backends.redis.calling import trouble
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import TROUBLE, Exhausted, is_wrong_server
from django_redislock.rules.steps import Answer

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from django_redislock.backends.quorum.ensemble import Ensemble
    from django_redislock.backends.quorum.members import Member
    from django_redislock.backends.quorum.voting import Replies, Round, Voting
    from django_redislock.backends.redis.connection import AsyncWire
    from django_redislock.backends.redis.pool import Pool
    from django_redislock.rules.steps import Call, Trouble

Result = TypeVar("Result")


def vote(votes: Generator[Round, Replies, Result], ensemble: Ensemble) -> Result:
    """Perform the rounds of a vote, blocking this thread."""
    try:
        question = next(votes)
        while True:
            question = votes.send(ensemble.ask(question))
    except StopIteration as end:
        result: Result = end.value
        return result


class _NobodyQueues:
    """Who waits comes back by himself, so no flow asks to be rung."""

    def tell(self, step: Any) -> Any:
        raise AssertionError("a quorum queues nobody: there is no bell, and no claim to confirm")

    listen = tell


class Session(_NobodyQueues, drivers.Blocking):
    """One flow's use of the blocking connections: an ensemble, kept from the first step on."""

    def __init__(self, voting: Voting, pool: Pool[Ensemble]) -> None:
        self._voting = voting
        self._pool = pool
        self._ensemble: Ensemble | None = None

    def call(self, step: Call) -> Answer:
        sent = clock.now()
        try:
            if self._ensemble is None:
                self._ensemble = self._pool.take(step.within)
                step = step._replace(within=rest(step.within, sent))
            value = vote(self._voting.answer(step), self._ensemble)
        except NoMajority as error:
            raise error.as_trouble(sent) from error.__cause__
        except Exhausted as error:
            raise trouble(error, sent, was_sent=False) from error
        except BaseException:
            if self._ensemble is not None:
                self._pool.drop(self._ensemble)
                self._ensemble = None
            raise
        return Answer(value, sent, clock.now())

    def close(self) -> None:
        if self._ensemble is not None:
            ensemble = self._ensemble
            try:
                self._pool.give(ensemble)
                self._ensemble = None
            except BaseException:
                self._ensemble = None
                self._pool.disown(ensemble)
                raise


class AsyncSession(_NobodyQueues, drivers.Awaiting):
    """One flow's use of its event loop's connections."""

    def __init__(self, voting: Voting, members: Sequence[Member]) -> None:
        self._voting = voting
        self._members = members

    async def call(self, step: Call) -> Answer:
        sent = clock.now()
        votes = self._voting.answer(step)
        try:
            question = next(votes)
            while True:
                question = votes.send(await self._ask(question))
        except StopIteration as end:
            return Answer(end.value, sent, clock.now())
        except NoMajority as error:
            raise error.as_trouble(sent) from error.__cause__

    def close(self) -> None:
        """There is nothing to give back: an event loop's connections are shared by its tasks."""

    async def _ask(self, question: Round) -> Replies:
        """See Ensemble.ask()."""
        begun = clock.now()
        until = begun + question.within
        wires = await self._connected(begun + question.within * CONNECT)
        said: Replies = {}
        awaited: dict[asyncio.Future[Any], int] = {}  # By the last reply: they come in order.
        replies: dict[int, list[asyncio.Future[Any]]] = {}
        for server in question.among:
            wire = wires.get(server)
            if wire is None:
                said[server] = self._members[server].trouble(begun)
                continue
            assert isinstance(wire, AsyncLine)
            commands = question.commands
            if not question.scripts <= wire.known:
                commands = question.in_full()
                wire.known |= question.scripts
            replies[server] = wire.post(commands, question.within)
            awaited[replies[server][-1]] = server
        is_enough = question.is_enough
        while awaited and not (is_enough and is_enough(said)):
            left = until - clock.now()
            done, _ = await asyncio.wait(
                awaited, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if not done and left <= 0:
                break
            for reply in done:
                server = awaited.pop(reply)
                said[server] = self._said(wires[server], replies[server], begun)
        if clock.now() >= until:
            error = TimeoutError("the server did not answer in time")
            for server in awaited.values():
                self._members[server].failed(error)
                said[server] = trouble(error, begun)
        return said

    def _said(
        self, wire: AsyncWire, replies: list[asyncio.Future[Any]], begun: float
    ) -> list[Any] | Trouble:
        try:
            found = [reply.result() for reply in replies]
        except TROUBLE as error:
            return trouble(error, begun)
        if any(map(is_wrong_server, found)):
            wire.close()
        return found

    async def _connected(self, until: float) -> dict[int, AsyncWire]:
        """See Ensemble._connect()."""
        wires, dials = {}, {}
        for server, member in enumerate(self._members):
            if wire := member.loops.open_wire():
                wires[server] = wire
            elif member.may_be_dialed:
                dials[member.adial()] = server
        waits = True
        while dials and waits:
            left = until - clock.now()
            awaited = [self._members[server] for server in dials.values()]
            if left <= 0:
                note_late(awaited)
            waits = left > 0 and is_worth_waiting(awaited, len(wires), len(self._members))
            done, _ = await asyncio.wait(
                dials, timeout=left if waits else 0, return_when=asyncio.FIRST_COMPLETED
            )
            for dial in done:
                server = dials.pop(dial)
                error = ConnectionError("cancelled") if dial.cancelled() else dial.exception()
                if error is not None:
                    self._members[server].failed(error)
                else:
                    self._members[server].connected()
                    wires[server] = dial.result()
        return wires
