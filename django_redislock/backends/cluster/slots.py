"""Which node of a cluster owns which locks: the owner node of each.

slot_map.py reads what a node tells of slots. This module keeps it.

redis-py has a map of slots, too. But it asks through clients of its own, which retry behind the
caller's back and have no common time limit (rule R5).
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import closing, suppress
from copy import copy
from typing import TYPE_CHECKING

from redis import exceptions as redis_errors

from django_redislock import clock, process
from django_redislock.backends.cluster.node import SLOT_OF, SlotMap, is_lost, read_slot_map
from django_redislock.backends.drivers import start_in_thread
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    NotOneCluster,
    ReplyError,
    at_servers,
)
from django_redislock.rules.keys import bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django_redislock.backends.cluster.node import Node, Redirection
    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import Call, Outcome

SOONEST = 0.1  # Seconds from one inquiry to the next.

# Seconds for which a node that was lost, or did not answer, is asked after all others. If another
# node disagrees with it, the other is believed.
LOST_FOR = 10.0
# Seconds for which a node is asked after all others because its answer ended no doubt: a master may
# be away for long, and a cluster may have many nodes.
NO_NEWS_FOR = 1.0


class DifferentClusters(NotOneCluster):
    """Nodes in LOCATION know nothing of each other."""


class Slots:
    """Which node owns which bucket of locks, as the nodes have said last.

    When that is in doubt, one thread asks the nodes, for all callers meanwhile. A node that is cut
    off from the others may not know that it has lost its slots. So after a node was lost, a reply
    that names it is ignored if another node names a new owner.
    """

    def __init__(
        self,
        location: Iterable[str],
        dialer_to: Callable[[str], Dialer],
        node_at: Callable[[str, Dialer], Node],
        patience: float,
    ) -> None:
        """Ask nobody yet.

        Args:
            location: Addresses of the nodes to ask first, as in a URL.
            dialer_to: Makes the dialer of an address.
            node_at: Makes the node at an address.
            patience: Seconds that an inquiry may take.
        """
        self._location = tuple(location)
        self._dialers = {address: dialer_to(address) for address in self._location}
        self._dialer_to = dialer_to
        self._node_at = node_at
        self._patience = patience
        self._nodes: dict[str, Node] = {}  # By address.
        self._owner_nodes: dict[int, Node] = {}  # By bucket.
        self._in_doubt = True
        # When an owner node was lost, by the bucket and its address. An answer that names another
        # node for each of them empties this.
        self._doubts: dict[tuple[int, str], float] = {}
        self._asked_last: dict[str, float] = {}  # Until when each unhelpful node is asked last.
        self._retired = False
        # A signal handler may take it while its own thread has it: every change under it may be
        # made twice.
        self._lock = threading.RLock()
        self._inquiry: Future[None] | None = None
        self._asked_at = -SOONEST
        self._compared = False  # Whether all nodes in LOCATION are known to be of one cluster.

    def owner_node(self, name: str) -> Node | None:
        """The owner node of the lock *name*; None if the nodes are to be asked first."""
        return None if self._in_doubt else self._owner_nodes.get(bucket_of(name))

    def last_owner_node(self, name: str) -> Node:
        """The last known owner node of the lock *name*."""
        return self._owner_nodes.get(bucket_of(name)) or self._node(self._location[0])

    def nodes(self) -> list[Node]:
        """All nodes that are in use."""
        return list(self._nodes.values())

    def retire(self) -> None:
        """See Backend.retire()."""
        self._retired = True
        for node in self.nodes():
            node.retire()

    def find(self, name: str, seconds: float) -> Node:
        """The owner node of the lock *name*, within so many seconds; or redis-py's exception."""
        return self.owner_node(name) or self.found(name, self.settle(seconds / 2))

    async def afind(self, name: str, seconds: float) -> Node:
        """See find(), without blocking the event loop."""
        return self.owner_node(name) or self.found(name, await self._asettle(seconds / 2))

    def settle(self, seconds: float) -> Exception | None:
        """Have the nodes asked. Returns the error, if any."""
        inquiry = self._inquire()
        return _problem(inquiry, seconds) if inquiry else None

    async def _asettle(self, seconds: float) -> Exception | None:
        inquiry = self._inquire()
        if inquiry:
            await _ended(inquiry, seconds)
        return _problem(inquiry, 0) if inquiry else None

    def found(self, name: str, problem: Exception | None) -> Node:
        """The owner node of the lock *name* after an inquiry, or redis-py's exception."""
        # An inquiry may fail although the node is well: it may still be the owner node, and refuse
        # only new connections.
        node = self._owner_nodes.get(bucket_of(name))
        if node is not None and not isinstance(problem, NotOneCluster):
            return node
        slot = SLOT_OF[bucket_of(name)]
        raise copy(problem) or redis_errors.ConnectionError(
            f"no node of the cluster keeps slot {slot}"
        )

    def slot_maps_of_location(self, seconds: float) -> dict[str, SlotMap | Exception]:
        """The answer of each node in LOCATION, or why it has none."""
        said: dict[str, SlotMap | Exception] = {}
        for address in self._location:
            try:
                said[address] = _slot_map_of(address, self._dialers[address], seconds)
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                said[address] = error
        return said

    def judge(self, node: Node, call: Call | Form, outcome: Outcome) -> Redirection | None:
        """Learn about the owner node from the outcome of a call. Returns where to ask instead."""
        redirection = node.redirection(outcome)
        if redirection is not None and not redirection.asking:
            owner_node = self.node(redirection)
            with self._lock:
                self._owner_nodes[bucket_of(call.name)] = owner_node
                self._doubts.pop((bucket_of(call.name), owner_node.address), None)
                # Ask it first: the node that has got a slot knows most about all slots.
                first = {owner_node.address: self._dialer(owner_node.address)}
                self._dialers = first | self._dialers
            self._in_doubt = True
        elif is_lost(outcome):
            with self._lock:
                if all(lost != node.address for _, lost in self._doubts):
                    self._asked_at = -SOONEST  # The last inquiry did not know of the loss.
                self._doubts[bucket_of(call.name), node.address] = clock.now()
                self._ask_last(node.address, LOST_FOR)
            self._in_doubt = True
            # Ask now: a process that only renews its leases would ask no sooner than for a lock.
            self._inquire()
        return redirection

    def node(self, redirection: Redirection) -> Node:
        """The node that a redirection leads to."""
        return self._node(redirection.address)

    def _node(self, address: str) -> Node:
        with self._lock:
            node = self._nodes.get(address)
            if node is None:
                made = self._node_at(address, self._dialer(address))
                node = self._nodes.setdefault(address, made)
                if self._retired:
                    node.retire()
            return node

    def _dialer(self, address: str) -> Dialer:
        dialer = self._dialers.get(address)
        if dialer is None:
            dialer = self._dialers[address] = self._dialer_to(address)
        return dialer

    # --- asking ---------------------------------------------------------------------------------

    def _inquire(self) -> Future[None] | None:
        """The inquiry that is under way, or else a new one; None if one has just ended."""
        with self._lock:
            if self._inquiry is not None:
                return self._inquiry
            if clock.now() < self._asked_at + SOONEST and self._owner_nodes:
                return None
            inquiry = self._inquiry = Future()
        try:  # Not with the lock held: if there are no more threads, this one asks.
            return start_in_thread(self._ask, "redislock-cluster", inquiry)
        except BaseException:  # A signal handler raised it: maybe no thread asks; none may wait.
            self._inquiry = None
            raise

    def _ask(self) -> None:
        try:
            self._learn(self._answers())
        finally:
            with self._lock:
                self._inquiry, self._asked_at = None, clock.now()

    def _answers(self) -> list[SlotMap]:
        """The answers of nodes, until one ends all doubt. At first all in LOCATION are asked."""
        started = clock.now()
        with self._lock:
            last = dict(self._asked_last)
            asked = sorted(self._dialers.items(), key=lambda one: max(last.get(one[0], 0), started))
        answers: list[SlotMap] = []
        errors: dict[str, Exception] = {}
        share = self._patience / max(2, len(asked))
        for address, dialer in asked:
            if answers and last.get(address, 0) > started:
                break  # This node and all after it are asked only if no other answers.
            try:
                answer = _slot_map_of(address, dialer, share)
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                errors[address] = error
                with self._lock:
                    self._ask_last(address, LOST_FOR)
                continue
            answers.append(answer)
            if self._doubtful(answer):
                with self._lock:
                    self._ask_last(address, NO_NEWS_FOR)
            elif self._compared:
                break
        if answers:
            return answers
        raise at_servers("no node of the cluster can be asked: ", errors)

    def _ask_last(self, address: str, seconds: float) -> None:
        """For so many seconds, ask a node after all others; called with the lock held."""
        until = clock.now() + seconds
        self._asked_last[address] = max(until, self._asked_last.get(address, 0))

    def _doubtful(self, answer: SlotMap) -> int:
        """For how many buckets of lost nodes an answer names no other owner node."""
        return sum(
            answer.owner_nodes.get(bucket, address) == address
            for (bucket, address), lost_at in list(self._doubts.items())
            if clock.now() < lost_at + LOST_FOR
        )

    def _learn(self, answers: list[SlotMap]) -> None:
        if not self._compared:
            first, *others = answers
            for other in others:
                if other.ids.isdisjoint(first.ids):
                    raise DifferentClusters(
                        f"{first.said_by} and {other.said_by} are of different clusters; name nodes"
                        " of one in LOCATION"
                    )
            self._compared = True
        best = min(answers, key=self._doubtful)
        owners = {bucket: self._node(address) for bucket, address in best.owner_nodes.items()}
        named = best.nodes.union(self._location)  # The nodes to ask next time.
        with self._lock:
            self._owner_nodes |= owners
            if not self._doubtful(best):
                self._doubts.clear()
            self._in_doubt = False
            used = {node.address for node in self._owner_nodes.values()}
            unused = [self._nodes.pop(one) for one in self._nodes.keys() - used]
            for address in self._dialers.keys() - named - used:
                del self._dialers[address]
                self._asked_last.pop(address, None)
            for address in named:
                self._dialer(address)
        for node in unused:
            node.retire()


