"""limit=N: at most N runs at a time, each with a permit that is a lease of its own."""

import threading
import time

import pytest

from django_redislock import LockUnavailable, held, signals
from django_redislock.rules.keys import lock_keys
from tests.celery.project import PATIENCE, journal
from tests.support.others import waiters
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


@pytest.mark.row("limit")
def test_one_more_than_the_limit_is_skipped(stage):
    key = stage.key()
    running = [stage.send("limited", key, hold=True) for _ in range(3)]
    stage.wait_for(key, "start", 3)
    assert stage.result(stage.send("limited", key))["skipped"] == "busy"
    stage.open_gate(key, 3)
    assert [stage.result(one) for one in running] == [f"did {key}"] * 3
    assert most_at_a_time(stage.events(key)) == 3


def test_each_permit_is_a_row_of_its_own(stage):
    key = stage.key()
    running = [stage.send("limited", key, hold=True) for _ in range(3)]
    stage.wait_for(key, "start", 3)
    rows = [lock for lock in held.list() if lock.name.startswith(key)]
    assert sorted(lock.name for lock in rows) == [key, f"{key}#2", f"{key}#3"]
    assert {lock.owner.task_id for lock in rows} == {one.id for one in running}
    assert sorted(lock.permit for lock in rows) == ["1/3", "2/3", "3/3"]
    assert len({lock.id for lock in rows}) == 3
    record = held.record(key)
    assert {run.owner.task_id for run in record.under_way} == {one.id for one in running}
    stage.open_gate(key, 3)
    for one in running:
        stage.result(one)
    assert not [lock for lock in held.list() if lock.name.startswith(key)]


def test_a_permit_taken_by_force_lets_one_more_run(stage):
    key = stage.key()
    running = [stage.send("limited", key, hold=True) for _ in range(3)]
    stage.wait_for(key, "start", 3)
    victim = held.get(f"{key}#2")
    assert held.force_release(victim.name, victim.id, by="a test")
    assert stage.result(stage.send("limited", key)) == f"did {key}"
    stage.open_gate(key, 3)
    outcomes = [one.get(timeout=PATIENCE, propagate=False) for one in running]
    assert sum(isinstance(outcome, Exception) for outcome in outcomes) == 1


def test_those_who_wait_take_whatever_permit_is_free(stage):
    key = stage.key()
    running = [stage.send("sharing", key, seconds=0.05) for _ in range(12)]
    assert [stage.result(one) for one in running] == [f"did {key}"] * 12
    assert most_at_a_time(stage.events(key)) == 2


def test_those_who_wait_are_served_first_come_first_served(stage):
    key = stage.key()
    for _ in range(2):
        stage.send("sharing", key, hold=True)
    stage.wait_for(key, "start", 2)
    waiting = []
    for number in range(1, 3):  # As many as the worker has slots left.
        waiting.append(stage.send("sharing", key, hold=True))
        wait_until(lambda: waiters(key) == number, PATIENCE, "it waits")  # noqa: B023 - at once
    stage.open_gate(key)
    stage.wait_for(key, "start", 3)
    first, second = (one.id for one in waiting)
    assert first in {lock.owner.task_id for lock in held.list()}
    assert [one.owner.task_id for one in held.detail(key).waiters] == [second]
    stage.open_gate(key, 3)
    assert [stage.result(one) for one in waiting] == [f"did {key}"] * 2


@pytest.mark.row("limit-duplicate")
def test_a_duplicate_takes_no_second_permit(stage):
    key = stage.key()
    first = stage.send("limited", key, hold=True)
    stage.wait_for(key, "start")
    stage.redeliver(first.id)
    stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
    stage.open_gate(key)
    assert stage.result(first) == f"did {key}"
    stage.wait_until_idle()
    assert stage.count(key, "start") == 1


def test_duplicates_that_start_together_do_not_run_together(stage):
    key, task_id = stage.key(), stage.key()
    for _ in range(4):
        stage.app.send_task(stage.task("limited").name, (key,), {"seconds": 0.1}, task_id=task_id)
    assert stage.result(stage.app.AsyncResult(task_id)) == f"did {key}"
    stage.wait_until_idle()
    assert stage.count(key, "start") == 1


