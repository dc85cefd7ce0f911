"""Locks on the nodes of a Redis or Valkey cluster."""

from __future__ import annotations

import heapq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from django_redislock import clock, humanize, process
from django_redislock.backends import drivers
from django_redislock.backends.base import Backend, Indexed
from django_redislock.backends.cluster.node import Node, check_node, turned_away_by
from django_redislock.backends.cluster.slots import Slots
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.checking import (
    check_timeout,
    checked_dialer,
    checked_options,
)
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    ReplyError,
    all_described,
    described,
    reason_of,
)
from django_redislock.backends.redis.sessions import in_thread
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding, problem
from django_redislock.humanize import counted
from django_redislock.rules import flows, scripts
from django_redislock.rules.keys import BUCKETS, bucket_of
from django_redislock.rules.replies import NamesReply
from django_redislock.rules.steps import Answer, Call, NotDone, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from django_redislock.backends.base import TakesCommands
    from django_redislock.backends.cluster.node import SlotMap
    from django_redislock.backends.drivers import Waits
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.backends.watchdog import Watchdog
    from django_redislock.conf import Conf
    from django_redislock.rules.forms import Form
    from django_redislock.rules.replies import LookReply
    from django_redislock.rules.steps import Listen, Outcome, Performer, Tell


# --- whether the nodes in LOCATION answer, and all slots are kept ---------------------------------


def coverage(said: Mapping[str, SlotMap | Exception], nodes: int) -> Finding:
    """Whether all slots are kept, as the nodes in LOCATION have *said*; *nodes* keep some."""
    answers = [one for one in said.values() if not isinstance(one, Exception)]
    wrong = {place: one for place, one in said.items() if isinstance(one, Exception)}
    kept = max((slot_map.owned for slot_map in answers), default=0)
    if kept < REDIS_CLUSTER_HASH_SLOTS:
        return problem(
            "E022",
            f"{REDIS_CLUSTER_HASH_SLOTS - kept} of {REDIS_CLUSTER_HASH_SLOTS} slots are kept by no"
            " node",
            "Let redis-cli --cluster check say what is wrong, and --cluster fix put it right.",
        )
    if wrong:
        return problem(
            "W022",
            f"{len(wrong)} of {len(said)} in LOCATION cannot be asked: {all_described(wrong)}",
            "Start them, or put LOCATION and OPTIONS right.",
        )
    return Finding("cluster", "ok", f"all slots are kept; {counted(nodes, 'node')} keep locks")


# --- performs the steps of one flow on the owner node of its lock: see rules.steps.Performer ------

# Any other node does nothing, and names the owner node, which is then asked within the time of
# the same step. While slots move, any other refusal goes to the flow: it tries again with the
# same token.

MOST_REDIRECTIONS = 4  # In one step: nodes that do not agree name each other.


