"""`manage.py send_invoices`: a command that cron starts on every server, and one server runs."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_redislock.jobs import current_lease
from django_redislock.management import SingleInstanceMixin
from shop.work import work


class Command(SingleInstanceMixin, BaseCommand):
    """Sends them, unless another server does, or has just done so."""

    help = "Send the invoices of a month."

    # Clocks of servers differ: one that is late finds the lock still taken.
    single_instance = {"name": "invoices:{month}", "ttl": 30, "min_hold": 60}

    def add_arguments(self, parser: CommandParser) -> None:
        """Which ones."""
        parser.add_argument("month", help="such as 2026-11")

    def handle(self, *, month: str, **options: Any) -> None:
        """Send them."""
        work(current_lease(), 2)
        self.stdout.write(f"Sent the invoices of {month}.")