def test_the_record_is_that_of_the_name(stage):
    key = stage.key()
    sent = stage.send("limited", key)
    stage.result(sent)
    record = held.record(key)
    assert record.last_success.owner.task_id == sent.id
    assert (record.under_way, record.last_unended) == ((), None)


@pytest.fixture
def told():
    """The signals about locks that are sent in this process, by name."""
    got = []

    def receiver_of(signal):
        return lambda **news: got.append((signal, news))

    receivers = {one: receiver_of(one) for one in ("lock_acquired", "lock_timed_out")}
    for one, receiver in receivers.items():
        getattr(signals, one).connect(receiver)
    yield got
    for one, receiver in receivers.items():
        getattr(signals, one).disconnect(receiver)


@pytest.mark.parametrize(("task", "wait"), [("limited", 0.0), ("sharing_impatiently", 2.5)])
def test_a_wait_that_runs_out_is_told_once_when_it_is_over(stage, told, task, wait):
    key = stage.key()
    permits = 3 if task == "limited" else 2
    running = [stage.send(task, key, hold=True) for _ in range(permits)]
    stage.wait_for(key, "start", permits)
    assert stage.task(task)(key)["skipped"] == "busy"
    stage.open_gate(key, permits)
    [(name, news)] = told
    assert (name, news["name"], news["using"]) == ("lock_timed_out", key, "default")
    assert news["holder"].rpartition(" ")[2] in {one.id for one in running}
    assert wait <= news["waited"] < wait + 10
    for one in running:
        stage.result(one)


def test_a_wait_that_ends_with_a_permit_is_told_with_its_whole_length(stage, told, monkeypatch):
    monkeypatch.setattr(journal, "server", lambda: stage.redis)  # The body runs in this process.
    key = stage.key()
    for _ in range(2):
        stage.send("sharing_impatiently", key, hold=True)
    stage.wait_for(key, "start", 2)

    def open_when_it_has_waited():
        wait_until(lambda: waiters(key), PATIENCE, "somebody waits")
        time.sleep(1.3)
        stage.open_gate(key)

    opener = threading.Thread(target=open_when_it_has_waited)
    opener.start()
    assert stage.task("sharing")(key) == f"did {key}"
    opener.join()
    stage.open_gate(key)
    [(name, news)] = told
    assert (name, news["lease"].name) == ("lock_acquired", key)
    assert news["waited"] > 1.1
    stage.wait_for(key, "end", 3)


def test_a_permit_that_never_ends_takes_one_place_and_no_more(stage):
    key = stage.key()
    keys = [lock_keys("redislock", key, number).lock for number in (1, 2, 3)]
    stage.redis.rpush(keys[0], "by hand")
    stage.redis.set(keys[1], "")
    for _ in range(5):
        assert stage.result(stage.send("limited", key)) == f"did {key}"
    running = stage.send("limited", key, hold=True)
    stage.wait_for(key, "start", 6)
    assert stage.result(stage.send("limited", key))["skipped"] == "busy"
    stage.open_gate(key)
    stage.result(running)
    # That all never end is no conflict, but an error that only an operator can end.
    stage.redis.set(keys[2], "")
    with pytest.raises(LockUnavailable):
        stage.result(stage.send("limited", key))
    stage.redis.delete(*keys)


# --- several limits ------------------------------------------------------------------------------


def test_limits_per_key_and_in_total_hold_and_all_calls_are_done(stage):
    key = stage.key()
    tenants = ["acme1", "acme1", "big2", "big2", "big2", "other1"]
    sent = [stage.send("exporting", key, tenant=tenant, seconds=0.2) for tenant in tenants]
    assert [stage.result(one) for one in sent] == [f"did {key}"] * len(sent)
    assert most_at_a_time(stage.events(key)) <= 3
    stage.wait_until_idle()
    assert not [lock for lock in held.list() if lock.name.startswith(key)]


def test_a_call_that_comes_back_stands_in_the_line_of_the_limit_that_is_busy(stage):
    key = stage.key()
    running = [
        stage.send("exporting", key, tenant=tenant, hold=True) for tenant in ("a1", "b1", "c1")
    ]
    stage.wait_for(key, "start", 3)
    rows = {lock.name: lock.owner.names for lock in held.list() if lock.name.startswith(key)}
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
