"""A task that is delivered twice, again after a crash, or retried: never dropped, never doubled."""

import base64
import json
import os
import re
import time

import kombu
import pytest
from celery import chain, chord, group

from django_redislock import distributed_lock, held
from django_redislock.rules.keys import lock_keys
from tests.celery.project import PATIENCE, SOON
from tests.support.databases import sqlite
from tests.support.faults import slack
from tests.support.processes import python
from tests.support.stored import newer_lease
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]


# Before, kombu looked for messages to deliver again every 100 s, and when a worker starts.
sweeps_often = pytest.mark.skipif(kombu.VERSION < (5, 7), reason="takes minutes with this kombu")


def deliver_again(stage, name, key, task_id, **options):
    """Put a message into the queue that looks as if a broker delivered the one of this id again.

    By send_task(), which does not say which call it is, and as the first one has said it. By
    apply_async() it would be another call.
    """
    said = stage.published.get(task_id, {}).get("redislock", {})
    headers = {"redislock": {"call": said.get("call")}}
    name = stage.task(name).name
    stage.app.send_task(name, (key,), task_id=task_id, headers=headers, **options)


def wait_until_put_off(stage, task_id, key, times=1):
    stage.wait_for_log(f"[{task_id}]: lock {key!r} is busy", times)


def wait_until_concluded(key):
    """Return once no run has the lock: its body has ended before.

    Until then, another call of the run's id is put off.
    """

    def concluded():
        return not held.record(key).under_way

    wait_until(concluded, PATIENCE, f"no run of {key} is under way", every=0.02)


def wait_for_end_as_duplicate(stage, sent, count=1):
    """Return once this many deliveries have ended without a result, and not to come back."""

    def ended():
        log = "".join(worker.log for worker in stage.workers)
        # Who is put off says so before it is ignored.
        put_off = len(re.findall(rf"Deferred \S+\[{sent.id}\]: lock", log))
        return log.count(f"[{sent.id}] ignored") - put_off >= count

    wait_until(ended, PATIENCE, f"{count} duplicates of {sent.id} have ended", every=0.02)


