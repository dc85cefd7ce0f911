"""Distributed locks for Django and Celery on Redis or Valkey.

Importing this needs neither configured settings nor Celery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_redislock.exceptions import (
    InvalidLockName,
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    StaleFence,
)
from django_redislock.lease import Lease
from django_redislock.lock import distributed_lock
from django_redislock.term import leadership

if TYPE_CHECKING:
    from django_redislock.celery import single_instance_task
    from django_redislock.effects import fenced_update

__version__ = "0.1.0"

__all__ = [
    "InvalidLockName",
    "Lease",
    "LockError",
    "LockLost",
    "LockMisuse",
    "LockTimeout",
    "LockUnavailable",
    "StaleFence",
    "distributed_lock",
    "fenced_update",
    "leadership",
    "single_instance_task",
]


def __getattr__(name: str) -> Any:
    # Celery is optional, and so is a database: each is imported when something of it is.
    if name == "single_instance_task":
        from django_redislock.celery import single_instance_task

        return single_instance_task
    if name == "fenced_update":
        from django_redislock.effects import fenced_update

        return fenced_update
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
