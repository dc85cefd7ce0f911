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
)
from django_redislock.lease import Lease
from django_redislock.lock import distributed_lock

if TYPE_CHECKING:
    from django_redislock.celery import single_instance_task

__version__ = "0.1.0"

__all__ = [
    "InvalidLockName",
    "Lease",
    "LockError",
    "LockLost",
    "LockMisuse",
    "LockTimeout",
    "LockUnavailable",
    "distributed_lock",
    "single_instance_task",
]


def __getattr__(name: str) -> Any:
    # Celery is optional, so it is imported when its decorator is.
    if name != "single_instance_task":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from django_redislock.celery import single_instance_task

    return single_instance_task
