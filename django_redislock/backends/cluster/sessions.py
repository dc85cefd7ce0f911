"""Performs the steps of one flow on the owner node of its lock: see rules.steps.Performer.

Any other node does nothing, and names the owner node, which is then asked within the time of the
same step. While slots move, any other refusal goes to the flow: it tries again with the same token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends import drivers
from django_redislock.backends.cluster.node import turned_away_by
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.connection import rest
from django_redislock.backends.redis.errors import CLIENT_ERRORS
from django_redislock.backends.redis.sessions import in_thread
from django_redislock.backends.sync_and_async import aperform, perform
from django_redislock.rules.steps import Answer, NotDone, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.cluster.node import Node
    from django_redislock.backends.cluster.slots import Slots
    from django_redislock.backends.sync_and_async import Waits
    from django_redislock.rules.steps import Bell, Call, Listen, Outcome, Performer, Tell

MOST_REDIRECTIONS = 4  # In one step: nodes that do not agree name each other.


class _OfNode(ABC):
    """One flow's use of the cluster, by a session of the node that it asks."""

    __slots__ = ("_node", "_session", "_slots")

    def __init__(
        self, slots: Slots, node: Node | None = None, session: Performer | None = None
    ) -> None:
        self._slots = slots
        self._node = node
        self._session = session

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
            node: Node = yield partial(self._find, step.name, step.within)
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
                node: Node = yield partial(self._find, call.name, call.within)
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

    @abstractmethod
    def _session_at(self, node: Node) -> Performer:
        """A new session of a node."""

    @abstractmethod
    def _find(self, name: str, seconds: float) -> Any:
        """See Slots.find()."""

    @abstractmethod
    def _call_asking(self, node: Node, call: Call) -> Any:
        """See Node.call_asking()."""


def _gone() -> NotDone:
    """The trouble if another node is to be asked, but cannot be yet."""
    now = clock.now()
    return NotDone("its slot is on its way to another node", now, now, "not_ready")


class ClusterSession(_OfNode, drivers.Blocking):
    """The use of a cluster by a flow that blocks its thread."""

    __slots__ = ()

    def call(self, step: Call) -> Answer:
        return perform(self._call(step))

    def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        return perform(self._call_all(calls))

    def tell(self, step: Tell) -> None:
        assert self._session is not None
        self._session.tell(step)

    def listen(self, step: Listen) -> Bell:
        assert self._session is not None
        bell: Bell = self._session.listen(step)
        return bell

    def _session_at(self, node: Node) -> Performer:
        return node.session()

    def _find(self, name: str, seconds: float) -> Node:
        return self._slots.find(name, seconds)

    def _call_asking(self, node: Node, call: Call) -> Outcome:
        return node.call_asking(call)


class AsyncClusterSession(_OfNode, drivers.Awaiting):
    """The use of a cluster by a flow that does not block the event loop."""

    __slots__ = ()

    async def call(self, step: Call) -> Answer:
        return await aperform(self._call(step))

    async def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        return await aperform(self._call_all(calls))

    async def tell(self, step: Tell) -> None:
        assert self._session is not None
        await self._session.tell(step)

    async def listen(self, step: Listen) -> Bell:
        assert self._session is not None
        bell: Bell = await self._session.listen(step)
        return bell

    def _session_at(self, node: Node) -> Performer:
        return node.async_session()

    async def _find(self, name: str, seconds: float) -> Node:
        return await self._slots.afind(name, seconds)

    async def _call_asking(self, node: Node, call: Call) -> Outcome:
        return await in_thread(partial(node.call_asking, call))
