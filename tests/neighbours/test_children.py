"""Workers whose children come and go while locks are held and waited for."""

import psutil
import pytest

from django_redislock import held
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]


def assert_one_at_a_time(events):
    """Each start is followed by its own end."""
    pairs = list(zip(events[::2], events[1::2], strict=True))
    for start, end in pairs:
        assert (start["event"], end["event"], end["pid"]) == ("start", "end", start["pid"])


def work_of(stage, key):
    return [one for one in stage.events(key) if one["event"] in {"start", "end"}]


@pytest.mark.parametrize("limit", ["--max-tasks-per-child", "--max-memory-per-child"])
def test_children_that_end_after_each_task_lose_and_double_nothing_and_leave_no_lock(
    own_stage, limit
):
    # All have more than one KiB of memory.
    own_stage.start(limit, "1", pool="prefork", concurrency=3)
    key = own_stage.key()
    first = own_stage.send("late", key, hold=True)
    own_stage.wait_for(key, "start")
    assert own_stage.result(own_stage.send("late", key))["skipped"] == "busy"
    others = [own_stage.send("retrying", key) for _ in range(2)]
    own_stage.wait_for_log("Deferred", 2)
    others.append(own_stage.send("waiting", key))
    own_stage.wait_for_waiter(key)
    own_stage.open_gate(key)
    assert [own_stage.result(one) for one in [first, *others]] == [f"did {key}"] * 4
    own_stage.wait_until_idle()
    events = work_of(own_stage, key)
    assert_one_at_a_time(events)
    children = {one["pid"] for one in events}
    assert len(children) == len(events) / 2  # None ran twice.
    assert held.get(key) is None


def test_an_autoscaled_pool_shrinks_and_grows_around_runs_that_hold_and_wait(
    own_stage, monkeypatch
):
    monkeypatch.setenv("AUTOSCALE_KEEPALIVE", "0.2")  # Seconds, in place of 30.
    worker = own_stage.start("--autoscale", "5,1", pool="prefork")
    kept, *freed = keys = [own_stage.key() for _ in range(3)]
    for key in keys:
        own_stage.send("brisk", key, hold=True)
        own_stage.wait_for(key, "start")
    waiting = own_stage.send("waiting", kept)
    own_stage.wait_for_waiter(kept)
    lease = held.get(kept).id
    parent = psutil.Process(worker.pid)

    def has_children(number):
        return len(parent.children()) <= number

    assert not has_children(3)
    for key in freed:
        own_stage.open_gate(key)
    wait_until(lambda: has_children(2), HUNG, "children go")  # Two are at work for the lock.
    assert held.get(kept).id == lease
    assert held.get(kept).waiters == 1

    again = [own_stage.send("brisk", key) for key in freed]  # The pool grows.
    assert [own_stage.result(one) for one in again] == [f"did {key}" for key in freed]
    own_stage.open_gate(kept)
    assert own_stage.result(waiting) == f"did {kept}"
    own_stage.wait_until_idle()
    assert [own_stage.count(key, "end") for key in keys] == [2, 2, 2]
    assert held.list() == []
