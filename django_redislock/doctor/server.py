"""A server under examination: its version, whether it is one of a cluster, and its clock."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from django.conf import settings
from redis.connection import parse_url

from django_redislock.backends.redis.dialing import OLDEST_VERSION, numbers_in
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.findings import Finding, problem
from django_redislock.process import cached_property

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from django_redislock.backends.base import Backend, TakesCommands
    from django_redislock.conf import Conf


# --- where settings lead: how redis-py reads addresses and options. Nothing is dialed -------------


def of_servers(conf: Conf) -> list[dict[str, Any]]:
    """The servers that keep the locks, as keyword arguments of redis-py's connections.

    Behind sentinels, the name of the service stands for the host, as it does in django-redis.
    """
    options = dict(conf.options)
    service = options.pop("service_name", None)
    if not isinstance(service, str):
        return list(parsed(conf.location, options))
    scheme = "rediss" if options.pop("ssl", False) else "redis"
    return list(parsed(f"{scheme}://{service}", options))


def of_sentinels(conf: Conf) -> list[dict[str, Any]]:
    """The sentinels, see of_servers(); none where there are none."""
    if "service_name" not in conf.options:
        return []
    return list(parsed(conf.location, conf.options.get("sentinel_kwargs", {})))


def parsed(location: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One URL, or several, as redis-py reads it; a URL wins over the options.

    Anything that is not a URL (None from an unset variable) is skipped.
    """
    for url in [location] if isinstance(location, str) else location or ():
        with suppress(ValueError, TypeError, AttributeError):
            yield {**options, **parse_url(url)}  # type: ignore[no-untyped-call]


def is_this_machine(host: str) -> bool:
    """Whether *host* is a name of this machine's own loopback."""
    return host.lower() in {"localhost", "::1"} or host.startswith("127.")


CLOCK_DIFFERENCE = 1.0  # Seconds.
RIGHTS_PER_DATABASE = (9, 1)  # The first Valkey that has them.


class Server:
    """One of the servers that keep the locks of a backend."""

    def __init__(self, backend: Backend, connected: TakesCommands, place: str) -> None:
        self.backend = backend
        self.place = place  # Its address.
        self._connected = connected

    @property
    def scripts_need(self) -> str:
        """What to do so that it allows scripts; "" if it does, as far as this process knows."""
        return self._connected.scripts_need

    @cached_property
    def info(self) -> dict[str, str]:
        """Its INFO; empty if it forbids the question."""
        reply = self.run("INFO")
        if isinstance(reply, ReplyError):
            return {}
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        return {key: value for key, colon, value in lines if colon}

    def number(self, key: str) -> int:
        """A number in its INFO; 0 if it is missing."""
        value = self.info.get(key, "0")
        return int(value) if value.isdecimal() else 0

    @property
    def has_rights_per_database(self) -> bool:
        """Whether the rights of a user may be for some of its databases only."""
        return numbers_in(self.info.get("valkey_version", "")) >= RIGHTS_PER_DATABASE

    def run(self, *command: str | int | bytes) -> Any:
        """Run one command; an error reply is returned."""
        return self.run_all([command])[0]

    def run_all(self, commands: list[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Run commands in one round trip; an error reply is returned."""
        return self._connected.commands(*commands) if commands else []

    def own_name(self, name: str) -> str:
        """A lock name that this server keeps: *name*, or one that begins with it."""
        names = (f"{name}-{number}" if number else name for number in count())
        return next(one for one in names if self.backend.keeps(self._connected, one))


def version(server: Server) -> Iterator[Finding]:
    info = server.info
    if "valkey_version" in info:
        yield Finding("version", "ok", f"Valkey {info['valkey_version']}")
        return
    version = info.get("redis_version", "")
    numbers = numbers_in(version)
    if not numbers:
        yield problem("W021", "unknown: the server does not tell", "Allow +info.")
    elif numbers < OLDEST_VERSION:
        yield problem("E021", f"Redis {version}", "Use Redis 7.0 or newer, or Valkey.")
    else:
        yield Finding("version", "ok", f"Redis {version}")


def cluster_mode(server: Server) -> Iterator[Finding]:
    """Whether a server of a cluster is used by a backend that does not know clusters."""
    backend = server.backend
    if backend.in_buckets or not server.info:
        return
    if not server.number("cluster_enabled"):
        yield Finding("cluster", "ok", "a server of its own, not one of a cluster")
        return
    yield problem(
        "E022",
        f"the server is one of a cluster, which {type(backend).__name__} cannot use",
        "Use django_redislock.backends.ClusterBackend.",
    )


def clock(server: Server) -> Iterator[Finding]:
    before = time.time()
    reply = server.run("TIME")
    after = time.time()
    if isinstance(reply, ReplyError):
        return  # Then no lock works either, and rights() has said so.
    seconds, microseconds = map(int, reply)
    difference = seconds + microseconds / 1_000_000 - (before + after) / 2
    if abs(difference) < CLOCK_DIFFERENCE:
        yield Finding("clock", "ok", "the server's clock and this machine's agree")
        return
    ahead = "ahead of" if difference > 0 else "behind"
    yield problem(
        "W028",
        f"the server's clock is {abs(difference):.1f} s {ahead} this machine's",
        "A steady difference does not matter to locks, only to jobs that start at a time of day; a"
        " jump does: while the server's clock is set back, locks are held beyond their ttl. Let NTP"
        " keep both right, in small steps.",
    )


# --- whether a Django cache uses the database of the locks: its clear() would flush them ----------


def caches(server: Server) -> Iterator[Finding]:
    shared = shared_caches(server.backend.conf)
    if not shared:
        yield Finding("cache", "ok", "no Django cache uses the same database")
        return
    yield problem(
        "W004",
        f"CACHES[{shared[0]!r}] uses the same database, and its clear() flushes all locks",
        "Give locks a database number of their own, in LOCATION or as OPTIONS['db'].",
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
