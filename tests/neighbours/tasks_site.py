"""A project with tasks of Django, kept in a database.

Arguments: the file of the database; and "work" to be a worker, or tasks to put into the queue, each
followed by its key.
"""

import json
import os
import sys
from importlib.util import find_spec

import django
from django.conf import settings
from django.core.management import call_command

OF_DJANGO = find_spec("django.tasks") is not None


def main(database, *what):
    settings.configure(
        INSTALLED_APPS=[
            "django_redislock",
            *([] if OF_DJANGO else ["django_tasks"]),
            "django_tasks_db",
        ],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": database,
                "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 30},
            }
        },
        REDISLOCK=json.loads(os.environ["TESTS_REDISLOCK"]),
        USE_TZ=True,
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
    )
    django.setup()
    if what == ("work",):
        call_command("db_worker", interval=0.1, startup_delay=False)
        return
    from tests.neighbours import tasks_of_django

    call_command("migrate", "django_tasks_database", verbosity=0)
    for name, key in zip(what[::2], what[1::2], strict=True):
        getattr(tasks_of_django, name).enqueue(key)


if __name__ == "__main__":
    main(*sys.argv[1:])
