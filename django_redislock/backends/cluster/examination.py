"""Whether the nodes in LOCATION answer, and all slots are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from django_redislock.backends.redis.errors import all_described
from django_redislock.findings import Finding
from django_redislock.humanize import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_redislock.backends.cluster.slot_map import SlotMap


def coverage(said: Mapping[str, SlotMap | Exception], nodes: int) -> Finding:
    """Whether all slots are kept, as the nodes in LOCATION have *said*; *nodes* keep some."""
    answers = [one for one in said.values() if not isinstance(one, Exception)]
    wrong = {place: one for place, one in said.items() if isinstance(one, Exception)}
    kept = max((slot_map.owned for slot_map in answers), default=0)
    if kept < REDIS_CLUSTER_HASH_SLOTS:
        return Finding(
            "cluster",
            "fail",
            f"{REDIS_CLUSTER_HASH_SLOTS - kept} of {REDIS_CLUSTER_HASH_SLOTS} slots are kept by no"
            " node",
            "Let redis-cli --cluster check say what is wrong, and --cluster fix put it right.",
            id="E022",
        )
    if wrong:
        return Finding(
            "cluster",
            "warn",
            f"{len(wrong)} of {len(said)} in LOCATION cannot be asked: {all_described(wrong)}",
            "Start them, or put LOCATION and OPTIONS right.",
            id="W022",
        )
    return Finding("cluster", "ok", f"all slots are kept; {counted(nodes, 'node')} keep locks")
