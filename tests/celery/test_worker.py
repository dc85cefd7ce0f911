"""@single_instance_task in a real worker: four processes, a real broker, a real result backend."""

import pytest
from celery import chain, chord, group

from django_redislock import LockLost, LockTimeout, distributed_lock, held
from tests.celery.project import PATIENCE

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = pytest.mark.usefixtures("worker")


@pytest.mark.proves("P7")
def test_of_two_runs_one_is_skipped_and_says_who_has_the_lock(stage):
    key = stage.key()
    first = stage.send("skipping", key, hold=True)
    pid = stage.wait_for(key, "start")["pid"]

    second = stage.send("skipping", key).get(timeout=PATIENCE)
    stage.open_gate(key)

    host_and_pid, task_id = second.pop("holder").split()
    assert second == {"skipped": "busy", "lock": key}
    assert task_id == first.id
    assert host_and_pid.endswith(f":{pid}")
    assert first.get(timeout=PATIENCE) == f"did {key}"
    assert len(stage.events(key, "start")) == 1


def test_a_plain_task_owns_the_lock_that_its_body_takes(stage):
    key = stage.key()
    sent = stage.send("plain", key, hold=True)
    stage.wait_for(key, "start")
    lock = held.get(key)
    assert lock.owner.task == "tests.celery.project.tasks.plain"
    with pytest.raises(LockTimeout, match=sent.id):
        distributed_lock(key, wait=0).__enter__()
    stage.open_gate(key)
    stage.result(sent)


def test_one_run_after_the_other_both_run(stage):
    key = stage.key()
    for _ in range(3):
        assert stage.send("skipping", key).get(timeout=PATIENCE) == f"did {key}"


def test_a_failed_run_leaves_the_lock_free(stage):
    key = stage.key()
    with pytest.raises(ValueError, match="as asked"):
        stage.send("skipping", key, fail=True).get(timeout=PATIENCE)
    assert not distributed_lock(key).locked()
    assert stage.send("skipping", key).get(timeout=PATIENCE) == f"did {key}"


def test_send_task_is_no_way_around_the_lock(stage):
    key = stage.key()
    first = stage.app.send_task("tests.celery.project.tasks.skipping", (key,), {"hold": True})
    stage.wait_for(key, "start")
    second = stage.app.send_task("tests.celery.project.tasks.skipping", (key,))
    assert second.get(timeout=PATIENCE)["skipped"] == "busy"
    stage.open_gate(key)
    assert first.get(timeout=PATIENCE) == f"did {key}"


def test_raise_fails_the_task(stage):
    key = stage.key()
    with distributed_lock(key), pytest.raises(LockTimeout) as raised:
        stage.send("raising", key).get(timeout=PATIENCE)
    assert raised.value.name == key
    assert stage.events(key) == []


def test_raise_and_autoretry_run_it_when_the_lock_is_free(stage):
    key = stage.key()
    first = stage.send("skipping", key, hold=True)
    stage.wait_for(key, "start")
    second = stage.send("insisting", key)
    third = stage.send("insisting", key)
    stage.open_gate(key)
    assert {one.get(timeout=PATIENCE) for one in (first, second, third)} == {f"did {key}"}
    events = [event["event"] for event in stage.events(key)]
    assert events == ["start", "end"] * 3


class TestCanvas:
    """A skipped member ends normally, so that what depends on it goes on."""

    @pytest.fixture
    def busy(self, stage):
        """A key whose lock is held by somebody else during the test."""
        key = stage.key()
        with distributed_lock(key):
            yield key

    @pytest.mark.proves("P7")
    def test_a_chord_has_its_body_run(self, stage, busy):
        skipping, collect = stage.task("skipping"), stage.task("collect")
        header = [skipping.s(stage.key()), skipping.s(busy), skipping.s(stage.key())]
        first, second, third = chord(header)(collect.s()).get(timeout=PATIENCE)
        assert first.startswith("did ")
        assert second["skipped"] == "busy"
        assert third.startswith("did ")

    @pytest.mark.proves("P7")
    def test_a_chain_goes_on_with_the_marked_value(self, stage, busy):
        append = stage.task("append")
        result, more = chain(stage.task("skipping").s(busy), append.s("more"))().get(
            timeout=PATIENCE
        )
        assert (result["skipped"], more) == ("busy", "more")

    @pytest.mark.proves("P7")
    def test_a_group_is_complete(self, stage, busy):
        skipping = stage.task("skipping")
        first, second = group(skipping.s(busy), skipping.s(stage.key()))().get(timeout=PATIENCE)
        assert first["skipped"] == "busy"
        assert second.startswith("did ")

    @pytest.mark.proves("P7")
    def test_a_callback_is_called(self, stage, busy):
        collect = stage.task("collect").s().set(task_id=(task_id := stage.key()))
        stage.task("skipping").apply_async((busy,), link=collect)
        assert stage.app.AsyncResult(task_id).get(timeout=PATIENCE)["skipped"] == "busy"


def test_a_task_that_replaces_itself_frees_the_lock_for_the_one_that_takes_its_place(stage):
    # The replacement has the same key: under the lock of the replaced run it would be skipped.
    key = stage.key()
    assert stage.send("replacing", key).get(timeout=PATIENCE) == f"did {key}"
    assert len(stage.events(key, "start")) == 2
    assert not distributed_lock(key).locked()


def test_celerys_own_deduplication_of_successful_tasks_may_be_on(own_stage):
    own_stage.start(worker_deduplicate_successful_tasks=True, task_acks_late=True)
    key = own_stage.key()
    first = own_stage.send("skipping", key, hold=True)
    own_stage.wait_for(key, "start")
    second = own_stage.send("skipping", key)
    own_stage.open_gate(key)
    assert first.get(timeout=PATIENCE) == f"did {key}"
    assert own_stage.result(second)
    assert own_stage.send("skipping", key).get(timeout=PATIENCE) == f"did {key}"


def test_a_run_that_is_put_off_has_not_started_and_one_whose_body_runs_has(own_stage):
    own_stage.start(task_track_started=True, pool="threads", concurrency=2)
    key = own_stage.key()
    with distributed_lock(key):
        sent = own_stage.send("retrying", key, hold=True)
        own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is busy")
        assert sent.state == "PENDING"
    pid = own_stage.wait_for(key, "start")["pid"]
    assert (sent.state, sent.info["pid"]) == ("STARTED", pid)
    own_stage.open_gate(key)
    assert own_stage.result(sent) == f"did {key}"


@pytest.mark.proves("P5")
def test_a_loss_calls_on_lost_and_with_abort_on_lost_ends_the_body_as_the_result_says(stage):
    key = stage.key()
    sent = stage.send("aborting", key)
    stage.wait_for(key, "start")
    lock = held.get(key)
    assert held.force_release(key, lock.id, by="a test")
    assert stage.wait_for(key, "lost")["reason"] == "forced"
    stage.open_gate(key)
    with pytest.raises(LockLost) as lost:
        stage.result(sent)
    assert (lost.value.name, lost.value.reason) == (key, "forced")
    assert stage.count(key, "step") == 0
