"""Whether held locks survive a restart of the server, and its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.findings import Finding
from django_redislock.humanize import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.doctor.server import Server


def persistence(server: Server) -> Iterator[Finding]:
    info = server.info
    if not info:
        return  # Nobody knows, and version() has said so.
    failed = [
        key
        for key in ("rdb_last_bgsave_status", "aof_last_write_status")
        if info.get(key, "ok") != "ok"
    ]
    if failed:
        yield Finding(
            "persistence",
            "fail",
            f"the last write to disk failed ({', '.join(failed)}); the server may refuse writes",
            "Look at the server's log, and at its disk.",
            id="E026",
        )
    elif info.get("aof_enabled") == "1":
        if server.backend.supports_majority:
            yield _last_second(server)
        else:
            yield Finding("persistence", "ok", "held locks survive a restart (append-only file)")
    elif server.backend.supports_majority:
        yield Finding(
            "persistence",
            "warn",
            "a server that is restarted has forgotten its locks",
            "Start it again only after the longest ttl; or set appendonly yes and appendfsync"
            " always.",
            id="W026",
        )
    else:
        yield Finding(
            "persistence",
            "warn",
            "a restart of the server frees locks that are still relied on",
            "Set appendonly yes; or guard what locks protect with the fence.",
            id="W026",
        )


def _last_second(server: Server) -> Finding:
    """Whether a restarted server knows its last grants, and so will not vote against them."""
    reply = server.run("CONFIG", "GET", "appendfsync")
    if isinstance(reply, ReplyError):
        return Finding(
            "persistence",
            "ok",
            "held locks survive a restart (append-only file); with appendfsync always also those of"
            " the last second",
        )
    if b"always" in (reply.values() if isinstance(reply, dict) else reply):  # RESP3, or RESP2.
        return Finding("persistence", "ok", "held locks survive a restart (appendfsync always)")
    return Finding(
        "persistence",
        "warn",
        "a server that is restarted has forgotten the locks of its last second",
        "Start it again only after the longest ttl; or set appendfsync always.",
        id="W026",
    )


def replication(server: Server) -> Iterator[Finding]:
    if not server.info:
        return  # Nobody knows, and version() has said so.
    backend = server.backend
    replicas, acknowledged = server.number("connected_slaves"), backend.conf.replicas_ack
    if server.info.get("role") == "slave":
        yield Finding(
            "replication",
            "fail",
            "LOCATION names a replica, which refuses writes",
            "Name the primary.",
            id="E027",
        )
    elif acknowledged > replicas:
        yield Finding(
            "replication",
            "fail",
            f"REPLICAS_ACK is {acknowledged}, but the server has {counted(replicas, 'replica')}: no"
            " lock can be taken",
            "Connect more replicas, or lower REPLICAS_ACK.",
            id="E027",
        )
    elif backend.supports_majority:
        yield Finding("replication", "ok", "a majority decides, and replicas do not count")
    elif not replicas and backend.supports_failover:
        yield Finding(
            "replication",
            "warn",
            "no replicas, so no server can take over",
            "Connect replicas to the master.",
            id="W027",
        )
    elif replicas and not acknowledged:
        yield Finding(
            "replication",
            "warn",
            f"{counted(replicas, 'replica')}; a failover may forget the last grants",
            "Set REPLICAS_ACK to 1 or more, so that a grant counts only when replicas know it.",
            id="W027",
        )
    elif replicas:
        yield Finding("replication", "ok", f"{acknowledged} of {replicas} replicas acknowledge")
    else:
        yield Finding("replication", "ok", "no replicas")
