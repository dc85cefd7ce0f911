"""A cluster of django-q2 whose broker is a database: makes the tables and a schedule, and runs.

Arguments: the file of its database; "plan" to make the tables and the schedule, "run" to run the
cluster; the name of the job; and its key.
"""

import json
import os
import sys

import django
from django.conf import settings
from django.core.management import call_command

from django_redislock import single_instance
from tests.celery.project.journal import note, wait_at_gate


@single_instance("{key}", ttl=3, min_hold=30)
def nightly(key):
    """Skip when busy, and for half a minute after a success."""
    return _work(key)


@single_instance("{key}", ttl=3, once=600, on_conflict="raise")
def careful(key):
    """Fail when busy: the message of a failure stays at the broker. Succeed once."""
    return _work(key)


def _work(key):
    note(key, "start")
    wait_at_gate(key)
    note(key, "end")
    return f"did {key}"


def configure(database):
    settings.configure(
        INSTALLED_APPS=["django_redislock", "django_q"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": database,
                "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "timeout": 30},
            }
        },
        REDISLOCK=json.loads(os.environ["TESTS_REDISLOCK"]),
        SECRET_KEY="not a secret",
        USE_TZ=True,
        Q_CLUSTER={
            "name": "tests",
            "orm": "default",
            "workers": 2,
            "bulk": 1,
            "poll": 0.1,
            # Shorter than the run, against the advice of its docs: it delivers again.
            "timeout": None,
            "retry": 1,
            "max_attempts": 0,
            "ack_failures": False,
        },
    )
    django.setup()


def main(database, what, job, key):
    configure(database)
    if what == "plan":
        from django.utils import timezone
        from django_q.models import Schedule

        call_command("migrate", "django_q", verbosity=0)
        name = f"{__spec__.name}.{job}"
        Schedule.objects.create(func=name, args=repr((key,)), next_run=timezone.now())
        return
    from django_q.cluster import Cluster
    from django_q.scheduler import scheduler

    cluster = Cluster()
    cluster.start()
    scheduler()  # The cluster itself does that every half minute.
    print("ready", flush=True)
    cluster.sentinel.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
