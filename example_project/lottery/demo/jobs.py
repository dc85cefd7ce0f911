"""The same jobs on several servers: what cron, or a queue, starts at the same moment on each."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from django.conf import settings

from lottery.demo.servers import manage_command
from lottery.demo.tables import table
from shop.rates import fetch_rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lottery.demo.processes import Child
    from lottery.demo.stage import Stage

SETTINGS = "example_project.jobs_settings"
BUSY = 75  # How `locks run` ends if it skips its command.


class Run(ABC):
    """A job that one server has started: a process."""

    kind: ClassVar[str]
    done: ClassVar[str]  # What the job says when it has done its work, and never else.

    def __init__(self, server: str, stage: Stage) -> None:
        self.server = server
        self._child: Child = stage.start(
            f"{server}-{self.kind}",
            self.command(),
            DEMO_MACHINE=server,
            DJANGO_SETTINGS_MODULE=SETTINGS,
        )

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line of the process."""

    def is_over(self) -> bool:
        """Whether it has ended.

        Raises:
            ChildDied: It has failed.
        """
        if self._child.status != BUSY:
            self._child.check()
        return self._child.status is not None

    def outcome(self) -> str:
        """What it has said in the end."""
        return (self._child.out() + self._child.err()).strip().rpartition("\n")[2]

    def row(self) -> list[object]:
        """Its row in the table."""
        return [self.kind, self.server, self._child.pid, self._child.status, self.outcome()]


class Command(Run):
    """A management command with SingleInstanceMixin."""

    kind = "command"
    done = "Sent the invoices of 2026-11."

    def command(self) -> Sequence[str]:
        """As in a crontab."""
        return manage_command("send_invoices", "2026-11")


class Script(Run):
    """A shell script, by `locks run`."""

    kind = "script"
    done = "Backed up the shop."

    def command(self) -> Sequence[str]:
        """As in a crontab."""
        script = os.path.relpath(Path(settings.BASE_DIR, "shop", "backup.sh"))
        return manage_command("locks", "run", "backup", "--min-hold", "1m", "--", "sh", script)


class Task(Run):
    """A task of Django, in the queue of this server, and the worker that runs it."""

    kind = "task"
    done = "Fetched the rates of EUR."

    def __init__(self, server: str, stage: Stage) -> None:
        self._result = fetch_rates.using(queue_name=server).enqueue("EUR")
        super().__init__(server, stage)

    def command(self) -> Sequence[str]:
        """A worker that ends when the queue is empty."""
        options = ("--queue-name", self.server, "--batch", "--no-reload", "--no-startup-delay")
        return manage_command("db_worker", *options)

    def outcome(self) -> str:
        """The result in the database: a skip is a successful one."""
        result = self._result
        result.refresh()
        return str(result.return_value if result.status == "SUCCESSFUL" else result.status)


class Jobs:
    """Each kind of job, started on each server at the same moment."""

    KINDS = (Command, Script, Task)

    def __init__(self, servers: Sequence[str], stage: Stage) -> None:
        self._runs = [kind(server, stage) for kind in self.KINDS for server in servers]

    def __str__(self) -> str:
        ran_once = sum(self._ran(kind) == 1 for kind in self.KINDS)
        return f"jobs={len(self.KINDS)} ran_once={ran_once} skipped={self._skipped()}"

    def are_over(self) -> bool:
        """Whether all have ended."""
        return all(run.is_over() for run in self._runs)

    def table(self) -> str:
        """One line per run."""
        return table(["job", "server", "pid", "exit", "outcome"], [run.row() for run in self._runs])

    def contradictions(self) -> Iterator[str]:
        """Everything that is not as it should be."""
        for kind in self.KINDS:
            if (ran := self._ran(kind)) != 1:
                yield f"The {kind.kind} was run by {ran} servers, not by one."
        if self._skipped() != len(self._runs) - len(self.KINDS):
            yield "Not every other server has skipped."

    def _ran(self, kind: type[Run]) -> int:
        return sum(isinstance(run, kind) and run.outcome() == kind.done for run in self._runs)

    def _skipped(self) -> int:
        return sum("skipped" in run.outcome().lower() for run in self._runs)
