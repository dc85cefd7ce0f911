"""Where locks are kept. Settings name a backend by its dotted path."""

from __future__ import annotations

from typing import Any

from django_redislock.backends.memory.backend import InMemoryBackend

try:
    from django_redislock.backends.cluster.backend import ClusterBackend
    from django_redislock.backends.quorum.backend import QuorumBackend
    from django_redislock.backends.redis.server import RedisBackend
    from django_redislock.backends.sentinel import SentinelBackend
except ImportError as error:
    if error.name != "hiredis":
        raise
    # Raised again where the backend is named. Django drops the error of importing an app, imports
    # the app once more, and fails at its half-imported modules.

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from django_redislock.backends import redis

        return getattr(redis, name)  # This import says what is missing, before any other module.


__all__ = [
    "ClusterBackend",
    "InMemoryBackend",
    "QuorumBackend",
    "RedisBackend",
    "SentinelBackend",
]
