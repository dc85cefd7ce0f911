"""Which node of a cluster owns which slots, as one of its nodes says."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.crc import key_slot

from django_redislock import humanize
from django_redislock.rules.keys import BUCKETS, hash_tag

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
