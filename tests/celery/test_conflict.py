"""What a run does that finds another one, by on_conflict; and what it does without Redis."""

import pytest
from celery import chain, chord
from celery.exceptions import MaxRetriesExceededError

from django_redislock import LockTimeout, LockUnavailable, distributed_lock, held
from tests.support.faults import slack

pytest_plugins = ["tests.celery.project.stage"]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("by", ["", "run"])
def test_a_task_that_calls_itself_is_no_other_delivery_of_its_message(stage, by):
    key = stage.key()
    outer, inner = stage.result(stage.send("calling_itself", key, by=by))
    assert outer == f"did {key}"
    assert (inner["skipped"], inner["lock"]) == ("busy", key)
    assert stage.count(key, "start") == 1


@pytest.mark.usefixtures("worker")
class TestRetry:
    """on_conflict="retry": the run comes back, under the same id, and then has its result."""

    @pytest.fixture
    def busy_with(self, stage):
        """A key, and the run that holds its lock until the gate is opened."""
        key = stage.key()
        holder = stage.send("retrying", key, hold=True)
        stage.wait_for(key, "start")
        return key, holder

    @pytest.mark.row("retry")
    def test_it_runs_when_the_lock_is_free(self, stage, busy_with):
        key, holder = busy_with
        second = stage.send("retrying", key)
        stage.wait_for_log(f"[{second.id}]: lock {key!r} is busy", 2)
        assert second.state == "PENDING"
        stage.open_gate(key)
        assert stage.result(second) == f"did {key}"
        assert stage.result(holder) == f"did {key}"
        assert stage.count(key, "start") == 2

    @pytest.mark.row("canvas-retry")
    def test_a_chord_waits_for_a_member_that_was_put_off(self, stage, busy_with):
        key, _ = busy_with
        retrying = stage.task("retrying")
        body = chord([retrying.s(stage.key()), retrying.s(key)])(stage.task("collect").s())
        stage.wait_for_log(f"[{body.parent.results[1].id}]: lock {key!r} is busy")
        stage.open_gate(key)
        assert stage.result(body)[1] == f"did {key}"

    @pytest.mark.row("canvas-retry")
    def test_so_does_a_chain_and_its_error_callback_stays_silent(self, stage, busy_with):
        key, _ = busy_with
        error = stage.task("collect").si("error").set(task_id=stage.key())
        first = stage.task("retrying").s(key).on_error(error)
        end = chain(first, stage.task("append").s("more"))()
        stage.wait_for_log(f"[{end.parent.id}]: lock {key!r} is busy")
        stage.open_gate(key)
        assert stage.result(end) == [f"did {key}", "more"]
        assert stage.app.AsyncResult(error.options["task_id"]).state == "PENDING"

    @pytest.mark.row("retry-items")
    @pytest.mark.parametrize("how", ["map", "chunks"])
    def test_the_items_of_one_message_wait_for_their_turn_in_its_slot(self, stage, busy_with, how):
        key, _ = busy_with
        task = stage.task("queued_retrying")
        items = task.map([key, key]) if how == "map" else task.chunks([(key,), (key,)], 2)
        sent = items.apply_async()
        stage.wait_for_waiter(key)
        stage.open_gate(key)
        results = stage.result(sent)
        assert (results if how == "map" else results[0]) == [f"did {key}"] * 2
        (worker,) = stage.workers
        assert "is an item of celery." in worker.log

    @pytest.mark.proves("P7")
    @pytest.mark.row("retry-deadline")
    def test_after_conflict_deadline_it_is_skipped(self, stage):
        key = stage.key()
        with distributed_lock(key):
            result = stage.result(stage.send("hurried", key))
        assert result["skipped"] == "busy"
        assert stage.events(key) == []

    @pytest.mark.proves("P7")
    @pytest.mark.row("retry-deadline")
    def test_the_time_of_a_pause_does_not_count_for_conflict_deadline(self, stage):
        key = stage.key()
        held.pause(key, 60, by="an operator")
        sent = stage.send("hurried", key)  # Its conflict_deadline is a second.
        stage.wait_for_log(f"[{sent.id}]: lock {key!r} is paused", 4)
        held.resume(key)
        assert stage.result(sent) == f"did {key}"

    def test_what_the_caller_asked_for_comes_along(self, stage):
        key = stage.key()
        with distributed_lock(key):
            sent = stage.task("retrying").apply_async(
                (key,),
                {"tags": {"a", "b"}, "hold": False},
                serializer="sets",
                expires=60,
                priority=3,
                time_limit=50,
                soft_time_limit=40,
                headers={"origin-of": "tests"},
            )
            stage.wait_for_log(f"[{sent.id}]: lock {key!r} is busy", 2)
        request = stage.wait_for(key, "request")
        stage.result(sent)
        assert request["priority"] == 3
        assert request["timelimit"] == [50, 40]
        assert request["expires"]
        assert request["headers"]["origin-of"] == "tests"
        assert request["tags"] == ["a", "b"]
        assert request["retries"] == 0


