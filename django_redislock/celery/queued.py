"""unique_queued: of the calls with one key, only one waits in the broker's queue at a time.

An economy, and no guarantee: ``send_task`` and other applications publish without asking. What
must not run twice at a time is kept apart by the lock around the body.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.signals import task_revoked
from celery.utils import uuid

from django_redislock import task_runs
from django_redislock.celery.defer import LONGEST_PAUSE, notes
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery import Task
    from celery.result import AsyncResult

    from django_redislock.celery.options import SingleInstance

logger = logging.getLogger("django_redislock.celery")

# A call that something else depends on is published: it must have a result of its own. One whose
# task id is chosen by the caller, as that of the last in a chain, is looked for under it.
_DEPENDENTS = ("link", "link_error", "chain", "chord", "group_id", "task_id")


def is_exempt(task: Task, options: Mapping[str, Any]) -> bool:
    """Whether a call is published in any case."""
    return bool(
        task.app.conf.task_always_eager
        or options.get("retries")
        or "tries" in notes(options.get("headers"))  # It was put off.
        or any(options.get(name) for name in _DEPENDENTS)
    )


def publish_once(
    task: Task,
    name: str,
    options: SingleInstance,
    publish: Callable[..., AsyncResult],
) -> AsyncResult:
    """Publish a call, unless one with the same key waits in the queue; return its result."""
    task_id = uuid()
    try:
        waiting = task_runs.announce(name, task_id, options.queued_ttl, using=options.using)
    except LockUnavailable as error:
        # It may be announced nevertheless: only the answer may have been lost.
        logger.warning("Publishing %s[%s] without asking: %s", task.name, task_id, error)
        waiting = ""
    if waiting:
        logger.info(
            "Did not publish %s: %s waits in the queue, with the same key %r",
            task.name,
            waiting,
            name,
        )
        return task.AsyncResult(waiting)
    try:
        return publish(task_id, queued=name)
    except BaseException:
        withdraw(task, name, task_id, options)
        raise


def withdraw(task: Task, name: str, task_id: str, options: SingleInstance) -> None:
    """The call *task_id* does not wait in the queue, or no longer."""
    try:
        task_runs.retract(name, task_id, using=options.using)
    except LockUnavailable as error:
        logger.warning(
            "Until queued_ttl is over, %s is not published with the key %r: %s",
            task.name,
            name,
            error,
        )


def requeue(task: Task, name: str, task_id: str, options: SingleInstance) -> float | None:
    """The call *task_id* goes back into the queue, and goes on waiting there.

    Returns:
        How many seconds ago it last stood for another call; None if it has not.
    """
    # From when it is due: as long as it may take until something is heard of it.
    try:
        return task_runs.requeue(
            name, task_id, LONGEST_PAUSE + options.queued_ttl, using=options.using
        )
    except LockUnavailable as error:
        logger.warning(
            "%s[%s] goes back to the queue, where it may no longer stand for others: %s",
            task.name,
            task_id,
            error,
        )
        return None


def _forget_revoked(sender: Any = None, request: Any = None, **kwargs: Any) -> None:
    """In a worker: a message has expired, or was revoked, before it started."""
    options = getattr(sender, "_single_instance", None)
    if options is not None and (name := notes(request.headers).get("queued")):
        withdraw(sender, name, request.id, options)


task_revoked.connect(_forget_revoked, dispatch_uid="django_redislock.unique_queued")
