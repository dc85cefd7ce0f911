"""`manage.py count_stock`: a plain lock in a plain command."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_redislock import LockLost, distributed_lock
from shop.work import work


class Command(BaseCommand):
    """Counts; who comes second waits."""

    help = "Count what is in the warehouse."

    def add_arguments(self, parser: CommandParser) -> None:
        """How long it takes."""
        parser.add_argument("--seconds", type=float, default=10, help="default: %(default)s")

    def handle(self, *, seconds: float, **options: Any) -> None:
        """Do it; end early, and say so, if the lock is taken away."""
        try:
            with distributed_lock("warehouse:stock", ttl=30, wait=60) as lease:
                self.stdout.write("Counting ...")
                self.stdout.flush()
                work(lease, seconds)
        except LockLost as lost:
            self.stdout.write(f"{lost} Stopped: somebody else may count now.")
        else:
            self.stdout.write("Counted.")
