"""Another broker (RabbitMQ), results elsewhere (django-celery-results), every pool of Celery."""

import importlib.util
import json
import os
import signal
import sqlite3

import pytest
from celery import chord

from django_redislock import distributed_lock, held
from django_redislock.celery import RunAbandoned
from tests.celery.project import LOST_SOON, PATIENCE, QUORUM
from tests.support.databases import sqlite
from tests.support.processes import python
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class TestRabbitMQ:
    """Redelivery is another there: at once when the connection of a worker is gone."""

    @pytest.fixture
    def own_stage(self, own_stage, rabbit):
        """A stage with that broker."""
        own_stage.use_broker(rabbit)
        return own_stage

    @pytest.mark.proves("P8")
    def test_a_conflict_is_seen_a_duplicate_put_off_and_a_chord_waits_for_a_member(self, own_stage):
        own_stage.start(pool="threads", concurrency=3)
        retrying, (key, first) = own_stage.task("retrying"), own_stage.begin("late")
        assert own_stage.result(own_stage.send("late", key))["skipped"] == "busy"
        own_stage.app.send_task(own_stage.task("late").name, (key,), task_id=first.id)
        own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
        header = [retrying.s(own_stage.key()), retrying.s(key)]
        body = chord(header)(own_stage.task("collect").s())
        own_stage.wait_for_log(f"[{body.parent.results[1].id}]: lock {key!r} is busy", 2)
        own_stage.open_gate(key)
        assert own_stage.result(first) == own_stage.result(body)[1] == f"did {key}"
        assert own_stage.count(key, "start") == 2

    @pytest.mark.proves("P8")
    def test_a_task_whose_worker_was_killed_runs_again_after_the_dead_lease(self, own_stage):
        first = own_stage.start()
        key, sent = own_stage.begin("late")
        first.kill()
        own_stage.start()
        own_stage.wait_for(key, "start", 2)
        own_stage.open_gate(key)
        assert own_stage.result(sent) == f"did {key}"
        assert own_stage.count(key, "end") == 1

    def test_a_call_that_kills_its_process_each_time_is_abandoned(self, own_stage):
        own_stage.start(pool="prefork", **LOST_SOON)
        key = own_stage.key()
        sent = own_stage.send("deadly_limited", key)
        assert isinstance(sent.get(timeout=PATIENCE, propagate=False), RunAbandoned)
        assert own_stage.count(key, "start") == 2

    @pytest.mark.proves("P8")
    @pytest.mark.parametrize("queue", [None, "another"])
    def test_on_quorum_queues_a_run_that_is_put_off_comes_back_to_its_queue(self, own_stage, queue):
        # There a delayed message waits at the broker, for whole seconds.
        own_stage.configure(**QUORUM)
        queues = ["--queues", queue] if queue else []
        own_stage.start(*queues, pool="threads", concurrency=2)
        key = own_stage.key()
        with distributed_lock(key):
            sent = own_stage.send("queued_retrying", key, queue=queue)
            own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is busy", 3)
        assert own_stage.result(sent) == f"did {key}"


@pytest.mark.parametrize("track_started", [False, True])
def test_a_duplicate_leaves_the_stored_result_alone_in_djangos_database_too(
    own_stage, tmp_path, monkeypatch, track_started
):
    pytest.importorskip("django_celery_results")
    database, settings = sqlite(tmp_path, "results"), "tests.celery.project.database_settings"
    monkeypatch.setenv("TESTS_DATABASE", json.dumps(database))
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": settings}
    python("-m", "django", "migrate", "--verbosity", "0", env=environment)

    def stored():
        columns = "status, result, date_done"
        query = f"SELECT {columns} FROM django_celery_results_taskresult WHERE task_id = ?"
        with sqlite3.connect(database["NAME"]) as connection:
            found = connection.execute(query, (sent.id,)).fetchone()
        connection.close()
        return found if found and found[0] == "SUCCESS" else None

    own_stage.start(
        pool="threads",
        concurrency=2,
        settings=settings,
        result_backend="django-db",
        task_track_started=track_started,
    )
    key = own_stage.key()
    sent = own_stage.send("late", key)
    before = wait_until(stored, PATIENCE, "the result is stored")
    assert before[:2] == ("SUCCESS", f'"did {key}"')
    own_stage.app.send_task(own_stage.task("late").name, (key,), task_id=sent.id)
    own_stage.wait_for_log(f"[{sent.id}] received", 2)
    own_stage.wait_until_idle()
    assert stored() == before
    assert own_stage.count(key, "start") == 1


# --- pools ----------------------------------------------------------------------------------------


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
