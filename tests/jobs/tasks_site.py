"""A project with tasks of Django, and its worker: queues each task twice, and prints the results.

Arguments: the file of its database, and REDISLOCK as JSON.
"""

import json
import sys
from importlib.util import find_spec

import django
from django.conf import settings
from django.core.management import call_command

from django_redislock import distributed_lock, single_instance

OF_DJANGO = find_spec("django.tasks") is not None
IMMEDIATE = f"{'django.tasks' if OF_DJANGO else 'django_tasks'}.backends.immediate.ImmediateBackend"


def main(database, redislock):
    settings.configure(
        INSTALLED_APPS=[
            "django_redislock",
            *([] if OF_DJANGO else ["django_tasks"]),
            "django_tasks_db",
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        REDISLOCK=json.loads(redislock),
        USE_TZ=True,
        TASKS={
            "default": {"BACKEND": "django_tasks_db.DatabaseBackend"},
            "immediate": {"BACKEND": IMMEDIATE},
        },
    )
    django.setup()
    call_command("migrate", verbosity=0)
    from tests.jobs.tasks import aload, load, load_as, whose

    queued = [one.enqueue(source) for one in (load, aload, load_as) for source in ("eu", "us")]
    owned = whose.enqueue()
    call_command("db_worker", batch=True, interval=0, verbosity=0)
    for one in queued:
        one.refresh()
    at_once = [
        one.using(backend="immediate").enqueue(source)
        for one in (load, load_as)
        for source in ("eu", "us")
    ]
    try:
        single_instance(load)
    except TypeError as error:
        assert "Write @task above @single_instance." in str(error)  # noqa: PT017
    owned.refresh()
    for one in owned, whose.using(backend="immediate").enqueue():
        assert one.return_value == ["tests.jobs.tasks.whose", one.id, f"job {one.id}"]
    with distributed_lock("itself") as lease:
        assert lease.owner.task == ""
    print(json.dumps([[one.status, one.return_value] for one in [*queued, *at_once]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
