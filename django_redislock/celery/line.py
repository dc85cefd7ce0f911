"""The line of deferred runs: each has its position, and comes back shortly before its turn.

A run that finds its lock busy, and is to come back, takes a position at the end of that lock's
line. It keeps the position until its body starts, however often it goes back to the broker. The
server of the locks says how many runs are before it. It knows how long runs last, so it also says
when the turn is.

The line saves work, and guarantees nothing. The message itself waits at the broker. If the line is
lost, runs come back as before, and stand in line again.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from django_redislock import logs, task_runs
from django_redislock.celery.message import carried, waits_in_broker
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from celery import Task

    from django_redislock.celery.options import SingleInstance
    from django_redislock.rules.flows import Busy

logger = logs.logger("django_redislock.celery")

NEAR = 1.0  # Seconds: a run so near its turn waits for it in its worker slot,
NEAREST = 2  # if it is among so many for each run that may be under way,
NEAREST_OF_SECONDS = 5  # or so many if it cannot come back after less than a second.
IN_SLOT = 2.0  # Seconds that it waits there at most.
OF_TIME_LIMIT = 1 / 20  # The part of a time limit that it may wait; the limit goes on meanwhile.

# The part of the time until its turn for which a run goes away. That time is a guess, and gets
# better as the turn comes nearer.
AWAY = 0.75
SHORTEST_PAUSE = 0.1  # Seconds.


class Turn(NamedTuple):
    """The turn of a run, as far as it is known."""

    ticket: int  # Its position, which its message carries.
    before: int  # How many runs stand before it.
    seconds: float  # Until its turn, as far as can be said.
    slots: int  # How many runs may wait for their turn in their slots.

    @property
    def is_near(self) -> bool:
        """Whether it is better to wait for it here and now."""
        return self.seconds <= NEAR and self.before < self.slots

    def pause(self) -> float:
        """Seconds after which the run is to come back."""
        return max(self.seconds * AWAY * random.uniform(0.9, 1.0), SHORTEST_PAUSE)


def stand(task: Task, busy: Busy, permits: int) -> Turn | None:
    """Take a position in the line for the current run, or keep it.

    Args:
        task: The task, during its run.
        busy: The outcome of its acquire, with the lock that is not free.
        permits: How many permits that lock has.

    Returns:
        When its turn is; None if the server does not say.
    """
    options: SingleInstance = task.single_instance_options
    ticket = carried(task.request.headers).get("ticket")
    try:
        found = task_runs.stand_in_line(
            busy.name,
            task.request.id,
            ticket if type(ticket) is int else 0,
            busy,
            spacing=options.min_hold,
            permits=permits,
            using=options.using,
        )
    except LockUnavailable as error:
        run = task.request.id
        known = {"lock": error.name, "alias": options.using, "reason": error.reason}
        extra = logs.of(job=task.name, task_id=run, **known)
        logger.warning("%s[%s] has no position in line: %s", task.name, run, error, extra=extra)
        return None
    nearest = NEAREST_OF_SECONDS if waits_in_broker(task.app) else NEAREST
    return Turn(*found, slots=nearest * permits)


def time_in_slot(task: Task) -> float:
    """Seconds that the current run may wait in its worker slot."""
    conf = task.app.conf
    hard, soft = task.request.timelimit or (None, None)
    limits = (
        hard or task.time_limit or conf.task_time_limit,
        soft or task.soft_time_limit or conf.task_soft_time_limit,
    )
    return min([IN_SLOT, *(float(limit) * OF_TIME_LIMIT for limit in limits if limit)])


def leave(task: Task, name: str, task_id: str) -> None:
    """Take the run out of the line: its body starts, or never will."""
    with suppress(LockUnavailable):  # Else the server drops it when its turn has passed.
        task_runs.leave_line(name, task_id, using=task.single_instance_options.using)
