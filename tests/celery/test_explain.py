"""``manage.py locks explain`` of calls that real workers have run, skipped, deferred or lost."""

import re

import pytest

from tests.celery.project import PATIENCE
from tests.operations.test_locks_command import locks_command
from tests.support.celery_app import celery_app
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = pytest.mark.django_db

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def explained(what):
    """What is said of a call, or of a lock."""
    outcome = locks_command("explain", getattr(what, "id", what))
    assert outcome.status == 0, outcome
    return outcome.out


def says(pattern, what):
    return re.search(pattern, explained(what), re.MULTILINE)


def test_a_run_its_deferral_and_its_skip_are_told(stage, worker):
    key, first = stage.begin("retrying")
    second = stage.send("retrying", key)
    stage.wait_for_log(f"Deferred tests.celery.project.tasks.retrying[{second.id}]")
    third = stage.send("skipping", key)
    assert stage.result(third)["skipped"] == "busy"

    run = rf"{key}: tests\.celery\.project\.tasks\.retrying\[{first.id}\] on \S+:\d+"
    assert says(rf"{run} got the lock \(lease \w+, fence \d+\)\. It has it now", first)
    place = r"was deferred, and took its place in line\. Now it is the first, and"
    assert says(rf"call {second.id} {place}", second)
    assert says(rf"\[{third.id}\] on ", third)
    assert says(rf"was skipped: busy \(\S+:\d+ {first.id}\)\.$", third)
    assert says(r"state SUCCESS, although the run was skipped \(skipped: busy", third)
    assert stage.result(stage.send("skipping", key))["skipped"] == "busy"
    assert says(r"was skipped: busy .*\. Since the last success 2 runs were skipped\.$", key)

    stage.open_gate(key)
    for sent in (first, second):
        assert stage.result(sent) == f"did {key}"
    assert says(
        rf"got the lock, after it was deferred (once|\d+ times) since {TIME}, the last time because"
        rf" it was held by \S+:\d+ \(lease \w+, fence \d+\)\. It ended well at {TIME}, after ",
        second,
    )
    ran = explained(second)
    assert "took its place in line" not in ran
    assert "The call succeeded, or a newer one replaced it: no duplicate of it runs." in ran
    assert "Celery's result backend has the state SUCCESS." in ran
    assert f"[{first.id}]" in explained(key)
    with celery_app(result_backend="redis://127.0.0.1:1/0"):
        ran = explained(second)
    assert "It ended well at" in ran
    assert "\nCelery's result backend cannot answer: " in ran


def test_failures_and_reasons_of_skips_are_told(stage, worker):
    failed = stage.send("skipping", stage.key(), fail=True)
    with pytest.raises(ValueError, match="as asked"):
        stage.result(failed)
    assert says("It ended without success at", failed)
    assert says("state FAILURE, with ValueError: as asked.", failed)

    for task, why, marker in (
        ("cooling", "cooling", "min_hold keeps the lock"),
        ("once", "done", "be skipped as done until"),
    ):
        key = stage.key()
        assert stage.result(stage.send(task, key)) == f"did {key}"
        assert stage.result(stage.send(task, key))["skipped"] == why
        assert says(rf"was skipped: {why} \(", key)
        assert says(rf"{marker}.*{TIME}", key)


def test_an_announced_call_and_a_killed_worker_are_told(own_stage):
    key, other = own_stage.key(), own_stage.key()
    waiting = own_stage.send("queued", key)
    assert says(f"Now the call {waiting.id} is announced by unique_queued", key)

    worker = own_stage.start()
    killed = own_stage.send("late", other, hold=True)
    own_stage.wait_for(other, "start")
    worker.kill()
    assert says("It has it now, after 0 renewals. Its process does not exist any more.", killed)
    told = "Nobody released the lease; it expired: its process was killed, or it lost the lease."
    wait_until(lambda: says(told, killed), PATIENCE, "the lease ends")
    assert not says("Its end was never noted", killed)  # Of its lease enough is told.


@pytest.mark.usefixtures("redislock")
def test_a_skip_with_all_that_may_be_known_is_one_but_no_other_result_is_printed():
    known = {"holder": "web-1:7", "by": "web-2:8", "ago": 1.5, "reason": "so", "expires_in": 3.0}
    others = [
        {"skipped": 3, "imported": 40, "password": "hunter2"},
        {"skipped": "busy", "password": "hunter2"},
        {"skipped": "busy", "lock": "lottery", "password": "hunter2"},
        {"skipped": ["hunter2"], "lock": "lottery"},
        {"skipped": "done", "lock": {"password": "hunter2"}},
    ]
    with celery_app(result_backend="cache+memory://") as app:
        for why in ("busy", "paused", "cooling", "done", "duplicate"):
            result = {"skipped": why, "lock": "lottery", **known}
            app.backend.store_result(f"skipped-{why}", result, "SUCCESS")
            assert f"although the run was skipped (skipped: {why}" in explained(f"skipped-{why}")
        for number, result in enumerate(others):
            app.backend.store_result(f"id-{number}", result, "SUCCESS")
            story = explained(f"id-{number}")
            assert "Celery's result backend has the state SUCCESS." in story
            assert "hunter2" not in story
