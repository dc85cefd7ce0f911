"""The memory that the servers of an alias use, as numbers for monitoring."""

from __future__ import annotations

from typing import NamedTuple

from django_redislock.backends.registry import backends
from django_redislock.doctor.server import Server
from django_redislock.exceptions import LockUnavailable


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
