"""Brokers other than the Redis of the locks: another Redis, purged or away, and files."""

import pytest
from django.core.management import call_command

from django_redislock import held

pytest_plugins = ["tests.celery.project.stage"]


@pytest.fixture
def apart(own_stage, make_server, settings):
    """A stage whose locks are on a Redis of their own, which is returned too."""
    server = make_server()
    redislock = {"default": {"LOCATION": server.url, "TTL": 3, "OPTIONS": {"socket_timeout": 0.5}}}
    own_stage.redislock = settings.REDISLOCK = redislock
    return own_stage, server


def test_with_two_redis_a_purge_of_the_broker_frees_no_lock_and_its_lost_call_can_be_forgotten(
    apart,
):
    stage, _ = apart
    stage.start()
    key, queued = stage.key(), stage.key()
    stage.send("brisk", key, hold=True)
    stage.wait_for(key, "start")
    lease = held.get(key).id
    first = stage.task("queued").delay(queued)  # The only worker is at work.
    assert not stage.task("queued").delay(queued).published

    stage.app.control.purge()
    assert stage.redis.llen("celery") == 0
    assert held.get(key).id == lease
    assert not stage.task("queued").delay(queued).published  # One that is lost stands for it.
    call_command("locks", "clean", "--queued", verbosity=0)
    again = stage.task("queued").delay(queued)
    assert again.published
    assert again.id != first.id
    stage.open_gate(key)
    assert stage.result(again) == f"did {queued}"


def test_with_two_redis_a_run_comes_back_when_that_of_the_locks_does(apart):
    stage, server = apart
    stage.start()
    key = stage.key()
    server.stop()
    sent = stage.send("hopeful", key)
    stage.wait_for_log("Deferred")
    assert stage.count(key, "start") == 0
    server.start()
    assert stage.result(sent) == f"did {key}"
    assert stage.count(key, "start") == 1


@pytest.fixture
def stage_of_files(own_stage, tmp_path):
    folder = tmp_path / "queue"
    folder.mkdir()
    own_stage.app.conf.update(
        broker_url="filesystem://",
        broker_transport_options={
            "data_folder_in": str(folder),
            "data_folder_out": str(folder),
            "control_folder": str(tmp_path / "control"),
        },
    )
    own_stage.conf |= {
        name: own_stage.app.conf[name] for name in ("broker_url", "broker_transport_options")
    }
    return own_stage


def test_with_files_as_broker_deferred_runs_come_back_and_run_once(stage_of_files):
    own_stage = stage_of_files
    own_stage.start(pool="threads", concurrency=2)
    key = own_stage.key()
    first = own_stage.send("brisk", key, hold=True)
    own_stage.wait_for(key, "start")
    others = [own_stage.send("retrying", key) for _ in range(3)]
    own_stage.wait_for_log("Deferred", 3)
    own_stage.open_gate(key)
    assert [own_stage.result(one) for one in (first, *others)] == [f"did {key}"] * 4
    assert own_stage.count(key, "start") == own_stage.count(key, "end") == 4
    assert held.get(key) is None
