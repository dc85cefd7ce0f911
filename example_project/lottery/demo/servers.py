"""The servers of the demo: a Redis for all, and those that start the lottery at noon."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import current_app
from django.conf import settings

from example_project import embedded_server

if TYPE_CHECKING:
    from pathlib import Path

    from celery import Task
    from kombu import Producer

    from lottery.demo.processes import Children
    from lottery.demo.stage import Stage


class RedisServer:
    """A Valkey server for this run of the demo alone."""

    def __init__(self, home: Path, children: Children) -> None:
        port, password = embedded_server.free_port(), secrets.token_urlsafe(24)
        config = embedded_server.write_config(home, port=port, password=password, daemon=False)
        self._child = children.start("valkey", [embedded_server.binary(), str(config)], env={})
        self._server = embedded_server.Server(pid=self._child.pid, port=port, password=password)

    @property
    def url(self) -> str:
        """Its address."""
        return self._server.url

    def check(self) -> None:
        """Raise ChildDied if it runs no more."""
        self._child.check(may_end=False)

    def __str__(self) -> str:
        return f"{self._server.version()} on port {self._server.port}"

    def is_up(self) -> bool:
        """Whether it answers."""
        self.check()
        return self._server.answers()


class Report(NamedTuple):
    """What became of the lottery on one server."""

    server: str
    pid: int
    late: float  # Seconds after noon at which the clock struck.
    outcome: str  # drew, skipped or failed
    details: dict[str, Any]


class LotteryServer:
    """One server: a Celery worker on a queue of its own, into which its clock puts the task."""

    def __init__(self, name: str, stage: Stage, task: Task) -> None:
        self.name = name
        self._task = task
        # A queue of its own; and one process per server is enough here.
        self._worker = stage.start(name, worker_command(name, "--queues", name, "--pool", "solo"))

    @property
    def pid(self) -> int:
        """The worker's process id; it runs its tasks itself, in no child."""
        return self._worker.pid

    def check(self) -> None:
        """Raise ChildDied if it has failed."""
        self._worker.check()

    def is_ready(self) -> bool:
        """Whether nothing is missing but noon."""
        self.check()
        return " ready." in self._worker.err()

    def start_lottery(self, noon: float, producer: Producer) -> None:
        """Publish the task; noon was then, in seconds since 1970."""
        self._late = time.time() - noon
        self._run = self._task.apply_async(queue=self.name, producer=producer)

    def report(self) -> Report | None:
        """What became of the lottery on this server; None as long as that is open."""
        self.check()
        if not self._run.ready():
            return None
        details = self._run.result
        if self._run.failed():
            return Report(self.name, self.pid, self._late, "failed", {"error": repr(details)})
        outcome = "skipped" if "skipped" in details else "drew"
        return Report(self.name, self.pid, self._late, outcome, details)


def worker_command(name: str, *options: str) -> list[str]:
    """A Celery worker that knows nothing of others."""
    return [
        *(sys.executable, "-m", "celery", "-A", "example_project", "worker"),
        *("--hostname", f"{name}@%h", "--loglevel", "INFO", *options),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]


def manage_command(*arguments: str) -> list[str]:
    """A command of `manage.py`."""
    return [sys.executable, str(settings.BASE_DIR / "manage.py"), *arguments]


def publish_to(broker_url: str) -> None:
    """What this process publishes goes there."""
    current_app.conf.update(broker_url=broker_url, result_backend=broker_url)
