"""Locks on the master that sentinels watch."""

from __future__ import annotations

from django_redislock.backends.sentinel.backend import SentinelBackend

__all__ = ["SentinelBackend"]
