"""Deferring a run: its message goes back to the broker under the same id, and comes again later."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING

from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from django_redislock.celery.again import publish_again
from django_redislock.celery.message import (
    acks_late,
    carried,
    carry,
    seconds_left,
    visibility_timeout,
    waits_in_broker,
)

if TYPE_CHECKING:
    from celery import Task

    from django_redislock.celery.line import Turn

FIRST_PAUSE = 0.5  # Seconds, doubled each time.
LONGEST_PAUSE = 60.0
MARGIN = 0.2  # Seconds after a lease should have ended.
LAST_PART = 0.75  # A run that must be back by some time comes in the last quarter until then.


class Deferred(Ignore):  # type: ignore[misc] # Celery has no types
    """This delivery ends without a result, and another one follows.

    No delivery reports for the task now, but a later one will. Otherwise Celery's Ignore would
    leave a canvas, or a caller of get(), waiting for ever.
    """


class _Rejected(Reject, Deferred):  # type: ignore[misc] # Celery has no types
    """The broker is to deliver the same message again, since it does not take a new one.

    It is an Ignore as well, and autoretry_for leaves that alone. On a plain Reject, Celery would
    publish a retry, which the broker does not take either, and then drop the message.
    """


def defer(
    task: Task,
    seconds: float,
    *,
    turn: Turn | None = None,
    until: float | None = None,
    started: bool = False,
) -> Deferred:
    """Publish this run again, under its id, and return what to raise: it ends without a result.

    Args:
        task: The task, during its run.
        seconds: Until the lock is expected to be free. The first pauses are shorter. None is longer
            than half of the visibility timeout: a worker keeps the delayed message, which the
            broker would deliver again.
        turn: Its turn in the line of deferred runs. It says how long the pause is, in place of
            *seconds*.
        until: When to be back at the latest, in seconds since the epoch.
        started: Whether an earlier delivery has started the work, and so was in time. Then this one
            does not expire: it is there in case that one dies.

    Raises:
        Deferred: The broker does not take the message, but has the old one still.
        OperationalError: It does not take the message, and has none.
    """
    before = carried(task.request.headers)
    tries = int(before.get("tries", 0))
    now = time.time()
    if turn is None:
        tries += 1
        pause = FIRST_PAUSE * 2 ** min(tries - 1, 10) * random.uniform(0.6, 1.0)
        pause = min(pause, seconds + MARGIN)
    else:
        tries, pause = 0, turn.pause()
        carry(task.request, ticket=turn.ticket)
    expires = None if started else task.request.expires
    left = min(math.inf if until is None else until - now, seconds_left(expires))
    # Not all at the same moment: that is too late for all but one of them.
    last = max(left, 0.0) * random.uniform(LAST_PART, 1.0)
    countdown = min(pause, LONGEST_PAUSE, visibility_timeout(task.app) / 2, last)
    if waits_in_broker(task.app):
        # The broker counts whole seconds, and at least one. A turn is rounded down, to not miss it.
        countdown = max(math.floor(countdown) if turn else math.ceil(countdown), 1)
    carry(task.request, tries=tries, since=before.get("since", now))
    try:
        publish_again(task, countdown, expires=expires)
    except OperationalError as error:
        if acks_late(task):  # Then the broker still has the message.
            raise _Rejected(error, requeue=True) from error
        raise
    return Deferred()
