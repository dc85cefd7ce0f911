"""When a worker or a run ends, in any way: when the lock is free again, and what is done.

docs/celery.md has a table of the ends and of what comes of each: here each of its rows is run.
"""

import os
import signal
import time

import pytest
from billiard.exceptions import WorkerLostError

from django_redislock import distributed_lock, held
from tests import ROOT
from tests.celery.project import LOST_SOON, PATIENCE, SOON
from tests.support.faults import slack
from tests.support.others import waiters
from tests.support.processes import runs
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Of the tasks whose leases end by themselves. What is free at once is so by a release: the lease
# would last for 20 s more, at least.
TTL = 6.0
AT_ONCE = 10.0

BROKER = {"broker_transport_options": SOON}
SOFT = {"worker_soft_shutdown_timeout": 1.0, **BROKER}


def finish(stage, worker, sent, pid):
    worker.signal(signal.SIGTERM)
    stage.open_gate(stage.current_key)


def quit_cold(stage, worker, sent, pid):
    worker.signal(signal.SIGQUIT)


def kill_worker(stage, worker, sent, pid):
    worker.kill()


def kill_child(stage, worker, sent, pid):
    os.kill(pid, signal.SIGKILL)


def revoke(stage, worker, sent, pid):
    sent.revoke(terminate=True, signal="SIGTERM")


def revoke_and_kill(stage, worker, sent, pid):
    sent.revoke(terminate=True, signal="SIGKILL")


def wait(stage, worker, sent, pid):
    """The time limit does it."""


# How a run ends while its body is at work: its task, what is done to it, and how its worker is
# configured, or by which of its options a time limit is set.
ENDS = {
    "warm shutdown (SIGTERM)": ("lengthy", finish, {}),
    "cold shutdown (SIGQUIT)": ("lengthy", quit_cold, {}),
    "cold shutdown (SIGQUIT), early ack": ("skipping", quit_cold, {}),
    "soft shutdown (SIGQUIT), its time runs out": ("lengthy", quit_cold, SOFT),
    "worker killed (SIGKILL)": ("late", kill_worker, BROKER),
    "worker killed (SIGKILL), early ack": ("brief", kill_worker, {}),
    "child killed (SIGKILL)": ("late", kill_child, {}),
    "child killed, reject_on_worker_lost": ("rejecting", kill_child, {}),
    "soft time limit": ("lengthy", wait, "--soft-time-limit"),
    "hard time limit": ("lengthy", wait, "--time-limit"),
    "revoke(terminate=True), SIGTERM": ("lengthy", revoke, {}),
    "revoke(terminate=True), SIGKILL": ("late", revoke_and_kill, {}),
}


def documented():
    """The rows of the table in the docs: each end, and what comes of it."""
    text = (ROOT / "docs" / "celery.md").read_text()
    table = text.partition("<!-- life cycle -->")[2].partition("<!-- end -->")[0]
    return [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]


def test_each_end_is_documented():
    assert [name for name, *_ in documented()] == [*ENDS]


@pytest.mark.proves("N4")
@pytest.mark.parametrize(("name", "free", "started", "done"), documented())
def test_life_cycle(own_stage, name, free, started, done):
    """When the lock is free, how often the body begins, and how often it gets to its end."""
    task, end, how = ENDS[name]
    options, conf = ([how, "4"], {}) if isinstance(how, str) else ([], how)
    own_stage.conf |= conf
    key = own_stage.current_key = own_stage.key()
    worker = own_stage.start(*options, pool="prefork")
    sent = own_stage.send(task, key, hold=True)
    pid = own_stage.wait_for(key, "start")["pid"]
    lease = held.get(key)

    def ended():
        """Whether the process that ran the body is gone, or the body has."""
        counts = (own_stage.count(key, event) for event in ("end", "interrupted"))
        return not runs(pid) or any(counts)

    def free_again():
        lock = held.get(key)
        return lock is None or lock.id != lease.id

    end(own_stage, worker, sent, pid)
    wait_until(ended, PATIENCE, "the body has ended", every=0.02)
    ended_at = time.monotonic()
    wait_until(free_again, PATIENCE, "the lease has ended", every=0.01)
    took = time.monotonic() - ended_at
    assert took < (AT_ONCE if free == "at once" else TTL + 1.5 + slack())

    if end in {finish, quit_cold, kill_worker}:
        worker.wait()
        own_stage.start()
    if started == "twice":
        own_stage.wait_for(key, "start", 2)
        own_stage.open_gate(key)
    if done == "once":
        assert own_stage.result(sent) == f"did {key}"
    own_stage.wait_until_idle()
    times = {"not at all": 0, "once": 1, "twice": 2}
    assert own_stage.count(key, "start") == times[started]
    assert own_stage.count(key, "end") == times[done]
    # Nothing is left in the way of the next run.
    own_stage.open_gate(key)
    with distributed_lock(key, wait=HUNG):
        pass


def test_a_child_that_is_killed_frees_its_permit_and_no_other(own_stage):
    own_stage.conf |= LOST_SOON
    own_stage.start(pool="prefork", concurrency=3)
    key = own_stage.key()
    running = [own_stage.send("limited", key, hold=True) for _ in range(2)]
    own_stage.wait_for(key, "start", 2)
    first, second = (held.get(key, permit=number) for number in (1, 2))
    os.kill(second.owner.pid, signal.SIGKILL)
    wait_until(lambda: held.get(key, permit=2) is None, PATIENCE, "its lease is over", every=0.02)
    running.append(own_stage.send("limited", key, hold=True))
    own_stage.wait_for(key, "start", 3)
    has_it = held.get(key, permit=2)
    assert has_it.owner.task_id == running[2].id
    own_stage.open_gate(key, 2)
    outcomes = {one.id: one.get(timeout=PATIENCE, propagate=False) for one in running}
    assert isinstance(outcomes.pop(second.owner.task_id), WorkerLostError)
    assert [*outcomes.values()] == [f"did {key}"] * 2
    assert first.owner.task_id in outcomes


def test_a_child_that_is_replaced_after_some_tasks_lets_go(own_stage):
    """worker_max_tasks_per_child: a new process per task, and the lock is free for it."""
    own_stage.start("--max-tasks-per-child", "1", pool="prefork")
    key = own_stage.key()
    for _ in range(3):
        assert own_stage.result(own_stage.send("late", key)) == f"did {key}"
    assert len({event["pid"] for event in own_stage.events(key, "start")}) == 3


def test_a_run_that_ends_while_it_waits_leaves_the_queue(own_stage):
    own_stage.start(pool="prefork")
    for limit in ({}, {"soft_time_limit": 4}, {"time_limit": 4}):
        key = own_stage.key()
        with distributed_lock(key):
            sent = own_stage.task("waiting").apply_async((key,), **limit)
            own_stage.wait_for_waiter(key)
            if not limit:
                sent.revoke(terminate=True)
            has_ended = {"REVOKED", "FAILURE"}
            wait_until(lambda: sent.state in has_ended, PATIENCE, "it has ended", every=0.02)  # noqa: B023
            wait_until(lambda: not waiters(key), 5, "nobody waits", every=0.02)  # noqa: B023
        assert own_stage.result(own_stage.send("waiting", key)) == f"did {key}"
        assert own_stage.count(key, "start") == 1
