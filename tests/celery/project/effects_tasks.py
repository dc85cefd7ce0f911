"""A task that writes to the default database, for workers with database_settings.py."""

import os

from django.db import connection
from django.db.backends.signals import connection_created

from django_redislock import signals, single_instance_task
from django_redislock.celery import current_lease
from tests.celery.project.journal import note, server, wait_at_gate
from tests.celery.project.tasks import work
from tests.effects.models import Entry


def write(key, **how):
    """Write one line, and then do as asked."""
    Entry.objects.create(fence=current_lease().fence)
    return work(key, **how)


@single_instance_task(key="{key}", atomic=True, acks_late=True, ttl=6)
def draw(key, **how):
    return write(key, **how)


# The options of docs/getting-started.md.
@single_instance_task(
    key="{key}",
    ttl=6,
    atomic=True,
    once="database",
    on_conflict="retry",
    acks_late=True,
    reject_on_worker_lost=True,
)
def draw_at_noon(key, **how):
    return write(key, **how)


@single_instance_task(key="{key}", atomic=True, bind=True, ttl=6)
def draw_and_go_on(self, key):
    """Write one line, and let another task do the rest."""
    Entry.objects.create(fence=1)
    raise self.replace(count.si(key))


@single_instance_task(key="{key}")
def count(key):
    """Count the lines, under the same lock."""
    return Entry.objects.count()


def stand_still_before_the_claim(execute, sql, *rest):
    """Wait until the test says so, if it has asked for that: for the lock of that name."""
    if "django_redislock_fence" in sql and (name := server().lpop("stand still")):
        key = name.decode()
        note(key, "claims")
        wait_at_gate(key)
    return execute(sql, *rest)


def watch_statements(connection, **news):
    """This process has a connection to the database."""
    connection.execute_wrappers.append(stand_still_before_the_claim)


def note_release(lease, **news):
    """A lock of this process was released."""
    note(lease.name, "released", in_transaction=connection.in_atomic_block)


if "TESTS_JOURNAL" in os.environ:  # Not in the tests' own process, which imports this too.
    connection_created.connect(watch_statements)
    signals.lock_released.connect(note_release)
