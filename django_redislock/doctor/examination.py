"""The examination of one alias: its settings, its backend, then each of its servers by topic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from django_redislock.backends.registry import backends
from django_redislock.doctor.caches import caches
from django_redislock.doctor.durability import persistence, replication
from django_redislock.doctor.keyspace import keyspace
from django_redislock.doctor.load import start
from django_redislock.doctor.memory import eviction, memory
from django_redislock.doctor.reach import distance, no_answer
from django_redislock.doctor.rights import PROBE, rights, take_and_release
from django_redislock.doctor.server import Server, clock, cluster_mode, version
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        yield no_answer(using, error)
        return
    with backend.servers() as by_place:
        servers = [Server(backend, one, place) for place, one in by_place.items()]
        yield from _examine(servers)
    if backend.supports_processes and not servers:
        yield take_and_release(PROBE, using)


def _examine(servers: list[Server]) -> Iterator[Finding]:
    """Examine the servers of one backend. If one ceases to answer, it is examined no further."""
    answering = list(servers)
    for topic in _TOPICS:
        found: list[tuple[Server, Finding]] = []
        for server in list(answering):
            try:
                found += [(server, finding) for finding in topic(server)]
            except LockUnavailable as error:
                answering.remove(server)
                found.append((server, no_answer(server.backend.alias, error)))
        # A finding that several servers share is told once.
        for finding in dict.fromkeys(finding for _, finding in found):
            places = [server.place for server, same in found if same == finding]
            where = "all servers" if len(places) == len(servers) else ", ".join(places)
            is_only = len(servers) == 1
            yield finding if is_only else replace(finding, says=f"{where}: {finding.says}")
