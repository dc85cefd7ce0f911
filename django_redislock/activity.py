"""Who is asking for a lock right now, as humans will read it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from django_redislock import process
from django_redislock.rules.stored import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator


class Activity(NamedTuple):
    """What the current thread or asyncio task is busy with."""

    path: str = ""  # Of the HTTP request being served.
    task: str = ""
    task_id: str = ""
    permit: str = ""


_IDLE = Activity()

current_activity: ContextVar[Activity] = ContextVar("redislock_activity", default=_IDLE)


@contextmanager
def busy_with(activity: Activity) -> Iterator[None]:
    """Name *activity* as the reason of all locks that are asked for within the block."""
    reset = current_activity.set(activity)
    try:
        yield
    finally:
        current_activity.reset(reset)


class _LastOwner(threading.local):
    """The owner that a thread had last, which it is until its activity or its process changes."""

    process: object = None
    activity: Activity | None = None
    owner: Owner


_last = _LastOwner()


def current_owner() -> Owner:
    """The owner that a lease granted now will have."""
    activity = current_activity.get()
    if _last.activity is not activity or _last.process is not process.current:
        _last.owner = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            thread=threading.current_thread().name,
            command=_command(),
            path=activity.path[:200],
            task=activity.task,
            task_id=activity.task_id,
            permit=activity.permit,
        )
        _last.activity, _last.process = activity, process.current
    return _last.owner


@cache
def _command() -> str:
    # The program and, of manage.py, the subcommand. Arguments may carry secrets.
    path = Path(sys.argv[0] if sys.argv else "")
    # Of "python -m celery", it is the path of celery/__main__.py.
    program = (path.parent if path.name == "__main__.py" else path).name or "python"
    if program in {"manage.py", "django-admin"} and len(sys.argv) > 1:
        return f"{program} {sys.argv[1]}"[:100]
    return program[:100]
