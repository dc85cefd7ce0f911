"""Publishes the message of a run once more, with all that it said, to come later.

Celery's retry makes a new message, but the task knows less than the old one said. The new one shows
the arguments that ``argsrepr`` hid, is not compressed, and names its own run as its parent.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.signals import task_received
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.serialization import registry
from kombu.transport.native_delayed_delivery import MAX_LEVEL, calculate_routing_key, level_name

from django_redislock.celery.message import queue_of, seconds_left, waits_in_broker

if TYPE_CHECKING:
    from celery import Task

# Celery's own headers, see celery.app.amqp.AMQP.as_task_v2().
_HEADERS = (
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries"),
    *("timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result"),
    *("replaced_task_nesting", "stamped_headers", "stamps"),
)
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")  # In the body, beside the arguments.
# Here RabbitMQ notes where a message has been. It would take them for a circle.
_OF_RABBITMQ = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")

# Properties that each message gets anew when it is published.
_MADE_ANEW = {
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


def _keep_content_type(request: Any = None, **kwargs: Any) -> None:
    """In a worker, for each message: keep its content type, which Celery does not tell the task."""
    if hasattr(request.task, "single_instance_options"):
        said = request.request_dict
        said["properties"] = {**said["properties"], "content_type": request.content_type}


task_received.connect(_keep_content_type, dispatch_uid="django_redislock.again")
