"""A task that does nothing, under each lock for Celery, and the worker that runs it."""

from __future__ import annotations

import os

from celery import Celery
from celery_heimdall import HeimdallTask  # type: ignore[import-untyped]
from celery_once import QueueOnce  # type: ignore[import-untyped]
from celery_singleton import Singleton  # type: ignore[import-untyped]

from benchmarks.contenders import (
    BARE,
    CELERY_HEIMDALL,
    CELERY_ONCE,
    CELERY_SINGLETON,
    OURS,
    OURS_QUEUED_ONCE,
    contender,
)
from django_redislock import single_instance_task

app = Celery("benchmarks")


def _work(number: int) -> int:
    return number


# Those of others lock when a task is published, each set of arguments by itself; ours at the run.
TASKS = {
    BARE: app.task(name="bare")(_work),
    CELERY_SINGLETON: app.task(name="singleton", base=Singleton)(_work),
    CELERY_HEIMDALL: app.task(name="heimdall", base=HeimdallTask, heimdall={"unique": True})(_work),
    CELERY_ONCE: app.task(name="once", base=QueueOnce)(_work),
    OURS_QUEUED_ONCE: single_instance_task(
        name="queued-once", key="bench:{number}", unique_queued=True
    )(_work),
    OURS: single_instance_task(name="ours")(_work),
}


@app.task  # type: ignore[untyped-decorator] # Celery has no types
def processes() -> tuple[int, int]:
    """The ids of the worker's two processes: the one that runs tasks, and its parent."""
    return os.getpid(), os.getppid()


def connect(port: int) -> None:
    """Have everybody use this server."""
    contender(OURS, port)  # It configures Django.
    url = f"redis://127.0.0.1:{port}/0"
    app.conf.update(
        broker_url=url,
        result_backend=url,
        # If we are ended early, results look for the server that is gone: not for 20 s.
        result_backend_transport_options={"retry_policy": {"max_retries": 1}},
        # By default each run waits for one second for the lock that its own publisher took.
        heimdall_unique_lock_blocking=False,
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url}},
    )


def work(port: int) -> None:
    """Be the worker, with one process for tasks, until SIGTERM."""
    os.dup2(2, 1)  # Our standard output is for the measured tables.
    connect(port)
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR")
    app.worker_main(["--quiet", "worker", "--pool=prefork", "--concurrency=1", *quiet])
