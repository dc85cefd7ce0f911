"""Locks on a Redis or Valkey server."""

from __future__ import annotations

try:
    import hiredis  # noqa: F401 - said here, before any module of this package needs it
except ModuleNotFoundError as error:
    text = "RedisBackend needs hiredis: pip install 'redis[hiredis]'."
    raise ImportError(text, name="hiredis") from error

from django_redislock.backends.redis.server import RedisBackend

__all__ = ["RedisBackend"]
