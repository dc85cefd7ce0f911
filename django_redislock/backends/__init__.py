"""Where locks are kept. Settings name a backend by its dotted path."""

from __future__ import annotations

from django_redislock.backends.memory import InMemoryBackend
from django_redislock.backends.redis import RedisBackend

__all__ = ["InMemoryBackend", "RedisBackend"]
