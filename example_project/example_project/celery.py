"""The Celery application: `celery -A example_project worker`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from celery import Celery, signals
from celery.concurrency.prefork import TaskPool

from example_project.telemetry import serve_metrics

if TYPE_CHECKING:
    from celery.worker.consumer import Consumer

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

app = Celery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

signals.worker_process_init.connect(serve_metrics)  # Of each child, after the fork.
signals.beat_init.connect(serve_metrics)


@signals.worker_ready.connect
def serve_metrics_of_threads(sender: Consumer, **_: object) -> None:
    """The pools of threads and greenlets have no children."""
    if not isinstance(sender.pool, TaskPool):
        serve_metrics()