@pytest.mark.usefixtures("worker")
class TestDuplicate:
    """Delivered twice, while the first delivery runs or after it has."""

    @pytest.mark.proves("P8")
    @pytest.mark.row("duplicate-running")
    def test_while_the_first_runs_it_is_put_off_and_neither_runs_nor_expires(self, stage):
        key, late = stage.key(), stage.task("late")
        sent = late.apply_async((key,), {"hold": True}, expires=8)
        expires_at = time.time() + 8
        stage.wait_for(key, "start")
        stage.redeliver(sent.id)
        wait_until_put_off(stage, sent.id, key)
        assert not sent.ready()
        wait_until(lambda: time.time() > expires_at, message="it would have expired", every=0.1)
        stage.open_gate(key)
        assert stage.result(sent) == f"did {key}"
        stage.wait_until_idle()
        assert stage.count(key, "start") == 1
        assert stage.app.AsyncResult(sent.id).result == f"did {key}"
        log = "".join(worker.log for worker in stage.workers)
        assert f"Discarding revoked task: {late.name}[{sent.id}]" not in log

    @pytest.mark.proves("P8")
    @pytest.mark.row("duplicate-running")
    @pytest.mark.parametrize("task", ["late", "limited"])
    def test_so_is_one_with_an_id_of_any_length(self, stage, task):
        key, task_id = stage.key(), stage.key() + "-and-so-on" * 100
        deliver_again(stage, task, key, task_id, kwargs={"hold": True})
        stage.wait_for(key, "start")
        deliver_again(stage, task, key, task_id)
        wait_until_put_off(stage, task_id, key)
        stage.open_gate(key, 2)
        assert stage.result(stage.app.AsyncResult(task_id)) == f"did {key}"
        stage.wait_until_idle()
        assert stage.count(key, "start") == 1

    @pytest.mark.proves("P8")
    def test_so_is_one_whose_first_is_run_by_a_newer_version(self, stage):
        key, task_id = stage.key(), stage.key()
        lock = lock_keys("redislock", key).lock
        stage.redis.set(lock, newer_lease(task_id=task_id), px=60_000)
        deliver_again(stage, "late", key, task_id)
        wait_until_put_off(stage, task_id, key)
        assert stage.count(key, "start") == 0
        stage.redis.delete(lock)
        assert stage.result(stage.app.AsyncResult(task_id)) == f"did {key}"

    @pytest.mark.proves("P8")
    @pytest.mark.row("duplicate-finished")
    @pytest.mark.row("duplicate-cooling")
    @pytest.mark.parametrize("task", ["late", "cooling"])
    def test_after_the_first_it_leaves_the_result_alone_also_while_the_lock_cools_down(
        self, stage, task
    ):
        key = stage.key()
        first = stage.send(task, key)
        assert stage.result(first) == f"did {key}"
        before = stage.redis.get(f"celery-task-meta-{first.id}")
        deliver_again(stage, task, key, first.id)
        stage.wait_for_log(first.id + "] received", 2)
        stage.wait_until_idle()
        assert stage.redis.get(f"celery-task-meta-{first.id}") == before
        assert stage.count(key, "start") == 1

    @pytest.mark.row("duplicate-unreported")
    def test_without_a_stored_result_it_ends_marked_so_that_a_canvas_goes_on(self, stage):
        key, task_id = stage.key(), stage.key()
        deliver_again(stage, "quiet", key, task_id)
        stage.wait_for(key, "end")
        stage.wait_until_idle()
        follower = stage.task("collect").s().set(task_id=stage.key())
        deliver_again(stage, "quiet", key, task_id, link=follower)
        result = stage.result(stage.app.AsyncResult(follower.options["task_id"]))
        assert (result["skipped"], result["lock"]) == ("duplicate", key)
        assert stage.count(key, "start") == 1

    @pytest.mark.row("duplicate-unreported")
    def test_so_it_does_without_a_result_backend(self, own_stage):
        own_stage.start(result_backend=None)
        key, next_key, task_id = own_stage.key(), own_stage.key(), own_stage.key()
        deliver_again(own_stage, "late", key, task_id)
        own_stage.wait_for(key, "end")
        follower = own_stage.task("late").si(next_key)
        deliver_again(own_stage, "late", key, task_id, link=follower)
        own_stage.wait_for(next_key, "end")
        assert own_stage.count(key, "start") == 1

    @pytest.mark.proves("P8")
    @pytest.mark.row("canvas-duplicate")
    def test_a_canvas_gets_the_real_result_of_a_member_delivered_twice(self, stage):
        late, keys = stage.task("late"), [stage.key() for _ in range(3)]
        in_chord = chord(group(late.s(key, hold=True) for key in keys[:2]))(
            stage.task("collect").s()
        )
        in_chain = chain(late.s(keys[2], hold=True), stage.task("append").s("more"))()
        for member, key in ((in_chord.parent.results[1], keys[1]), (in_chain.parent, keys[2])):
            stage.wait_for(key, "start")
            stage.redeliver(member.id)
            wait_until_put_off(stage, member.id, key)
        for key in keys:
            stage.open_gate(key)
        assert stage.result(in_chord) == [f"did {key}" for key in keys[:2]]
        assert stage.result(in_chain) == [f"did {keys[2]}", "more"]
        stage.wait_until_idle()
        assert [stage.count(key, "start") for key in keys] == [1, 1, 1]


