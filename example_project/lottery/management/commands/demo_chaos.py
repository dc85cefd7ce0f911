"""`manage.py demo_chaos`: many lotteries, workers killed at random, and each is drawn once.

Every task is acknowledged late, so the broker delivers the task of a killed worker again. The
lock keeps such a delivery from running beside the first one, and from being dropped because the
dead worker's lease is not over yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lottery.demo.chaos import Broker, Killer, Outcome, Worker
from lottery.demo.stage import DemoCommand
from lottery.tasks import run_numbered_lottery

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from lottery.demo.stage import Stage

WORKERS = 4
KILL_EVERY = 2.0  # seconds, on average
ENDS_WITHIN = 240  # seconds


class Command(DemoCommand):
    """Runs the demo."""

    help = "Draw many lotteries while workers are killed at random; each is drawn exactly once."

    def add_arguments(self, parser: CommandParser) -> None:
        """How many."""
        parser.add_argument("--lotteries", type=int, default=200, help="default: %(default)s")

    def handle(self, *, lotteries: int, **options: Any) -> None:
        """Run it; the exit status is 0 only if every lottery was drawn exactly once."""
        self.say(f"{lotteries} lotteries, {WORKERS} workers, and somebody who kills them.", "")
        with self.stage(ENDS_WITHIN) as stage:
            outcome = self._draw(stage, lotteries)
        self.say("", str(outcome))
        if not outcome.is_perfect():
            raise SystemExit(1)

    def _draw(self, stage: Stage, lotteries: int) -> Outcome:
        workers = [Worker(f"worker-{number}", stage) for number in range(1, WORKERS + 1)]
        while not all(worker.is_ready() for worker in workers):
            stage.patience.pause("starting the workers")
        self.progress("workers", f"{WORKERS} are ready")

        broker = Broker(stage.redis)
        killer = Killer(workers, KILL_EVERY)
        to_publish = list(range(1, lotteries + 1))
        while to_publish:
            broker.publish(run_numbered_lottery.name, to_publish)
            while not broker.is_idle():
                stage.patience.pause("drawing")
                if victim := killer.strike():
                    drawn = Outcome(lotteries).drawn
                    self.progress("chaos", f"killed {victim.name}; drawn: {drawn}")
            if to_publish := broker.swallowed():
                self.progress("chaos", f"died with its messages, published again: {to_publish}")
        self.progress("broker", f"is quiet after {sum(one.deaths for one in workers)} deaths")
        return Outcome(lotteries)
