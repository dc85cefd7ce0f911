"""Locks on the nodes of a cluster."""

from __future__ import annotations

from django_redislock.backends.cluster.backend import ClusterBackend

__all__ = ["ClusterBackend"]
