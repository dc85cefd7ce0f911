"""A broker other than Redis (RabbitMQ), and results elsewhere (django-celery-results)."""

import os
import sqlite3

import pytest
from celery import chord

from django_redislock import distributed_lock
from django_redislock.celery import RunAbandoned
from tests.celery.project import LOST_SOON, PATIENCE
from tests.celery.project.rabbit import QUORUM
from tests.support.processes import python
from tests.support.waiting import wait_until

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
        key, retrying = own_stage.key(), own_stage.task("retrying")
        first = own_stage.send("late", key, hold=True)
        own_stage.wait_for(key, "start")
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
        key = own_stage.key()
        first = own_stage.start()
        sent = own_stage.send("late", key, hold=True)
        own_stage.wait_for(key, "start")
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
    database, settings = tmp_path / "results.sqlite3", "tests.celery.project.database_settings"
    monkeypatch.setenv("TESTS_DATABASE", str(database))
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": settings}
    python("-m", "django", "migrate", "--verbosity", "0", env=environment)

    def stored():
        columns = "status, result, date_done"
        query = f"SELECT {columns} FROM django_celery_results_taskresult WHERE task_id = ?"
        with sqlite3.connect(database) as connection:
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
