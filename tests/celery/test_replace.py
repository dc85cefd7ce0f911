"""on_conflict="replace" with real workers: the newest call wins."""

import time

import pytest

from django_redislock import held
from django_redislock.celery.options import SingleInstance

pytest_plugins = ["tests.celery.project.stage"]

SUPERSEDED = "replaced"


@pytest.fixture
def stage(own_stage):
    return own_stage


@pytest.fixture
def worker(stage):
    return stage.start(pool="threads", concurrency=4)


def outcome(stage, sent):
    return stage.result(sent)["skipped"]


class TestABodyThatLooks:
    @pytest.mark.row("replaced")
    def test_it_ends_early_and_its_retry_does_not_come_back(self, stage, worker):
        """Its autoretry_for takes the loss for a failure, and publishes a retry."""
        key = stage.key()
        first = stage.send("newest_wins", key, looks=True)
        stage.wait_for(key, "start")
        second = stage.send("newest_wins", key)
        assert outcome(stage, first) == SUPERSEDED
        assert stage.result(second) == f"did {key}"
        stage.wait_until_idle()
        assert stage.count(key, "start") == 2
        assert outcome(stage, first) == SUPERSEDED
        record = held.record(key)
        assert second.id in record.last_skip.by
        assert record.last_skip.owner.task_id == first.id


class TestABodyThatDoesNotLook:
    @pytest.mark.row("replace")
    def test_it_loses_its_lease_after_its_time(self, stage, worker):
        key = stage.key()
        first = stage.send("newest_wins", key, hold=True)
        stage.wait_for(key, "start")
        second = stage.send("newest_wins", key)
        stage.wait_for(key, "start", 2)
        assert stage.result(second) == f"did {key}"
        stage.open_gate(key)
        assert outcome(stage, first) == SUPERSEDED


class TestABodyThatIsKilled:
    @pytest.mark.row("replaced")
    def test_the_newest_call_follows_when_its_lease_ends_and_the_killed_one_stays_away(
        self, stage, worker
    ):
        key = stage.key()
        first = stage.send("newest_wins", key, hold=True)
        stage.wait_for(key, "start")
        worker.kill()
        stage.start(pool="threads", concurrency=4)
        second = stage.send("newest_wins", key)
        assert stage.result(second) == f"did {key}"
        stage.redeliver(first.id)
        assert stage.result(first)["skipped"] in {SUPERSEDED, "duplicate"}
        assert stage.count(key, "start") == 2


@pytest.mark.row("replace")
@pytest.mark.row("replaced")
def test_a_third_call_replaces_the_one_that_waits_in_its_worker_slot(stage, worker):
    key = stage.key()
    first = stage.send("newest_wins_late", key, hold=True)
    stage.wait_for(key, "start")
    second = stage.send("newest_wins_late", key)
    stage.wait_for_waiter(key)
    third = stage.send("newest_wins_late", key)
    assert outcome(stage, second) == SUPERSEDED
    stage.open_gate(key)
    assert stage.result(third) == f"did {key}"
    assert stage.result(first) == f"did {key}"
    assert stage.count(key, "start") == 2


def test_an_older_call_that_comes_back_does_not_replace_a_newer_one(stage, worker):
    key = stage.key()
    newer = stage.send("newest_wins", key, hold=True)
    stage.wait_for(key, "start")
    older = stage.task("newest_wins").apply_async(
        (key,), retries=1, headers={"redislock": {"at": time.time() - 60}}
    )
    assert outcome(stage, older) == SUPERSEDED
    stage.open_gate(key)
    assert stage.result(newer) == f"did {key}"


@pytest.mark.parametrize("option", [{"unique_queued": True}, {"debounce": 5}])
def test_options_that_publish_no_newer_call_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} and"):
        SingleInstance(on_conflict="replace", **option)
