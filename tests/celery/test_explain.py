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


def explained(sent):
    outcome = locks_command("explain", sent.id)
    assert outcome.status == 0, outcome
    return outcome.out


def test_a_run_its_deferral_and_its_skip_are_told(stage, worker):
    key = stage.key()
    first = stage.send("retrying", key, hold=True)
    stage.wait_for(key, "start")
    second = stage.send("retrying", key)
    stage.wait_for_log(f"Deferred tests.celery.project.tasks.retrying[{second.id}]")
    third = stage.send("skipping", key)
    assert stage.result(third)["skipped"] == "busy"

    assert re.search(
        rf"{key}: tests\.celery\.project\.tasks\.retrying\[{first.id}\] on \S+:\d+ got the lock"
        rf" \(lease \w+, fence \d+\)\. It has it now",
        explained(first),
    )
    assert re.search(
        rf"call {second.id} was deferred, and took its place in line\. Now it is the first, and",
        explained(second),
    )
    skip = explained(third)
    assert f"[{third.id}] on " in skip
    assert re.search(rf"was skipped: busy \(\S+:\d+ {first.id}\)\.$", skip, re.MULTILINE)
    assert re.search(r"state SUCCESS, although the run was skipped \(skipped: busy", skip)
    fourth = stage.send("skipping", key)
    assert stage.result(fourth)["skipped"] == "busy"
    story = locks_command("explain", key).out
    assert f"{fourth.id}" in story
    assert re.search(
        r"was skipped: busy .*\. Since the last success 2 runs were skipped\.$", story, re.MULTILINE
    )

    stage.open_gate(key)
    for sent in (first, second):
        assert stage.result(sent) == f"did {key}"
    ran = explained(second)
    assert re.search(
        rf"got the lock, after it was deferred (once|\d+ times) since {TIME}, the last time because"
        rf" it was held by \S+:\d+ \(lease \w+, fence \d+\)\. It ended well at {TIME}, after ",
        ran,
    )
    assert "took its place in line" not in ran
    assert "The call succeeded, or a newer one replaced it: no duplicate of it runs." in ran
    assert "Celery's result backend has the state SUCCESS." in ran
    assert f"[{first.id}]" in locks_command("explain", key).out


def test_failures_and_reasons_of_skips_are_told(stage, worker):
    failed = stage.send("skipping", stage.key(), fail=True)
    with pytest.raises(ValueError, match="as asked"):
        stage.result(failed)
    story = explained(failed)
    assert "It ended without success at" in story
    assert "state FAILURE, with ValueError: as asked." in story

    for task, why in (("cooling", "cooling"), ("once", "done")):
        key = stage.key()
        done, skipped = stage.send(task, key), stage.send(task, key)
        results = sorted([stage.result(done), stage.result(skipped)], key=str)
        assert results[1]["skipped"] in (why, "busy")
        if results[1]["skipped"] == "busy":
            skipped = stage.send(task, key)
            assert stage.result(skipped)["skipped"] == why
        story = locks_command("explain", key).out
        assert f"was skipped: {why} (" in story
        marker = {"cooling": "min_hold keeps the lock", "done": "be skipped as done until"}[why]
        assert re.search(rf"{marker}.*{TIME}", story)


def test_an_announced_call_and_a_killed_worker_are_told(own_stage):
    key = own_stage.key()
    waiting = own_stage.send("queued", key)
    story = locks_command("explain", key).out
    assert f"Now the call {waiting.id} is announced by unique_queued" in story

    worker = own_stage.start()
    other = own_stage.key()
    killed = own_stage.send("late", other, hold=True)
    own_stage.wait_for(other, "start")
    worker.kill()
    assert "It has it now, after 0 renewals. Its process does not exist any more." in explained(
        killed
    )
    told = "Nobody released the lease; it expired: its process was killed, or it lost the lease."
    wait_until(lambda: told in explained(killed), PATIENCE, "the lease ends")
    assert "Its end was never noted" not in explained(killed)  # Of its lease enough is told.


def test_a_result_backend_that_is_away_is_told_in_a_line(stage, worker):
    sent = stage.send("skipping", stage.key())
    stage.result(sent)
    with celery_app(result_backend="redis://127.0.0.1:1/0"):
        story = explained(sent)
    assert "It ended well at" in story
    assert "\nCelery's result backend cannot answer: " in story


@pytest.mark.usefixtures("redislock")
@pytest.mark.parametrize(
    "result",
    [
        {"skipped": 3, "imported": 40, "password": "hunter2"},
        {"skipped": "busy", "password": "hunter2"},
        {"skipped": "busy", "lock": "lottery", "password": "hunter2"},
        {"skipped": ["hunter2"], "lock": "lottery"},
        {"skipped": "done", "lock": {"password": "hunter2"}},
    ],
)
def test_a_result_of_another_form_is_neither_a_skip_nor_printed(result):
    with celery_app(result_backend="cache+memory://") as app:
        app.backend.store_result("the-id", result, "SUCCESS")
        story = locks_command("explain", "the-id").out
    assert "Celery's result backend has the state SUCCESS." in story
    assert "hunter2" not in story


@pytest.mark.parametrize("why", ["busy", "paused", "cooling", "done", "duplicate"])
def test_a_skip_with_all_that_may_be_known_of_it_is_one(why):
    known = {"holder": "web-1:7", "by": "web-2:8", "ago": 1.5, "reason": "so", "expires_in": 3.0}
    result = {"skipped": why, "lock": "lottery", **known}
    with celery_app(result_backend="cache+memory://") as app:
        app.backend.store_result(f"skipped-{why}", result, "SUCCESS")
        story = locks_command("explain", f"skipped-{why}").out
    assert f"although the run was skipped (skipped: {why}" in story
