"""`manage.py start_lottery`: what a server's clock runs at noon."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from lottery.tasks import run_lottery

PATIENCE = 60  # seconds for the outcome to come back


class Command(BaseCommand):
    """Publishes the lottery's task and reports what became of it."""

    help = "Start the lottery, as every server does at noon, and report what became of it."

    def handle(self, **options: Any) -> None:
        """Publish, wait for the outcome, and report."""
        run = run_lottery.delay()
        self.stdout.write(f"started: task_id {run.id}")
        outcome = run.get(timeout=PATIENCE, propagate=False)
        if run.failed():
            self.stdout.write(f"failed: error {outcome!r}")
        else:
            state = "skipped" if outcome.pop("skipped", None) else "drew"
            details = ", ".join(f"{name} {value}" for name, value in outcome.items())
            self.stdout.write(f"{state}: {details}")