def _slot_map_of(address: str, dialer: Dialer, seconds: float) -> SlotMap:
    """The answer of the node at *address*; it names at least one owner node."""
    with closing(dialer.dial(seconds / 2)) as connection:
        reply = connection.execute(packed("CLUSTER", "SLOTS"), seconds / 2)
    if isinstance(reply, ReplyError):
        raise copy(reply)
    if not reply:  # It is of no cluster yet, or no longer.
        raise redis_errors.ConnectionError("it knows of no node that keeps slots")
    return read_slot_map(address, reply)


def _problem(inquiry: Future[None], seconds: float) -> Exception | None:
    """Why an inquiry has not succeeded within so many seconds; None if it has."""
    try:
        problem = inquiry.exception(seconds)
    except TimeoutError as error:
        process.pass_on_interrupt(error)
        return redis_errors.ConnectionError("no node of the cluster has answered yet")
    if problem is not None and not isinstance(problem, CLIENT_ERRORS):
        raise copy(problem) from problem
    return problem


async def _ended(inquiry: Future[None], seconds: float) -> None:
    """Return when the inquiry has ended, or after so many seconds. A cancellation lets it go on."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: Future[None]) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(wake)

    inquiry.add_done_callback(tell)
    await asyncio.wait([ended], timeout=seconds)
