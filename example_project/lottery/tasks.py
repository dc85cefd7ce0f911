"""The task that every server starts at noon."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from celery import Task, shared_task

from django_redislock import single_instance_task
from django_redislock.celery import current_lease
from lottery.drawing import draw_winners

if TYPE_CHECKING:
    from lottery.models import Draw


# The lock alone would not make it *one* draw: drawing takes milliseconds, and a server whose clock
# is late would find the lock free again. `min_hold` keeps it for as long as clocks may differ.
# With `acks_late` the broker delivers it again if the worker that draws is killed: the others have
# skipped by then. With `atomic` the database refuses a draw of a server that was stopped until its
# lease had ended. If no server answers at noon, as while a replica takes over, it is tried again.
@single_instance_task(
    key="lottery",
    ttl=30,
    min_hold=30,
    acks_late=True,
    atomic=True,
    on_unavailable="retry",
    bind=True,
)
def run_lottery(self: Task) -> dict[str, Any]:
    """Draw the winners; of all the servers that start this, one does, the others skip."""
    return _report(draw_winners(server=_server(self), fence=current_lease().fence))


# The database remembers that it is drawn, whatever Redis and the worker forget.
@single_instance_task(
    key="lottery:{number}", ttl=2, atomic=True, once="database", acks_late=True, bind=True
)
def run_numbered_lottery(self: Task, number: int, applause: float = 0.05) -> dict[str, Any]:
    """Draw one lottery of many, whatever happens; see `manage.py demo_chaos`."""
    return _draw_numbered(self, number, applause)


# Its applause can be longer, since it is in no transaction: SQLite has one at a time.
@single_instance_task(key="lottery:{number}", ttl=2, once=3600, acks_late=True, bind=True)
def run_unguarded_lottery(self: Task, number: int, applause: float = 0.2) -> dict[str, Any]:
    """The same with all that Redis can do, and nothing that the database can."""
    return _draw_numbered(self, number, applause)


@shared_task(bind=True)
def run_lottery_without_lock(self: Task) -> dict[str, Any]:
    """Draw the winners, whoever else does; only to show what the lock is for."""
    return _report(draw_winners(server=_server(self), fence=None))


def _draw_numbered(task: Task, number: int, applause: float) -> dict[str, Any]:
    draw = draw_winners(server=_server(task), fence=task.lease.fence, number=number)
    time.sleep(applause)  # Here, most of those are killed that are.
    return _report(draw)


def _server(task: Task) -> str:
    return task.request.hostname or "no worker"


def _report(draw: Draw) -> dict[str, Any]:
    return {"draw": draw.pk, "fence": draw.fence, "winners": draw.winners.count()}