@pytest.mark.usefixtures("worker")
class TestAnotherCall:
    """Made on purpose under an id that a finished run had."""

    @pytest.mark.parametrize("task", ["late", "quiet", "limited"])
    def test_it_runs_by_send_task_too_if_its_header_says_so(self, stage, task):
        key, nightly, task = stage.key(), stage.key(), stage.task(task)
        for times in (1, 2):
            task.apply_async((key,), task_id=nightly)
            stage.wait_for(key, "end", times)
        call = {"redislock": {"call": "the third night"}}
        stage.app.send_task(task.name, (key,), task_id=nightly, headers=call)
        stage.wait_for(key, "end", 3)
        stage.wait_until_idle()

    @pytest.mark.parametrize("headers", [False, True])
    def test_a_task_that_calls_itself_under_its_own_id_goes_on(self, stage, headers):
        key = stage.key()
        stage.task("polling").apply_async((key, 3, headers), task_id=stage.key())
        stage.wait_for(key, "end", 3)
        stage.wait_until_idle()
        assert stage.count(key, "start") == 3

    @pytest.mark.row("duplicate-finished")
    def test_a_canvas_that_a_plain_task_publishes_runs_once_for_each_of_its_runs(self, stage):
        key, nightly, publish = stage.key(), stage.key(), stage.task("publish_canvas")
        for times in (1, 2):
            publisher = publish.apply_async((key, nightly))
            stage.wait_for(key, "end", times)
        stage.wait_until_idle()
        stage.app.send_task(publish.name, (key, nightly), task_id=publisher.id)
        stage.wait_for_log(f"{nightly}]: lock {key!r} is duplicate")
        assert stage.count(key, "start") == 2

    def test_while_the_lock_cools_down_it_is_a_conflict_unless_a_permit_is_free(self, stage):
        for task, permits in (("cooling", 1), ("limited_cooling", 2)):
            key, nightly, cooling = stage.key(), stage.key(), stage.task(task)
            for times in range(permits):
                cooling.apply_async((key,), task_id=nightly)
                stage.wait_for(key, "end", times + 1)
                wait_until_concluded(key)
            cooling.apply_async((key,), task_id=nightly)
            stage.wait_for_log(f"{nightly}]: lock {key!r} is")
            record = held.record(key)
            assert record.last_skip.why != "duplicate"
            assert stage.count(key, "start") == permits

    @pytest.mark.row("duplicate-finished")
    def test_a_message_that_comes_again_is_a_duplicate_and_says_so(self, stage):
        key, nightly, late = stage.key(), stage.key(), stage.task("late")
        message = {"headers": {"redislock": {"call": "tonight"}}, "task_id": nightly}
        assert stage.result(late.apply_async((key,), **message)) == f"did {key}"
        late.apply_async((key,), **message)
        stage.wait_for_log(f"{nightly}]: lock {key!r} is duplicate")
        stage.wait_until_idle()
        assert stage.count(key, "start") == 1
        assert stage.app.AsyncResult(nightly).result == f"did {key}"
        record = held.record(key)
        assert (record.last_skip.why, record.skips) == ("duplicate", 0)


@pytest.mark.slow
@pytest.mark.row("duplicate-finished")
def test_with_rpc_a_duplicate_sends_no_second_result_and_calls_nothing(own_stage):
    own_stage.conf["result_backend"] = "rpc://"
    own_stage.start(pool="threads", concurrency=2)
    key, next_key, late = own_stage.key(), own_stage.key(), own_stage.task("late")
    reply_to = own_stage.key()
    sent = late.apply_async((key,), link=late.si(next_key), reply_to=reply_to)
    own_stage.wait_for(next_key, "end")
    deliver_again(own_stage, "late", key, sent.id, link=late.si(next_key), reply_to=reply_to)
    own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is duplicate")
    own_stage.wait_for_log(f"[{sent.id}] ignored", 2)  # It has come back once.
    own_stage.wait_until_idle()
    assert (own_stage.count(key, "start"), own_stage.count(next_key, "start")) == (1, 1)
    (result,) = own_stage.redis.lrange(reply_to, 0, -1)
    assert f"did {key}".encode() in base64.b64decode(json.loads(result)["body"])


