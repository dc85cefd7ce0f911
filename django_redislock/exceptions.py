"""Everything that can go wrong with a lock.

LockError
├── LockTimeout      another owner held the lock until the wait ran out
├── LockLost         the lease ended while its owner relied on it
├── StaleFence       the database has a newer fence of the lock: a later lease has written
├── LockUnavailable  the server did not, could not or would not answer
├── LockMisuse       the call can never work: a deadlock with itself, a lease of another process
└── InvalidLockName  the name cannot be a lock's name (also a ValueError)

The arguments of an exception are its data, so that it survives pickling and Celery's result
backends. ``__str__`` makes the sentence. New arguments go to the end: a worker with an older
version of the class leaves out those that it does not know (``*newer``).
"""

from __future__ import annotations

import math
from typing import Literal

from django_redislock.humanize import counted

LostReason = Literal["expired", "forced", "taken", "unreachable", "replaced"]
UnavailableReason = Literal[
    "timeout", "connection", "pool", "not_ready", "replicas", "majority", "refused"
]

_LOST_BECAUSE: dict[str, str] = {
    "expired": "its time ran out before it was renewed, or the server lost its key",
    "forced": "an operator released it by force",
    "taken": "another owner holds the lock now",
    "replaced": "a newer call has replaced this one",
    "unreachable": "the server could not be reached in time to renew it",
}


class LockError(Exception):
    """Base of all errors about a lock. Do not raise it directly."""

    name: str

    def __init__(self, name: str, *details: object) -> None:
        super().__init__(name, *details)
        self.name = name


class LockTimeout(LockError):
    """Another owner held the lock until the wait ran out.

    Attributes:
        name: The lock.
        holder: The holder, or the last one if the lock cools down, as ``host:pid`` and what it
            runs; None if unknown.
        expires_in: Seconds until the holder's lease ends unless renewed, or the cooling ends; None
            if unknown.
        cooling: Whether the lock cools down: its owner is done, and min_hold keeps it taken.
        alias: The alias of the lock in REDISLOCK.
        reason: If an operator has paused the lock (`manage.py locks pause`): why, or "" if none was
            given. Else None.
        rate: Whether it is a Rate, and no start was due. Then *expires_in* is exactly when one is.
    """

    def __init__(
        self,
        name: str,
        holder: str | None = None,
        expires_in: float | None = None,
        cooling: bool = False,
        alias: str = "default",
        reason: str | None = None,
        rate: bool = False,
        *newer: object,
    ) -> None:
        super().__init__(name, holder, expires_in, cooling, alias, reason, rate)
        self.holder = holder
        self.expires_in = expires_in
        self.cooling = cooling
        self.alias = alias
        self.reason = reason
        self.rate = rate

    def __str__(self) -> str:
        if self.rate:
            due = f"; the next one is due in {self.expires_in or 0:.1f} s"
            return f"Rate {self.name!r} has no start left{due}."
        who, left = self.holder or "another owner", self.expires_in
        if self.cooling:
            says, ends = f"it cools down after {who}", ", and is free in {:.1f} s"
        elif self.reason is not None:
            says = ": ".join(filter(None, (f"paused by {who}", self.reason)))
            ends = "; this pause ends in {:.1f} s"
        else:
            says, ends = f"held by {who}", "; its lease ends in {:.1f} s unless it is renewed"
        if left is not None and math.isfinite(left):
            says += ends.format(left)
        return f"Lock {self.name!r} is busy: {says}."


class LockLost(LockError):
    """The lease ended while its owner relied on it.

    Attributes:
        name: The lock.
        reason: "expired", "forced", "taken", "unreachable" or "replaced".
        over: If a release or a setting such as max_hold ended it: a clause that says so. Else "".
    """

    def __init__(
        self, name: str, reason: LostReason = "expired", over: str = "", *newer: object
    ) -> None:
        super().__init__(name, reason, over)
        self.reason = reason
        self.over = over

    def __str__(self) -> str:
        if self.over:
            return f"The lease of lock {self.name!r} is not held: {self.over}."
        return f"The lease of lock {self.name!r} was lost: {_LOST_BECAUSE[self.reason]}."


class StaleFence(LockError):
    """A later lease of the lock has written to the database, so this one must not write any more.

    It is raised before anything is written in this transaction.

    Attributes:
        name: The lock.
        fence: The fence of the lease that came too late.
        newer: The fence that the database has.
    """

    def __init__(self, name: str, fence: int, newer: int) -> None:
        super().__init__(name, fence, newer)
        self.fence = fence
        self.newer = newer

    def __str__(self) -> str:
        return (
            f"Fence {self.fence} of lock {self.name!r} is stale: another lease has claimed"
            f" fence {self.newer} in the database. Nothing was written."
        )


class LockUnavailable(LockError):
    """The server did not, could not or would not answer. It never means "busy".

    Attributes:
        name: The lock.
        problem: What happened, as a clause. The client's own exception is the ``__cause__``.
        reason: The same in a word, for metrics: "timeout" (no answer in time), "connection" (none
            could be made, or it was lost), "pool" (none of max_connections became free),
            "not_ready" (the server answers, but cannot serve now: failover, loading, too many
            clients), "replicas" (too few have acknowledged), "majority" (too few servers of a
            quorum), or "refused" (passwords, rights, databases, types, memory).
    """

    def __init__(
        self,
        name: str,
        problem: str = "the server did not answer",
        reason: UnavailableReason = "timeout",
        *newer: object,
    ) -> None:
        super().__init__(name, problem, reason)
        self.problem = problem
        self.reason = reason

    def __str__(self) -> str:
        return f"Lock {self.name!r} is unavailable: {self.problem}."


class LockMisuse(LockError):
    """The call can never work, so it is refused at once instead of waiting for ever.

    Attributes:
        name: The lock.
        problem: What was wrong and what to do, as a sentence.
    """

    def __init__(self, name: str, problem: str = "") -> None:
        super().__init__(name, problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"Lock {self.name!r}: {self.problem}"


class InvalidLockName(LockError, ValueError):
    """The name cannot be a lock's name.

    Attributes:
        name: The ``repr`` of the argument, cut to a readable length.
        problem: The rule it breaks, as a clause.
    """

    def __init__(self, name: str, problem: str = "") -> None:
        super().__init__(name, problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"Invalid lock name {self.name}: {self.problem}."


# --- the error of a call that was started too often and never ended; see give_up_after ------------


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
