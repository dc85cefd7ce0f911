"""Whether a Django cache uses the database of the locks: its clear() would flush them."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.conf import settings

from django_redislock.doctor.addresses import is_this_machine, of_servers, parsed
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django_redislock.conf import Conf
    from django_redislock.doctor.server import Server


def caches(server: Server) -> Iterator[Finding]:
    shared = shared_caches(server.backend.conf)
    if not shared:
        yield Finding("cache", "ok", "no Django cache uses the same database")
        return
    yield Finding(
        "cache",
        "warn",
        f"CACHES[{shared[0]!r}] uses the same database, and its clear() flushes all locks",
        "Give locks a database number of their own, in LOCATION or as OPTIONS['db'].",
        id="W004",
    )


def shared_caches(conf: Conf) -> list[str]:
    """The aliases in CACHES that use the database of these locks."""
    ours = _databases(of_servers(conf))
    found = []
    for alias, cache in getattr(settings, "CACHES", {}).items():
        location, options = cache.get("LOCATION", ""), cache.get("OPTIONS", {})
        if isinstance(location, str):
            location = re.split("[;,]", location)
        uses_redis = "redis" in str(cache.get("BACKEND", "")).lower()
        if uses_redis and ours & _databases(parsed(location, options)):
            found.append(alias)
    return found


def _databases(addresses: Iterable[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """The databases at these addresses: (host, port, db) or (path, db)."""
    databases = set()
    for parts in addresses:
        with suppress(ValueError, TypeError):
            port, db = int(parts.get("port", 6379)), int(parts.get("db") or 0)
            host = str(parts.get("host", "localhost")).lower()
            host = "localhost" if is_this_machine(host) else host
            databases.add((parts["path"], db) if "path" in parts else (host, port, db))
    return databases
