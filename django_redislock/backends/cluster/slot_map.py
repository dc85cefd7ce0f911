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


class _NamedNode(NamedTuple):
    host: bytes | None  # Empty: the host of the node that was asked.
    port: int
    id: bytes


def read_slot_map(said_by: str, reply: Any) -> SlotMap:
    """Read what the node at the address *said_by* answered to CLUSTER SLOTS."""
    its_host = said_by.rpartition(":")[0].strip("[]")
    found = SlotMap(said_by, {}, set(), set(), 0)
    for low, high, *named in reply:
        nodes = [_NamedNode(*one[:3]) for one in named]  # The owner node, then its replicas.
        addresses = [
            humanize.address(one.host.decode() if one.host else its_host, one.port) for one in nodes
        ]
        found.nodes.update(addresses)
        found.ids.update(one.id for one in nodes)
        for bucket, slot in enumerate(SLOT_OF):
            if low <= slot <= high:
                found.owner_nodes[bucket] = addresses[0]
        found = found._replace(owned=found.owned + high - low + 1)
    return found
