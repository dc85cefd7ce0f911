"""What a run in a real worker does that finds another one, by on_conflict, or no Redis."""

import pytest
from celery import chain, chord, group
from celery.exceptions import MaxRetriesExceededError

from django_redislock import LockLost, LockTimeout, LockUnavailable, distributed_lock, held
from tests.support.faults import slack
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
with_worker = pytest.mark.usefixtures("worker")


@pytest.fixture
def busy(stage):
    """A key whose lock is held by somebody else during the test."""
    key = stage.key()
    with distributed_lock(key):
        yield key


@with_worker
@pytest.mark.proves("P7")
def test_of_two_runs_one_is_skipped_and_says_who_has_the_lock_however_it_was_published(stage):
    key = stage.key()
    first = stage.send("skipping", key, hold=True)
    pid = stage.wait_for(key, "start")["pid"]
    second = stage.result(stage.app.send_task(stage.task("skipping").name, (key,)))
    stage.open_gate(key)
    host_and_pid, task_id = second.pop("holder").split()
    assert second == {"skipped": "busy", "lock": key}
    assert task_id == first.id
    assert host_and_pid.endswith(f":{pid}")
    assert stage.result(first) == f"did {key}"
    assert stage.count(key, "start") == 1


@with_worker
def test_a_plain_task_owns_the_lock_that_its_body_takes(stage):
    key, sent = stage.begin("plain")
    lock = held.get(key)
    assert lock.owner.task == stage.task("plain").name
    with pytest.raises(LockTimeout, match=sent.id):
        distributed_lock(key, wait=0).__enter__()
    stage.open_gate(key)
    stage.result(sent)


@with_worker
@pytest.mark.row("retry-raise")
def test_raise_and_autoretry_run_it_when_the_lock_is_free_and_max_retries_counts(stage):
    key, first = stage.begin("skipping")
    others = [stage.send("insisting", key) for _ in range(2)]
    with pytest.raises(LockTimeout) as raised:
        stage.result(stage.send("resigning", key))
    assert raised.value.name == key
    stage.open_gate(key)
    assert [stage.result(one) for one in (first, *others)] == [f"did {key}"] * 3
    assert [event["event"] for event in stage.events(key)] == ["start", "end"] * 3


@with_worker
@pytest.mark.proves("P7")
def test_what_depends_on_a_skipped_member_goes_on(stage, busy):
    skipping, collect, append = map(stage.task, ("skipping", "collect", "append"))
    free = skipping.s(stage.key())
    in_chord = chord([skipping.s(stage.key()), skipping.s(busy), free])(collect.s())
    in_chain = chain(skipping.s(busy), append.s("more"))()
    in_group = group(skipping.s(busy), skipping.s(stage.key()))()
    called = collect.s().set(task_id=stage.key())
    skipping.apply_async((busy,), link=called)

    first, second, third = stage.result(in_chord)
    assert (first[:4], second["skipped"], third[:4]) == ("did ", "busy", "did ")
    skipped, more = stage.result(in_chain)
    assert (skipped["skipped"], more) == ("busy", "more")
    skipped, ran = stage.result(in_group)
    assert (skipped["skipped"], ran[:4]) == ("busy", "did ")
    assert stage.result(stage.app.AsyncResult(called.options["task_id"]))["skipped"] == "busy"


@with_worker
@pytest.mark.parametrize("by", ["", "run"])
def test_a_task_that_calls_itself_is_no_other_delivery_of_its_message(stage, by):
    key = stage.key()
    outer, inner = stage.result(stage.send("calling_itself", key, by=by))
    assert outer == f"did {key}"
    assert (inner["skipped"], inner["lock"]) == ("busy", key)
    assert stage.count(key, "start") == 1


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


@with_worker
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


@with_worker
def test_a_run_goes_on_with_the_lease_that_was_handed_over(stage):
    key = stage.key()
    with distributed_lock(key) as lease:
        run = stage.send("retrying", key, hold=True, baton=lease.hand_over())
        stage.wait_for(key, "start")
        with pytest.raises(LockTimeout):
            distributed_lock(key, wait=0).__enter__()
    stage.open_gate(key)
    assert stage.result(run) == f"did {key}"


