"""limit=N: at most N runs at a time, each with a permit that is a lease of its own."""

import pytest

from django_redislock import LockUnavailable, held
from django_redislock.rules.keys import lock_keys
from tests.celery.project import PATIENCE
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = pytest.mark.usefixtures("worker")


def most_at_a_time(events):
    """How many runs were under way at the same time, at most."""
    most = now = 0
    for event in events:
        now += {"start": 1, "end": -1}.get(event["event"], 0)
        most = max(most, now)
    return most


def held_of(key):
    return [lock for lock in held.list() if lock.name.startswith(key)]


@pytest.fixture
def running(stage):
    """Three runs with all permits of a key, until its gate is opened."""
    key = stage.key()
    running = [stage.send("limited", key, hold=True) for _ in range(3)]
    stage.wait_for(key, "start", 3)
    return key, running


@pytest.mark.row("limit")
def test_one_more_than_the_limit_is_skipped_and_each_permit_is_a_row_of_its_own(stage, running):
    key, sent = running
    ids = {one.id for one in sent}
    assert stage.result(stage.send("limited", key))["skipped"] == "busy"
    rows = held_of(key)
    assert sorted(lock.name for lock in rows) == [key, f"{key}#2", f"{key}#3"]
    assert {lock.owner.task_id for lock in rows} == ids
    assert sorted(lock.permit for lock in rows) == ["1/3", "2/3", "3/3"]
    assert len({lock.id for lock in rows}) == 3
    record = held.record(key)
    assert {run.owner.task_id for run in record.under_way} == ids
    stage.open_gate(key, 3)
    assert [stage.result(one) for one in sent] == [f"did {key}"] * 3
    assert most_at_a_time(stage.events(key)) == 3
    assert not held_of(key)
    record = held.record(key)
    assert record.last_success.owner.task_id in ids
    assert (record.under_way, record.last_unended) == ((), None)


def test_a_permit_taken_by_force_lets_one_more_run(stage, running):
    key, sent = running
    victim = held.get(f"{key}#2")
    assert held.force_release(victim.name, victim.id, by="a test")
    assert stage.result(stage.send("limited", key)) == f"did {key}"
    stage.open_gate(key, 3)
    outcomes = [one.get(timeout=PATIENCE, propagate=False) for one in sent]
    assert sum(isinstance(outcome, Exception) for outcome in outcomes) == 1


def test_those_who_wait_take_whatever_permit_is_free(stage):
    key = stage.key()
    sent = [stage.send("sharing", key, seconds=0.05) for _ in range(12)]
    assert [stage.result(one) for one in sent] == [f"did {key}"] * 12
    assert most_at_a_time(stage.events(key)) == 2


@pytest.mark.row("limit-duplicate")
def test_duplicates_take_no_second_permit_also_if_they_start_together(stage):
    other, task_id = stage.key(), stage.key()
    key, first = stage.begin("limited")
    stage.redeliver(first.id)
    stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
    for _ in range(4):
        stage.app.send_task(stage.task("limited").name, (other,), {"seconds": 0.1}, task_id=task_id)
    assert stage.result(stage.app.AsyncResult(task_id)) == f"did {other}"
    stage.open_gate(key)
    assert stage.result(first) == f"did {key}"
    stage.wait_until_idle()
    assert stage.count(key, "start") == stage.count(other, "start") == 1


def test_a_permit_that_never_ends_takes_one_place_and_no_more(stage):
    key = stage.key()
    keys = [lock_keys("redislock", key, number).lock for number in (1, 2, 3)]
    stage.redis.rpush(keys[0], "by hand")
    stage.redis.set(keys[1], "")
    for _ in range(2):
        assert stage.result(stage.send("limited", key)) == f"did {key}"
    running = stage.send("limited", key, hold=True)
    stage.wait_for(key, "start", 3)
    assert stage.result(stage.send("limited", key))["skipped"] == "busy"
    stage.open_gate(key)
    stage.result(running)
    # That all never end is no conflict, but an error that only an operator can end.
    stage.redis.set(keys[2], "")
    with pytest.raises(LockUnavailable):
        stage.result(stage.send("limited", key))
    stage.redis.delete(*keys)


def test_limits_per_key_and_in_total_hold_and_all_calls_are_done(stage):
    key = stage.key()
    tenants = ["acme1", "acme1", "big2", "big2", "big2", "other1"]
    sent = [stage.send("exporting", key, tenant=tenant, seconds=0.2) for tenant in tenants]
    assert [stage.result(one) for one in sent] == [f"did {key}"] * len(sent)
    assert most_at_a_time(stage.events(key)) <= 3
    stage.wait_until_idle()
    assert not held_of(key)


def test_a_call_that_comes_back_stands_in_the_line_of_the_limit_that_is_busy(stage):
    key = stage.key()
    tenants = ("a1", "b1", "c1")
    running = [stage.send("exporting", key, tenant=tenant, hold=True) for tenant in tenants]
    stage.wait_for(key, "start", 3)
    rows = {lock.name: lock.owner.names for lock in held_of(key)}
    assert rows[f"{key}:a1"] == f"{key}:a1, {key}"
    same, other = (stage.send("exporting", key, tenant=tenant) for tenant in ("a1", "d1"))

    def stand_in_line():
        lines = (lock_keys("redislock", name).line for name in (f"{key}:a1", key))
        return [stage.redis.zcard(line) for line in lines]

    wait_until(lambda: stand_in_line() == [1, 1], PATIENCE, "both stand in line")
    stage.open_gate(key, 3)
    assert [stage.result(one) for one in (*running, same, other)] == [f"did {key}"] * 5
    stage.wait_until_idle()
    assert stand_in_line() == [0, 0]
