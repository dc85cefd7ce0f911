"""Putting a run off: it goes back to the broker under the same id, to come again later."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NoReturn

from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery, Task

# What a message of ours carries along, as a dictionary: "tries", how often it was put off in a
# row; "since", when the first time was (seconds since the epoch); "raised", whether the task
# failed with LockTimeout before; "serializer", if the publisher chose one; "queued", the key under
# which it was announced as the only one that waits in the queue, until its body starts.
HEADER = "redislock"

FIRST_PAUSE = 0.5  # Seconds, doubled each time.
LONGEST_PAUSE = 60.0
MARGIN = 0.2  # Seconds after a lease should have ended.

# Seconds after which a broker delivers an unacknowledged message again, if it is not configured.
# It is 3600 for Redis and 1800 for SQS; RabbitMQ closes the connection after 1800.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers an unacknowledged message again."""
    configured = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return float(configured or DEFAULT_VISIBILITY_TIMEOUT)


def can_defer(task: Task) -> bool:
    """Whether this run came from a broker, to which it can go back."""
    request = task.request
    return bool(request.id) and not (request.called_directly or request.is_eager)


def has_result(task: Task) -> bool:
    """Whether the result of this run is stored, so that others can tell that it has ended."""
    return not (_ignores_result(task) or isinstance(task.backend, DisabledBackend))


def _ignores_result(task: Task) -> bool:
    # As the caller said, else as the task does; a request that is silent shows False.
    return bool(vars(task.request).get("ignore_result", task.ignore_result))


def notes(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a message with these headers carries along; see HEADER."""
    found = (headers or {}).get(HEADER)
    return dict(found) if isinstance(found, dict) else {}


def noted(options: Mapping[str, Any], **added: Any) -> dict[str, Any]:
    """The options of apply_async() with which a message carries along what is *added*."""
    headers = options.get("headers") or {}
    return {**options, "headers": {**headers, HEADER: {**notes(headers), **added}}}


def carry(task: Task, **changed: Any) -> None:
    """Change what a retry or deferral of this run carries along; None removes."""
    wanted = {**notes(task.request.headers), **changed}
    carried = {key: value for key, value in wanted.items() if value is not None}
    headers = {**(task.request.headers or {}), HEADER: carried}
    if not carried:
        del headers[HEADER]
    task.request.headers = headers or None


def defer(task: Task, seconds: float, *, until: float | None = None) -> NoReturn:
    """Publish this run again, under its id, and end without a result.

    Nobody reports for it now, and somebody will later: the only case in which Celery's Ignore
    does not leave a canvas, or a caller of get(), waiting for ever.

    Args:
        task: The task, during its run.
        seconds: Until what is in its way is expected to be gone. It comes back after a shorter
            time at first, and no later than after half of the visibility timeout: until then the
            worker keeps a delayed message, and a message that is kept longer is delivered twice.
        until: When to be back at the latest, in seconds since the epoch.

    Raises:
        ComesAgain: Always, unless the broker does not take the message and has it no longer.
    """
    carried = notes(task.request.headers)
    tries = int(carried.get("tries", 0))
    now = time.time()
    pause = min(FIRST_PAUSE * 2 ** min(tries, 10), LONGEST_PAUSE) * random.uniform(0.6, 1.0)
    countdown = min(pause, seconds + MARGIN, visibility_timeout(task.app) / 2)
    if until is not None:
        countdown = min(countdown, max(until - now, 0.0))
    carry(task, tries=tries + 1, since=carried.get("since", now))
    _republish(task, countdown, carried.get("serializer"))
    raise ComesAgain


def _republish(task: Task, countdown: float, serializer: str | None) -> None:
    request = task.request
    # As Task.retry() does; but it is no retry, and counts as none.
    signature = task.signature_from_request(
        request,
        countdown=countdown,
        retries=request.retries,
        ignore_result=_ignores_result(task),
        add_to_parent=False,
        **({"serializer": serializer} if serializer else {}),
    )
    try:
        signature.apply_async()
    except OperationalError as error:
        # With late acknowledgement the message is still the broker's, and comes again.
        if acks_late(task):
            raise _Requeue(error, requeue=True) from error
        raise


class ComesAgain(Ignore):  # type: ignore[misc] # Celery has no types
    """This delivery ends without a result, and another one follows."""


class _Requeue(Reject, ComesAgain):  # type: ignore[misc] # Celery has no types
    """A Reject that autoretry_for leaves alone, as it does Ignore.

    The retry would be published in vain too, and Celery then drops the message.
    """


def acks_late(task: Task) -> bool:
    """Whether the message of a run is acknowledged only after it."""
    return bool(task.app.conf.task_acks_late if task.acks_late is None else task.acks_late)
