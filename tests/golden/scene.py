"""One scene of locks, waiters and runs, for everything that shows them."""

import threading
from contextlib import ExitStack, contextmanager, suppress

from django_redislock import LockError, distributed_lock, held, single_instance, task_runs
from django_redislock.holder import Activity, busy_with, current_owner
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.names import check_name
from tests.operations.commands import running
from tests.support.others import held_by, waiters
from tests.support.stored import newer_lease
from tests.support.waiting import wait_until

LONG = {"ttl": 3600, "wait": 3600}
TASK = Activity(task="shop.tasks.import_catalogue", task_id="3f6c8e1e-6d0f-4d3e-9a38-9b8f2f2f5a10")


@contextmanager
def locks_waiters_and_runs(locks):
    """Everything that can be seen: it lasts as long as the block."""
    _runs(locks)
    for name, task in {
        "import:8": "tasks.import",
        "import:{9}": "tasks.import",
        "sync": "",
    }.items():
        task_runs.announce(check_name(name), f"of {name}", 3600, task=task, using="default")
        await_later(locks.redis)
    with ExitStack() as stack:
        handed = distributed_lock("handed", **LONG)
        for block in (
            held_by("invoices", task="billing.tasks.run", ttl=1000),
            held_by("gpu", host="gpu-1", ttl=2000, limit=2),
            running("gpu", "video-1", ttl=2500, limit=2),
            busy_with(TASK),
            distributed_lock("import:7", ttl=3000),
            distributed_lock("b", "a", ttl=4000),
            handed,
        ):
            stack.enter_context(block)
            await_later(locks.redis)
        handed.lease.hand_over(within=5000)
        with distributed_lock("cooling", min_hold=6000):
            pass
        for_ever = 9_000_000_000_000_000  # Until after the last year that Python knows.
        for name, value in (("foreign", "of another program"), ("newer", newer_lease())):
            locks.redis.set(lock_keys(locks.prefix, name).lock, value, px=for_ever)
            assert not distributed_lock(name, wait=0).acquire()  # Now it is known to lists.
        held.pause("paused", lasts=7200, by="ops", reason="the disk is replaced")
        threads = [_wait_for("import:7") for _ in range(2)]
        wait_until(lambda: waiters("import:7") == 2)
        yield
    for thread in threads:
        thread.join()


def _wait_for(name):
    def wait():
        with suppress(LockError), busy_with(Activity(path="/shop/import/")):
            lock = distributed_lock(name, **LONG)
            lock.acquire()
            lock.release()

    thread = threading.Thread(target=wait, name="waiter")
    thread.start()
    return thread


def _runs(locks):
    """A success, a failure, a skip, one that never ended, and one that is done for an hour."""

    def work(fails=False):
        if fails:
            raise ValueError("no catalogue")

    report = single_instance("report:{fails}", ttl=60)(work)
    report()
    await_later(locks.redis)
    with suppress(ValueError):
        report(fails=True)
    await_later(locks.redis)
    with distributed_lock("report:False", **LONG):
        _run_elsewhere(report)
    await_later(locks.redis)
    with suppress(LockError), running("killed", "killed-1"):
        killed = lock_keys(locks.prefix, "killed")  # As when its lease is over.
        locks.redis.delete(killed.lock)
        locks.redis.zrem(killed.held, killed.lock)
    await_later(locks.redis)
    with running("gpu", "video-0", limit=2):
        pass
    await_later(locks.redis)
    with held_by("gpu", limit=2):
        await_later(locks.redis)
        with running("gpu", "video-00", limit=2):
            pass
    await_later(locks.redis)
    daily = single_instance("daily", ttl=60, once=3600)(work)
    daily()
    await_later(locks.redis)
    daily()
    await_later(locks.redis)


def await_later(redis):
    """Return a millisecond later: lists have the last to run first, by the millisecond."""
    ran = redis.time()
    wait_until(lambda: redis.time() > (ran[0], ran[1] + 1000))


def _run_elsewhere(function):
    """Run it in a thread of its own, so that it is another's."""
    thread = threading.Thread(target=function, name="another")
    thread.start()
    thread.join()


def command_of_this_process():
    """What the owner of a lease of this process shows."""
    return current_owner().command
