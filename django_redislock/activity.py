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
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Remembered(threading.local):
    process: object = None
    activity: Activity | None = None
    owner: Owner


_remembered = _Remembered()


def current_owner() -> Owner:
    """The owner that a lease granted now will have."""
    activity = current_activity.get()
    here = _remembered
    if here.activity is not activity or here.process is not process.current:
        here.owner = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            thread=threading.current_thread().name,
            command=_command(),
            path=activity.path[:200],
            task=activity.task,
            task_id=activity.task_id,
            permit=activity.permit,
        )
        here.activity, here.process = activity, process.current
    return here.owner


def is_gone(owner: Owner) -> bool:
    """Whether the process of *owner* was one of this host, and does not exist any more.

    False also means that nobody can tell: another host's process, or one whose id is in use again.
    A container that shares its host's name, but not its process ids, makes this wrong; see
    docs/locks-command.md.
    """
    # On Windows os.kill() would not ask, but kill.
    if os.name != "posix" or owner.host != socket.gethostname():
        return False
    if owner.pid is None or owner.pid <= 0:  # These would mean whole groups of processes.
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # Another user's; or a number that is no process id.
        return False
    return False


def described(owner: Owner) -> dict[str, Any]:
    """What ``manage.py locks --json`` prints of an owner; unknown is None."""
    return {
        "host": owner.host or None,
        "pid": owner.pid,
        "thread": owner.thread or None,
        "task": owner.task or None,
        "task_id": owner.task_id or None,
        "command": owner.command or None,
        "path": owner.path or None,
        "permit": owner.permit or None,
    }


@cache
def _command() -> str:
    # The program and, of manage.py, the subcommand. Arguments may carry secrets.
    path = Path(sys.argv[0] if sys.argv else "")
    # Of "python -m celery", it is the path of celery/__main__.py.
    program = (path.parent if path.name == "__main__.py" else path).name or "python"
    if program in {"manage.py", "django-admin"} and len(sys.argv) > 1:
        return f"{program} {sys.argv[1]}"[:100]
    return program[:100]
