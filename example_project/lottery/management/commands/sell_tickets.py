"""`manage.py sell_tickets 10`: read a number, and write another one, under a lock."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import connection

from django_redislock import LockLost, StaleFence, distributed_lock
from lottery.models import Pot

if TYPE_CHECKING:
    from collections.abc import Callable


class Command(BaseCommand):
    """Adds tickets to the pot, and tells each step."""

    help = "Add tickets to the pot, and tell each step."

    def add_arguments(self, parser: CommandParser) -> None:
        """How many, and what goes wrong."""
        parser.add_argument("count", type=int)
        parser.add_argument(
            "--without-fence", action="store_true", help="rely on the lock and the check of it"
        )
        parser.add_argument(
            "--stop",
            action="store_true",
            help="be stopped (SIGSTOP) after the check of the lease, before the first write",
        )

    def handle(self, *, count: int, without_fence: bool, stop: bool, **options: Any) -> None:
        """Add them; who could not write because another lease came in between tries again."""
        with connection.execute_wrapper(StopOnce(self.tell)) if stop else nullcontext():
            while True:
                try:
                    return self._sell(count, fenced=not without_fence)
                except StaleFence as late:
                    self.tell(f"StaleFence: {late.newer} is newer")
                except LockLost:
                    if without_fence:
                        return self.tell("LockLost, after the write")
                self.tell("tries again")

    def tell(self, step: str) -> None:
        """Write a step where it is seen at once."""
        self.stdout.write(step)
        self.stdout.flush()

    def _sell(self, count: int, *, fenced: bool) -> None:
        with distributed_lock("pot", ttl=6, wait=60) as lease:
            self.tell(f"has the lock, fence {lease.fence}")
            with lease.atomic() if fenced else nullcontext():
                pot = Pot.objects.get()
                self.tell(f"reads {pot.tickets}")
                pot.tickets += count
                lease.ensure_held()
                pot.save()
            self.tell(f"writes {pot.tickets}")


class StopOnce:
    """Stops this process before it writes for the first time, whatever it has checked before.

    It stands around each statement that Django sends. On SQLite a transaction begins with the right
    to write here (see DATABASES), so one that is stopped later would keep out all others.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._has_stopped = False

    def __call__(self, execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        """Send the statement."""
        if sql.startswith(("BEGIN", "UPDATE")) and not self._has_stopped:
            self._has_stopped = True
            self._tell("has checked its lease: SIGSTOP")
            os.kill(os.getpid(), signal.SIGSTOP)
        return execute(sql, *rest)
