"""What goes on in the shop while `demo_admin` runs: machines, and the work that comes up there."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery import current_app
from kombu.exceptions import OperationalError

from lottery.demo.servers import manage_command, publish_to, worker_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lottery.demo.processes import Child
    from lottery.demo.stage import Stage

MACHINES = ("worker-1", "worker-2", "worker-3")
# Runs that wait for a lock keep their slots: enough for all on one machine, if it comes to that.
SLOTS = "24"

KILLED_AFTER = 15.0  # seconds of counting: it has been renewed once by then
FORGOTTEN_AGAIN_AFTER = 90.0  # seconds


@dataclass(frozen=True)
class Errand:
    """Work that comes up every so many seconds, several times at once."""

    every: float
    task: str
    args: tuple[Any, ...] = ()
    times: int = 1


ERRANDS = (
    Errand(170, "shop.tasks.import_catalogue"),
    *(
        Errand(26, "shop.tasks.render_sales_report", (f"2026-{month:02}",))
        for month in range(5, 11)
    ),
    Errand(27, "shop.tasks.sync_customer", (77,), times=4),
    Errand(24, "shop.tasks.sync_customer", (1204,), times=3),
    Errand(12, "shop.tasks.charge_subscriptions"),
    Errand(40, "lottery.tasks.run_lottery", times=3),
    Errand(10, "shop.tasks.reconcile_payments"),
)


class Shop:
    """All that goes on."""

    def __init__(self, stage: Stage) -> None:
        self._forgotten = Forgotten(stage)
        self._stock = StockCount(stage)
        self._workers = [Worker(name, stage) for name in MACHINES]
        self._clock = Clock(stage, ERRANDS)

    def is_ready(self) -> bool:
        """Whether work can come up."""
        return self._forgotten.is_ready() and all(worker.is_ready() for worker in self._workers)

    def check(self) -> None:
        """Raise ChildDied if a worker runs no more."""
        for worker in self._workers:
            worker.check()

    def attend(self) -> Iterator[tuple[str, str]]:
        """Do what is due; tells who has news, and which."""
        self._clock.strike()
        self._stock.attend()
        if news := self._forgotten.attend():
            yield "office", news


class Clock:
    """Publishes the errands when they are due."""

    def __init__(self, stage: Stage, errands: Iterable[Errand]) -> None:
        publish_to(stage.redis.url)
        self._due = dict.fromkeys(errands, time.monotonic())

    def strike(self) -> None:
        """Publish what is due by now."""
        # If Redis is gone, whoever looks after it will say so.
        with suppress(OperationalError):
            for errand, due in self._due.items():
                if time.monotonic() >= due:
                    for _ in range(errand.times):
                        current_app.send_task(errand.task, errand.args, ignore_result=True)
                    self._due[errand] = time.monotonic() + errand.every


class Worker:
    """A machine with a Celery worker."""

    def __init__(self, name: str, stage: Stage) -> None:
        command = worker_command(name, "--pool", "threads", "--concurrency", SLOTS)
        # Asked to end, it would wait for its runs, and some take minutes.
        self._child = stage.machine(name, command, abrupt=True)

    def check(self) -> None:
        """Raise ChildDied if it runs no more."""
        self._child.check(may_end=False)

    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        return " ready." in self._child.err()


class StockCount:
    """`manage.py count_stock` that is killed each time before it is done, and started again."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._count()

    def attend(self) -> None:
        """Kill it when it is time; its successor waits until the lease of the dead is over."""
        if _is_over(self._child):
            self._count()
        elif self._counting_since is None:
            if self._child.out():
                self._counting_since = time.monotonic()
        elif time.monotonic() - self._counting_since > KILLED_AFTER:
            self._child.kill()

    def _count(self) -> None:
        command = manage_command("count_stock", "--seconds", "3600")
        self._child = self._stage.machine("warehouse", command)
        self._counting_since: float | None = None


class Forgotten:
    """`manage.py reconcile_payments` in a terminal that somebody has left: it hangs."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ended_at: float | None = None
        self._start()

    def is_ready(self) -> bool:
        """Whether it has the lock."""
        self._child.check()
        return bool(self._child.out())

    def attend(self) -> str:
        """Start it again a while after its end; tells what is new."""
        if self._ended_at is None:
            if not _is_over(self._child):
                return ""
            self._ended_at = time.monotonic()
            last_words = "Killed." if self._child.status else self._child.out().splitlines()[-1]
            return f"manage.py reconcile_payments: {last_words}"
        if time.monotonic() - self._ended_at < FORGOTTEN_AGAIN_AFTER:
            return ""
        self._ended_at = None
        self._start()
        return "manage.py reconcile_payments: started, and forgotten, once more"

    def _start(self) -> None:
        command = manage_command("reconcile_payments", "--seconds", str(24 * 3600))
        self._child = self._stage.machine("office", command)


def _is_over(child: Child) -> bool:
    """Whether it has ended or was killed; both may be.

    Raises:
        ChildDied: It has failed.
    """
    if child.status is not None and child.status > 0:
        child.check()
    return child.status is not None
