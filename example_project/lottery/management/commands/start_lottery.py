"""`manage.py start_lottery`: what a server's clock runs at noon."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand, CommandParser

from lottery.tasks import run_lottery, run_lottery_without_lock

PATIENCE = 60  # seconds for the outcome to come back


class Command(BaseCommand):
    """Publishes the lottery's task and reports what became of it."""

    help = "Start the lottery, as every server does at noon, and report what became of it."

    def add_arguments(self, parser: CommandParser) -> None:
        """Where, when and how."""
        parser.add_argument("--queue", help="publish to this queue instead of the default one")
        parser.add_argument(
            "--at",
            default="",
            help="wait for this moment, in seconds since 1970; - reads it from standard input",
        )
        parser.add_argument(
            "--skew", type=float, default=0, help="be late by a random time up to this many seconds"
        )
        parser.add_argument("--without-lock", action="store_true", help="let everybody draw")
        parser.add_argument(
            "--json",
            action="store_true",
            dest="as_json",
            help="report each step as JSON, one per line",
        )

    def handle(
        self, *, queue: str, at: str, skew: float, without_lock: bool, as_json: bool, **options: Any
    ) -> None:
        """Wait, publish, wait for the outcome, and report."""
        report = self.report_json if as_json else self.report
        task = run_lottery_without_lock if without_lock else run_lottery
        # The connection is made beforehand: at noon there is nothing left to do but publish.
        with current_app.producer_or_acquire() as producer:
            producer.connection.ensure_connection(max_retries=3)
            report(state="ready")
            noon = float(sys.stdin.readline() if at == "-" else at or time.time())
            time.sleep(max(0, noon + random.uniform(0, skew) - time.time()))
            late = time.time() - noon
            run = task.apply_async(queue=queue, producer=producer)
        report(state="started", task_id=run.id, late=late)
        outcome = run.get(timeout=PATIENCE, propagate=False)
        if run.failed():
            report(state="failed", error=repr(outcome))
        else:
            report(state="skipped" if "skipped" in outcome else "drew", **outcome)

    def report_json(self, **step: Any) -> None:
        """Report to a program: one object per line."""
        self.stdout.write(json.dumps(step))
        self.stdout.flush()

    def report(self, *, state: str, **step: Any) -> None:
        """Report to a person."""
        details = ", ".join(f"{name} {value}" for name, value in step.items() if name != "skipped")
        self.stdout.write(f"{state}: {details}" if details else state)
