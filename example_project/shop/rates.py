"""A task of Django. `manage.py db_worker` runs it."""

from __future__ import annotations

from datetime import timedelta

from django_redislock import single_instance
from django_redislock.jobs import current_lease
from shop.work import work

try:
    from django.tasks import task
except ImportError:  # Before Django 6.
    from django_tasks import task


# Whichever servers ask for it, and how often: once an hour.
@task
@single_instance("rates:{currency}", ttl=30, once=timedelta(hours=1))
def fetch_rates(currency: str) -> str:
    """Fetch the exchange rates of a currency from the bank."""
    work(current_lease(), 2)
    return f"Fetched the rates of {currency}."
