"""The memory that the servers of an alias use, and since when they have records."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from django_redislock.backends.registry import backends
from django_redislock.doctor.server import Server
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding
from django_redislock.humanize import duration
from django_redislock.task_runs import oldest_run

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    backend = backends[using]
    with backend.servers() as by_place:
        return [_load(Server(backend, one, place)) for place, one in by_place.items()]


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
    backend = backends[using]
    with backend.servers() as by_place:
        servers = [Server(backend, one, place) for place, one in by_place.items()]
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
