"""The servers of the demo: a Redis for all, and those that start the lottery at noon."""

from __future__ import annotations

import json
import secrets
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import current_app
from django.conf import settings

from example_project import embedded_server

if TYPE_CHECKING:
    from pathlib import Path

    from lottery.demo.processes import Children
    from lottery.demo.stage import Stage

SKEW = 0.1  # seconds by which a server's clock may be late


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
    """One server: a Celery worker on a queue of its own, and a clock that starts the lottery.

    Both are processes; the clock writes down what happens.
    """

    def __init__(self, name: str, stage: Stage, *, without_lock: bool) -> None:
        self.name = name
        # A queue of its own; and one process per server is enough here.
        worker = worker_command(name, "--queues", name, "--pool", "solo")
        self._worker = stage.start(f"{name}-worker", worker)
        self._clock = stage.start(f"{name}-clock", _clock_command(name, without_lock))

    @property
    def pid(self) -> int:
        """The worker's process id; it runs its tasks itself, in no child."""
        return self._worker.pid

    def is_ready(self) -> bool:
        """Whether nothing is missing but noon."""
        return "ready" in self._story() and " ready." in self._worker.err()

    def set_noon(self, noon: float) -> None:
        """Tell the clock when noon is, in seconds since 1970."""
        self._clock.tell(str(noon))

    def report(self) -> Report | None:
        """What became of the lottery on this server; None as long as that is open."""
        story = self._story()
        for outcome in ("drew", "skipped", "failed"):
            if outcome in story:
                late = story["started"]["late"]
                return Report(self.name, self.pid, late, outcome, story[outcome])
        return None

    def _story(self) -> dict[str, dict[str, Any]]:
        """The steps that the clock has written down: ready, started and the outcome."""
        self._worker.check()
        self._clock.check()
        complete_lines = self._clock.out().rpartition("\n")[0].splitlines()
        return {step.pop("state"): step for step in map(json.loads, complete_lines)}


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


def _clock_command(name: str, without_lock: bool) -> list[str]:
    command = manage_command("start_lottery", "--json", "--queue", name)
    command += ["--at", "-", "--skew", str(SKEW)]
    return [*command, "--without-lock"] if without_lock else command
