"""`manage.py demo`: several servers race for the lottery at noon, and one draws.

Starts a Valkey server, a database and, for each server, a Celery worker and a clock, all of them
for this run only; sets noon; reports; and takes everything away again.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from lottery.demo.patience import Interrupted, Patience
from lottery.demo.processes import ChildDied, Children
from lottery.demo.results import Results
from lottery.demo.servers import SKEW, LotteryServer, RedisServer
from lottery.drawing import PRIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

Found = TypeVar("Found")

ELIGIBLE, INELIGIBLE = 1000, 50
NOON_IN = 2  # seconds after all are ready
ENDS_WITHIN = 50  # seconds


class Command(BaseCommand):
    """Runs the demo."""

    help = "Let several servers race for the lottery at noon; exactly one draws."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """How many servers, and whether they lock."""
        parser.add_argument("--servers", type=int, default=4, help="default: %(default)s")
        parser.add_argument(
            "--without-lock", action="store_true", help="show what goes wrong without the lock"
        )

    def handle(self, *, servers: int, without_lock: bool, **options: Any) -> None:
        """Run it; the exit status is 0 only if the database agrees with what was reported."""
        if servers < 1:
            raise CommandError("There must be at least one server.")
        self._began = time.monotonic()
        try:
            with Patience(ENDS_WITHIN) as patience, _home() as home:
                results = self._run(home, patience, servers, without_lock)
        except Interrupted as interrupted:
            self.stderr.write(str(interrupted))
            raise SystemExit(interrupted.exit_status) from None
        except (ChildDied, TimeoutError) as error:
            raise CommandError(str(error)) from error

        contradictions = list(results.contradictions(draws=servers if without_lock else 1))
        for contradiction in contradictions:
            self.stderr.write(contradiction)
        self.stdout.write(str(results))
        if contradictions:
            raise SystemExit(1)

    def _run(self, home: Path, patience: Patience, count: int, without_lock: bool) -> Results:
        how = "without a lock" if without_lock else "with a lock"
        self._say(f"The lottery at noon: {count} servers {how}, {PRIZES} prizes.", "")

        # Two blocks, so that Redis is the last to go.
        with Children(home) as redis_children, Children(home) as children:
            redis = RedisServer(home, redis_children)
            while not redis.is_up():
                patience.pause("starting Redis")
            self._progress("redis", redis)

            call_command("migrate", verbosity=0)
            call_command("populate", eligible=ELIGIBLE, ineligible=INELIGIBLE, verbosity=0)
            self._progress("database", f"{ELIGIBLE} eligible participants, {INELIGIBLE} others")

            environment = _environment_of_workers(redis)
            servers = [
                LotteryServer(name, children, environment, without_lock=without_lock)
                for name in _names(count)
            ]
            for server, _ in _as_they_come(servers, LotteryServer.is_ready, patience, "starting"):
                self._progress(server.name, f"ready, pid {server.pid}")

            noon = time.time() + NOON_IN
            for server in servers:
                server.set_noon(noon)
            self._progress(
                "noon", f"in {NOON_IN} s; every clock is up to {SKEW * 1000:.0f} ms late"
            )
            reports = []
            for server, report in _as_they_come(servers, LotteryServer.report, patience, "drawing"):
                reports.append(report)
                self._progress(server.name, report.outcome)

        results = Results(reports)
        self._say("", results.table(), "", *results.winners())
        if without_lock:
            self._say(results.damage(), "")
        return results

    def _progress(self, who: str, what: object) -> None:
        self._say(f"{time.monotonic() - self._began:5.1f} s  {who:10} {what}")

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.stdout.write(line)
        self.stdout.flush()


@contextmanager
def _home() -> Iterator[Path]:
    """The directory for all files of this run."""
    home: Path = settings.DEMO_HOME
    home.mkdir(mode=0o700)
    try:
        yield home
    finally:
        connections.close_all()
        shutil.rmtree(home)


def _environment_of_workers(redis: RedisServer) -> dict[str, str]:
    path = [str(settings.BASE_DIR), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "REDIS_URL": redis.url,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "PYTHONPATH": os.pathsep.join(path),
    }


def _names(count: int) -> list[str]:
    digits = len(str(count))
    return [f"server-{number:0{digits}}" for number in range(1, count + 1)]


def _as_they_come(
    servers: Sequence[LotteryServer],
    look: Callable[[LotteryServer], Found | None],
    patience: Patience,
    what: str,
) -> Iterator[tuple[LotteryServer, Found]]:
    """Look at the servers until each has something to show; hand out what, as soon as it has."""
    waiting = list(servers)
    while waiting:
        patience.pause(what)
        for server in list(waiting):
            if found := look(server):
                waiting.remove(server)
                yield server, found
