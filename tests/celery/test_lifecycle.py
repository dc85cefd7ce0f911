"""When a worker or a run ends, in any way: when the lock is free again, and what is done.

Each test ends with the same three facts, and docs/celery.md has them as a table, which
test_docs.py compares with LIFE_CYCLE below.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from billiard.exceptions import WorkerLostError
from celery.result import AsyncResult

from django_redislock import distributed_lock, held
from tests.celery.project import LOST_SOON, PATIENCE, SOON
from tests.celery.project.stage import Stage, Worker
from tests.support.faults import slack
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Of the tasks whose leases end by themselves. What is free at once is so by a release: the lease
# would last for 20 s more, at least.
TTL = 6.0
AT_ONCE = 10.0

Free = Literal["at once", "after the lease"]
Times = Literal["once", "twice", "not at all"]


@dataclass(frozen=True)
class Ending:
    """One way for a run to end while its body is at work, and what comes of it."""

    name: str  # As the table in the docs has it.
    task: str
    act: Callable[[Stage, Worker, AsyncResult, int], None]  # int: the pid that runs the body
    free: Free
    started: Times  # How often the body begins.
    done: Times  # How often it gets to its end.
    ends_worker: bool = False
    options: tuple[str, ...] = ()
    conf: tuple[tuple[str, Any], ...] = ()


def _open_gate_and(number):
    def act(stage, worker, sent, pid):
        worker.signal(number)
        stage.open_gate(stage.current_key)

    return act


def _signal(number):
    return lambda stage, worker, sent, pid: worker.signal(number)


def _kill_worker(stage, worker, sent, pid):
    worker.kill()


def _kill_child(stage, worker, sent, pid):
    os.kill(pid, signal.SIGKILL)


def _revoke(number):
    return lambda stage, worker, sent, pid: sent.revoke(terminate=True, signal=number)


def _nothing(stage, worker, sent, pid):
    """The time limit does it."""


BROKER = (("broker_transport_options", SOON),)
SOFT = (("worker_soft_shutdown_timeout", 1.0), *BROKER)

LIFE_CYCLE = [
    Ending(
        "warm shutdown (SIGTERM)",
        "lengthy",
        _open_gate_and(signal.SIGTERM),
        "at once",
        "once",
        "once",
        ends_worker=True,
    ),
    Ending(
        "cold shutdown (SIGQUIT)",
        "lengthy",
        _signal(signal.SIGQUIT),
        "at once",
        "twice",
        "once",
        ends_worker=True,
    ),
    Ending(
        "cold shutdown (SIGQUIT), early ack",
        "skipping",
        _signal(signal.SIGQUIT),
        "at once",
        "once",
        "not at all",
        ends_worker=True,
    ),
    Ending(
        "soft shutdown (SIGQUIT), its time runs out",
        "lengthy",
        _signal(signal.SIGQUIT),
        "at once",
        "twice",
        "once",
        ends_worker=True,
        conf=SOFT,
    ),
    Ending(
        "worker killed (SIGKILL)",
        "late",
        _kill_worker,
        "after the lease",
        "twice",
        "once",
        ends_worker=True,
        conf=BROKER,
    ),
    Ending(
        "worker killed (SIGKILL), early ack",
        "brief",
        _kill_worker,
        "after the lease",
        "once",
        "not at all",
        ends_worker=True,
    ),
    Ending("child killed (SIGKILL)", "late", _kill_child, "after the lease", "once", "not at all"),
    Ending(
        "child killed, reject_on_worker_lost",
        "rejecting",
        _kill_child,
        "after the lease",
        "twice",
        "once",
    ),
    Ending(
        "soft time limit",
        "lengthy",
        _nothing,
        "at once",
        "once",
        "not at all",
        options=("--soft-time-limit", "4"),
    ),
    Ending(
        "hard time limit",
        "lengthy",
        _nothing,
        "at once",
        "once",
        "not at all",
        options=("--time-limit", "4"),
    ),
    Ending(
        "revoke(terminate=True), SIGTERM",
        "lengthy",
        _revoke("SIGTERM"),
        "at once",
        "once",
        "not at all",
    ),
    Ending(
        "revoke(terminate=True), SIGKILL",
        "late",
        _revoke("SIGKILL"),
        "after the lease",
        "once",
        "not at all",
    ),
]


@pytest.mark.proves("N4")
@pytest.mark.parametrize("ending", LIFE_CYCLE, ids=lambda ending: ending.name)
def test_life_cycle(own_stage, ending):
    own_stage.conf |= dict(ending.conf)
    key = own_stage.current_key = own_stage.key()
    worker = own_stage.start(*ending.options, pool="prefork")
    sent = own_stage.send(ending.task, key, hold=True)
    pid = own_stage.wait_for(key, "start")["pid"]
    lease = held.get(key)

    ending.act(own_stage, worker, sent, pid)
    wait_until(lambda: _ended(own_stage, worker, pid), PATIENCE, "the body has ended", every=0.02)
    ended_at = time.monotonic()
    wait_until(lambda: _other_than(lease.id, key), PATIENCE, "the lease has ended", every=0.01)
    took = time.monotonic() - ended_at
    assert took < (AT_ONCE if ending.free == "at once" else TTL + 1.5 + slack())

    if ending.ends_worker:
        worker.wait()
        own_stage.start()
    if ending.started == "twice":
        own_stage.wait_for(key, "start", 2)
        own_stage.open_gate(key)
    if ending.done == "once":
        assert own_stage.result(sent) == f"did {key}"
    own_stage.wait_until_idle()
    times = {"not at all": 0, "once": 1, "twice": 2}
    assert own_stage.count(key, "start") == times[ending.started]
    assert own_stage.count(key, "end") == times[ending.done]
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
    assert second.owner.pid is not None
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


@pytest.mark.parametrize("how", ["revoked", "soft time limit", "hard time limit"])
def test_a_run_that_ends_while_it_waits_leaves_the_queue(own_stage, how):
    own_stage.start(pool="prefork")
    key = own_stage.key()
    limits = {"soft time limit": {"soft_time_limit": 4}, "hard time limit": {"time_limit": 4}}
    with distributed_lock(key):
        sent = own_stage.task("waiting").apply_async((key,), **limits.get(how, {}))
        own_stage.wait_for_waiter(key)
        if how == "revoked":
            sent.revoke(terminate=True)
        wait_until(
            lambda: sent.state in {"REVOKED", "FAILURE"}, PATIENCE, "it has ended", every=0.02
        )
        wait_until(lambda: not waiters(key), 5, "nobody waits", every=0.02)
    assert own_stage.result(own_stage.send("waiting", key)) == f"did {key}"
    assert own_stage.count(key, "start") == 1


def _ended(stage, worker, pid):
    """Whether the process that ran the body is gone, or the body has."""
    key = stage.current_key
    return not _runs(pid) or stage.count(key, "end") > 0 or stage.count(key, "interrupted") > 0


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # It may go while it is looked at.
        return False


def _other_than(lease_id, key):
    lock = held.get(key)
    return lock is None or lock.id != lease_id
