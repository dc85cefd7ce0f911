"""What one flow asks for, done on all servers: see rules.steps.Performer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from django_redislock import clock
from django_redislock.backends import drivers
from django_redislock.backends.quorum.lines import AsyncLine
from django_redislock.backends.quorum.members import (
    dialing_time,
    is_worth_more_time,
    is_worth_waiting,
    majority_of,
    note_late,
    to_dial,
)
from django_redislock.backends.quorum.patience import Patience
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
        begun = sent = clock.now()
        try:
            if self._ensemble is None:
                patience = step.patience + step.within / 2
                self._ensemble = self._pool.take(step.within, patience=patience)
                begun = min(begun + step.patience, clock.now())
                step = step._replace(within=rest(step.within, begun))
            self._ensemble.connect(step.within)
            sent = clock.now()  # A lease does not begin while its servers are not asked yet.
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
        self._lines: dict[int, AsyncLine] = {}  # The open ones, by server.

    async def call(self, step: Call) -> Answer:
        await self._connect(step.within)
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
        begun, patience = clock.now(), Patience(question.within)
        is_enough, is_patient = question.is_enough, False
        said: Replies = {}
        awaited: dict[asyncio.Future[Any], int] = {}  # By the last reply: they come in order.
        replies: dict[int, list[asyncio.Future[Any]]] = {}
        fit = self._fit(question.within)
        is_needed = len(fit) < majority_of(len(self._members))
        for server in question.among:
            line = self._lines.get(server)
            if line is None or (server not in fit and not is_needed):
                said[server] = self._members[server].trouble(begun)
                continue
            commands = question.commands
            if not question.scripts <= line.known:
                commands = question.in_full()
                line.known |= question.scripts
            replies[server] = line.post(commands)
            awaited[replies[server][-1]] = server
        while awaited and not (is_enough and is_enough(said)):
            seconds = patience.part()
            done, _ = await asyncio.wait(
                awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for reply in done:
                server = awaited.pop(reply)
                said[server] = self._said(server, replies[server], begun)
            if done or seconds:
                continue
            answers = sum(found.__class__ is list for found in said.values())
            if not is_patient and is_worth_more_time(answers, len(awaited), len(self._members)):
                is_patient, patience = True, Patience(question.within)
            else:
                error = TimeoutError("the server did not answer in time")
                for server in awaited.values():
                    self._members[server].failed(error)
                    said[server] = trouble(error, begun)
                break
        return said

    def _said(
        self, server: int, replies: list[asyncio.Future[Any]], begun: float
    ) -> list[Any] | Trouble:
        try:
            found = [reply.result() for reply in replies]
        except TROUBLE as error:
            return trouble(error, begun)
        self._members[server].is_trusted = True
        if any(map(is_wrong_server, found)):
            self._lines[server].close()
        return found

    async def _connect(self, within: float) -> None:
        """See Ensemble.connect()."""
        of = len(self._members)
        self._lines = {s: line for s in range(of) if (line := self._open_line(s))}
        if len(self._fit(within)) == of:
            return
        for _ in range(2):  # What has come while this loop stood still is read.
            await asyncio.sleep(0)
        fit = self._fit(within)
        lacking = {s: member for s, member in enumerate(self._members) if s not in fit}
        dials = {self._members[server].adial(within): server for server in to_dial(lacking, of)}
        patience = Patience(dialing_time(within))
        while dials:
            awaited = [self._members[server] for server in dials.values()]
            waits = is_worth_waiting(awaited, len(self._fit(within)), of)
            seconds = patience.part() if waits else 0.0
            done, _ = await asyncio.wait(
                dials, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for dial in done:
                server = dials.pop(dial)
                if line := self._open_line(server):
                    self._lines[server] = line
            if not done and not seconds:
                if waits:
                    note_late(awaited)
                return

    def _fit(self, within: float) -> set[int]:
        """See Ensemble."""
        return {server for server, line in self._lines.items() if not line.is_late(within)}

    def _open_line(self, server: int) -> AsyncLine | None:
        line = self._members[server].loops.current()
        assert line is None or isinstance(line, AsyncLine)
        return line
