"""A run that is deferred: its message comes again as it came, with all that it said."""

from concurrent.futures import ThreadPoolExecutor

import kombu
import pytest
from celery.signals import task_received
from celery.worker.request import Request
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from django_redislock import distributed_lock
from django_redislock.celery import SingleInstanceTask
from tests.celery.project import PATIENCE, QUORUM
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]


@pytest.fixture(
    params=[
        "redis",
        pytest.param("rabbitmq", marks=pytest.mark.slow),
        pytest.param("quorum queues", marks=pytest.mark.slow),
    ]
)
def own_stage(request, own_stage):
    """A stage with each broker, and no worker."""
    if request.param == "redis":
        own_stage.configure(task_default_queue=own_stage.key())
    else:
        conf = QUORUM if request.param == "quorum queues" else {}
        own_stage.use_broker(request.getfixturevalue("rabbit"), **conf)
    return own_stage


def new_queue(stage):
    """A queue that no other test uses."""
    name = stage.key()
    if stage.app.conf.task_default_queue_type == "quorum":
        with stage.app.connection_for_write() as connection:
            # As a worker does when it starts.
            declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
            queue = stage.app.amqp.queues[name]
            queue.bind(connection.default_channel).declare()
            bind_queue_to_native_delayed_delivery_exchange(connection, queue)
    return name


def take(stage, queue):
    """Take the next message out of a queue, as a worker does."""

    def get():
        with stage.app.connection_for_read() as connection:
            return kombu.Queue(queue).bind(connection.default_channel).get(no_ack=True)

    return wait_until(get, PATIENCE, f"a message is in the queue {queue}", every=0.05)


def execute(stage, message):
    """Run the task of a message, as a worker does."""
    name = message.headers["task"]
    request = Request(message, app=stage.app, task=stage.app.tasks[name], hostname="tests")
    task_received.send(sender=None, request=request)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(request.execute).result(PATIENCE)


def said(message):
    """All that a message says, but when it is to run, and where it stands in line.

    On quorum queues it waits at the broker, so that it comes through another exchange.
    """
    headers = {name: said for name, said in message.headers.items() if "-death" not in name}
    headers.pop("eta")
    carried = dict(headers.pop("redislock", None) or {})
    assert carried.pop("tries", 0) == 0
    is_deferred = bool(carried.pop("ticket", 0))
    assert bool(carried.pop("since", 0)) == is_deferred
    assert carried.pop("deferred", "").startswith("1 ") == is_deferred
    properties = dict(message.properties)
    for changing in ("delivery_tag", "delivery_info", "application_headers", "expiration"):
        properties.pop(changing, None)
    return {
        "headers": headers,
        "carried": carried,
        "properties": properties,
        "body": message.payload,
        "as": (message.content_type, message.content_encoding),
        "to": message.delivery_info["routing_key"].rpartition(".")[2],
    }


def deferred(stage, key, queue):
    """The message that waits for the lock *key*, and the one that comes after it."""
    first = take(stage, queue)
    with distributed_lock(key):
        execute(stage, first)
    return first, take(stage, queue)


EVERYTHING = {
    "argsrepr": "(a key)",
    "kwargsrepr": "{a secret}",
    "priority": 3,
    "expires": 600,
    "headers": {"origin-of": "tests"},
    "shadow": "another name",
    "time_limit": 50,
    "soft_time_limit": 40,
    "serializer": "sets",
    "compression": "gzip",
    "ignore_result": True,
    "reply_to": "somebody",
    "root_id": "the root",
    "parent_id": "the parent",
    "group_id": "the group",
    "group_index": 3,
    "stamped_headers": ["tenant"],
    "tenant": "the tenant",
    "message_id": "the message",
    "app_id": "the tests",
    "delivery_mode": 1,
}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["nothing", "everything"])
def test_it_says_what_it_said(own_stage, options):
    key, queue = own_stage.key(), new_queue(own_stage)
    if options:
        follower = own_stage.task("collect").si()
        options = {
            **options,
            "link": follower,
            "link_error": follower,
            "chain": [dict(follower)],
            "chord": dict(follower),
        }
    own_stage.task("retrying").apply_async((key,), queue=queue, **options)
    first, second = deferred(own_stage, key, queue)
    assert said(second) == said(first)
    assert second.headers["eta"]
    if options:
        assert second.headers["expires"]
        assert second.headers["argsrepr"] == "(a key)"
        assert second.headers["compression"]
        # RabbitMQ takes it away from what has waited on its quorum queues.
        if (expiration := second.properties.get("expiration")) or "x-death" not in second.headers:
            assert 0 < float(expiration) / 1000 <= 600


on_redis = pytest.mark.parametrize("own_stage", ["redis"], indirect=True)


@on_redis
def test_what_another_program_has_published_says_what_it_said(own_stage):
    key, queue = own_stage.key(), new_queue(own_stage)
    name = own_stage.task("retrying").name
    own_stage.app.send_task(name, (key,), queue=queue, serializer="sets", argsrepr="hidden")
    first, second = deferred(own_stage, key, queue)
    assert said(second) == said(first)


@on_redis
def test_headers_that_a_tracer_nests_hide_no_others_and_keep_no_revoked_call_announced(
    own_stage, monkeypatch
):
    """Sentry's and Datadog's do it, and Celery then shows a task the nested ones alone."""
    options = {"key": "{key}", "unique_queued": True, "on_conflict": "retry"}
    how = {"base": SingleInstanceTask, "ignore_result": True, "single_instance": options}

    @own_stage.app.task(name=own_stage.key(), **how)
    def load(key):
        seen.append(load.request.headers)

    def call():
        headers = {"tenant": "one", "headers": {"trace": "2"}}
        return load.apply_async((key,), queue=queue, headers=headers)

    seen, key, queue = [], own_stage.key(), new_queue(own_stage)
    assert [call().published, call().published] == [True, False]
    _, second = deferred(own_stage, key, queue)
    assert second.headers["tenant"] == "one"
    assert second.headers["headers"]["trace"] == "2"
    execute(own_stage, second)
    assert [(one["tenant"], one["trace"]) for one in seen] == [("one", "2")]

    revoked = call()  # The run has retracted the first one.
    assert [revoked.published, call().published] == [True, False]
    monkeypatch.setattr("celery.worker.request.revoked_tasks", {revoked.id})
    message = take(own_stage, queue)
    assert Request(message, app=own_stage.app, task=load, hostname="tests").revoked()
    assert call().published


@on_redis
def test_a_retry_shows_no_more_of_the_arguments_than_the_caller_did(own_stage):
    how = {"base": SingleInstanceTask, "bind": True, "ignore_result": True}

    @own_stage.app.task(name=own_stage.key(), **how)
    def log_in(self, secret):
        raise self.retry(countdown=1)

    queue = new_queue(own_stage)
    log_in.apply_async(("a secret",), queue=queue, argsrepr="hidden")
    first = take(own_stage, queue)
    execute(own_stage, first)
    second = take(own_stage, queue)
    assert second.headers["retries"] == 1
    for shown in ("argsrepr", "kwargsrepr"):
        assert second.headers[shown] == first.headers[shown]
