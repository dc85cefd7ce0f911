"""on_conflict="replace" with real workers: the newest call wins."""

import time

import pytest

from django_redislock import held
from django_redislock.celery.options import SingleInstance

pytest_plugins = ["tests.celery.project.stage"]


@pytest.fixture
def start(own_stage):
    return lambda: own_stage.start(pool="threads", concurrency=4)


def outcome(stage, sent):
    return stage.result(sent)["skipped"]


@pytest.mark.row("replace")
@pytest.mark.row("replaced")
def test_a_body_ends_early_if_it_looks_else_loses_its_lease_and_its_retry_stays_away(
    own_stage, start
):
    """Its autoretry_for takes the loss for a failure, and publishes a retry."""
    stage = own_stage
    start()
    key, first = stage.begin("newest_wins", hold=False, looks=True)
    second = stage.send("newest_wins", key)
    assert outcome(stage, first) == "replaced"
    assert stage.result(second) == f"did {key}"
    stage.wait_until_idle()
    assert stage.count(key, "start") == 2
    assert outcome(stage, first) == "replaced"
    record = held.record(key)
    assert second.id in record.last_skip.by
    assert record.last_skip.owner.task_id == first.id

    key, first = stage.begin("newest_wins")
    second = stage.send("newest_wins", key)
    stage.wait_for(key, "start", 2)
    assert stage.result(second) == f"did {key}"
    stage.open_gate(key)
    assert outcome(stage, first) == "replaced"


@pytest.mark.row("replaced")
def test_if_it_is_killed_the_newest_call_follows_when_its_lease_ends_and_it_stays_away(
    own_stage, start
):
    worker = start()
    key, first = own_stage.begin("newest_wins")
    worker.kill()
    start()
    second = own_stage.send("newest_wins", key)
    assert own_stage.result(second) == f"did {key}"
    own_stage.redeliver(first.id)
    assert outcome(own_stage, first) in {"replaced", "duplicate"}
    assert own_stage.count(key, "start") == 2


@pytest.mark.row("replace")
@pytest.mark.row("replaced")
def test_a_third_call_replaces_the_one_that_waits_but_an_older_one_that_comes_back_does_not(
    own_stage, start
):
    stage = own_stage
    start()
    key, first = stage.begin("newest_wins_late")
    second = stage.send("newest_wins_late", key)
    stage.wait_for_waiter(key)
    third = stage.send("newest_wins_late", key)
    assert outcome(stage, second) == "replaced"
    long_ago = {"redislock": {"at": time.time() - 60}}
    older = stage.task("newest_wins_late").apply_async((key,), retries=1, headers=long_ago)
    assert outcome(stage, older) == "replaced"
    stage.open_gate(key)
    assert stage.result(third) == stage.result(first) == f"did {key}"
    assert stage.count(key, "start") == 2


@pytest.mark.parametrize("option", [{"unique_queued": True}, {"debounce": 5}])
def test_options_that_publish_no_newer_call_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} and"):
        SingleInstance(on_conflict="replace", **option)
