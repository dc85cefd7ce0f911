"""Whether a majority of the servers answers, and none of them fails together with another."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from django_redislock.backends.quorum.servers import majority_of
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_redislock.backends.base import TakesCommands


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
        return Finding(
            "quorum",
            "fail",
            f"{' and '.join(same[0])} are the same server, which has one vote",
            "Name each server once, by the address that all machines reach it by.",
            id="E034",
        )
    if len(silent) >= majority_of(of):
        return Finding(
            "quorum",
            "fail",
            f"{len(silent)} of {of} servers cannot be asked, so no lock can be taken",
            "Put right what is said of each.",
            id="E034",
        )
    if silent:
        return Finding(
            "quorum",
            "warn",
            f"{', '.join(silent)} of {of} servers cannot be asked; locks go on, but fewer may fail",
            "Start it. If it has lost its data, only after the longest ttl: see Topologies.",
            id="W034",
        )
    if on_one_host > 1:
        return Finding(
            "quorum",
            "warn",
            f"{on_one_host} of {of} servers are on one machine, and fail together",
            "Put each server on a machine of its own.",
            id="W034",
        )
    return Finding("quorum", "ok", f"all {of} servers answer, each on its own machine")
