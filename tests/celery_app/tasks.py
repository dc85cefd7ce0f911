"""Tasks that do nothing but say so, each under another kind of lock.

All take a *key*, which is in the name of their lock, so that tests do not meet.
"""

from __future__ import annotations

import time
from typing import Any

from celery import Task, shared_task

from django_redislock import LockTimeout, single_instance_task
from django_redislock.celery import current_lease
from tests.celery_app.journal import note, wait_at_gate


def work(key: str, *, hold: bool = False, seconds: float = 0.0, fail: bool = False) -> str:
    """The body of all tasks: note the start and the end, and in between do as asked."""
    lease = current_lease()
    note(key, "start", fence=lease and lease.fence)
    if hold:
        wait_at_gate(key)
    time.sleep(seconds)
    if fail:
        note(key, "failure")
        raise ValueError("as asked")
    note(key, "end")
    return f"did {key}"


@single_instance_task(key="{key}")
def skipping(key: str, **how: Any) -> str:
    """Skip when busy."""
    return work(key, **how)


@single_instance_task(key="{key}", on_conflict="raise")
def raising(key: str, **how: Any) -> str:
    """Fail when busy."""
    return work(key, **how)


@single_instance_task(
    key="{key}",
    on_conflict="raise",
    autoretry_for=(LockTimeout,),
    retry_kwargs={"countdown": 0.2, "max_retries": 100},
)
def insisting(key: str, **how: Any) -> str:
    """Retry when busy."""
    return work(key, **how)


@single_instance_task(key="{key}", min_hold=0.3)
def lottery(key: str, noon: int, seconds: float = 0.02) -> int:
    """Draw."""
    note(key, "draw", noon=noon)
    time.sleep(seconds)
    return noon


@single_instance_task(key="{key}")
def hasty_lottery(key: str, noon: int, seconds: float = 0.02) -> int:
    """Draw, under a lock that is free again as soon as the draw is done."""
    note(key, "draw", noon=noon)
    time.sleep(seconds)
    return noon


@shared_task
def collect(results: Any) -> Any:
    """What comes after in a canvas."""
    return results


@shared_task(bind=True)
def append(self: Task, result: Any, more: Any) -> list[Any]:
    """What comes next in a chain."""
    return [result, more]