@pytest.mark.usefixtures("worker")
class TestWait:
    """on_conflict="wait": the run stands in the lock's queue, in its worker slot."""

    @pytest.mark.row("wait")
    def test_it_runs_as_soon_as_the_lock_is_free(self, stage):
        key = stage.key()
        first = stage.send("waiting", key, hold=True)
        stage.wait_for(key, "start")
        second = stage.send("waiting", key)
        stage.wait_for_waiter(key)
        stage.open_gate(key)
        assert [stage.result(one) for one in (first, second)] == [f"did {key}"] * 2
        end, start = stage.wait_for(key, "end"), stage.wait_for(key, "start", 2)
        assert start["time"] - end["time"] < 1 + slack()

    @pytest.mark.row("wait-skip")
    def test_when_the_wait_runs_out_it_is_skipped(self, stage):
        key = stage.key()
        with distributed_lock(key):
            assert stage.result(stage.send("impatient", key))["skipped"] == "busy"

    @pytest.mark.row("wait-duplicate")
    def test_a_duplicate_that_waits_for_its_first_delivery_does_not_run_after_it(self, stage):
        key = stage.key()
        first = stage.send("waiting", key, hold=True)
        stage.wait_for(key, "start")
        stage.app.send_task(stage.task("waiting").name, (key,), task_id=first.id)
        stage.wait_for_waiter(key)
        stage.open_gate(key)
        assert stage.result(first) == f"did {key}"
        stage.wait_until_idle()
        assert not distributed_lock(key).locked()
        assert stage.count(key, "start") == 1


@pytest.mark.usefixtures("worker")
class TestOthers:
    """on_conflict as a function; once."""

    @pytest.mark.row("callable")
    def test_a_function_gives_the_result(self, stage):
        key = stage.key()
        with distributed_lock(key) as lease:
            result = stage.result(stage.send("answering", key, seconds=7))
        assert result == {"key": key, "sorry": {"seconds": 7}, "holder": str(lease.owner)}

    @pytest.mark.row("callable-retry")
    def test_a_function_that_retries_is_asked_each_time_until_max_retries(self, stage):
        key = stage.key()
        with distributed_lock(key), pytest.raises(MaxRetriesExceededError):
            stage.result(stage.send("pleading", key))
        assert [event["retries"] for event in stage.events(key, "conflict")] == [0, 1, 2]

    @pytest.mark.row("once")
    def test_what_is_done_once_is_skipped_and_a_failure_is_not_done(self, stage):
        key = stage.key()
        with pytest.raises(ValueError, match="as asked"):
            stage.result(stage.send("once", key, fail=True))
        first = stage.send("once", key)
        assert stage.result(first) == f"did {key}"
        result = stage.result(stage.send("once", key))
        assert (result["skipped"], result["lock"]) == ("done", key)
        assert result["by"].endswith(first.id)


@pytest.mark.slow
class TestUnavailable:
    """The lock server does not answer; the broker does."""

    @pytest.fixture
    def lock_server(self, own_stage, make_server):
        """The server of the locks alone, stopped."""
        server = make_server()
        own_stage.redislock["default"]["LOCATION"] = server.url
        own_stage.start(pool="threads", concurrency=2)
        server.stop()
        return server

    @pytest.mark.row("unavailable-raise")
    def test_by_default_the_task_fails_and_its_body_does_not_run(self, own_stage, lock_server):
        key = own_stage.key()
        with pytest.raises(LockUnavailable):
            own_stage.result(own_stage.send("skipping", key))
        assert own_stage.events(key) == []

    @pytest.mark.row("unavailable-retry")
    def test_with_retry_it_runs_when_the_server_is_back(self, own_stage, lock_server):
        key = own_stage.key()
        sent = own_stage.send("hopeful", key)
        own_stage.wait_for_log(f"[{sent.id}]: Lock {key!r} is unavailable")
        assert own_stage.events(key) == []
        lock_server.start()
        assert own_stage.result(sent) == f"did {key}"

    @pytest.mark.row("unavailable-run")
    def test_with_run_it_runs_and_says_so_loudly(self, own_stage, lock_server):
        key = own_stage.key()
        sent = own_stage.send("careless", key)
        assert own_stage.result(sent) == f"did {key}"
        assert own_stage.events(key, "start")[0]["fence"] is None
        own_stage.wait_for_log(f"[{sent.id}] runs WITHOUT its lock")
        assert "ERROR" in own_stage.workers[0].log

    @pytest.mark.row("unavailable-release")
    def test_if_it_is_gone_when_the_body_ends_the_result_is_kept(self, own_stage, lock_server):
        lock_server.start()
        key = own_stage.key()
        sent = own_stage.send("lasting", key, hold=True)  # It is to end while its lease lasts.
        own_stage.wait_for(key, "start")
        lock_server.stop()
        own_stage.open_gate(key)
        assert own_stage.result(sent) == f"did {key}"
        own_stage.wait_for_log(f"Left the block of lock {key!r}")
        assert "ERROR" in own_stage.workers[0].log


@pytest.mark.usefixtures("worker")
def test_a_run_goes_on_with_the_lease_that_was_handed_over(stage):
    key = stage.key()
    with distributed_lock(key) as lease:
        run = stage.send("retrying", key, hold=True, baton=lease.hand_over())
        stage.wait_for(key, "start")
        with pytest.raises(LockTimeout):
            distributed_lock(key, wait=0).__enter__()
    stage.open_gate(key)
    assert stage.result(run) == f"did {key}"
