"""Those who hold locks and wait for them, as child processes: what the pages show."""

import threading
import time
from dataclasses import replace
from itertools import count

from django.db import connections

from django_redislock import distributed_lock, handle, held
from django_redislock.holder import Activity, busy_with, current_owner
from django_redislock.lock import Lock
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.options import Options
from django_redislock.task_runs import note_skip
from tests.support.processes import hear, say
from tests.support.waiting import wait_until


def hold(name, **how):
    """Hold one lock. Then, as told: release it, or say why it was lost."""
    lock = distributed_lock(name, **{"wait": 60, **how})
    assert lock.acquire()
    lease = lock.lease
    say(lease.id)
    while True:
        if hear() == "release":
            lock.release()
            say("released")
        else:
            wait_until(lambda: lease.lost_reason)
            say(lease.lost_reason)


def machine(host, pid, locks):
    """Be a machine called *host* that takes many locks, each in a thread of its own.

    A lock is ``{"name": ...}`` and, if wished, the *task*, *task_id* or *path* that wants it, for
    how many *seconds* it is held (else for good), how many *turns* it is taken (None: for good),
    how many runs were *skipped*, and what distributed_lock takes.

    It is ready when each lock is held for good, or waited for, or done with.
    """

    def pretended(**said):
        return replace(current_owner(**said), host=host, pid=pid, command="celery worker")

    handle.current_owner = pretended

    def is_queued(name):
        owners = [waiter.owner for waiter in held.detail(name).waiters]
        return (host, pid) in [(owner.host, owner.pid) for owner in owners]

    for lock in locks:
        settled = threading.Event()
        taker = threading.Thread(target=_take, args=[settled], kwargs=lock, daemon=True)
        taker.start()
        # In this order.
        wait_until(lambda: settled.is_set() or not taker.is_alive() or is_queued(lock["name"]))  # noqa: B023 - called at once
        assert settled.is_set() or taker.is_alive(), f"{lock} was not taken"
    say("ready")
    hear()


def complete(folder, runs):
    """Note runs as completed, each with what add_run() takes, in the database of the site."""
    from tests.operations.test_once_command import add_run

    connections["default"].settings_dict["NAME"] = f"{folder}/site.sqlite3"
    for run in runs:
        add_run(**run)
    say(len(runs))
    hear()


def _take(settled, name, task="", task_id="", path="", seconds=None, turns=1, skipped=0, **how):
    for turn in count() if turns is None else range(turns):
        with busy_with(Activity(path=path, task=task, task_id=task_id)):
            run = RunMarker(f"{task_id}-{turn}", 0) if task else None
            with Lock(name, Options(**{"wait": 3600, **how}), run):
                if seconds is None or turns is None:
                    settled.set()
                time.sleep(3600 if seconds is None else seconds)
    for _ in range(skipped):
        with busy_with(Activity(task=task, task_id=task_id)):
            note_skip(name, "busy", using="default")
    settled.set()
