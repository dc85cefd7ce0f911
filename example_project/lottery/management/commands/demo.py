"""`manage.py demo`: several servers race for the lottery at noon, and one draws.

Starts a Valkey server, a database and, for each server, a Celery worker and a clock, all of them
for this run only; sets noon; reports; and takes everything away again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.management.base import CommandError, CommandParser

from lottery.demo.results import Results
from lottery.demo.servers import SKEW, LotteryServer
from lottery.demo.stage import DemoCommand
from lottery.drawing import PRIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lottery.demo.patience import Patience
    from lottery.demo.stage import Stage

Found = TypeVar("Found")

NOON_IN = 2.0  # seconds after all are ready, unless told otherwise
STRIKE_BEFORE = 0.3  # seconds before noon, so that every server finds it dead
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
        servers = [LotteryServer(name, stage, without_lock=without_lock) for name in _names(count)]
        patience = stage.patience
        for server, _ in _as_they_come(servers, LotteryServer.is_ready, patience, "starting"):
            self.progress(server.name, f"ready, pid {server.pid}")

        noon = time.time() + noon_in
        for server in servers:
            server.set_noon(noon)
        self.progress("noon", f"in {noon_in:g} s; every clock is up to {SKEW * 1000:.0f} ms late")
        if stage.topology is not None:
            while time.time() < noon - STRIKE_BEFORE:
                patience.pause("waiting for noon")
            self.progress("strike", stage.topology.strike())
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
