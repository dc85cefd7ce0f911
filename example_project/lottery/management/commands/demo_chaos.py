"""`manage.py demo_chaos`: many lotteries, workers killed at random, and each is drawn once.

Every task is acknowledged late, so the broker delivers the task of a killed worker again. The
lock keeps such a delivery from running beside the first one, and from being dropped because the
dead worker's lease is not over yet.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from lottery.demo.chaos import Broker, Killer, Outcome, Worker
from lottery.demo.patience import Interrupted, Patience
from lottery.demo.processes import ChildDied, Children
from lottery.demo.servers import RedisServer
from lottery.management.commands.demo import _environment_of_workers, _home
from lottery.tasks import run_numbered_lottery

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 4
KILL_EVERY = 2.0  # seconds, on average
ENDS_WITHIN = 240  # seconds


class Command(BaseCommand):
    """Runs the demo."""

    help = "Draw many lotteries while workers are killed at random; each is drawn exactly once."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """How many."""
        parser.add_argument("--lotteries", type=int, default=200, help="default: %(default)s")

    def handle(self, *, lotteries: int, **options: Any) -> None:
        """Run it; the exit status is 0 only if every lottery was drawn exactly once."""
        self._began = time.monotonic()
        try:
            with Patience(ENDS_WITHIN) as patience, _home() as home:
                outcome = self._run(home, patience, lotteries)
        except Interrupted as interrupted:
            self.stderr.write(str(interrupted))
            raise SystemExit(interrupted.exit_status) from None
        except (ChildDied, TimeoutError) as error:
            raise CommandError(str(error)) from error
        self.stdout.write(str(outcome))
        if not outcome.is_perfect():
            raise SystemExit(1)

    def _run(self, home: Path, patience: Patience, lotteries: int) -> Outcome:
        self._say(f"{lotteries} lotteries, {WORKERS} workers, and somebody who kills them.")
        with Children(home) as redis_children, Children(home) as children:
            redis = RedisServer(home, redis_children)
            while not redis.is_up():
                patience.pause("starting Redis")
            self._progress(f"Redis: {redis}")
            call_command("migrate", verbosity=0)
            call_command("populate", verbosity=0)

            environment = {
                **_environment_of_workers(redis),
                "DJANGO_SETTINGS_MODULE": "example_project.chaos_settings",
            }
            names = [f"worker-{number}" for number in range(1, WORKERS + 1)]
            workers = [Worker(name, children, environment) for name in names]
            while not all(worker.is_ready() for worker in workers):
                patience.pause("starting the workers")
            self._progress(f"{WORKERS} workers are ready")

            broker = Broker(redis.url)
            killer = Killer(workers, KILL_EVERY)
            to_publish = list(range(1, lotteries + 1))
            while to_publish:
                broker.publish(run_numbered_lottery.name, to_publish)
                while not broker.is_idle():
                    patience.pause("drawing")
                    if victim := killer.strike():
                        self._progress(f"killed {victim.name}; drawn: {Outcome(lotteries).drawn}")
                if to_publish := broker.swallowed():
                    self._progress(f"died with its messages, published again: {to_publish}")
            self._progress(f"all is quiet after {sum(one.deaths for one in workers)} deaths")
            return Outcome(lotteries)

    def _progress(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:5.1f} s  {what}")

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
