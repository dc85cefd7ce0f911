"""What the shop's workers do: one task for each way in which runs may meet."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from celery import shared_task

from django_redislock import single_instance_task
from shop.work import work

if TYPE_CHECKING:
    from celery import Task


class CardDeclined(Exception):
    """The bank does not pay."""


# Lasts many times its ttl: the lease is renewed for as long as the worker lives.
@single_instance_task(key="catalogue:import", ttl=30, bind=True)
def import_catalogue(self: Task) -> None:
    """Import the suppliers' catalogue, which takes minutes."""
    work(self.lease, 150)


# Runs for the same customer wait in line instead of being skipped at once.
@single_instance_task(key="customer:{customer_id}", ttl=10, on_conflict="wait", wait=60, bind=True)
def sync_customer(self: Task, customer_id: int) -> None:
    """Carry the changes of one customer over to the bookkeeping."""
    work(self.lease, random.uniform(4, 7))


# The database bears three of these at a time.
@single_instance_task(
    key="sales-report", limit=3, ttl=20, on_conflict="wait", wait=60, bind=True, ignore_result=True
)
def render_sales_report(self: Task, month: str) -> None:
    """Render the report of one month."""
    work(self.lease, random.uniform(8, 14))


@single_instance_task(key="subscriptions:charge", ttl=10, bind=True)
def charge_subscriptions(self: Task) -> None:
    """Charge what is due. After a failure the lock is free at once: the next run tries again."""
    work(self.lease, random.uniform(3, 6))
    if random.random() < 0.3:
        raise CardDeclined


# The command of the same name does the same, under the same lock.
@single_instance_task(key="payments:reconcile", ttl=15, bind=True)
def reconcile_payments(self: Task) -> None:
    """Compare the payments with the bank's statement."""
    work(self.lease, 3)


# Of several beats, one sends it for each due time: see `manage.py demo_jobs`.
@shared_task(ignore_result=True)
def poll_bank(due: str) -> None:
    """Ask the bank which payments have come in until this due time."""
