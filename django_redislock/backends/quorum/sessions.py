"""Performs the steps of one flow on all servers: see rules.steps.Performer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends import drivers
from django_redislock.backends.quorum.ensemble import AsyncEnsemble
from django_redislock.backends.quorum.voting import NoMajority, outcomes_of
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import Exhausted
from django_redislock.rules.steps import Answer, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.backends.quorum.ensemble import Ensemble
    from django_redislock.backends.quorum.servers import QuorumServer
    from django_redislock.backends.quorum.voting import Vote, Voting
    from django_redislock.backends.redis.pool import Pool
    from django_redislock.rules.steps import Call, Outcome


class _NobodyQueues:
    """A waiter comes back by itself, so no flow wants a bell."""

    def tell(self, step: Any) -> Any:
        raise AssertionError("a quorum queues nobody: there is no bell, and nothing to confirm")

    listen = tell


class Session(_NobodyQueues, drivers.Blocking):
    """One flow's use of the blocking connections: an ensemble, kept from the first step on."""

    def __init__(
        self, voting: Voting, pool: Pool[Ensemble], ensemble: Ensemble | None = None
    ) -> None:
        self._voting = voting
        self._pool = pool
        self._ensemble = ensemble

    def call(self, step: Call) -> Answer:
        value, sent = self._vote(step, self._voting.of(step).answer)
        return Answer(value, sent, clock.now())

    def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        try:
            values, sent = self._vote(calls[0], lambda _: self._voting.answer_all(calls))
        except (Unanswered, Refused) as trouble:
            return [trouble] * len(calls)
        return outcomes_of(values, sent)

    def _vote(self, step: Call, votes: Callable[[Call], Vote]) -> tuple[Any, float]:
        """The result of the votes of a step, or of many alike, and when it was asked for."""
        started = sent = clock.now()
        try:
            if self._ensemble is None:
                patience = step.patience + step.within / 2
                self._ensemble = self._pool.take(step.within, patience=patience)
                started = min(started + step.patience, clock.now())
                step = step._replace(within=rest(step.within, started))
            self._ensemble.connect(step.within)
            sent = clock.now()  # No lease begins before its servers are asked.
            return self._ensemble.vote(votes(step)), sent
        except NoMajority as error:
            raise error.as_trouble(sent) from error.__cause__
        except Exhausted as error:
            raise trouble_of(error, sent, was_sent=False) from error
        except BaseException:
            if self._ensemble is not None:
                self._pool.drop(self._ensemble)
                self._ensemble = None
            raise

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

    def __init__(self, voting: Voting, servers: Sequence[QuorumServer]) -> None:
        self._voting = voting
        self._ensemble = AsyncEnsemble(servers)

    async def call(self, step: Call) -> Answer:
        await self._ensemble.connect(step.within)
        sent = clock.now()
        try:
            value = await self._ensemble.vote(self._voting.of(step).answer(step))
        except NoMajority as error:
            raise error.as_trouble(sent) from error.__cause__
        return Answer(value, sent, clock.now())

    async def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        await self._ensemble.connect(max(call.within for call in calls))
        sent = clock.now()
        return outcomes_of(await self._ensemble.vote(self._voting.answer_all(calls)), sent)

    def close(self) -> None:
        """There is nothing to give back: the tasks of an event loop share its connections."""
