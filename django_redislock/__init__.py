"""Distributed locks for Django and Celery on Redis or Valkey.

Importing this needs neither configured settings nor Celery.
"""

from __future__ import annotations

from importlib import import_module
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
from django_redislock.lock import distributed_lock, take_up
from django_redislock.rules.limit import Limit, Rate
from django_redislock.term import leadership

if TYPE_CHECKING:
    from django_redislock.celery import single_instance_task
    from django_redislock.fencing import fenced_update
    from django_redislock.jobs import Skipped, single_instance

__version__ = "1.0.0rc1"

__all__ = [
    "InvalidLockName",
    "Lease",
    "Limit",
    "LockError",
    "LockLost",
    "LockMisuse",
    "LockTimeout",
    "LockUnavailable",
    "Rate",
    "Skipped",
    "StaleFence",
    "distributed_lock",
    "fenced_update",
    "leadership",
    "single_instance",
    "single_instance_task",
    "take_up",
]


# Celery and a database are optional: names that need one are imported on first use.
_IMPORTED_LATER = {
    "Skipped": "jobs",
    "fenced_update": "fencing",
    "single_instance": "jobs",
    "single_instance_task": "celery",
}


def __getattr__(name: str) -> Any:
    if module := _IMPORTED_LATER.get(name):
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