@pytest.mark.usefixtures("worker")
class TestRetry:
    """A Celery retry, whose own first try or somebody else holds the lock."""

    @staticmethod
    def tries(stage, key):
        return [event["retries"] for event in stage.events(key, "start")]

    @pytest.mark.proves("P8")
    @pytest.mark.row("retry-own")
    @pytest.mark.row("canvas-retried")
    def test_one_that_comes_before_its_first_try_has_let_go_is_not_lost_and_a_chord_waits_for_it(
        self, stage
    ):
        keys = [stage.key() for _ in range(3)]
        header = [
            stage.task("replacing").s(keys[0]),
            stage.task("flaky").s(keys[1], hold=True),
            stage.task("skipping").s(keys[2]),
        ]
        body = chord(header)(stage.task("collect").s())
        replaced, retried, _ = (member.id for member in body.parent.results)
        wait_until_put_off(stage, retried, keys[1])
        stage.wait_for(keys[0], "end")
        assert not body.ready()
        deliver_again(stage, "replacing", keys[0], replaced)
        stage.open_gate(keys[1])
        assert stage.result(body) == [f"did {key}" for key in keys]
        stage.wait_until_idle()
        # The first delivery of one, and what it was replaced by; both tries of another.
        assert [stage.count(key, "start") for key in keys] == [2, 2, 1]
        assert self.tries(stage, keys[1]) == [0, 1]

    @pytest.mark.row("retry-returned")
    @pytest.mark.parametrize("kind", ["", "_once", "_cooling", "_limited"])
    def test_a_retry_whose_first_try_ended_well_is_no_duplicate_of_it(self, stage, kind):
        key, sent = stage.begin(name := f"asking_again{kind}")
        stage.open_gate(key)
        stage.wait_for(key, "start", 2)
        assert stage.result(sent) == "tried 1"
        stage.open_gate(key)
        stage.wait_for(key, "end", 2)
        stage.wait_until_idle()
        assert self.tries(stage, key) == [0, 1]

        for retries in (0, 1):
            deliver_again(stage, name, key, sent.id, retries=retries)
            # Not only until the broker has no message left: it has none of a task that has begun.
            wait_for_end_as_duplicate(stage, sent, retries + 1)
        stage.wait_until_idle()
        # Celery keeps the result of the first success.
        assert stage.app.AsyncResult(sent.id).result == "tried 1"
        assert stage.count(key, "start") == 2

    @pytest.mark.row("retry-returned")
    def test_a_duplicate_of_the_first_try_is_one_although_its_retry_is_still_to_come(self, stage):
        key, sent = stage.begin("asking_again", pause=2)
        stage.open_gate(key)
        assert stage.result(sent) == "tried 1"
        deliver_again(stage, "asking_again", key, sent.id)
        stage.wait_for_log(f"[{sent.id}] received", 3)  # The retry too, ahead of its time.
        stage.wait_for(key, "start", 2)
        stage.open_gate(key)
        stage.wait_for(key, "end", 2)
        wait_for_end_as_duplicate(stage, sent)
        stage.wait_until_idle()
        assert self.tries(stage, key) == [0, 1]

    @pytest.mark.proves("P8")
    @pytest.mark.row("retry-returned")
    def test_of_many_that_retry_at_once_none_is_lost_and_no_duplicate_of_a_first_try_runs(
        self, stage
    ):
        keys = [stage.key() for _ in range(40)]
        results = [stage.send("flaky", key) for key in keys]
        assert [stage.result(one) for one in results] == [f"did {key}" for key in keys]
        deliver_again(stage, "flaky", keys[0], results[0].id)
        wait_for_end_as_duplicate(stage, results[0])
        stage.wait_until_idle()
        assert [self.tries(stage, key) for key in keys] == [[0, 1]] * 40

    @pytest.mark.proves("P8")
    @pytest.mark.row("retry-other")
    def test_a_retry_that_finds_another_holder_is_put_off(self, stage):
        key, retried = stage.begin("flaky")
        other = stage.send("waiting", key, hold=True)
        stage.wait_for_waiter(key)
        stage.open_gate(key)  # The other one has the lock in the step that frees it.
        stage.wait_for_log(f"{other.id}, and a retry finds it held")
        assert not retried.ready()
        stage.open_gate(key)
        assert stage.result(other) == f"did {key}"
        assert stage.result(retried) == f"did {key}"