class _OfNode:
    """One flow's use of the cluster, by a session of the node that it asks.

    One text for both kinds of flows; how a wait is done is an attribute of the class.
    """

    __slots__ = ("_node", "_session", "_slots")

    _perform: ClassVar[Callable[..., Any]]  # See drivers.perform().
    _find: ClassVar[Callable[..., Any]]  # See Slots.find().
    _session_at: ClassVar[Callable[..., Any]]  # A new session of a node.
    _call_asking: ClassVar[Callable[..., Any]]  # See Node.call_asking().

    def __init__(
        self, slots: Slots, node: Node | None = None, session: Performer | None = None
    ) -> None:
        self._slots = slots
        self._node = node
        self._session = session

    def call(self, step: Call) -> Any:
        return self._perform(self._call(step))

    def call_all(self, calls: Sequence[Call]) -> Any:
        return self._perform(self._call_all(calls))

    def tell(self, step: Tell) -> Any:
        assert self._session is not None
        return self._session.tell(step)

    def listen(self, step: Listen) -> Any:
        assert self._session is not None
        return self._session.listen(step)

    def close(self) -> None:
        """Give back what the flow has used of its node."""
        if self._session is not None:
            self._session.close()

    def _to(self, node: Node) -> Performer:
        if self._session is None or node is not self._node:
            self.close()
            self._node, self._session = node, self._session_at(node)
        return self._session

    def _call(self, step: Call) -> Waits[Answer]:
        started = clock.now()
        try:
            node: Node = yield partial(self._find, self._slots, step.name, step.within)
        except CLIENT_ERRORS as error:
            raise trouble_of(error, started, was_sent=False) from error
        for _ in range(MOST_REDIRECTIONS):
            left = step._replace(within=rest(step.within, started))
            try:
                answer: Answer = yield partial(self._to(node).call, left)
            except (Unanswered, Refused) as error:
                redirection = self._slots.judge(node, step, error)
                if redirection is None and turned_away_by(error):
                    raise _gone() from error
                if redirection is None:
                    raise
            else:
                return answer
            node = self._slots.node(redirection)
            if redirection.asking:
                left = step._replace(within=rest(step.within, started))
                outcome: Outcome = yield partial(self._call_asking, node, left)
                return self._answered(node, step, outcome)
        problem = "the nodes of the cluster do not agree which one keeps it"
        raise NotDone(problem, started, clock.now(), "not_ready")

    def _call_all(self, calls: Sequence[Call]) -> Waits[list[Outcome]]:
        """Run scripts in one go on each node that keeps some of the locks, one node after another.

        A call that a node turns away is repeated alone.
        """
        started = clock.now()
        outcomes: dict[int, Outcome] = {}
        by_node: dict[Node, list[int]] = {}
        for number, call in enumerate(calls):
            try:
                node: Node = yield partial(self._find, self._slots, call.name, call.within)
            except CLIENT_ERRORS as error:
                outcomes[number] = trouble_of(error, started, was_sent=False)
            else:
                by_node.setdefault(node, []).append(number)
        for node, numbers in by_node.items():
            some = [calls[number] for number in numbers]
            answers: list[Outcome] = yield partial(self._to(node).call_all, some)
            for number, call, outcome in zip(numbers, some, answers, strict=True):
                outcomes[number] = outcome
                redirection = self._slots.judge(node, call, outcome)
                if redirection or turned_away_by(outcome):
                    try:
                        outcomes[number] = yield from self._call(call)
                    except (Unanswered, Refused) as trouble:
                        outcomes[number] = trouble.with_traceback(None)  # See forget_frames().
        return [outcomes[number] for number in range(len(calls))]

    def _answered(self, node: Node, step: Call, outcome: Outcome) -> Answer:
        """The answer of the node to which a slot is on its way."""
        if isinstance(outcome, Answer):
            return outcome
        self._slots.judge(node, step, outcome)
        if turned_away_by(outcome):  # The slot has gone elsewhere.
            raise _gone() from outcome
        raise copy(outcome) from outcome.__cause__


def _gone() -> NotDone:
    """The trouble if another node is to be asked, but cannot be yet."""
    now = clock.now()
    return NotDone("its slot is on its way to another node", now, now, "not_ready")


class ClusterSession(_OfNode, drivers.Blocking):
    """The use of a cluster by a flow that blocks its thread."""

    __slots__ = ()

    _perform = staticmethod(drivers.perform)
    _find = staticmethod(Slots.find)
    _session_at = staticmethod(Node.session)
    _call_asking = staticmethod(Node.call_asking)


async def _acall_asking(node: Node, call: Call) -> Outcome:
    return await in_thread(partial(node.call_asking, call))


class AsyncClusterSession(_OfNode, drivers.Awaiting):
    """The use of a cluster by a flow that does not block the event loop."""

    __slots__ = ()

    _perform = staticmethod(drivers.aperform)
    _find = staticmethod(Slots.afind)
    _session_at = staticmethod(Node.async_session)
    _call_asking = staticmethod(_acall_asking)


FIRST_PAGE = 32  # Names, at least, that each bucket is asked for.


