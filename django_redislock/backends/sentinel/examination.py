"""Whether sentinels can have a replica take over, and a master that is cut off stops granting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_redislock.backends.redis.errors import ReplyError, all_described
from django_redislock.backends.sentinel.sentinels import OPTIONS
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from django_redislock.backends.sentinel.sentinels import Sentinels

FEWEST_SENTINELS = 3


def isolation(replication: Any) -> Finding:
    """Whether a master that is cut off stops, by its answer to INFO replication."""
    # The server tells this number only if min-replicas-to-write is set.
    if not isinstance(replication, ReplyError) and b"min_slaves_good_slaves" in replication:
        return Finding("isolation", "ok", "a master without its replicas grants nothing")
    return Finding(
        "isolation",
        "warn",
        "a master that is cut off goes on granting to clients that reach it, beside its successor",
        "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers; or REPLICAS_ACK.",
        id="W033",
    )


def agreement(sentinels: Sentinels, number: int, within: float) -> Finding:
    """Whether the sentinels, so many in LOCATION, are enough, and agree."""
    service = sentinels.service
    said = sentinels.execute_on_each(
        within, ("SENTINEL", "MASTER", service), ("SENTINEL", "CKQUORUM", service)
    )
    silent = {place: one for place, one in said.items() if isinstance(one, Exception)}
    answers = [replies for replies in said.values() if not isinstance(replies, Exception)]
    states = [state for state, _ in answers if isinstance(state, dict)]
    masters = {b"%s:%s" % (state[b"ip"], state[b"port"]) for state in states}
    refusals = [quorum for _, quorum in answers if isinstance(quorum, ReplyError)]
    named = ", ".join(sorted(master.decode() for master in masters))
    if refusals or len(masters) > 1:
        return Finding(
            "sentinels",
            "fail",
            f"they could not agree on a failover: {refusals[0]}"
            if refusals
            else f"they name different masters: {named}",
            "Let all of them run, and see what SENTINEL CKQUORUM and their logs say.",
            id="E032",
        )
    if silent:
        return Finding(
            "sentinels",
            "warn",
            f"{len(silent)} of {number} cannot be asked: {all_described(silent, OPTIONS)}",
            f"Start them, or put LOCATION and {OPTIONS} right.",
            id="W032",
        )
    if number < FEWEST_SENTINELS or number % 2 == 0:
        return Finding(
            "sentinels",
            "warn",
            f"LOCATION names {number}; a majority must be alive for a failover",
            "Run three or five, on machines that do not fail together, and name all of them.",
            id="W032",
        )
    return Finding("sentinels", "ok", f"all {number} answer, and call {named} the master")
