"""The application, in a worker (``celery -A tests.celery_app.app``) and in the test itself."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery
from kombu.serialization import register

# A serializer of the project's own: JSON that knows sets.
register(
    "sets",
    lambda data: json.dumps(data, default=lambda found: {"set": sorted(found)}),
    lambda data: json.loads(data, object_hook=lambda it: set(it["set"]) if "set" in it else it),
    content_type="application/x-sets",
    content_encoding="utf-8",
)


def make_app(conf: dict[str, Any]) -> Celery:
    """Make an application with the tasks of the tests; *conf* says where the broker is."""
    app = Celery("tests", set_as_current=False)
    app.conf.update(
        include=["tests.celery_app.tasks"],
        worker_prefetch_multiplier=1,
        accept_content=["json", "sets"],
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        **conf,
    )
    return app


if "TESTS_CELERY" in os.environ:
    app = make_app(json.loads(os.environ["TESTS_CELERY"]))
    app.set_current()
    app.set_default()
