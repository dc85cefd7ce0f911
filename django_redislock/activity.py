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
    around: Activity | None = None  # The one in which it began; see begin().


_IDLE = Activity()

current_activity: ContextVar[Activity] = ContextVar("redislock_activity", default=_IDLE)


def within(activity: Activity) -> Activity:
    """The activity as a part of the current one: it has the path and the task id of that one."""
    around = current_activity.get()
    task_id = activity.task_id or around.task_id
    if (around.path, task_id) == (activity.path, activity.task_id):
        return activity
    return activity._replace(path=around.path, task_id=task_id)


def begin(activity: Activity) -> None:
    """Name *activity* as the reason of all locks that are asked for from now on; see end()."""
    current_activity.set(within(activity)._replace(around=current_activity.get()))


def end(task_id: str) -> None:
    """Go back to what was before the begin() of this task; do nothing if it is not current."""
    activity = current_activity.get()
    if activity.around is not None and activity.task_id == task_id:
        current_activity.set(activity.around)


@contextmanager
def busy_with(activity: Activity) -> Iterator[None]:
    """Name *activity* as the reason of all locks that are asked for within the block."""
    reset = current_activity.set(activity)
    try:
        yield
    finally:
        current_activity.reset(reset)
