"""Locks on a Redis or Valkey server."""

from __future__ import annotations

from django_redislock.backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
