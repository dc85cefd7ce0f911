"""Deferring a run: its message goes back to the broker under the same id, and comes again later."""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.exceptions import Ignore, Reject
from celery.signals import task_received
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.serialization import registry
from kombu.transport.native_delayed_delivery import MAX_LEVEL, calculate_routing_key, level_name

from django_redislock import logs, task_runs
from django_redislock.celery.message import (
    acks_late,
    carried,
    carry,
    of_others,
    queue_of,
    seconds_left,
    visibility_timeout,
    waits_in_broker,
)
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from celery import Task

    from django_redislock.celery.options import SingleInstance
    from django_redislock.rules.flows import Busy


# --- publishes the message of a run once more, with all that it said, to come later ---------------

# Celery's retry makes a new message, but the task knows less than the old one said. The new one
# shows the arguments that ``argsrepr`` hid, is not compressed, and names its own run as its
# parent.

# Celery's own headers, see celery.app.amqp.AMQP.as_task_v2().
_HEADERS = (
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries"),
    *("timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
    *("replaced_task_nesting", "stamped_headers", "stamps"),
)
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")  # In the body, beside the arguments.
# Here RabbitMQ notes where a message has been. It would take them for a circle.
_OF_RABBITMQ = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")

# A property, in a worker only: the message had headers within its headers.
_HAD_NESTED = "redislock_nested"

# Properties that each message gets anew when it is published.
_MADE_ANEW = {
    _HAD_NESTED,
    *("content_type", "content_encoding", "application_headers", "expiration"),
    *("delivery_info", "delivery_tag", "body_encoding"),
}


def publish_again(task: Task, countdown: float, *, expires: Any) -> None:
    """Publish the message of the current run again, under its id, to where it came from.

    Args:
        task: The task, during its run.
        countdown: Seconds until it is to run; whole ones if it waits at the broker.
        expires: When it expires, as a message says it; None for never.

    Raises:
        OperationalError: The broker does not take it.
    """
    app, request = task.app, task.request
    said = vars(request)
    eta = datetime.now(UTC) + timedelta(seconds=countdown)
    headers = {name: said[name] for name in _HEADERS if name in said}
    headers |= {"eta": eta.isoformat(), "expires": expires}
    others = request.headers or {}  # Not Celery's; ours is among them.
    headers |= {name: others[name] for name in others if not name.startswith(_OF_RABBITMQ)}
    had = request.properties or {}
    if had.get(_HAD_NESTED):
        headers["headers"] = dict(others)
    properties = {name: value for name, value in had.items() if name not in _MADE_ANEW}
    properties.setdefault("priority", None)  # Else kombu says 0.
    if expires is not None:
        properties["expiration"] = max(seconds_left(expires), 0.0)
    body = request.args, request.kwargs, {name: said.get(name) for name in _EMBEDDED}
    event: dict[str, Any] | None = None
    if app.conf.task_send_sent_event:
        same = ("root_id", "parent_id", "retries", "eta", "expires")
        event = {"uuid": request.id, "name": task.name} | {one: headers.get(one) for one in same}
        event |= {"args": headers.get("argsrepr"), "kwargs": headers.get("kwargsrepr")}
    # If the message does not tell, it is the task's own, or the default.
    serializer = registry.type_to_name.get(had.get("content_type"), task.serializer)
    with app.producer_or_acquire() as producer:
        broker = producer.connection
        try:
            app.amqp.send_task_message(
                producer,
                task.name,
                (headers, {}, body, event),
                serializer=serializer,
                compression=said.get("compression"),
                **properties,
                **_destination(task, countdown),
            )
        except OperationalError:
            raise
        except (*broker.recoverable_connection_errors, *broker.recoverable_channel_errors) as error:
            # As send_task() does; each transport has its own errors.
            raise OperationalError(str(error)) from error


def _destination(task: Task, countdown: float) -> dict[str, Any]:
    """Where the message of the current run came from, as options for publishing."""
    queues, delivered = task.app.amqp.queues, task.request.delivery_info or {}
    exchange, routing_key = delivered.get("exchange"), delivered.get("routing_key")
    if waits_in_broker(task.app):
        # It came through the exchanges where it waited; its routing key begins with its delay.
        queue = queues.get(queue_of(task.request, task.app))
        if queue is not None and queue.exchange.type != "direct":
            return {
                "exchange": Exchange(level_name(MAX_LEVEL), type="topic"),  # type: ignore[no-untyped-call]
                "routing_key": calculate_routing_key(int(countdown), queue.routing_key),
            }
    if exchange:
        # Any type but direct: Celery would send the message to the default exchange.
        return {"exchange": exchange, "routing_key": routing_key, "exchange_type": "topic"}
    if not routing_key:
        return {}
    if queue := queues.get(routing_key):
        return {"queue": queue}
    # It was declared by somebody else.
    return {"queue": Queue(routing_key), "declare": []}  # type: ignore[no-untyped-call]


def _keep(request: Any = None, **kwargs: Any) -> None:
    """In a worker, for each message: keep what Celery does not tell the task.

    That is its content type. And if tracers such as Sentry's put headers into a second dictionary
    among the headers, Celery tells the task those alone.
    """
    if hasattr(request.task, "single_instance_options"):
        said = request.request_dict
        kept = {"content_type": request.content_type}
        if isinstance(nested := said.get("headers"), dict):
            kept[_HAD_NESTED] = True
            said["headers"] = {**nested, **of_others(said)}
        said["properties"] = {**said["properties"], **kept}


task_received.connect(_keep, dispatch_uid="django_redislock.again")


# --- the line of deferred runs: each has its position, and comes back shortly before its turn -----

# A run that finds its lock busy, and is to come back, takes a position at the end of that lock's
# line. It keeps the position until its body starts, however often it goes back to the broker. The
# server of the locks says how many runs are before it. It knows how long runs last, so it also
# says when the turn is.
#
# The line saves work, and guarantees nothing. The message itself waits at the broker. If the line
# is lost, runs come back as before, and stand in line again.

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
        When its turn is; None if the server does not say, or keeps no line.
    """
    options: SingleInstance = task.single_instance_options
    if task_runs.unrecorded(options.using):
        return None
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


FIRST_PAUSE = 0.5  # Seconds, doubled each time.
LONGEST_PAUSE = 60.0
MARGIN = 0.2  # Seconds after a lease should have ended.
# A run that must be back by some time comes when this part of the time until then is over. The rest
# is for the broker and the worker, who are late by a little.
LAST_PART = (0.75, 0.95)


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
    due: float | None = None,
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
        due: Seconds until a start that it has reserved is due. They are the pause then.
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
    if due is not None:
        tries, pause = 0, due
    elif turn is None:
        tries += 1
        pause = FIRST_PAUSE * 2 ** min(tries - 1, 10) * random.uniform(0.6, 1.0)
        pause = min(pause, seconds + MARGIN)
    else:
        tries, pause = 0, turn.pause()
        carry(task.request, ticket=turn.ticket)
    expires = None if started else task.request.expires
    left = min(math.inf if until is None else until - now, seconds_left(expires))
    # Not all at the same moment: that is too late for all but one of them.
    last = max(left, 0.0) * random.uniform(*LAST_PART)
    countdown = min(hop(task, pause), last)
    carry(task.request, tries=tries, since=before.get("since", now))
    return _go_back(task, countdown, expires=expires, early=turn is not None)


def put_off(task: Task, seconds: float) -> Deferred:
    """As defer(), for a run that has not asked for its lock: this counts as no try."""
    return _go_back(task, hop(task, seconds), expires=task.request.expires)


def hop(task: Task, seconds: float) -> float:
    """How many of these *seconds* a message may wait in one go.

    A worker keeps it meanwhile, and the broker would deliver it again.
    """
    return min(seconds, LONGEST_PAUSE, visibility_timeout(task.app) / 2)


def _go_back(task: Task, countdown: float, *, expires: Any, early: bool = False) -> Deferred:
    if waits_in_broker(task.app):
        # The broker counts whole seconds, and at least one. A turn is rounded down, to not miss it.
        countdown = max(math.floor(countdown) if early else math.ceil(countdown), 1)
    try:
        publish_again(task, countdown, expires=expires)
    except OperationalError as error:
        if acks_late(task):  # Then the broker still has the message.
            raise _Rejected(error, requeue=True) from error
        raise
    return Deferred()
