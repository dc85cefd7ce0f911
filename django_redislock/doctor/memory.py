"""Whether a server may throw locks away, and whether there is memory for more of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_redislock.findings import Finding
from django_redislock.humanize import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.doctor.server import Server

NEARLY_FULL = 0.8  # Of the memory that a server may use, and of the records that are kept.
RECORD = 1_400  # Bytes that the records of one lock take, with names and hosts of some length.


def eviction(server: Server) -> Iterator[Finding]:
    policy = server.info.get("maxmemory_policy", "")
    if not policy:
        yield Finding(
            "eviction", "warn", "unknown: the server does not tell", "Allow +info.", id="W025"
        )
    elif not server.number("maxmemory"):
        yield Finding("eviction", "ok", "no memory limit, so no lock is evicted")
    elif policy == "noeviction":
        yield Finding("eviction", "ok", "memory is limited and nothing is evicted (noeviction)")
    else:
        evicted = server.number("evicted_keys")
        already = f"; it has evicted {counted(evicted, 'key')} already" if evicted else ""
        yield Finding(
            "eviction",
            "fail",
            f"the policy {policy} may evict a held lock{already}",
            "Set maxmemory-policy noeviction, or keep locks on a server of their own.",
            id="E025",
        )


def memory(server: Server) -> Iterator[Finding]:
    """Whether memory is left for locks, and whether records of runs may fill it."""
    used, limit = server.number("used_memory"), server.number("maxmemory")
    if limit and used >= NEARLY_FULL * limit:
        yield Finding(
            "memory",
            "warn",
            f"{used / limit:.0%} of maxmemory are in use; when it is full, no lock can be taken",
            "Raise maxmemory, and see what the memory is used for.",
            id="W036",
        )
    if server.scripts_need:
        return
    backend = server.backend
    known, most = backend.ran_permits(0).total, backend.most_records
    lacking = (most - known) * RECORD - (limit - used)
    if known >= NEARLY_FULL * most:
        yield Finding(
            "records",
            "warn",
            f"{known} locks of tasks have records, and those of {most} are kept: the oldest go"
            f" before {duration(backend.conf.records_for)} are over, and `locks runs` does not know"
            " them then",
            "Is an object named in a key? Raise RECORDS if its records are needed for so long, or"
            " lower RECORDS_FOR if they are not.",
            id="W037",
        )
    # Each server of a cluster has a part of them; and a few are no sign that there will be more.
    elif limit and not backend.in_buckets and known >= most / 10 and lacking > 0:
        yield Finding(
            "records",
            "warn",
            f"{known} locks of tasks have records, and those of {most} are kept: for so many, about"
            f" {lacking / 1_000_000:.1f} MB of maxmemory are lacking",
            "Lower RECORDS or RECORDS_FOR, or raise maxmemory.",
            id="W037",
        )