@with_worker
class TestRetry:
    """on_conflict="retry": the run comes back, under the same id, and then has its result."""

    @pytest.fixture
    def held_key(self, stage):
        """A key, whose lock a run holds until the gate is opened."""
        key, _ = stage.begin("retrying")
        return key

    @pytest.mark.row("retry")
    @pytest.mark.row("canvas-retry")
    def test_it_runs_when_the_lock_is_free_and_a_canvas_waits_for_it(self, stage, held_key):
        retrying, collect, append = map(stage.task, ("retrying", "collect", "append"))
        alone = retrying.delay(held_key)
        in_chord = chord([retrying.s(stage.key()), retrying.s(held_key)])(collect.s())
        error = collect.si("error").set(task_id=stage.key())
        in_chain = chain(retrying.s(held_key).on_error(error), append.s("more"))()
        for call, times in ((alone, 2), (in_chord.parent.results[1], 1), (in_chain.parent, 1)):
            stage.wait_for_log(f"[{call.id}]: lock {held_key!r} is busy", times)
            assert call.state == "PENDING"
        stage.open_gate(held_key)
        assert stage.result(alone) == stage.result(in_chord)[1] == f"did {held_key}"
        assert stage.result(in_chain) == [f"did {held_key}", "more"]
        assert stage.app.AsyncResult(error.options["task_id"]).state == "PENDING"
        assert stage.count(held_key, "start") == 4

    @pytest.mark.row("retry-items")
    def test_the_items_of_one_message_wait_for_their_turn_in_its_slot(self, stage, held_key):
        task = stage.task("queued_retrying")
        chunks = task.chunks([(held_key,), (held_key,)], 2).apply_async()
        mapped = task.map([held_key, held_key]).apply_async()
        stage.wait_for_waiter(held_key)
        stage.open_gate(held_key)
        results = [*stage.result(mapped), *stage.result(chunks)[0]]
        assert results == [f"did {held_key}"] * 4
        (worker,) = stage.workers
        assert "is an item of celery." in worker.log

    @pytest.mark.proves("P7")
    @pytest.mark.row("retry-deadline")
    def test_after_conflict_deadline_it_is_skipped_but_the_time_of_a_pause_does_not_count(
        self, stage, busy
    ):
        paused = stage.key()
        held.pause(paused, 60, by="an operator")
        sent = stage.send("hurried", paused)  # Its conflict_deadline is a second.
        assert stage.result(stage.send("hurried", busy))["skipped"] == "busy"
        assert stage.events(busy) == []
        stage.wait_for_log(f"[{sent.id}]: lock {paused!r} is paused", 4)
        held.resume(paused)
        assert stage.result(sent) == f"did {paused}"


@with_worker
class TestWait:
    """on_conflict="wait": the run stands in the lock's queue, in its worker slot."""

    @pytest.mark.row("wait")
    def test_it_runs_as_soon_as_the_lock_is_free(self, stage):
        key, first = stage.begin("waiting")
        second = stage.send("waiting", key)
        stage.wait_for_waiter(key)
        stage.open_gate(key)
        assert [stage.result(one) for one in (first, second)] == [f"did {key}"] * 2
        end, start = stage.wait_for(key, "end"), stage.wait_for(key, "start", 2)
        assert start["time"] - end["time"] < 1 + slack()

    @pytest.mark.row("wait-skip")
    def test_when_the_wait_runs_out_it_is_skipped(self, stage, busy):
        assert stage.result(stage.send("impatient", busy))["skipped"] == "busy"

    @pytest.mark.row("wait-duplicate")
    def test_a_duplicate_that_waits_for_its_first_delivery_does_not_run_after_it(self, stage):
        key, first = stage.begin("waiting")
        stage.app.send_task(stage.task("waiting").name, (key,), task_id=first.id)
        stage.wait_for_waiter(key)
        stage.open_gate(key)
        assert stage.result(first) == f"did {key}"
        stage.wait_until_idle()
        assert not distributed_lock(key).locked()
        assert stage.count(key, "start") == 1


