"""The content of a message besides the task's arguments, and how its broker will treat it."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from numbers import Real
from typing import TYPE_CHECKING, Any

from celery._state import get_current_worker_task  # As Celery.current_worker_task, for any app.
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.signals import task_postrun, task_prerun, worker_init
from celery.utils import uuid
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.transport.native_delayed_delivery import MAX_NUMBER_OF_BITS_TO_USE

from django_redislock.holder import Activity, begin, end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery, Task


# The header in which a message of ours carries a dictionary:
#   "tries"       how often its run was deferred in a row, since it last stood in line
#   "since"       when it was deferred for the first time, in seconds since the epoch
#   "deferred"    how often it was deferred in all, and because of whom: see Owner.deferred
#   "raised"      the lock has kept the body from starting, so a retry that was published because of
#                 that is no retry of the body
#   "ticket"      its position in the line of deferred runs, see line.py
#   "line"        the lock of that line, if it is another one than that of the run
#   "reserved"    the starts that it has reserved under rates, by name: see lua/take_start.lua
#   "call"        which of the calls under one task id it is, the same in redeliveries and retries
#   "at"          when the call was made or due, in seconds since the epoch, with once_per, debounce
#                 or on_conflict="replace"
#   "baton"       by which its first run takes up a lease, see lease.py
#   "queued"      the lock name under which its call was announced (see queued.py), until the body
#                 starts
HEADER = "redislock"

# What Celery writes among the headers of a message, and in a worker adds to them.
_OF_CELERY = {*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"}

# Seconds after which a broker delivers an unacknowledged message again, if it is not configured.
# It is 1800 for SQS; RabbitMQ closes the connection after 1800.
DEFAULT_VISIBILITY_TIMEOUT = 1800.0
VISIBILITY_TIMEOUT_OF_REDIS = 3600.0
_OF_REDIS = ("redis:", "rediss:", "redis+socket:", "sentinel:")

# The prefix of the routing key of a message that has waited at the broker.
_WAITED = re.compile(rf"^(?:[01]\.){{{MAX_NUMBER_OF_BITS_TO_USE}}}")


def carried(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The dictionary that a message with these headers carries; see HEADER."""
    found = (headers or {}).get(HEADER)
    return dict(found) if isinstance(found, dict) else {}


def carried_by(request: Any) -> dict[str, Any]:
    """What the message carries of a request that has ended before defer._keep() could see it."""
    return carried(request.headers) or carried(vars(request))


