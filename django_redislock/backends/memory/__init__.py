"""Locks within one process, for tests and first steps."""

from __future__ import annotations

from django_redislock.backends.memory.backend import InMemoryBackend

__all__ = ["InMemoryBackend"]
