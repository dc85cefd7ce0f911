"""A broker other than Redis (RabbitMQ), and results elsewhere (django-celery-results)."""

import importlib.util
import os
import sqlite3
import subprocess
import sys

import pytest
from celery import chord

from django_redislock import distributed_lock
from django_redislock.celery import RunAbandoned
from tests.celery.project import LOST_SOON, PATIENCE
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class TestRabbitMQ:
    """Redelivery is another there: at once when the connection of a worker is gone."""

    @pytest.fixture
    def own_stage(self, own_stage, rabbit):
        """A stage with that broker."""
        ours = {"broker_url": rabbit.url, "task_default_queue": own_stage.key()}
        own_stage.conf |= ours
        own_stage.app.conf.update(ours)
        return own_stage

    @pytest.mark.proves("P8")
    def test_a_conflict_is_seen_and_a_duplicate_put_off(self, own_stage):
        own_stage.start(pool="threads", concurrency=3)
        key = own_stage.key()
        first = own_stage.send("late", key, hold=True)
        own_stage.wait_for(key, "start")
        assert own_stage.result(own_stage.send("late", key))["skipped"] == "busy"
        own_stage.app.send_task(own_stage.task("late").name, (key,), task_id=first.id)
        own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
        own_stage.open_gate(key)
        assert own_stage.result(first) == f"did {key}"
        assert own_stage.count(key, "start") == 1

    def test_a_chord_waits_for_a_member_that_was_put_off(self, own_stage):
        own_stage.start(pool="threads", concurrency=3)
        key, retrying = own_stage.key(), own_stage.task("retrying")
        with distributed_lock(key):
            body = chord([retrying.s(own_stage.key()), retrying.s(key)])(
                own_stage.task("collect").s()
            )
            own_stage.wait_for_log(f"[{body.parent.results[1].id}]: lock {key!r} is busy", 2)
        assert own_stage.result(body)[1] == f"did {key}"

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
        quorum = {
            "task_default_queue_type": "quorum",
            "task_default_exchange_type": "topic",
            "task_create_missing_queue_type": "quorum",
            "task_create_missing_queue_exchange_type": "topic",
        }
        own_stage.conf |= quorum
        own_stage.app.conf.update(quorum)
        queues = ["--queues", queue] if queue else []
        own_stage.start(*queues, pool="threads", concurrency=2)
        key = own_stage.key()
        with distributed_lock(key):
            sent = own_stage.send("queued_retrying", key, queue=queue)
            own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is busy", 3)
        assert own_stage.result(sent) == f"did {key}"


class TestDjangoResults:
    """Results in the database: what is stored is left alone there too."""

    @pytest.fixture
    def database(self, tmp_path, monkeypatch):
        """A database with the tables."""
        if importlib.util.find_spec("django_celery_results") is None:
            pytest.skip("django-celery-results is not installed")
        path = tmp_path / "results.sqlite3"
        monkeypatch.setenv("TESTS_DATABASE", str(path))
        command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
        settings = {"DJANGO_SETTINGS_MODULE": "tests.celery.project.database_settings"}
        subprocess.run(command, env=os.environ | settings, check=True, timeout=60)
        return path

    @pytest.mark.parametrize("track_started", [False, True])
    def test_a_duplicate_leaves_the_stored_result_alone(self, own_stage, database, track_started):
        def stored(task_id):
            columns = "status, result, date_done"
            query = f"SELECT {columns} FROM django_celery_results_taskresult WHERE task_id = ?"
            with sqlite3.connect(database) as connection:
                found = connection.execute(query, (task_id,)).fetchone()
            connection.close()
            return found

        own_stage.start(
            pool="threads",
            concurrency=2,
            settings="tests.celery.project.database_settings",
            result_backend="django-db",
            task_track_started=track_started,
        )
        key = own_stage.key()
        sent = own_stage.send("late", key)

        def succeeded():
            found = stored(sent.id)
            return found if found and found[0] == "SUCCESS" else None

        before = wait_until(succeeded, PATIENCE, "the result is stored")
        assert before[:2] == ("SUCCESS", f'"did {key}"')
        own_stage.app.send_task(own_stage.task("late").name, (key,), task_id=sent.id)
        own_stage.wait_for_log(f"[{sent.id}] received", 2)
        own_stage.wait_until_idle()
        assert stored(sent.id) == before
        assert own_stage.count(key, "start") == 1
