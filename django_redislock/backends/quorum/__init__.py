"""Locks on the majority of several independent servers."""

from __future__ import annotations

from django_redislock.backends.quorum.backend import QuorumBackend

__all__ = ["QuorumBackend"]
