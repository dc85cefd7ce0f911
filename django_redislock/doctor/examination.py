"""The examination of one alias: its settings, its backend, then each of its servers by topic."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, InterfaceError

from django_redislock.backends.redis.errors import (
    NotOneCluster,
    TooOld,
    is_of_rights,
    meaning_of,
)
from django_redislock.backends.registry import backends
from django_redislock.doctor.keyspace import eviction, keyspace, memory, persistence, replication
from django_redislock.doctor.rights import PROBE, distance, fewest_rights, rights, take_and_release
from django_redislock.doctor.server import Server, caches, clock, cluster_mode, version
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding, problem
from django_redislock.humanize import duration
from django_redislock.rules.arguments import DEFAULT_DATABASE
from django_redislock.task_runs import oldest_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django_redislock.backends.base import Backend


# --- the memory that the servers of an alias use, and since when they have records ----------------


class Load(NamedTuple):
    """The load of one server."""

    place: str  # Its address.
    answers: bool
    scripting: bool = True  # Whether it allows scripts, as far as this process knows.
    memory: int = 0  # Bytes in use; 0 if it forbids INFO.
    memory_limit: int = 0  # 0: there is none.


def loads(using: str) -> list[Load]:
    """The load of each server of an alias; empty if locks are kept in memory.

    Also empty on a cluster of which no node is known yet.

    Raises:
        ImproperlyConfigured: Something about the alias is wrong.
    """
    with _servers(backends[using]) as servers:
        return [*map(_load, servers)]


@contextmanager
def _servers(backend: Backend) -> Iterator[list[Server]]:
    with backend.servers() as by_place:
        yield [Server(backend, one, place) for place, one in by_place.items()]


def _load(server: Server) -> Load:
    try:
        used, limit = server.number("used_memory"), server.number("maxmemory")
    except LockUnavailable:
        return Load(server.place, answers=False)
    return Load(server.place, True, not server.scripts_need, used, limit)


def start(server: Server) -> Iterator[Finding]:
    """When it was started, and whether its records begin there: it may have come back empty."""
    if "uptime_in_seconds" in server.info:
        since, begin = server.number("uptime_in_seconds"), ""
        with suppress(LockUnavailable):  # Without the rights to ask, that is another finding.
            begin = "; records of runs begin there" if _records_begin_at(server, since) else ""
        yield Finding("start", "ok", f"{duration(since)} ago{begin}")


def beginnings(using: str) -> dict[str, int]:
    """The servers of an alias whose records begin at their start, so many seconds ago.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    with _servers(backends[using]) as servers:
        since = {one.place: (one, one.number("uptime_in_seconds")) for one in servers}
        return {place: ago for place, (one, ago) in since.items() if _records_begin_at(one, ago)}


def _records_begin_at(server: Server, since: int) -> bool:
    """Whether no run is known from before the start of the server, so many seconds ago."""
    if not (since and not server.scripts_need and since < server.backend.conf.records_for):
        return False
    oldest = oldest_run(using=server.backend.alias)
    if oldest is None:
        return True
    kept = server.number("rdb_last_load_keys_loaded") or server.info.get("aof_enabled") == "1"
    return not kept and oldest.ago < since + 1  # The server counts whole seconds.


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
        yield problem(
            "W005",
            f"{type(backend).__name__} keeps locks within one process",
            "Use RedisBackend for locks that several processes or machines share.",
        )
    try:
        yield from backend.examine()
    except LockUnavailable as error:
        yield _no_answer(backend, error)
        return
    with _servers(backend) as servers:
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
        return problem("E021", says, "Use a newer server.")
    if isinstance(cause, NotOneCluster):
        advice = f"Put LOCATION of {where} right."
        return problem("E022", says, advice)
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
    return problem("E020", says, advice)


# --- whether ``migrate`` has made the permissions of the admin's page -----------------------------


def examine_admin() -> Iterator[Finding]:
    """Ask the database, unless the admin is not installed."""
    if not apps.is_installed("django.contrib.admin"):
        yield Finding("permissions", "ok", "not needed: the admin is not installed")
        return
    known = apps.get_model("auth", "Permission").objects.filter(
        content_type__app_label="django_redislock", codename="force_release_heldlock"
    )
    try:
        found = known.exists()
    except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
        yield Finding(
            "permissions",
            "warn",
            f"the database does not tell whether the admin's page has its permissions: {error}",
            "Run manage.py migrate, or check DATABASES.",
        )
        return
    if found:
        yield Finding("permissions", "ok", "the admin's page has its permissions")
    else:
        yield Finding(
            "permissions",
            "warn",
            "the admin's page lacks its permissions, so only superusers see it",
            "Run manage.py migrate.",
        )


# --- whether ``migrate`` has made the tables that atomic and once="database" write to -------------


def examine_tables() -> Iterator[Finding]:
    """Ask the default database, unless there is none."""
    from django_redislock.completed_runs import CompletedRun
    from django_redislock.fences import Fence, has_table

    database = f"database {DEFAULT_DATABASE!r}"
    try:
        missing = [
            str(model._meta.verbose_name_plural)
            for model in (Fence, CompletedRun)
            if not has_table(model, DEFAULT_DATABASE)
        ]
    except ImproperlyConfigured:
        yield Finding("tables", "ok", "not needed: DATABASES names no default database")
    except Error as error:
        yield Finding(
            "tables",
            "warn",
            f"{database} does not tell whether it has the tables of fences: {error}",
            "Check DATABASES.",
        )
    else:
        if missing:
            yield Finding(
                "tables",
                "warn",
                f"{database} has no table of {' and of '.join(missing)}, which atomic and"
                ' once="database" need',
                "Run manage.py migrate django_redislock.",
            )
        else:
            yield Finding("tables", "ok", f"{database} has the tables of fences")
