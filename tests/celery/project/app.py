"""The application, in a worker (``celery -A tests.celery.project.app``) and in the test."""

import json
import os
import time
from contextvars import ContextVar

from billiard.pool import TimeoutHandler
from celery import Celery, signals
from celery.schedules import schedule
from kombu.serialization import register

# A serializer of the project's own: JSON that knows sets.
register(
    "sets",
    lambda data: json.dumps(data, default=lambda found: {"set": sorted(found)}),
    lambda data: json.loads(data, object_hook=lambda it: set(it["set"]) if "set" in it else it),
    content_type="application/x-sets",
    content_encoding="utf-8",
)


class Noon(schedule):
    """Each whole *every* seconds, by a clock that is *late*: all servers have the same noon."""

    def __init__(self, every, late):
        super().__init__(every)
        self.every, self.late = every, late

    def is_due(self, last_run_at):
        now, last = time.time() - self.late, last_run_at.timestamp() - self.late
        return now // self.every > last // self.every, self.every - now % self.every

    def __reduce__(self):  # Beat keeps its schedule in a file.
        return Noon, (self.every, self.late)


def lock_in_parent(key):
    """Let the worker itself hold the lock *key* before it forks its children."""

    @signals.worker_init.connect(weak=False)
    def hold(**kwargs):
        from django_redislock import distributed_lock

        lock = distributed_lock(key, ttl=6)
        assert lock.acquire()
        holding.append(lock)


holding = []

schema = ContextVar("schema", default="public")  # Of the tenant whose request or task this is.


class OfTenants(Celery):
    """As that of tenant-schemas-celery: each message says the schema of its caller."""

    def send_task(self, name, args=None, kwargs=None, **options):
        options["headers"] = {"_schema_name": schema.get(), **(options.get("headers") or {})}
        return super().send_task(name, args=args, kwargs=kwargs, **options)


@signals.task_prerun.connect(weak=False)
def enter_schema(task, **kwargs):
    """Run a task in the schema of its caller."""
    schema.set((task.request.headers or {}).get("_schema_name", "public"))


def give_time_to_end():
    """Let children end by themselves when their hard time limit is over, even on a busy machine.

    After 100 ms Celery kills them. A release takes a few, unless the machine stands still.
    """
    kill = TimeoutHandler._trywaitkill

    def end(handler, child):
        child.terminate()
        if child._popen.wait(timeout=10) is None:
            kill(handler, child)

    TimeoutHandler._trywaitkill = end


def make_app(conf):
    """Make an application with the tasks of the tests; *conf* says where the broker is."""
    conf = dict(conf)
    noon, held_by_parent = conf.pop("noon", None), conf.pop("held_by_parent", None)
    kind = OfTenants if conf.pop("of_tenants", False) else Celery
    app = kind("tests", set_as_current=False)
    app.conf.update(
        include=["tests.celery.project.tasks"],
        worker_prefetch_multiplier=1,
        accept_content=["json", "sets"],
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        **conf,
    )
    if noon:
        at = Noon(noon["every"], noon["late"])
        entry = {
            "task": "tests.celery.project.tasks.at_noon",
            "args": [noon["key"]],
            "schedule": at,
        }
        app.conf.beat_schedule = {"noon": entry}
    if held_by_parent:
        lock_in_parent(held_by_parent)
    return app


if "TESTS_CELERY" in os.environ:
    app = make_app(json.loads(os.environ["TESTS_CELERY"]))
    app.set_current()
    app.set_default()
    give_time_to_end()
