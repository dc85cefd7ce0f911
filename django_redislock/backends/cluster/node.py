"""A node of a cluster that keeps locks, as one process uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from redis.crc import key_slot

from django_redislock import clock, humanize
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.dialing import check_version
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    ON_ITS_WAY_TEXTS,
    Exhausted,
    NotOneCluster,
    ReplyError,
)
from django_redislock.backends.redis.server import Server
from django_redislock.rules.keys import BUCKETS, hash_tag
from django_redislock.rules.steps import Answer, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.backends.base import Backend
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.rules.steps import Call, Outcome


# --- which node of a cluster owns which slots, as one of its nodes says ---------------------------

SLOT_OF = [key_slot(hash_tag(bucket).encode()) for bucket in range(BUCKETS)]


class SlotMap(NamedTuple):
    """One answer to CLUSTER SLOTS. An address is as in a URL."""

    said_by: str  # The address of the node that was asked.
    owner_nodes: dict[int, str]  # The address of the owner node, by bucket.
    nodes: set[str]  # Addresses of all nodes that it names; replicas know as much as masters.
    ids: set[bytes]  # The ids of the same nodes.
    owned: int  # How many slots have an owner node.


UNKNOWN = "?"  # What nodes call the host of one whose hostname they do not know.


class _NamedNode(NamedTuple):
    host: bytes | None  # Empty: the host of the node that was asked.
    port: int
    id: bytes
    metadata: Any = ()  # Pairs: other names of the host.


def read_slot_map(said_by: str, reply: Any) -> SlotMap:
    """Read what the node at the address *said_by* answered to CLUSTER SLOTS."""
    its_host = said_by.rpartition(":")[0].strip("[]")
    found = SlotMap(said_by, {}, set(), set(), 0)
    for low, high, *named in reply:
        nodes = [_NamedNode(*one[:4]) for one in named]  # The owner node, then its replicas.
        addresses = [_address(one, its_host) for one in nodes]
        found.nodes.update(filter(None, addresses))
        found.ids.update(one.id for one in nodes)
        for bucket, slot in enumerate(SLOT_OF):
            if low <= slot <= high and addresses[0]:
                found.owner_nodes[bucket] = addresses[0]
        found = found._replace(owned=found.owned + high - low + 1)
    return found


def _address(node: _NamedNode, its_host: str) -> str:
    """Where a node is; "" if nobody says. *its_host*: that of the node that was asked."""
    host = node.host
    if host == UNKNOWN.encode():
        pairs = node.metadata
        names = (
            pairs if isinstance(pairs, dict) else dict(zip(pairs[::2], pairs[1::2], strict=True))
        )
        if b"ip" not in names:
            return ""
        host = names[b"ip"]
    return humanize.address(host.decode() if host else its_host, node.port)


# Transient error replies that say nothing about the owner node of a slot.
_HOLDS_ON = frozenset({"BUSY", "LOADING", "NOREPLICAS", "TRYAGAIN"})


class NoCluster(NotOneCluster):
    """The server that answers is no node of a cluster."""


class Redirection(NamedTuple):
    """The owner node of a slot, as another node names it."""

    address: str
    asking: bool  # The slot is on its way there: ask it once, after ASKING.


class Node(Server):
    """A server that is one of a cluster."""

    def __init__(
        self,
        backend: Backend,
        address: str,
        dialer: Dialing,
        most_connections: int,
        judge: Callable[[Node, Call, Outcome], object],
    ) -> None:
        """Dial nobody yet.

        Args:
            backend: The backend of the locks.
            address: Where the node is, as in a URL.
            dialer: Makes the connections.
            most_connections: See Server.
            judge: Called with the outcome of each renewal.
        """
        super().__init__(backend, dialer, most_connections)
        self.address = address
        self._judge = judge

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes = self._in_its_words(super().renew_many(calls))
        for call, outcome in zip(calls, outcomes, strict=True):
            # If the slot of a lease has moved, another node's watchdog takes the lease over.
            self._judge(self, call, outcome)
        return outcomes

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        return self._in_its_words(super().call_many(calls))

    def _in_its_words(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Make redirections quote the node, without the advice to use ClusterBackend."""
        for outcome in outcomes:
            if isinstance(outcome, Refused) and (error := turned_away_by(outcome)):
                outcome.problem = str(error)
        return outcomes

    def call_asking(self, call: Call) -> Outcome:
        """Run a script although the slot is still on its way to this node."""
        started, was_sent = clock.now(), False

        def call_once(connection: Connection) -> Outcome:
            nonlocal started, was_sent
            started, was_sent = clock.now(), True
            return self._caller.call_asking(
                connection, call._replace(within=call.within / 2), started
            )

        try:
            return self._pool.use(call_once, call.within / 2)
        except CLIENT_ERRORS as error:
            return trouble_of(error, started, was_sent=was_sent)

    def redirection(self, outcome: Outcome) -> Redirection | None:
        """The node that an answer of this node names in its place; None if it names none."""
        error = turned_away_by(outcome)
        if error is None:
            return None
        place = str(error).split()[-1]
        host, _, port = place.rpartition(":")
        if host == UNKNOWN:
            return None
        if not host:  # The host of this node.
            host = self.address.rpartition(":")[0].strip("[]")
        return Redirection(humanize.address(host, int(port)), error.code == "ASK")


def check_node(hello: Any) -> None:
    """Judge a server by its answer to HELLO.

    Raises:
        NoCluster: It is a server of its own, or a sentinel.
        TooOld: It lacks commands that the scripts need.
    """
    check_version(hello)
    if not isinstance(hello, dict) or hello.get(b"mode") != b"cluster":
        raise NoCluster(
            "this is no node of a cluster; for a server of its own use RedisBackend, for sentinels"
            " SentinelBackend"
        )


def turned_away_by(outcome: Outcome) -> ReplyError | None:
    """The error by which a node says that another one is to be asked, named or not."""
    error = outcome.__cause__ if isinstance(outcome, Refused) else None
    return error if isinstance(error, ReplyError) and error.code in {"ASK", "MOVED"} else None


def is_lost(outcome: Outcome) -> bool:
    """Whether a node may no longer own its slots: it did not answer, or says so."""
    if isinstance(outcome, Answer):
        return False
    cause = outcome.__cause__
    if isinstance(outcome, Refused):
        # If it refuses the dial itself, another server may have its address now.
        if isinstance(cause, ReplyError):
            return cause.code == "MOVED"  # To a node that it cannot name.
        return cause is not None
    if isinstance(cause, ReplyError):
        is_on_its_way = any(text in str(cause) for text in ON_ITS_WAY_TEXTS)
        return cause.code not in _HOLDS_ON and not is_on_its_way
    return not isinstance(cause, Exhausted)