@pytest.mark.slow
class TestCrash:
    """The worker dies with the task in its hands; the broker delivers it again."""

    @pytest.fixture
    def own_stage(self, own_stage):
        """A broker that gives up on a silent worker after a second."""
        own_stage.conf["broker_transport_options"] = SOON
        return own_stage

    @pytest.mark.proves("P8")
    @pytest.mark.row("crash")
    @pytest.mark.parametrize("baton", [False, True])
    def test_a_task_whose_worker_was_killed_runs_again_after_the_dead_lease(self, own_stage, baton):
        key = own_stage.key()
        first = own_stage.start()
        with distributed_lock(key) as lease:
            handed = {"baton": lease.hand_over()} if baton else {}
        sent = own_stage.send("late", key, hold=True, **handed)
        dead = own_stage.wait_for(key, "start")
        first.kill()
        killed_at = time.time()
        # Before 5.7, kombu gives up on silent workers when one starts, and then not for minutes.
        wait_until(lambda: time.time() - dead["time"] > 1, message="the visibility timeout is over")
        own_stage.start()
        ready_at = time.time()
        if baton:
            own_stage.wait_for_log("does not go on with a lease")
        again = own_stage.wait_for(key, "start", 2)
        assert again["fence"] > dead["fence"] > lease.fence  # It runs under a lock of its own.
        own_stage.open_gate(key)
        assert own_stage.result(sent) == f"did {key}"
        assert own_stage.count(key, "end") == 1
        # Its lease had six seconds at most.
        assert again["time"] - max(killed_at + 6, ready_at) < 3 + slack()

    @pytest.mark.row("once-database")
    def test_a_worker_killed_between_commit_and_release_repeats_nothing_though_redis_is_emptied(
        self, own_stage, make_server, tmp_path, monkeypatch
    ):
        locks, key = make_server(), own_stage.key()
        own_stage.redislock["default"]["LOCATION"] = locks.url
        settings = "tests.celery.project.database_settings"
        monkeypatch.setenv("TESTS_DATABASE", json.dumps(sqlite(tmp_path, "lottery")))
        python(
            *("-m", "django", "migrate", "django_redislock", "--verbosity=0"),
            env=os.environ | {"DJANGO_SETTINGS_MODULE": settings},
        )
        first = own_stage.start(settings=settings)
        sent = own_stage.send("completing", key, hold=True)
        own_stage.wait_for(key, "committed")
        first.kill()
        locks.client().flushall()
        second = own_stage.start(settings=settings)
        own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is duplicate")
        again = own_stage.send("completing", key)
        own_stage.wait_for_log(f"[{again.id}]: lock {key!r} is done")
        assert own_stage.count(key, "start") == 1
        assert second.process.poll() is None

    @pytest.mark.row("crash")
    def test_of_many_that_start_the_lottery_one_draws_although_the_first_to_try_is_killed(
        self, own_stage
    ):
        first = own_stage.start()
        key, winner = own_stage.begin("draw_late")
        others = [own_stage.send("draw_late", key) for _ in range(3)]
        own_stage.start()
        assert [own_stage.result(one)["skipped"] for one in others] == ["busy"] * 3
        first.kill()
        own_stage.start()  # Before 5.7, kombu delivers again only when a worker starts.
        own_stage.wait_for(key, "start", 2)
        own_stage.open_gate(key)  # Not before: the dead one may stand at it for a moment still.
        assert own_stage.result(winner) == f"did {key}"
        assert own_stage.result(own_stage.send("draw_late", key))["skipped"] == "cooling"
        assert own_stage.count(key, "end") == 1

    @sweeps_often
    @pytest.mark.row("visibility-timeout")
    @pytest.mark.row("visibility-timeout-eta")
    @pytest.mark.parametrize(
        ("task", "countdown"), [("late", None), ("late", 8), ("brief", 8)], ids=str
    )
    def test_a_task_that_lasts_or_waits_beyond_the_visibility_timeout_runs_once(
        self, own_stage, task, countdown
    ):
        key = own_stage.key()
        for _ in range(2):
            own_stage.start(ready=False)
        for worker in own_stage.workers:
            worker.wait_ready()
        sent = own_stage.task(task).apply_async((key,), {"hold": True}, countdown=countdown)
        # Twice in a worker by now, with a second delivery of itself.
        own_stage.wait_for_log(f"[{sent.id}] received", 2, timeout=PATIENCE)
        assert own_stage.count(key, "start") == (0 if countdown else 1)
        wait_until_put_off(own_stage, sent.id, key, 1 if countdown else 3)
        own_stage.open_gate(key)
        assert own_stage.result(sent) == f"did {key}"
        own_stage.wait_until_idle()
        assert own_stage.count(key, "start") == 1
        assert own_stage.app.AsyncResult(sent.id).result == f"did {key}"

    @pytest.mark.proves("P8")
    @sweeps_often
    @pytest.mark.row("visibility-timeout-crash")
    def test_the_work_is_not_lost_if_the_first_delivery_dies_after_the_second_came(self, own_stage):
        first = own_stage.start()
        key, sent = own_stage.begin("late")
        own_stage.start()
        wait_until_put_off(own_stage, sent.id, key)
        first.kill()
        own_stage.wait_for(key, "start", 2)
        own_stage.open_gate(key)
        assert own_stage.result(sent) == f"did {key}"
        assert own_stage.count(key, "end") == 1