@with_worker
@pytest.mark.row("callable")
@pytest.mark.row("callable-retry")
def test_a_function_gives_the_result_or_retries_and_is_asked_each_time_until_max_retries(stage):
    key = stage.key()
    with distributed_lock(key) as lease:
        result = stage.result(stage.send("answering", key, seconds=7))
        with pytest.raises(MaxRetriesExceededError):
            stage.result(stage.send("pleading", key))
    assert result == {"key": key, "sorry": {"seconds": 7}, "holder": str(lease.owner)}
    assert [event["retries"] for event in stage.events(key, "conflict")] == [0, 1, 2]


@with_worker
@pytest.mark.row("once")
def test_what_is_done_once_is_skipped_and_a_failure_is_not_done(stage):
    key = stage.key()
    with pytest.raises(ValueError, match="as asked"):
        stage.result(stage.send("once", key, fail=True))
    first = stage.send("once", key)
    assert stage.result(first) == f"did {key}"
    result = stage.result(stage.send("once", key))
    assert (result["skipped"], result["lock"]) == ("done", key)
    assert result["by"].endswith(first.id)


@pytest.mark.slow
@pytest.mark.row("unavailable-raise")
@pytest.mark.row("unavailable-run")
@pytest.mark.row("unavailable-retry")
@pytest.mark.row("unavailable-release")
def test_while_the_lock_server_does_not_answer_but_the_broker_does(own_stage, make_server):
    stage, server = own_stage, make_server()
    stage.redislock["default"]["LOCATION"] = server.url
    stage.start(pool="threads", concurrency=2)
    server.stop()

    key = stage.key()
    with pytest.raises(LockUnavailable):  # By default.
        stage.result(stage.send("skipping", key))
    assert stage.events(key) == []

    sent = stage.send("careless", key)
    assert stage.result(sent) == f"did {key}"
    assert stage.events(key, "start")[0]["fence"] is None
    stage.wait_for_log(f"[{sent.id}] runs WITHOUT its lock")
    assert "ERROR" in stage.workers[0].log

    key = stage.key()
    sent = stage.send("hopeful", key)
    stage.wait_for_log(f"[{sent.id}]: Lock {key!r} is unavailable")
    assert stage.events(key) == []
    server.start()
    assert stage.result(sent) == f"did {key}"

    key, sent = stage.begin("lasting")  # It is to end while its lease lasts.
    server.stop()
    stage.open_gate(key)
    assert stage.result(sent) == f"did {key}"
    stage.wait_for_log(f"Left the block of lock {key!r}")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.row("two-beats")
def test_of_two_beats_with_clocks_that_differ_one_draws_at_each_noon(own_stage, tmp_path):
    """Two servers with a scheduler each: the same job twice, at what both believe to be noon."""
    every = 9.0  # Seconds between two noons; min_hold is 5, so a busy machine may be late by 4.
    key = own_stage.key()
    for late in (0.0, 0.3):
        own_stage.start(
            *("--beat", "--schedule", str(tmp_path / f"schedule-{late}")),
            ready=False,
            noon={"key": key, "every": every, "late": late},
        )
    workers = own_stage.workers
    for worker in workers:
        worker.wait_ready()

    def sent_by_all():
        return all(worker.log.count("Sending due task noon") >= 2 for worker in workers)

    wait_until(sent_by_all, 60, "two noons have passed", every=0.05)
    own_stage.wait_for(key, "draw", 2)
    own_stage.wait_until_idle()
    for worker in workers:
        worker.kill()
    noons = [int(draw["time"] // every) for draw in own_stage.events(key, "draw")]
    assert len(noons) >= 2
    assert noons == list(range(noons[0], noons[0] + len(noons)))
