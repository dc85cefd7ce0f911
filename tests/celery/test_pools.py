"""Every pool of Celery."""

import importlib.util
import os
import signal

import pytest

from django_redislock import distributed_lock, held
from tests.celery.project import PATIENCE
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_each_run_has_a_lease_of_its_own_which_is_renewed_and_a_conflict_is_seen(own_stage, pool):
    """In a pool in which several runs are under way at a time."""
    if pool in {"gevent", "eventlet"} and importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    own_stage.start(pool=pool, concurrency=4)
    keys = [own_stage.key() for _ in range(3)]
    running = [own_stage.send("late", key, hold=True) for key in keys]
    fences = {own_stage.wait_for(key, "start")["fence"] for key in keys}
    assert len(fences) == 3
    own_stage.redeliver(running[1].id)
    own_stage.wait_for_log(f"[{running[1].id}]: lock {keys[1]!r} is busy")

    def renewed():
        assert own_stage.result(own_stage.send("late", keys[0]))["skipped"] == "busy"
        return held.get(keys[0]).held_for > 2 * 6  # Twice its ttl.

    wait_until(renewed, PATIENCE, "the lease is renewed", every=0.5)
    for key in keys:
        own_stage.open_gate(key)
    assert [own_stage.result(one) for one in running] == [f"did {key}" for key in keys]
    own_stage.wait_until_idle()
    assert [own_stage.count(key, "start") for key in keys] == [1, 1, 1]


@pytest.mark.proves("R8")
def test_a_lock_that_the_worker_took_before_it_forked_stays_the_workers(own_stage):
    key, other = own_stage.key(), own_stage.key()
    worker = own_stage.start(
        "--max-tasks-per-child", "2", pool="prefork", concurrency=2, held_by_parent=key
    )
    lease = held.get(key)
    assert lease.owner.pid == worker.pid

    # To the children it is somebody else's, however many come and go, and at whatever end.
    for _ in range(3):
        result = own_stage.result(own_stage.send("skipping", key))
        assert (result["skipped"], result["holder"]) == ("busy", str(lease.owner))
        assert own_stage.result(own_stage.send("skipping", other)) == f"did {other}"
    own_stage.send("skipping", other, hold=True)
    os.kill(own_stage.wait_for(other, "start", 4)["pid"], signal.SIGKILL)

    def renewed():
        now = held.get(key)
        assert now.id == lease.id
        return now.held_for > 2 * 6  # Twice its ttl.

    wait_until(renewed, PATIENCE, "the worker renews its lease", every=0.05)
    assert {event["pid"] for event in own_stage.events(other, "start")}.isdisjoint({worker.pid})
    waiting = own_stage.send("waiting", key)
    own_stage.wait_for_waiter(key)
    assert held.force_release(key, lease.id, by="a test")
    assert own_stage.result(waiting) == f"did {key}"
    with distributed_lock(key, wait=HUNG):
        pass
