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
# skipped by then.
@single_instance_task(key="lottery", ttl=30, min_hold=30, acks_late=True, bind=True)
def run_lottery(self: Task) -> dict[str, Any]:
    """Draw the winners; of all the servers that start this, one does, the others skip."""
    return _report(draw_winners(server=_server(self), fence=current_lease().fence))


@single_instance_task(key="lottery:{number}", ttl=2, bind=True, acks_late=True)
def run_numbered_lottery(self: Task, number: int, drum_roll: float = 0.1) -> dict[str, Any]:
    """Draw one lottery of many, whatever happens to the workers; see `manage.py demo_chaos`."""
    time.sleep(drum_roll)
    draw = draw_winners(server=_server(self), fence=self.lease.fence, number=number)
    time.sleep(drum_roll)
    return _report(draw)


@shared_task(bind=True)
def run_lottery_without_lock(self: Task) -> dict[str, Any]:
    """Draw the winners, whoever else does; only to show what the lock is for."""
    return _report(draw_winners(server=_server(self), fence=None))


def _server(task: Task) -> str:
    return task.request.hostname or "no worker"


def _report(draw: Draw) -> dict[str, Any]:
    return {"draw": draw.pk, "fence": draw.fence, "winners": draw.winners.count()}
