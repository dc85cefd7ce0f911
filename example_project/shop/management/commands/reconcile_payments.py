"""`manage.py reconcile_payments`: by hand what the task of the same name does by the clock."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_redislock import LockLost, distributed_lock
from shop.work import work


class Command(BaseCommand):
    """Reconciles, unless the task or another command does."""

    help = "Compare the payments with the bank's statement."

    def add_arguments(self, parser: CommandParser) -> None:
        """How long it takes."""
        parser.add_argument("--seconds", type=float, default=10, help="default: %(default)s")

    def handle(self, *, seconds: float, **options: Any) -> None:
        """Do it; end early, and say so, if the lock is taken away."""
        try:
            with distributed_lock("payments:reconcile", ttl=15) as lease:
                self.stdout.write("Reconciling ...")
                self.stdout.flush()
                work(lease, seconds)
        except LockLost as lost:
            self.stdout.write(f"{lost} Stopped: somebody else may reconcile now.")
        else:
            self.stdout.write("Reconciled.")