def of_others(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a message's headers that are not Celery's, as Celery tells them from its own."""
    return {name: value for name, value in headers.items() if name not in _OF_CELERY}


def carrying(options: Mapping[str, Any], **added: Any) -> dict[str, Any]:
    """The options of apply_async(), changed so that the message carries *added* too."""
    headers = options.get("headers") or {}
    return {**options, "headers": {**headers, HEADER: {**carried(headers), **added}}}


def call_of_id(options: Mapping[str, Any]) -> str | None:
    """The call that an apply_async() with these options, a task id among them, makes.

    A program may make many calls under an id of its own choice. A part of a canvas had its id
    before: if its publisher is delivered twice, it is published twice, and that is one call.

    Returns:
        None if nothing tells it from another call under the same id.
    """
    had: str | None = carried(options.get("headers")).get("call")
    if options.get("retries"):
        return had
    publisher = get_current_worker_task()
    if publisher is None:
        return had or str(uuid())
    own = carried(publisher.request.headers).get("call") or publisher.request.id
    # A part of a canvas, or a task's replacement, was frozen, and so has a reply_to.
    if options.get("reply_to") or options.get("parent_id"):
        return had or own
    # A program may pass all headers on, as for tracing, and so those of its own call.
    return had if had and had != own else str(uuid())


def carry(request: Any, **changed: Any) -> None:
    """Change what the message of a retry or deferral of this run will carry; None removes."""
    wanted = {**carried(request.headers), **changed}
    left = {key: value for key, value in wanted.items() if value is not None}
    headers = {**(request.headers or {}), HEADER: left}
    if not left:
        del headers[HEADER]
    request.headers = headers or None


def is_delivered(request: Any) -> bool:
    """Whether a broker delivered this run, so that it can go back there."""
    return bool(request.id) and not (request.called_directly or request.is_eager)


def stores_result(task: Task) -> bool:
    """Whether the result of this run is stored, so that others can tell that it has ended."""
    return not (ignores_result(task) or isinstance(task.backend, DisabledBackend))


def shows_results(task: Task) -> bool:
    """Whether a worker can look up the result of a run; that of rpc:// goes to the caller alone."""
    return not isinstance(task.backend, DisabledBackend | RPCBackend)


def ignores_result(task: Task) -> bool:
    """Whether the result of this run is not wanted: as the caller said, else as the task says."""
    # The request's class says False if the caller said nothing. What the caller said is in the
    # request's own dictionary.
    return bool(vars(task.request).get("ignore_result", task.ignore_result))


def acks_late(task: Task) -> bool:
    """Whether the message of a run is acknowledged only after it."""
    return bool(task.app.conf.task_acks_late if task.acks_late is None else task.acks_late)


def time_limits(task: Task) -> tuple[float, float]:
    """The hard and the soft time limit of this run, in seconds; math.inf for none."""
    of_message = task.request.timelimit or (None, None)
    of_task = task.time_limit, task.soft_time_limit  # Else the settings'.
    hard, soft = zip(of_message, of_task, _limits_of_worker, strict=True)
    return next(filter(None, hard), math.inf), next(filter(None, soft), math.inf)


def _keep_time_limits(sender: Any, **kwargs: Any) -> None:
    """In a worker that starts, also for its children: keep what its command line says."""
    _limits_of_worker[:] = sender.time_limit, sender.soft_time_limit


_limits_of_worker: list[float | None] = [None, None]
worker_init.connect(_keep_time_limits, dispatch_uid="django_redislock.message")


def seconds_left(expires: Any) -> float:
    """How long a message lives with this option *expires*: as Celery takes it, or has sent it."""
    if expires is None:
        return math.inf
    if isinstance(expires, Real):
        return float(expires)
    when: datetime = maybe_make_aware(maybe_iso8601(expires))  # To Celery, a naive one is in UTC.
    return (when - datetime.now(UTC)).total_seconds()


def delay_of(options: Mapping[str, Any]) -> float:
    """Seconds until a call with these options of apply_async() is due."""
    eta = options.get("eta")
    return max(options.get("countdown") or (0.0 if eta is None else seconds_left(eta)), 0.0)


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers an unacknowledged message again."""
    configured = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if configured:
        return float(configured)
    urls = app.conf.broker_read_url or ""  # Of several brokers, all are of one kind.
    first = str(urls if isinstance(urls, str) else next(iter(urls), ""))
    of_redis = first.startswith(_OF_REDIS)
    return VISIBILITY_TIMEOUT_OF_REDIS if of_redis else DEFAULT_VISIBILITY_TIMEOUT


def waits_in_broker(app: Celery) -> bool:
    """Whether a delayed message waits at the broker, and not in a worker.

    Celery asks the same: RabbitMQ keeps it there if one of the queues is a quorum queue.
    """
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])


def queue_of(request: Any, app: Celery) -> str | None:
    """The queue that this run came from, if the application knows it."""
    routing_key = _WAITED.sub("", (request.delivery_info or {}).get("routing_key") or "")
    found = (name for name, queue in app.amqp.queues.items() if queue.routing_key == routing_key)
    return next(found, None)


# --- names each plain task of Celery as the owner of the locks that its body takes ----------------


def _begin_task(task_id: str, task: Any, **kwargs: object) -> None:
    if not hasattr(task, "single_instance_options"):  # Its run does so itself.
        begin(Activity(task=task.name, task_id=task_id))


def _end_task(task_id: str, task: Any, **kwargs: object) -> None:
    if not hasattr(task, "single_instance_options"):
        end(task_id)


task_prerun.connect(_begin_task, dispatch_uid="django_redislock.holder")
task_postrun.connect(_end_task, dispatch_uid="django_redislock.holder")
