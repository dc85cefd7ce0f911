"""single_instance_task(atomic=True) on real workers: what is in the database, and in the result."""

import json
import os
import signal

import pytest

from django_redislock import LockLost, StaleFence, distributed_lock, held
from tests.effects.models import Entry, written
from tests.support.databases import described, on_mariadb, on_postgres, on_sqlite
from tests.support.servers import stop_process
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DRAW = "tests.celery.project.effects_tasks.draw"
DRAW_AT_NOON = "tests.celery.project.effects_tasks.draw_at_noon"


@pytest.fixture
def start(own_stage, database, monkeypatch):
    """Start a worker whose default database is ours."""
    monkeypatch.setenv("TESTS_DATABASE", json.dumps(described(database)[database]))

    def start():
        return own_stage.start(
            settings="tests.celery.project.database_settings",
            imports=["tests.celery.project.effects_tasks"],
        )

    return start


def send(stage, key, task=DRAW, **how):
    """Publish the task that draws."""
    return stage.app.send_task(task, (key,), how)


@on_mariadb
def test_it_is_committed_before_the_next_holder_has_the_lock(own_stage, database, start):
    start()
    key = own_stage.key()
    sent = send(own_stage, key, hold=True)
    fence = own_stage.wait_for(key, "start")["fence"]
    assert written(database) == []
    own_stage.open_gate(key)
    with distributed_lock(key, wait=HUNG):
        assert written(database) == [fence]
    assert own_stage.result(sent) == f"did {key}"
    assert [one["in_transaction"] for one in own_stage.events(key, "released")] == [False]


@on_sqlite
def test_a_worker_stopped_before_its_claim_writes_nothing_and_its_result_is_stale_fence(
    own_stage, database, start
):
    worker = start()
    key = own_stage.key()
    own_stage.redis.rpush("stand still", key)
    sent = send(own_stage, key)
    own_stage.wait_for(key, "claims")
    stop_process(worker.pid)
    with distributed_lock(key, wait=HUNG) as lease, lease.atomic(database):
        Entry.objects.using(database).create(fence=lease.fence)
    own_stage.open_gate(key)
    os.kill(worker.pid, signal.SIGCONT)
    with pytest.raises(StaleFence) as stale:
        own_stage.result(sent)
    assert stale.value.name == key
    assert stale.value.fence < stale.value.newer == lease.fence
    assert sent.state == "FAILURE"
    assert written(database) == [lease.fence]
    assert own_stage.events(key, "start") == []
    own_stage.wait_until_idle()  # It is not delivered again: the work is done.


@on_postgres
@pytest.mark.parametrize("fate", ["it fails", "its worker is killed", "it stands still"])
def test_the_lottery_of_getting_started_is_drawn_once_whatever_becomes_of_its_first_run(
    fate, own_stage, database, start
):
    worker, key = start(), own_stage.key()
    first = send(own_stage, key, DRAW_AT_NOON, hold=True, fail=fate == "it fails")
    own_stage.wait_for(key, "start")
    lease = held.get(key)
    others = [send(own_stage, key, DRAW_AT_NOON) for _ in range(3)]
    start()
    own_stage.wait_for_log("Deferred")
    if fate == "its worker is killed":
        worker.kill()
    elif fate == "it stands still":
        stop_process(worker.pid)
        wait_until(
            lambda: (lock := held.get(key)) is not None and lock.id != lease.id,
            message="another run has the lock",
        )
        os.kill(worker.pid, signal.SIGCONT)
    own_stage.open_gate(key)
    if fate != "its worker is killed":
        with pytest.raises(ValueError if fate == "it fails" else LockLost):
            own_stage.result(first)
    results = [own_stage.result(one) for one in others]
    assert results.count(f"did {key}") == 1
    assert [one["skipped"] for one in results if one != f"did {key}"] == ["done"] * 2
    assert len(written(database)) == 1


@on_sqlite
def test_a_task_that_replaces_itself_is_committed_before_the_one_that_takes_its_place(
    own_stage, database, start
):
    start()
    key = own_stage.key()
    sent = own_stage.app.send_task(f"{DRAW}_and_go_on", (key,))
    assert own_stage.result(sent) == 1
    assert written(database) == [1]
