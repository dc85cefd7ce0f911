"""`manage.py demo_chaos`: many lotteries, much goes wrong, and each of them is drawn once.

Every task is acknowledged late, so the broker delivers the task of a silent worker again. The lock
keeps such a delivery from running beside the first one, and from being dropped because the lease of
the first is not over yet. What the lock cannot know, the database does: which lotteries are drawn,
and whether a later lease has begun to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lottery.demo.chaos import FAULTS, Broker, Outcome, Worker
from lottery.demo.stage import DemoCommand
from lottery.tasks import run_numbered_lottery, run_unguarded_lottery

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from lottery.demo.chaos import Fault
    from lottery.demo.stage import Stage

TASKS = {"on": run_numbered_lottery, "off": run_unguarded_lottery}
ENDS_WITHIN = 240  # seconds


class Command(DemoCommand):
    """Runs the demo."""

    help = "Draw many lotteries while much goes wrong; each is drawn exactly once."

    def add_arguments(self, parser: CommandParser) -> None:
        """How many, and what goes wrong."""
        parser.add_argument("--lotteries", type=int, default=200, help="default: %(default)s")
        parser.add_argument("--workers", type=int, default=4, help="default: %(default)s")
        parser.add_argument(
            "--fault", choices=FAULTS, default="kill", help="what goes wrong; default: %(default)s"
        )
        parser.add_argument(
            "--guard",
            choices=TASKS,
            default="on",
            help="whether the database keeps out what the lock cannot; default: %(default)s",
        )

    def handle(
        self, *, lotteries: int, workers: int, fault: str, guard: str, **options: Any
    ) -> None:
        """Run it; the exit status is 1 if the guard is on and not every lottery was drawn once."""
        kind = FAULTS[fault]
        self.say(f"{lotteries} lotteries, {workers} workers, and somebody who {kind.deed}.")
        self.say("The lock is alone, without the database." if guard == "off" else "")
        with self.stage(ENDS_WITHIN) as stage:
            outcome = self._draw(stage, kind, TASKS[guard].name, lotteries, workers)
        self.say("", str(outcome))
        if guard == "on" and not outcome.is_perfect():
            raise SystemExit(1)

    def _draw(
        self, stage: Stage, kind: type[Fault], task: str, lotteries: int, count: int
    ) -> Outcome:
        names = [f"worker-{number}" for number in range(1, count + 1)]
        workers = [Worker(name, stage, kind.settings) for name in names]
        while not all(worker.is_ready() for worker in workers):
            stage.patience.pause("starting the workers")
        self.progress("workers", f"{count} are ready")

        broker, fault = Broker(stage.redis), kind(workers, stage)
        to_publish = list(range(1, lotteries + 1)) * kind.copies
        while to_publish:
            broker.publish(task, to_publish)
            while not (broker.is_idle() and fault.is_over()):
                stage.patience.pause("drawing")
                if news := fault.strike():
                    self.progress("chaos", f"{news}; drawn: {Outcome(lotteries).drawn}")
            if to_publish := broker.failed():
                self.progress("broker", f"lost or failed, published again: {to_publish}")
        self.progress("broker", "is quiet")
        return Outcome(lotteries)
