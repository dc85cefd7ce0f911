"""The examination of one alias: its settings, its backend, then each of its servers by topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from django_redislock.backends.redis.errors import (
    NotOneCluster,
    TooOld,
    is_of_rights,
    meaning_of,
)
from django_redislock.backends.registry import backends
from django_redislock.doctor.caches import caches
from django_redislock.doctor.durability import persistence, replication
from django_redislock.doctor.keyspace import keyspace
from django_redislock.doctor.load import start
from django_redislock.doctor.memory import eviction, memory
from django_redislock.doctor.reach import distance
from django_redislock.doctor.rights import PROBE, fewest_rights, rights, take_and_release
from django_redislock.doctor.server import Server, clock, cluster_mode, version
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_redislock.backends.base import Backend

_TOPICS: tuple[Callable[[Server], Iterator[Finding]], ...] = (
    distance,
    version,
    start,
    cluster_mode,
    rights,
    eviction,
    memory,
    persistence,
    replication,
    clock,
    keyspace,
    caches,
)


def examine(using: str) -> Iterator[Finding]:
    """Examine one alias; end early if no server answers."""
    try:
        backend = backends[using]
    except ImproperlyConfigured as error:
        yield Finding(
            "settings",
            "fail",
            str(error),
            "Until this is put right, every lock of this alias raises it.",
        )
        return
    if not backend.supports_processes:
        yield Finding(
            "server",
            "warn",
            f"{type(backend).__name__} keeps locks within one process",
            "Use RedisBackend for locks that several processes or machines share.",
            id="W005",
        )
    try:
        yield from backend.examine()
    except LockUnavailable as error:
        yield _no_answer(backend, error)
        return
    with backend.servers() as by_place:
        servers = [Server(backend, one, place) for place, one in by_place.items()]
        yield from _examine(servers)
    if backend.supports_processes and not servers:
        yield take_and_release(PROBE, using)


def _examine(servers: list[Server]) -> Iterator[Finding]:
    """Examine the servers of one backend. If one ceases to answer, it is examined no further."""
    answering, refusing = list(servers), set[Server]()
    for topic in _TOPICS:
        found: list[tuple[Server, Finding]] = []
        for server in list(answering):
            try:
                found += [(server, finding) for finding in topic(server)]
            except LockUnavailable as error:
                answering.remove(server)
                if server not in refusing:
                    found.append((server, _no_answer(server.backend, error)))
        # If a lock cannot be taken, that is the reason why questions by scripts fail, too.
        refusing |= {server for server, one in found if one.id == "E023"}
        # A finding that several servers share is told once.
        for finding in dict.fromkeys(finding for _, finding in found):
            places = [server.place for server, same in found if same == finding]
            where = "all servers" if len(places) == len(servers) else ", ".join(places)
            is_only = len(servers) == 1
            yield finding if is_only else replace(finding, says=f"{where}: {finding.says}")


def _no_answer(backend: Backend, error: LockUnavailable) -> Finding:
    """The finding about a server that does not answer, or is of no use now, or at all."""
    where, says = f"REDISLOCK[{backend.alias!r}]", error.problem
    cause = meaning_of(error.__cause__ or error)
    if isinstance(cause, TooOld):
        return Finding("version", "fail", says, "Use a newer server.", id="E021")
    if isinstance(cause, NotOneCluster):
        advice = f"Put LOCATION of {where} right."
        return Finding("cluster", "fail", says, advice, id="E022")
    if error.reason in {"timeout", "connection"}:
        says = f"no answer: {says}"
        advice = (
            f"Check LOCATION and OPTIONS of {where}, the network, whether the server runs, and"
            " whether it expects TLS (rediss://)."
        )
    elif error.reason == "refused":
        says = f"refused: {says}"
        advice = f"Put that right in {where}, or at the server."
        if is_of_rights(cause):
            advice = fewest_rights(backend, per_database="access database" in says)
    else:
        says = f"not ready: {says}"
        advice = "Run the doctor again. If it stays so, look at the server's log."
    return Finding("server", "fail", says, advice, id="E020")
