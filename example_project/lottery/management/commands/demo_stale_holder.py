"""`manage.py demo_stale_holder`: a holder is stopped beyond its lease, and writes too late.

Two servers sell tickets: each takes the lock, reads how many were sold, checks its lease and writes
the sum. The first one is stopped between its check and its write until the second one is done.
That is shown without the fence, and with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lottery.demo.servers import manage_command
from lottery.demo.stage import DemoCommand
from lottery.models import Pot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lottery.demo.stage import Stage

TICKETS = {"web-1": 10, "web-2": 20}
SOLD = sum(TICKETS.values())
ENDS_WITHIN = 90  # seconds
WIDTH = 38  # Of what the first server does; beside it stands what the second does.


class Command(DemoCommand):
    """Runs the demo."""

    help = "Stop a holder beyond its lease, between its check and its write."

    def handle(self, **options: Any) -> None:
        """Run it; the exit status is 0 if an update is lost without the fence, and none with it."""
        self.say("web-1 is stopped between its check and its write, for longer than its lease.", "")
        with self.stage(ENDS_WITHIN) as stage:
            self.say("", "with distributed_lock(...):")
            without_fence = self._sell(stage, "--without-fence")
            self.say("", "with distributed_lock(...) as lease, lease.atomic():")
            with_fence = self._sell(stage)
        self.say("", f"RESULT sold={SOLD} without_fence={without_fence} with_fence={with_fence}")
        if without_fence == SOLD or with_fence != SOLD:
            raise SystemExit(1)

    def _sell(self, stage: Stage, *options: str) -> int:
        """Let both servers sell; returns how many tickets the pot has in the end."""
        pot, _ = Pot.objects.update_or_create(pk=1, defaults={"tickets": 0})
        self.say("", f"{'':9}{'web-1':{WIDTH}} web-2")
        first = Seller(stage, "web-1", "--stop", *options)
        for step in first.steps(until="SIGSTOP"):
            self._show(step)
        for step in Seller(stage, "web-2", *options).steps(until="writes"):
            self._show("┆", step)
        first.go_on()
        self._show("SIGCONT")
        for step in first.steps():
            self._show(step)
        pot.refresh_from_db()
        self.say("", f"{'':9}{SOLD} tickets are sold, and the pot has {pot.tickets}.")
        return pot.tickets

    def _show(self, first: str, second: str = "") -> None:
        self.progress(f"{first:{WIDTH}}", second)


class Seller:
    """A server that sells tickets."""

    def __init__(self, stage: Stage, name: str, *options: str) -> None:
        self._patience = stage.patience
        command = manage_command("sell_tickets", str(TICKETS[name]), *options)
        self._child = stage.machine(name, command)
        self._told = 0

    def steps(self, until: str = "") -> Iterator[str]:
        """What it does, from where this was left off, up to a step or to its end."""
        is_over = False
        while not is_over:
            self._patience.pause("selling tickets")
            self._child.check()
            is_over = self._child.status is not None
            for step in self._child.out().rpartition("\n")[0].splitlines()[self._told :]:
                self._told += 1
                yield step
                if until and until in step:
                    return

    def go_on(self) -> None:
        """Let it go on where it was stopped."""
        self._child.go_on()
