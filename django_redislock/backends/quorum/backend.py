"""Locks on the majority of several independent servers (Redlock)."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, humanize
from django_redislock.backends import drivers
from django_redislock.backends.base import Backend, Indexed
from django_redislock.backends.quorum.ensemble import AsyncEnsemble, Ensemble
from django_redislock.backends.quorum.servers import (
    AsyncQuorumConnection,
    Fences,
    QuorumConnection,
    QuorumServer,
    majority_of,
)
from django_redislock.backends.quorum.voting import NoMajority, Voting, outcomes_of
from django_redislock.backends.redis.calling import Caller, trouble_of
from django_redislock.backends.redis.checking import check_timeout, checked_dialer, checked_options
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.dialing import PROTOCOLS
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    Exhausted,
    ReplyError,
    described,
    reason_of,
)
from django_redislock.backends.redis.pool import Pool
from django_redislock.backends.redis.server import Server
from django_redislock.backends.watchdog import Watchdog
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding, problem
from django_redislock.rules.steps import Answer, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from django_redislock.backends.base import TakesCommands
    from django_redislock.backends.quorum.voting import Vote
    from django_redislock.conf import Conf
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import Call, Outcome


# --- whether a majority of the servers answers, and none of them fails together with another ------


def majority(servers: Mapping[str, TakesCommands]) -> Finding:
    """Examine the servers as one quorum."""
    by_id: dict[str, list[str]] = {}
    silent = []
    for place, server in servers.items():
        try:
            (info,) = server.commands(("INFO", "server"))
        except LockUnavailable:
            silent.append(place)
            continue
        told = None if isinstance(info, ReplyError) else re.search(rb"run_id:(\w+)", info)
        by_id.setdefault(told[1].decode() if told else place, []).append(place)
    same = [places for places in by_id.values() if len(places) > 1]
    return _judge(list(servers), silent, same)


def _judge(places: list[str], silent: list[str], same: list[list[str]]) -> Finding:
    of = len(places)
    on_one_host = max(Counter(place.rpartition(":")[0] for place in places).values())
    if same:
        return problem(
            "E034",
            f"{' and '.join(same[0])} are the same server, which has one vote",
            "Name each server once, by the address that all machines reach it by.",
        )
    if len(silent) >= majority_of(of):
        return problem(
            "E034",
            f"{len(silent)} of {of} servers cannot be asked, so no lock can be taken",
            "Put right what is said of each.",
        )
    if silent:
        return problem(
            "W034",
            f"{', '.join(silent)} of {of} servers cannot be asked; locks go on, but fewer may fail",
            "Start it. If it has lost its data, only after the longest ttl: see Topologies.",
        )
    if on_one_host > 1:
        return problem(
            "W034",
            f"{on_one_host} of {of} servers are on one machine, and fail together",
            "Put each server on a machine of its own.",
        )
    return Finding("quorum", "ok", f"all {of} servers answer, each on its own machine")


# --- performs the steps of one flow on all servers: see rules.steps.Performer ---------------------


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


LOCATION_IS = "['redis://host-1:6379/0', 'redis://host-2:6379/0', 'redis://host-3:6379/0']"
FEWEST_SERVERS = 3
# Short against the ttl: the time to wait for a server that is down is lost for the lease.
LONGEST_OPERATION = 0.5  # Seconds.
OPERATIONS_IN_A_TTL = 10


class QuorumBackend(Backend):
    """Locks on the majority of several servers that know nothing of each other (Redlock).

    LOCATION is a list of URLs, an odd number of at least three. OPTIONS are those of RedisBackend,
    for all of the servers; ``max_connections`` is for each of them. A quorum keeps locks, and no
    records of runs: what needs some names another alias.
    """

    in_parts = True
    supports_majority = True
    supports_queues = False
    supports_batons = False
    supports_rates = False
    supports_records = False

    def __init__(self, conf: Conf) -> None:
        where = f"REDISLOCK[{conf.alias!r}]"
        options, self._most_connections = checked_options(conf.options, f"{where}['OPTIONS']")
        if conf.replicas_ack:
            raise ImproperlyConfigured(
                f"{where}['REPLICAS_ACK'] must be 0: the servers of a quorum have no replicas that"
                " count. A majority of them is what makes a grant safe."
            )
        for key in ("records", "records_for"):
            if getattr(conf, key) != getattr(type(conf), key):
                raise ImproperlyConfigured(
                    f"{where} must leave {key.upper()} out: a quorum keeps no records of runs."
                )
        self.quorum = _quorum(conf.location, options, where)
        timeouts = [server.dialer.timeout for server in self.quorum]
        for number, timeout in enumerate(timeouts):
            check_timeout(timeout, f"{where}['LOCATION'][{number}]: socket_timeout")
        self._timeout = max(filter(None, timeouts), default=None)
        super().__init__(conf)

    def _start(self) -> None:
        super()._start()
        self._caller = Caller(self.alias, self.prefix, self.process)
        self._fences = Fences(self.prefix)
        limit = self._most_connections - Pool.BESIDE
        self._pool = Pool(lambda seconds: Ensemble(self.quorum), limit)
        self._watchdog_ensemble: Ensemble | None = None
        self.watchdog = Watchdog(self, self)
        self.watch = self.watchdog.watch  # type: ignore[method-assign] # a hop less

    def after_fork(self) -> None:
        # Only this process's copies are closed; the parent goes on using its own.
        for server in self.quorum:
            server.after_fork()
        self._pool.abandon()
        self.close_watchdog()
        super().after_fork()

    def retire(self) -> None:
        super().retire()
        self._pool.retire()

    def prepare_watchdog(self) -> None:
        """See watchdog.Renewer: no lock is handed over here, so there is nothing to confirm."""

    def close_watchdog(self) -> None:
        """See watchdog.Renewer."""
        ensemble, self._watchdog_ensemble = self._watchdog_ensemble, None
        if ensemble is not None:
            ensemble.close()

    def operation_timeout(self, ttl: float) -> float:
        return self._timeout or min(LONGEST_OPERATION, ttl / OPERATIONS_IN_A_TTL)

    def session(self, form: Form | None = None) -> Session:
        return Session(self._voting(), self._pool)

    def async_session(self, form: Form | None = None) -> AsyncSession:
        return AsyncSession(self._voting(), self.quorum)

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """See watchdog.Renewer."""
        started = self.clock()
        if self._watchdog_ensemble is None:
            self._watchdog_ensemble = Ensemble(self.quorum)
        try:
            if not self._watchdog_ensemble.connect(min(call.within for call in calls)):
                outcomes = self._otherwise(calls)
                if outcomes is not None:
                    return outcomes
            return self._ask(calls, self._watchdog_ensemble)
        except Exception as error:  # noqa: BLE001 - told apart by trouble_of()
            self.close_watchdog()
            return [trouble_of(error, started)] * len(calls)

    def _otherwise(self, calls: Sequence[Call]) -> list[Outcome] | None:
        """Run scripts on idle connections, or on those of an event loop; None without any."""
        ensemble = self._pool.take_idle()
        if ensemble is None:
            ways = (server.loops.call_all(self.async_session, calls) for server in self.quorum)
            return next((outcomes for outcomes in ways if outcomes is not None), None)
        with closing(Session(self._voting(), self._pool, ensemble)) as session:
            return session.call_all(calls)

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        try:
            return self._pool.use(lambda ensemble: self._call_many(calls, ensemble), self.within)
        except CLIENT_ERRORS as error:
            raise LockUnavailable(self.prefix, described(error), reason_of(error)) from error

    def _call_many(self, calls: Sequence[Call], ensemble: Ensemble) -> list[Outcome]:
        ensemble.connect(min(call.within for call in calls))
        return self._ask(calls, ensemble)

    def _ask(self, calls: Sequence[Call], ensemble: Ensemble) -> list[Outcome]:
        sent = clock.now()
        return outcomes_of(ensemble.vote(self._voting().answers(calls)), sent)

    def _voting(self) -> Voting:
        return Voting(self._caller, self.quorum, self._fences)

    def examine(self) -> Iterator[Finding]:
        with self.servers() as servers:
            yield majority(servers)

    @contextmanager
    def servers(self) -> Iterator[Mapping[str, TakesCommands]]:
        """See Backend.servers(). Each server has connections of its own for the block."""
        limit = self._most_connections
        servers = {one.name: Server(self, one.dialer, limit) for one in self.quorum}
        try:
            yield servers
        finally:
            for server in servers.values():
                server.retire()

    def _indexed(self, which: str, limit: int, offset: int, *, latest_first: bool) -> Indexed:
        # From the first name on: each server has another order, so their pages do not fit.
        end, total = offset + limit, 0
        scores: dict[bytes, float] = {}
        for page in self._pages(which, 0, end, latest_first=latest_first):
            for key, score in page.scores:
                scores[key] = max(float(score), scores.get(key, -math.inf))
            total = max(total, page.total, len(scores))
        in_order = sorted(scores, key=lambda key: scores[key], reverse=latest_first)
        permits = [one for key in in_order[offset:end] if (one := self.permit_in(key))]
        return Indexed(permits, total)


def _quorum(
    location: str | tuple[str, ...], options: dict[str, Any], where: str
) -> list[QuorumServer]:
    """The servers.

    Raises:
        ImproperlyConfigured: They are no quorum. The message says what to do.
    """
    urls = [location] if isinstance(location, str) else location
    if len(urls) < FEWEST_SERVERS or len(urls) % 2 == 0:
        raise ImproperlyConfigured(
            f"{where}['LOCATION'] must be a list of an odd number of servers, at least"
            f" {FEWEST_SERVERS}, such as {LOCATION_IS}, not of {len(list(filter(None, urls)))}."
            " With an even number no more of them may fail than with one less."
        )
    servers: dict[str, QuorumServer] = {}
    for number, url in enumerate(urls):
        of_url = f"{where}['LOCATION'][{number}]"
        dialer = checked_dialer(
            url,
            options,
            of_url,
            f"{where}['OPTIONS']",
            types=(QuorumConnection, AsyncQuorumConnection),
            protocols=PROTOCOLS,
        )
        name = humanize.address_of(url)
        if name in servers:
            raise ImproperlyConfigured(
                f"{of_url} names {name} twice, also with another database: a server has one vote."
            )
        servers[name] = QuorumServer(name, dialer)
    return list(servers.values())
