"""The error of a call that was started too often and never ended; see give_up_after."""

from __future__ import annotations

from django_redislock.humanize import counted


class RunAbandoned(Exception):
    """A call is not started again: its earlier starts have not ended, so it kills its workers.

    Its body did not run this time. The arguments of the exception are its data, so that a result
    backend can keep them.

    Attributes:
        task: The full name of the task.
        task_id: The id of the call.
        lock: The lock of its runs.
        starts: How many of its starts have not ended.
    """

    def __init__(self, task: str, task_id: str = "", lock: str = "", starts: int = 0) -> None:
        super().__init__(task, task_id, lock, starts)
        self.task = task
        self.task_id = task_id
        self.lock = lock
        self.starts = starts

    def __str__(self) -> str:
        return (
            f"{self.task}[{self.task_id}] was abandoned: it was started"
            f" {counted(self.starts, 'time')} under lock {self.lock!r} and never ended. Most"
            " likely it kills its worker; check the memory of the worker."
        )
