"""`manage.py demo`: several servers race for the lottery at noon, and one draws.

Starts a Valkey server, a database and, for each server, a Celery worker, all of them for this run
only; plays the clocks of the servers at noon; reports; and takes everything away again.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

from celery import current_app
from django.core.management.base import CommandError, CommandParser

from lottery.demo.patience import POLL
from lottery.demo.results import Results
from lottery.demo.servers import LotteryServer, publish_to
from lottery.demo.stage import DemoCommand
from lottery.drawing import PRIZES
from lottery.tasks import run_lottery, run_lottery_without_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lottery.demo.patience import Patience
    from lottery.demo.stage import Stage

Found = TypeVar("Found")

NOON_IN = 2.0  # seconds after all are ready, unless told otherwise
STRIKE_BEFORE = 0.3  # seconds before noon, so that every server finds it dead
SKEW = 0.1  # seconds by which a server's clock may be late
ENDS_WITHIN = 90  # seconds, and those until noon


class Command(DemoCommand):
    """Runs the demo."""

    help = "Let several servers race for the lottery at noon; exactly one draws."

    def add_arguments(self, parser: CommandParser) -> None:
        """How many servers, when noon is, and whether they lock."""
        parser.add_argument("--servers", type=int, default=4, help="default: %(default)s")
        parser.add_argument(
            "--noon-in",
            type=float,
            default=NOON_IN,
            metavar="SECONDS",
            help="from when all are ready; default: %(default)g",
        )
        parser.add_argument(
            "--without-lock", action="store_true", help="show what goes wrong without the lock"
        )
        self.add_backend(parser)

    def handle(
        self, *, servers: int, noon_in: float, without_lock: bool, backend: str, **options: Any
    ) -> None:
        """Run it; the exit status is 0 only if the database agrees with what was reported."""
        if servers < 1:
            raise CommandError("There must be at least one server.")
        how = "without a lock" if without_lock else "with a lock"
        self.say(f"The lottery at noon: {servers} servers {how}, {PRIZES} prizes.", "")
        with self.stage(ENDS_WITHIN + noon_in, backend) as stage:
            results = self._race(stage, servers, noon_in, without_lock)

        self.say("", results.table(), "", *results.winners())
        if without_lock:
            self.say(results.damage(), "")
        contradictions = list(results.contradictions(draws=servers if without_lock else 1))
        for contradiction in contradictions:
            self.stderr.write(contradiction)
        self.stdout.write(str(results))
        if contradictions:
            raise SystemExit(1)

    def _race(self, stage: Stage, count: int, noon_in: float, without_lock: bool) -> Results:
        task = run_lottery_without_lock if without_lock else run_lottery
        servers = [LotteryServer(name, stage, task) for name in _names(count)]
        publish_to(stage.redis.url)
        patience = stage.patience
        for server, _ in _as_they_come(servers, LotteryServer.is_ready, patience, "starting"):
            self.progress(server.name, f"ready, pid {server.pid}")

        def wait_until(moment: float) -> None:
            while (left := moment - time.time()) > 0:
                for server in servers:
                    server.check()
                patience.pause("waiting for noon", min(POLL, left))

        # The connections are made beforehand: at noon there is nothing left to do but publish.
        current_app.backend.client.ping()
        with current_app.producer_or_acquire() as producer:
            producer.connection.ensure_connection(max_retries=3)
            noon = time.time() + noon_in
            how = f"every clock is up to {SKEW * 1000:.0f} ms late"
            self.progress("noon", f"in {noon_in:g} s; {how}")
            if stage.topology is not None:
                wait_until(noon - STRIKE_BEFORE)
                self.progress("strike", stage.topology.strike())
            clocks = sorted((random.uniform(0, SKEW), server.name, server) for server in servers)
            for late, _, server in clocks:
                wait_until(noon + late)
                server.start_lottery(noon, producer)
        reports = []
        for server, report in _as_they_come(servers, LotteryServer.report, patience, "drawing"):
            reports.append(report)
            self.progress(server.name, report.outcome)
        return Results(reports)


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