class ClusterBackend(Backend):
    """Locks on the nodes of a Redis (7.0 or newer) or Valkey cluster; each keeps some of them.

    LOCATION is the address of a node, or a list of several. One node that is alive names all
    others. OPTIONS are those of RedisBackend, for all nodes; ``max_connections`` is for each.
    """

    in_buckets = True
    in_parts = True
    supports_failover = True

    def __init__(self, conf: Conf) -> None:
        where = f"REDISLOCK[{conf.alias!r}]"
        self._of_options = f"{where}['OPTIONS']"
        self._options, self._most_connections = checked_options(conf.options, self._of_options)
        for name in ("host", "port", "path"):
            if name in self._options:
                raise ImproperlyConfigured(
                    f"{self._of_options}[{name!r}]: LOCATION says where its nodes are; leave it"
                    " out."
                )
        if not conf.location:
            raise ImproperlyConfigured(
                f"{where} has no LOCATION, so no node is named. Add"
                " 'LOCATION': ['redis://host-1:6379', 'redis://host-2:6379']."
            )
        of_location = f"{where}['LOCATION']"
        if isinstance(conf.location, str):
            urls = {of_location: conf.location}
        else:
            urls = {f"{of_location}[{number}]": url for number, url in enumerate(conf.location)}
        self._url = next(iter(urls.values()))
        self._location: list[str] = []
        for of_url, url in urls.items():
            self._add(url, of_url)
        # That of the URL, if there is one: redis-py lets the URL win.
        self._timeout = self._dialer_to(self._location[0]).timeout
        check_timeout(self._timeout, f"{of_location}: socket_timeout")
        super().__init__(conf)

    def _add(self, url: str, of_url: str) -> None:
        """Take one URL of LOCATION.

        Raises:
            ImproperlyConfigured: Names the setting and says what to do.
        """
        checked_dialer(url, self._options, of_url, self._of_options)
        if urlsplit(url).scheme == "unix":
            raise ImproperlyConfigured(
                f"{of_url} is a socket, but nodes of a cluster are reached by redis://host:6379."
            )
        place = humanize.address_of(url)
        if _moved(url, place) != _moved(self._url, place):
            raise ImproperlyConfigured(
                f"{of_url} differs from the first one in more than host and port. The rest is for"
                " all nodes; put it into OPTIONS."
            )
        if place in self._location:
            raise ImproperlyConfigured(f"{of_url} names {place} twice; name each once.")
        self._location.append(place)

    def _dialer_to(self, address: str) -> Dialer:
        of_url = "The address of a node, as the cluster names it,"
        url = _moved(self._url, address)
        return checked_dialer(url, self._options, of_url, self._of_options, check_node)

    def _node_at(self, address: str, dialer: Dialer) -> Node:
        return Node(self, address, dialer, self._most_connections, self.slots.judge)

    def _start(self) -> None:
        super()._start()
        self.slots = Slots(self._location, self._dialer_to, self._node_at, self.within)

    def after_fork(self) -> None:
        for node in self.slots.nodes():
            node.abandon()
        super().after_fork()

    def retire(self) -> None:
        self.slots.retire()

    def watchdog_of(self, name: str) -> Watchdog:
        return self.slots.last_owner_node(name).watchdog

    def operation_timeout(self, ttl: float) -> float:
        return self._timeout or super().operation_timeout(ttl)

    # --- performing -----------------------------------------------------------------------------

    def session(self, form: Form | None = None) -> ClusterSession:
        if form is None or form.connection is None:
            return ClusterSession(self.slots)
        return ClusterSession(self.slots, form.server, form.server.session(form))

    def async_session(self, form: Form | None = None) -> AsyncClusterSession:
        if form is None or form.connection is None:
            return AsyncClusterSession(self.slots)
        return AsyncClusterSession(self.slots, form.server, form.server.async_session(form))

    def begin(self, form: Form, /) -> None:
        form.server = node = self.slots.owner_node(form.name)
        if node is not None:
            node.begin(form)
            self._learn_from(form)

    async def abegin(self, form: Form, /) -> None:
        form.server = node = self.slots.owner_node(form.name)
        if node is not None:
            await node.abegin(form)
            self._learn_from(form)

    def _learn_from(self, form: Form) -> None:
        # In a forked child do nothing: the parent asks the other nodes.
        if form.trouble is not None and form.made_in is process.current:
            self.slots.judge(form.server, form, form.trouble)

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        """See Backend.call_many(). All nodes are asked at once; if one fails, the others do not."""
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(calls)))
        for _ in range(2):  # Calls that are redirected are made once more.
            moved: list[int] = []
            for node, numbers, answers in self._call_nodes(calls, left):
                for number, outcome in zip(numbers, answers, strict=True):
                    outcomes[number] = outcome
                    redirection = node and self.slots.judge(node, calls[number], outcome)
                    if redirection and redirection.asking:
                        asked = self.slots.node(redirection).call_asking(calls[number])
                        outcomes[number] = asked
                    elif redirection or turned_away_by(outcome):
                        moved.append(number)
            left = moved
        return [outcomes[number] for number in range(len(calls))]

    def _call_nodes(
        self, calls: Sequence[Call], numbers: Sequence[int]
    ) -> Iterator[tuple[Node | None, list[int], list[Outcome]]]:
        """Run those of *calls* on the owner nodes of their locks.

        Yields each node with the numbers of its calls and their outcomes; None in place of a node
        for a lock that has no owner node.
        """
        started, problem = clock.now(), None
        if any(self.slots.owner_node(calls[number].name) is None for number in numbers):
            problem = self.slots.settle(self.within)
        by_node: dict[Node, list[int]] = {}
        for number in numbers:
            try:
                node = self.slots.found(calls[number].name, problem)
            except CLIENT_ERRORS as error:
                yield None, [number], [trouble_of(error, started)]
            else:
                by_node.setdefault(node, []).append(number)
        if not by_node:
            return

        def call(node: Node) -> list[Outcome]:
            some = [calls[number] for number in by_node[node]]
            try:
                return node.call_many(some)
            except LockUnavailable as error:
                return [trouble_of(error.__cause__ or error, started)] * len(some)

        first, *others = by_node
        with ThreadPoolExecutor(max(1, len(others))) as threads:
            answers = threads.map(call, others)
            yield first, by_node[first], call(first)
            for node, outcomes in zip(others, answers, strict=True):
                yield node, by_node[node], outcomes

    # --- being examined -------------------------------------------------------------------------

    def examine(self) -> Iterator[Finding]:
        problem = self.slots.settle(self.within)
        if problem is not None:
            raise LockUnavailable(self.prefix, described(problem), reason_of(problem)) from problem
        said = self.slots.slot_maps_of_location(self.within)
        yield coverage(said, len(self.slots.nodes()))

    @contextmanager
    def servers(self) -> Iterator[Mapping[str, TakesCommands]]:
        yield {node.address: node for node in self.slots.nodes()}

    def keeps(self, server: TakesCommands, name: str) -> bool:
        return self.slots.last_owner_node(name) is server

    # --- looking --------------------------------------------------------------------------------

    def _indexed(self, which: str, limit: int, offset: int, *, latest_first: bool) -> Indexed:
        # The indexes of all buckets are merged into one, and a part of it is returned.
        end = offset + limit
        # Each bucket is asked for more than its share, so hardly one has to be asked again.
        part = 2 * end // BUCKETS + FIRST_PAGE

        def page(bucket: int, start: int) -> Call:
            args = which, start, part, int(latest_first)
            return Call(scripts.NAMES, _IN_BUCKET[bucket], args, self.within)

        def entries(bucket: int, found: NamesReply) -> Iterator[tuple[bytes, bytes]]:
            for start in count(part, part):
                yield from found.scores
                if start >= found.total:
                    return
                found = NamesReply(*self.results_of([page(bucket, start)])[0])

        parts: list[Iterator[tuple[bytes, bytes]]] = []
        totals, silent, problem = 0, [], None
        outcomes = self.call_many([page(bucket, 0) for bucket in range(BUCKETS)])
        for bucket, outcome in enumerate(outcomes):
            if isinstance(outcome, Answer):
                found = NamesReply(*outcome.value)
                totals += found.total
                parts.append(entries(bucket, found))
            elif isinstance(outcome, Unanswered) or not isinstance(outcome.__cause__, ReplyError):
                # It may also refuse the dial: a certificate, say, or a user that it does not know.
                silent.append(self.slots.last_owner_node(_IN_BUCKET[bucket]).address)
                problem = outcome
            else:
                raise flows.unavailable(self.prefix, outcome) from outcome.__cause__
        if problem is not None and not parts:
            raise flows.unavailable(self.prefix, problem) from problem.__cause__
        in_order = heapq.merge(*parts, key=_score, reverse=latest_first)
        keys = [key for key, _ in islice(in_order, offset, end)]
        permits = [one for key in keys if (one := self.permit_in(key))]
        return Indexed(permits, totals, tuple(dict.fromkeys(silent)))

    def seen(self, name: str, value: list[Any]) -> LookReply:
        return super().seen(name, value)._replace(where=self.slots.last_owner_node(name).address)


def _moved(url: str, address: str) -> str:
    """The same URL with another address."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    database = parts.path.rstrip("/").removesuffix("/0")
    return parts._replace(netloc=f"{user}{at}{address}", path=database).geturl()


def _score(entry: tuple[bytes, bytes]) -> float:
    return float(entry[1])


def _names_in_buckets() -> list[str]:
    """For each bucket a name that is in it. Calls about its index go by that name."""
    found: dict[int, str] = {}
    for number in count():
        found.setdefault(bucket_of(str(number)), str(number))
        if len(found) == BUCKETS:
            break
    return [found[bucket] for bucket in range(BUCKETS)]


_IN_BUCKET = _names_in_buckets()
