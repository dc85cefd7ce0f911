"""What the running code works on, such as a request or a job; shown as part of a lock's owner."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Activity(NamedTuple):
    """The work of the current thread or asyncio task."""

    path: str = ""  # Of the HTTP request being served.
    command: str = ""  # Of a shell, if the work is done by one; or else what runs this process.
    task: str = ""  # The full name of the job: of a task, a function or a command.
    task_id: str = ""
    deferred: str = ""  # See Owner.deferred.


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
