"""unique_queued: of the calls with one key, one waits in the broker's queue."""

import inspect
import signal
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import count
from zoneinfo import ZoneInfo

import pytest
from celery import chain
from celery._state import _task_stack
from celery.exceptions import SoftTimeLimitExceeded
from celery.states import REVOKED
from celery.worker import control
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db.transaction import atomic, set_rollback
from kombu.exceptions import ContentDisallowed, EncodeError, OperationalError

from django_redislock import LockMisuse, distributed_lock, task_runs
from django_redislock.celery import SingleInstanceTask
from django_redislock.celery import queued as arguments
from django_redislock.rules import scripts
from tests.celery.project import PATIENCE
from tests.celery.project.app import make_app, schema
from tests.celery.project.tasks import Order
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]


@pytest.fixture
def workers_proxy(own_stage, settings, make_server, make_proxy):
    """Between Redis and a worker of the test's own, which has started; callers pass it by."""
    server = make_server()
    proxy = make_proxy(server)
    own_stage.redislock["default"]["LOCATION"] = proxy.url
    own_stage.start()
    settings.REDISLOCK = {"default": {"LOCATION": server.url}}
    return proxy


def waiting(stage):
    """How many messages wait in the queue."""
    return int(stage.redis.llen("celery"))


def _tells_of_revocations():
    """Whether a worker stores that a call was revoked as soon as it hears of it (Celery 5.7)."""
    return "mark_as_revoked" in inspect.getsource(control)


class TestWithoutWorker:
    """Nothing starts, so everything waits."""

    def test_a_second_call_returns_the_first_one_and_publishes_nothing(self, own_stage):
        key = own_stage.key()
        first = own_stage.send("queued", key)
        assert own_stage.send("queued", key, seconds=3).id == first.id
        assert own_stage.task("queued").delay(key).id == first.id
        assert waiting(own_stage) == 1

    def test_another_key_is_another_call(self, own_stage):
        assert own_stage.send("queued", "a").id != own_stage.send("queued", "b").id
        assert waiting(own_stage) == 2

    def test_two_tasks_with_one_key_do_not_take_each_others_calls(self, own_stage):
        key, newest = own_stage.key(), own_stage.task("queued_newest")
        first = own_stage.send("queued_retrying", key)
        other = newest.delay(key, "its own")
        assert other.id != first.id
        assert own_stage.send("queued_retrying", key).id == first.id
        another = newest.delay(key, "also its own")
        assert another.id != first.id
        assert waiting(own_stage) == 3
        own_stage.start()
        for call in (first, other, another):
            assert own_stage.result(call) == f"did {key}"
        said = [one["what"] for one in own_stage.events(key, "what")]
        assert sorted(said) == ["also its own", "its own"]

    def test_the_second_caller_gets_the_result_of_the_first_call(self, own_stage):
        key = own_stage.key()
        own_stage.send("queued", key)
        second = own_stage.send("queued", key)
        own_stage.start()
        assert own_stage.result(second) == f"did {key}"
        assert own_stage.count(key, "start") == 1

    def test_calls_at_a_commit_become_one_and_a_rollback_publishes_none(
        self, own_stage, transactional_db
    ):
        task, key = own_stage.task("queued"), own_stage.key()
        with atomic():
            set_rollback(True)
            assert task.delay_on_commit(key) is None
        assert waiting(own_stage) == 0
        with atomic():
            task.delay_on_commit(key)
            task.apply_async_on_commit((key,))
            assert waiting(own_stage) == 0
        assert waiting(own_stage) == 1

    @pytest.mark.parametrize(
        "how",
        [
            {"queue": "slow"},
            {"queue": "slow", "priority": 9},
            {"routing_key": "elsewhere"},
            {"exchange": "elsewhere", "routing_key": "celery"},
            {"priority": 9},
            {"priority": 0},
            {"headers": {"tenant": "a"}},
        ],
        ids=str,
    )
    def test_a_call_stands_for_none_that_goes_another_way_or_with_other_headers(
        self, own_stage, how
    ):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.apply_async((key,), **how)
        assert first.published
        second = task.delay(key)
        assert second.published
        assert second.id != first.id
        again = task.apply_async((key,), **how)
        assert again.published == ("headers" not in how), "the last way counts, the first headers"

    def test_the_way_counts_that_routes_choose(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        own_stage.app.conf.task_routes = [
            lambda name, args, kwargs, options, task=None: {"queue": f"of {args[0]} {kwargs}"}
        ]
        first = task.delay(key)
        assert task.delay(key).id == first.id
        assert task.delay(key, seconds=1).id != first.id

    def test_the_priority_counts_that_a_call_inherits(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        own_stage.app.conf.task_inherit_parent_priority = True
        first, parent = task.delay(key), own_stage.task("skipping")
        run = {"id": "parent", "called_directly": False, "delivery_info": {"priority": 9}}
        parent.push_request(**run)
        _task_stack.push(parent)
        try:
            second = task.delay(key)
            assert task.delay(key).id == second.id
        finally:
            _task_stack.pop()
            parent.pop_request()
        assert second.id != first.id
        assert task.delay(key).published

    def test_headers_of_traces_are_no_other_headers(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.delay(key)
        traced = {"traceparent": "00-1-2-00", "sentry-trace": "1", "baggage": "x", "headers": {}}
        assert task.apply_async((key,), headers=traced).id == first.id

    def test_queued_headers_says_which_headers_count(self, own_stage):
        # Not in tasks.py, which an older version reads too, see tests/upgrades.
        options = {"key": "sync", "unique_queued": True, "queued_headers": ["_schema_name"]}
        how = {"base": SingleInstanceTask, "single_instance": options}

        def sync(): ...

        task = own_stage.app.task(name=own_stage.key(), **how)(sync)

        def call(**headers):
            return task.apply_async(headers=headers)

        first = call(_schema_name="a", request="1")
        assert call(_schema_name="a", request="2").id == first.id
        for other in (call(_schema_name="b", request="1"), call(request="1")):
            assert other.published

    def test_the_result_says_whether_its_call_was_published(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        assert task.delay(key).published is True
        assert task.delay(key).published is False
        assert task.apply_async((key,), task_id=own_stage.key()).published is True
        own_stage.app.conf.task_always_eager = True
        assert task.delay(key).published is True

    def test_a_base_class_that_publishes_later_publishes_without_asking(self, own_stage):
        later = []

        class Committing(own_stage.app.Task):
            abstract = True

            def apply_async(self, *args, **options):
                later.append(lambda: super(Committing, self).apply_async(*args, **options))

        def sync(key): ...

        base = type("Both", (SingleInstanceTask, Committing), {"abstract": True})
        how = {"base": base, "single_instance": {"key": "{key}", "unique_queued": True}}
        task, key = own_stage.app.task(name=own_stage.key(), **how)(sync), own_stage.key()
        assert task.delay(key) is task.delay(key) is None
        assert waiting(own_stage) == 0
        for publish in later:
            publish()
        assert waiting(own_stage) == 2

    def test_it_ends_with_queued_ttl(self, own_stage):
        key = own_stage.key()
        first = own_stage.send("queued_briefly", key)
        assert own_stage.send("queued_briefly", key).id == first.id

        def published():
            return own_stage.send("queued_briefly", key).id != first.id

        wait_until(published, PATIENCE, "another call is published")

    @pytest.mark.parametrize("by", ["countdown", "eta"])
    def test_which_counts_from_when_it_is_due(self, own_stage, by):
        key, task = own_stage.key(), own_stage.task("queued_briefly")
        delay = task.single_instance_options.queued_ttl + 60
        when = {by: delay if by == "countdown" else datetime.now(UTC) + timedelta(seconds=delay)}
        first = task.apply_async((key,), **when)
        (calls,) = task_runs.calls([key])
        assert calls.queued == first.id
        assert calls.queued_until is not None
        assert delay < calls.queued_until - calls.server_time <= delay + 6

    @pytest.mark.parametrize("said", ["by the task", "seconds", "when", "when in UTC"])
    def test_it_ends_when_its_message_expires(self, own_stage, said):
        # RabbitMQ drops it then, and tells no worker.
        key, when = own_stage.key(), datetime.now(tz=ZoneInfo("Asia/Kolkata"))
        when += timedelta(seconds=6)
        options = {
            "by the task": {},
            "seconds": {"expires": 6},
            "when": {"expires": when},
            "when in UTC": {"expires": when.astimezone(UTC).replace(tzinfo=None)},
        }
        task = own_stage.task("queued_perishable" if said == "by the task" else "queued")
        first = task.apply_async((key,), **options[said])
        again = {"expires": 1}  # Which it outlives, at first.
        assert task.apply_async((key,), **again).id == first.id

        def published():
            return bool(task.apply_async((key,), **again).id != first.id)

        wait_until(published, PATIENCE, "another call is published", every=0.1)

    @pytest.mark.parametrize("worse", [{"expires": 30}, {"countdown": 3000}], ids=str)
    @pytest.mark.parametrize("absolute", [False, True])
    def test_a_call_stands_for_none_that_runs_earlier_or_expires_later(
        self, own_stage, worse, absolute
    ):
        key, task = own_stage.key(), own_stage.task("queued")
        if absolute:
            ((name, seconds),) = worse.items()
            when = datetime.now(UTC) + timedelta(seconds=seconds)
            worse = {"eta" if name == "countdown" else name: when}
        first = task.apply_async((key,), **worse)
        assert task.apply_async((key,), **worse).id == first.id
        second = task.delay(key)
        assert second.id != first.id
        for options in ({}, worse):
            assert task.apply_async((key,), **options).id == second.id
        assert waiting(own_stage) == 2

    def test_a_call_that_cannot_be_serialized_leaves_nothing(self, own_stage):
        key = own_stage.key()
        with pytest.raises(EncodeError):
            own_stage.send("queued", key, what=object())
        own_stage.send("queued", key)
        assert waiting(own_stage) == 1

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SoftTimeLimitExceeded])
    def test_nor_does_one_that_is_interrupted_before_it_is_published(
        self, own_stage, monkeypatch, interrupt
    ):
        announce = task_runs.announce

        def announce_and_be_interrupted(*args, **how):
            announce(*args, **how)
            raise interrupt

        key = own_stage.key()
        with monkeypatch.context() as patch:
            patch.setattr(task_runs, "announce", announce_and_be_interrupted)
            with pytest.raises(interrupt):
                own_stage.send("queued", key)
        assert waiting(own_stage) == 0
        own_stage.send("queued", key)
        assert waiting(own_stage) == 1

    @pytest.mark.slow
    def test_nor_does_one_that_no_broker_takes(self, own_stage):
        key = own_stage.key()
        nowhere = "redis://127.0.0.1:1/0"
        with make_app({**own_stage.conf, "broker_url": nowhere}) as app:
            with pytest.raises(OperationalError):
                app.tasks[own_stage.task("queued").name].apply_async((key,), retry=False)
            app.pool.force_close_all()
        own_stage.send("queued", key)
        assert waiting(own_stage) == 1

    def test_wrong_arguments_are_refused_and_leave_nothing(self, own_stage):
        with pytest.raises(TypeError):
            own_stage.task("queued").delay()
        assert waiting(own_stage) == 0

    def test_a_call_that_something_depends_on_is_published(self, own_stage):
        key = own_stage.key()
        queued, append = own_stage.task("queued"), own_stage.task("append")
        queued.delay(key)
        chain(queued.s(key), append.s(1))()
        queued.apply_async((key,), link=append.s(1))
        assert waiting(own_stage) == 3

    @pytest.mark.parametrize("by_task", [False, True])
    def test_a_call_whose_result_is_kept_and_one_whose_is_not_stand_for_none_of_the_other_kind(
        self, own_stage, by_task
    ):
        key, task = own_stage.key(), own_stage.task("queued_quiet" if by_task else "queued")
        other = task.apply_async((key,), ignore_result=not by_task)
        first = task.delay(key)
        assert first.id != other.id
        assert task.apply_async((key,), ignore_result=not by_task).id != first.id
        assert task.apply_async((key,), ignore_result=by_task).id == first.id
        assert waiting(own_stage) == 3

    def test_send_task_is_no_way_to_break_it(self, own_stage):
        key = own_stage.key()
        own_stage.app.send_task(own_stage.task("queued").name, (key,))
        own_stage.send("queued", key)
        assert waiting(own_stage) == 2

    def test_without_redis_it_is_published(self, own_stage, settings):
        settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
        key = own_stage.key()
        own_stage.send("queued", key)
        own_stage.send("queued", key)
        assert waiting(own_stage) == 2


@pytest.mark.slow
class TestWithWorker:
    """What waits no longer may be called again."""

    def test_a_call_that_has_started_waits_no_longer(self, own_stage):
        own_stage.start()
        key = own_stage.key()
        first = own_stage.send("queued", key, hold=True)
        own_stage.wait_for(key, "start")
        second = own_stage.send("queued", key)
        assert second.id != first.id
        assert own_stage.send("queued", key).id == second.id
        own_stage.open_gate(key)
        assert own_stage.result(first) == own_stage.result(second) == f"did {key}"
        assert own_stage.count(key, "start") == 2

    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_a_call_that_never_starts_is_forgotten(self, own_stage, how):
        own_stage.start()
        key, queued = own_stage.key(), own_stage.task("queued")
        later = {}
        if how == "expired":
            first = queued.apply_async((key,), expires=-1)
        else:
            later = {"eta": datetime.now(UTC) + timedelta(seconds=4)}
            first = queued.apply_async((key,), **later)
            own_stage.wait_for_log(f"[{first.id}] received")
            first.revoke()

        def publish_another():
            sent = queued.apply_async((key,), **later)  # The first one stands for no earlier one.
            return None if sent.id == first.id else sent

        second = wait_until(publish_another, PATIENCE, "another call is published", every=0.02)
        assert own_stage.result(second) == f"did {key}"
        own_stage.wait_for_log("Discarding revoked task")

    @pytest.mark.parametrize("waits", ["in the queue", "in a worker", "deferred"])
    @pytest.mark.parametrize("through", ["result", "control"])
    def test_a_call_made_after_one_was_revoked_runs(self, own_stage, waits, through):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        later = {"countdown": 4} if waits == "in a worker" else {}
        own_stage.start(*(["--queues", "another"] if waits == "in the queue" else []))
        lock = distributed_lock(key) if waits == "deferred" else nullcontext()
        with lock:
            first = task.apply_async((key, "first"), **later)
            if waits == "in a worker":
                own_stage.wait_for_log(f"[{first.id}] received")
            elif waits == "deferred":
                own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
            assert task.apply_async((key, "merged"), **later).id == first.id
            if through == "result":
                first.revoke()
            else:
                if not _tells_of_revocations():
                    pytest.skip("this Celery says it when the call is due")
                own_stage.app.control.revoke(first.id)
                wait_until(lambda: first.state == REVOKED, PATIENCE, "it is known", every=0.02)
            second = task.apply_async((key, "second"), **later)
            assert second.published
            assert task.apply_async((key, "third"), **later).id == second.id
            own_stage.wait_for_log(f"Tasks flagged as revoked: {first.id}")
        if waits == "in the queue":
            own_stage.start()  # It was not there to hear of the revocation.
        assert own_stage.result(second) == f"did {key}"
        own_stage.wait_until_idle()
        said = [one["what"] for one in own_stage.events(key, "what")]
        assert said[-1] == "third"
        assert len(said) == (2 if waits == "in the queue" else 1)

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's.
    def test_a_call_whose_end_the_server_was_not_told_stands_for_no_others(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.delay(key)
        task.backend.mark_as_failure(first.id, ValueError("as when only Redis is down"))
        second = task.delay(key)
        assert second.published
        assert task.delay(key).id == second.id

    def test_if_no_result_can_be_read_an_announced_call_counts_as_waiting(
        self, own_stage, monkeypatch, caplog
    ):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.delay(key)

        def refuse(*args):
            raise ConnectionError("refused")

        monkeypatch.setattr(task.backend, "get_state", refuse)
        assert task.delay(key).id == first.id
        assert "still waits in the queue is not known: refused" in caplog.text

    @pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
    def test_after_a_purge_calls_are_published_once_the_announced_ones_are_forgotten(
        self, request, own_stage, broker
    ):
        if broker == "rabbitmq":
            url = request.getfixturevalue("rabbit").url
            ours = {"broker_url": url, "task_default_queue": own_stage.key()}
            own_stage.conf |= ours
            own_stage.app.conf.update(ours)
        key = own_stage.key()
        lost = own_stage.send("queued", key)
        assert own_stage.app.control.purge() == 1
        assert own_stage.send("queued", key).id == lost.id
        call_command("locks", "clean", "--queued", "--task", own_stage.task("queued").name)
        call = own_stage.send("queued", key)
        assert call.published
        own_stage.start()
        assert own_stage.result(call) == f"did {key}"

    def test_a_run_that_was_put_off_is_published_again(self, own_stage):
        own_stage.start()
        key = own_stage.key()
        with distributed_lock(key):
            sent = own_stage.send("queued_retrying", key)
            own_stage.wait_for_log(f"[{sent.id}]: lock {key!r} is busy", 2)
        assert own_stage.result(sent) == f"did {key}"

    def test_a_call_is_forgotten_although_its_arguments_look_different_in_the_worker(
        self, own_stage
    ):
        own_stage.start()
        key, task = own_stage.key(), own_stage.task("queued_parts")
        for times in (1, 2):
            assert own_stage.result(task.delay(key, (1, 2))) == f"did {key}"
            assert own_stage.count(key, "start") == times

    @pytest.mark.parametrize("place", ["last in a chain", "callback", "of a chosen id"])
    def test_a_call_that_is_looked_for_under_its_own_id_is_published(self, own_stage, place):
        own_stage.start()
        key, append = own_stage.key(), own_stage.task("append")
        own_stage.task("queued").apply_async((key,), countdown=60)
        queued = own_stage.task("queued").si(key)
        if place == "last in a chain":
            sought = chain(append.si(1, 2), queued)()
        else:
            queued.set(task_id=own_stage.key())
            sought = own_stage.app.AsyncResult(queued.options["task_id"])
            if place == "callback":
                append.apply_async((1, 2), link=queued)
            else:
                queued.apply_async()
        assert own_stage.result(sought) == f"did {key}"

    def test_a_call_whose_announcement_was_made_but_not_answered_is_forgotten_too(
        self, own_stage, settings, make_server, make_proxy
    ):
        server = make_server()
        own_stage.redislock["default"]["LOCATION"] = server.url
        own_stage.start()
        proxy = make_proxy(server)
        settings.REDISLOCK = {"default": {"LOCATION": proxy.url}}
        proxy.rule_for_script(scripts.ANNOUNCE.sha, "cut_after", times=2)
        key = own_stage.key()
        assert own_stage.result(own_stage.send("queued", key)) == f"did {key}"
        assert own_stage.result(own_stage.send("queued", key)) == f"did {key}"
        assert own_stage.count(key, "start") == 2

    @pytest.mark.parametrize("task", ["queued", "queued_newest"])
    @pytest.mark.parametrize("ends", ["well", "badly"])
    def test_a_call_of_whose_start_the_server_was_not_told_is_forgotten_at_its_end(
        self, own_stage, workers_proxy, task, ends
    ):
        key, call = own_stage.key(), own_stage.task(task)
        args = (key, "what") if task == "queued_newest" else (key,)
        rule = workers_proxy.rule_for_script(scripts.RETRACT.sha, "cut_before", times=None)
        fails = "crash" if task == "queued_newest" else "fail"
        first = call.delay(*args, hold=True, **{fails: ends == "badly"})
        own_stage.wait_for(key, "start")
        assert call.delay(*args).id == first.id, "it is dropped"
        assert rule.hits
        workers_proxy.clear_rules()
        own_stage.open_gate(key)
        first.get(timeout=PATIENCE, propagate=False)

        def another_is_published():
            return bool(call.delay(*args).id != first.id)

        wait_until(another_is_published, PATIENCE, "another call is published", every=0.02)

    def test_a_call_that_its_ending_process_takes_along_is_forgotten(self, own_stage):
        own_stage.start(pool="prefork")
        key = own_stage.key()
        first = own_stage.send("queued_exiting", key)

        def another_is_published():
            return own_stage.send("queued_exiting", key).id != first.id

        wait_until(another_is_published, PATIENCE, "another call is published", every=0.02)

    def test_but_not_one_that_is_delivered_again_after_it(self, own_stage):
        worker = own_stage.start()
        key = own_stage.key()
        first = own_stage.send("queued_exiting_late", key)
        worker.wait()
        assert own_stage.send("queued_exiting_late", key).id == first.id


class TestTenants:
    """Calls whose messages carry the schema of their caller, as with tenant-schemas-celery."""

    @pytest.fixture
    def app(self, own_stage):
        with make_app({**own_stage.conf, "of_tenants": True}) as app:
            yield app
            app.pool.force_close_all()

    @pytest.mark.parametrize("name", ["queued_of_tenant", "queued_in_schema"])
    @pytest.mark.parametrize("said", ["by the app", "by the caller"])
    def test_each_tenants_call_runs_in_its_schema_with_its_arguments(
        self, own_stage, app, name, said
    ):
        key, task = own_stage.key(), app.tasks[own_stage.task(name).name]

        def call(tenant, what):
            if said == "by the caller":
                return task.apply_async((key, what), headers={"_schema_name": tenant})
            token = schema.set(tenant)
            try:
                return task.delay(key, what)
            finally:
                schema.reset(token)

        first, other = call("a", "first"), call("b", "other")
        assert other.published
        assert call("a", "second").id == first.id
        own_stage.start(of_tenants=True)
        assert own_stage.result(first) == own_stage.result(other) == f"did {key}"
        ran = {(one["schema"], one["what"]) for one in own_stage.events(key, "what")}
        assert ran == {("a", "second"), ("b", "other")}


class TestNewest:
    """With "newest", the call that waits runs with what the last one says."""

    @staticmethod
    def said(stage, key):
        """With what the bodies ran."""
        return [one["what"] for one in stage.events(key, "what")]

    def call(self, stage, key, what, **options):
        """Call the task."""
        how = options.pop("how", {})
        return stage.task("queued_newest").apply_async((key, what), how, **options)

    @staticmethod
    def kept(stage):
        """For which calls the server keeps arguments."""
        keys = stage.redis.scan_iter("*:runs")
        fields = [field for key in keys for field in stage.redis.hkeys(key)]
        return [field for field in fields if field.startswith(b"last:")]

    def test_the_last_call_wins_and_says_what_is_shown(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        assert self.call(own_stage, key, "second").id == first.id
        hidden = {"argsrepr": "(hidden)", "kwargsrepr": "{}"}
        assert self.call(own_stage, key, "third", how={"fail": True}, **hidden).id == first.id
        assert waiting(own_stage) == 1
        assert self.kept(own_stage) == [f"last:{first.id}".encode()]
        own_stage.start(pool="prefork")
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert self.said(own_stage, key) == ["third", "third"], "its retry has them too"
        assert self.kept(own_stage), "for a second delivery of the first try"
        for ran in own_stage.events(key, "what"):
            assert ran["args"] == [key, "third"]
            assert ran["kwargs"] == {"fail": True}
            assert ran["shown"] == ["(hidden)", "{}"]

    def test_also_while_it_is_put_off_and_no_longer_when_its_body_has_started(self, own_stage):
        own_stage.start()
        key = own_stage.key()
        with distributed_lock(key):
            first = self.call(own_stage, key, "first")
            own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 2)
            assert self.call(own_stage, key, "second", how={"hold": True}).id == first.id
            own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 4)
        own_stage.wait_for(key, "start")
        third = self.call(own_stage, key, "third")
        assert third.id != first.id
        own_stage.open_gate(key)
        assert own_stage.result(first) == own_stage.result(third) == f"did {key}"
        assert self.said(own_stage, key) == ["second", "third"]

    @pytest.mark.slow
    def test_also_if_its_worker_is_killed_and_it_is_delivered_again(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        self.call(own_stage, key, "second", how={"hold": True})
        worker = own_stage.start()
        own_stage.wait_for(key, "start")
        worker.kill()
        own_stage.redeliver(first.id)
        own_stage.open_gate(key)
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"
        assert self.said(own_stage, key) == ["second", "second"]

    @pytest.mark.slow
    @pytest.mark.parametrize("task", ["queued_newest", "queued_newest_waiting"])
    def test_also_if_a_cold_shutdown_ends_its_body_or_its_wait_for_the_lock(self, own_stage, task):
        key, call = own_stage.key(), own_stage.task(task)
        waits = task == "queued_newest_waiting"
        how = {} if waits else {"hold": True}
        first = call.delay(key, "first", **how)
        assert call.delay(key, "second", **how).id == first.id
        with distributed_lock(key) if waits else nullcontext():
            worker = own_stage.start(pool="prefork")
            if waits:
                own_stage.wait_for_waiter(key)
            else:
                own_stage.wait_for(key, "start")
            worker.signal(signal.SIGQUIT)
            worker.wait()
        own_stage.open_gate(key)
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert self.said(own_stage, key) == ["second"] * (1 if waits else 2)
        assert not self.kept(own_stage)

    def test_also_if_it_has_the_broker_deliver_it_again(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        self.call(own_stage, key, "second", how={"reject": True})
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert self.said(own_stage, key) == ["second", "second"]
        assert not self.kept(own_stage)

    def test_also_if_it_is_delivered_twice_and_the_first_run_fails(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        how = {"hold": True, "crash": True}
        assert self.call(own_stage, key, "second", how=how).id == first.id
        own_stage.start()  # It does one thing after another.
        own_stage.wait_for(key, "start")
        own_stage.redeliver(first.id)
        own_stage.open_gate(key, 2)
        own_stage.wait_for(key, "what", 2)
        own_stage.wait_until_idle()
        assert self.said(own_stage, key) == ["second", "second"]
        assert not self.kept(own_stage)

    def test_also_if_it_fails_before_its_run_and_is_delivered_twice(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest_refusing")
        first = task.delay(key, "first")
        assert task.delay(key, "second").id == first.id
        own_stage.start()
        with pytest.raises(ValueError, match="as asked"):
            own_stage.result(first)
        own_stage.wait_until_idle()
        assert self.kept(own_stage) == [f"last:{first.id}".encode()]
        assert task.delay(key, "third").id != first.id

    @pytest.mark.parametrize("task", ["queued_newest_raising", "queued_newest_pleading"])
    def test_also_if_celery_retries_it_since_the_lock_was_busy(self, own_stage, task):
        key, call = own_stage.key(), own_stage.task(task)
        first = call.delay(key, "first")
        assert call.delay(key, "second").id == first.id
        with distributed_lock(key):
            own_stage.start()
            own_stage.wait_for_log(f"[{first.id}] retry: Retry in", 2)
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert self.said(own_stage, key) == ["second"]
        assert bool(self.kept(own_stage)) == bool(call.acks_late)

    @pytest.mark.slow
    def test_also_if_celery_retries_it_since_redis_did_not_answer(self, own_stage, workers_proxy):
        workers_proxy.refuse()
        key, call = own_stage.key(), own_stage.task("queued_newest_raising")
        first = call.delay(key, "first")
        own_stage.wait_for_log(f"[{first.id}] retry: Retry in")
        assert call.delay(key, "second").id == first.id
        workers_proxy.heal()
        assert own_stage.result(first) == f"did {key}"
        assert self.said(own_stage, key) == ["second"]

    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_what_was_kept_for_a_call_that_never_starts_goes_with_it(self, own_stage, how):
        own_stage.start()
        key = own_stage.key()
        terms = [{}, {}]
        if how == "expired":
            terms = [{"expires": 8}, {"expires": 1}]  # Which it outlives.
        with distributed_lock(key):
            first = self.call(own_stage, key, "first", **terms[0])
            own_stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
            assert self.call(own_stage, key, "second", **terms[1]).id == first.id
            if how == "revoked":
                first.revoke()
            wait_until(lambda: not self.kept(own_stage), PATIENCE, "it is forgotten", every=0.05)
        third = self.call(own_stage, key, "third")
        assert own_stage.result(third) == f"did {key}"
        assert self.said(own_stage, key) == ["third"]

    def test_if_the_server_loses_them_it_has_its_own(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        assert self.call(own_stage, key, "second").id == first.id
        for runs in own_stage.redis.scan_iter("*:runs"):
            own_stage.redis.delete(runs)
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"
        assert self.said(own_stage, key) == ["first"]

    def test_a_call_that_is_too_long_to_be_kept_is_published(self, own_stage):
        key = own_stage.key()
        first = self.call(own_stage, key, "first")
        second = self.call(own_stage, key, "x" * 65_536)
        assert second.id != first.id
        assert self.call(own_stage, key, "third").id == second.id
        assert waiting(own_stage) == 2

    def test_a_call_that_could_not_be_made_changes_nothing(self, own_stage):
        key = own_stage.key()
        self.call(own_stage, key, "first")
        with pytest.raises(EncodeError):
            self.call(own_stage, key, "second", how={"seconds": object()})
        with pytest.raises(TypeError):
            own_stage.task("queued_newest").delay(key)
        assert not self.kept(own_stage)

    def test_with_true_the_first_call_wins(self, own_stage):
        key = own_stage.key()
        first = own_stage.send("queued", key)
        assert own_stage.send("queued", key, fail=True).id == first.id
        assert not self.kept(own_stage)
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"

    def test_a_call_with_another_limit_does_not_give_a_run_its_arguments(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest_limited")
        first = task.delay(key, "a")
        others = [task.delay(key, "b"), task.delay(key, "a", number=2)]
        assert first.id not in {other.id for other in others}
        assert task.delay(key, "a", more="later").id == first.id
        own_stage.start()
        for call in (first, *others):
            assert own_stage.result(call) == f"did {key}"
        for ran in own_stage.events(key, "what"):
            assert ran["locks"] == [key, f"{key}:{ran['what'][0]}"]
        said = self.said(own_stage, key)
        assert sorted(said) == [["a", 1, "later"], ["a", 2, ""], ["b", 1, ""]]

    @pytest.mark.parametrize("name", ["queued_fickle", "queued_fickle_limited"])
    def test_arguments_that_name_another_lock_in_the_worker_are_not_run_with(self, own_stage, name):
        key, task = own_stage.key(), own_stage.task(name)
        first = task.delay(key, key)
        assert task.delay(key, Order(key)).id == first.id
        own_stage.start()
        with pytest.raises(LockMisuse):
            own_stage.result(first)
        assert own_stage.count(key, "start") == 0
        assert own_stage.result(task.delay(key, key)) == f"did {key}"

    def test_they_are_written_and_read_as_a_message_is(self, own_stage):
        task = own_stage.task("queued_newest")
        found = arguments.unpacked(own_stage.app, arguments.packed(task, ("k", "w"), {}, {}))
        assert found == (["k", "w"], {}, {"argsrepr": "('k', 'w')", "kwargsrepr": "{}"})
        pickled = arguments.packed(task, ("k", "w"), {}, {"serializer": "pickle"})
        with pytest.raises(ContentDisallowed):
            arguments.unpacked(own_stage.app, pickled)

    def test_a_model_of_pydantic_is_written_as_one_is(self, own_stage):
        pydantic = pytest.importorskip("pydantic")
        Article = pydantic.create_model("Article", pk=int)  # noqa: N806

        def price(article): ...

        price.__annotations__["article"] = Article
        how = {"base": SingleInstanceTask, "single_instance": {"unique_queued": "newest"}}
        task = own_stage.app.task(pydantic=True, name=own_stage.key(), **how)(price)
        if not getattr(task, "_dump_pydantic_arguments", None):
            pytest.skip("this Celery does not publish models")
        first = task.delay(Article(pk=1))
        assert task.delay(Article(pk=2)).id == first.id
        (runs,) = own_stage.redis.scan_iter("*:runs")
        kept = own_stage.redis.hget(runs, f"last:{first.id}").partition(b"|")[2]
        assert arguments.unpacked(own_stage.app, kept).args == [{"pk": 2}]

    def test_on_a_quorum_it_is_refused(self, own_stage, settings):
        settings.REDISLOCK = {
            "default": {
                "BACKEND": "django_redislock.backends.QuorumBackend",
                "LOCATION": [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)],
            }
        }
        with pytest.raises(ImproperlyConfigured, match="unique_queued needs records of runs"):
            self.call(own_stage, own_stage.key(), "first")


@pytest.mark.usefixtures("worker")
class TestPutOff:
    """A run that goes back to the broker still waits in the queue, and stands for later calls."""

    def test_of_many_calls_during_one_run_one_more_runs(self, stage):
        key = stage.key()
        first = stage.send("queued_retrying", key, hold=True)
        stage.wait_for(key, "start")
        second = stage.send("queued_retrying", key)
        for times in range(1, 5):
            stage.wait_for_log(f"[{second.id}]: lock {key!r} is busy", times)
            assert {stage.send("queued_retrying", key).id for _ in range(2)} == {second.id}
        stage.open_gate(key)
        assert stage.result(first) == stage.result(second) == f"did {key}"
        stage.wait_until_idle()
        assert stage.count(key, "start") == 2

    def test_also_if_it_is_put_off_for_longer_than_queued_ttl(self, stage):
        key = stage.key()
        queued_ttl = stage.task("queued_retrying_briefly").single_instance_options.queued_ttl
        with distributed_lock(key):
            first = stage.send("queued_retrying_briefly", key)
            times, over = count(1), time.monotonic() + queued_ttl
            while time.monotonic() < over:
                stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", next(times))
            assert stage.send("queued_retrying_briefly", key).id == first.id
        assert stage.result(first) == f"did {key}"

    def test_also_if_it_waits_in_a_worker(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_waiting", key)
            stage.wait_for_waiter(key)
            assert stage.send("queued_waiting", key).id == first.id
        assert stage.result(first) == f"did {key}"

    def test_also_when_its_wait_in_a_worker_is_over(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_impatient", key)
            stage.wait_for_log(f"Deferred {stage.task('queued_impatient').name}[{first.id}]", 2)
            assert stage.send("queued_impatient", key).id == first.id
        assert stage.result(first) == f"did {key}"

    @pytest.mark.slow
    def test_also_while_redis_does_not_answer_it(self, own_stage, workers_proxy):
        workers_proxy.refuse()
        key = own_stage.key()
        first = own_stage.send("queued_hopeful", key)
        own_stage.wait_for_log(f"[{first.id}]: Lock {key!r} is unavailable")
        assert own_stage.send("queued_hopeful", key).id == first.id
        workers_proxy.heal()
        assert own_stage.result(first) == f"did {key}"
        assert own_stage.result(own_stage.send("queued_hopeful", key)) == f"did {key}"
        assert own_stage.count(key, "start") == 2

    def test_it_stands_for_others_until_its_body_starts(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_retrying", key, hold=True)
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
        stage.wait_for(key, "start")
        second = stage.send("queued_retrying", key)
        assert second.id != first.id
        stage.open_gate(key)
        assert stage.result(first) == stage.result(second) == f"did {key}"

    @pytest.mark.parametrize("task", ["queued", "queued_raising", "queued_hurried"])
    def test_or_until_it_ends_without_a_body(self, stage, task):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send(task, key)
            first.get(timeout=PATIENCE, propagate=False)
        second = stage.send(task, key)
        assert second.id != first.id
        assert stage.result(second) == f"did {key}"

    def test_or_until_it_is_known_that_it_will_be_skipped(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_leaving", key)
            stage.wait_for(key, "conflict")
        # The lock is free, and the first call has not ended.
        second = stage.send("queued_leaving", key)
        assert second.id != first.id
        stage.open_gate(key)
        assert stage.result(first) == "skipped"
        assert stage.result(second) == f"did {key}"

    @pytest.mark.parametrize(("task", "of"), [("queued_order", Order), ("queued_refusing", str)])
    def test_or_until_it_fails_before_its_run(self, stage, task, of):
        key = stage.key()
        first = stage.task(task).delay(of(key))
        first.get(timeout=PATIENCE, propagate=False)

        def another_is_published():
            return bool(stage.task(task).delay(of(key)).id != first.id)

        wait_until(another_is_published, PATIENCE, "another call is published", every=0.02)

    @pytest.mark.parametrize("task", ["queued_ignoring", "queued_answering", "queued_rejecting"])
    def test_or_until_it_ends_before_its_run(self, stage, task):
        key = stage.key()
        first = stage.send(task, key)

        def another_is_published():
            return stage.send(task, key).id != first.id

        wait_until(another_is_published, PATIENCE, "another call is published", every=0.02)

    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_or_until_it_is_given_up_in_the_queue(self, stage, how):
        key, task = stage.key(), stage.task("queued_retrying")
        with distributed_lock(key):
            first = task.apply_async((key,), expires=8 if how == "expired" else None)
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 2)
            if how == "revoked":
                first.revoke()
            stage.wait_for_log(f"Discarding revoked task: {task.name}[{first.id}]")

            def another_is_published():
                return stage.send("queued_retrying", key).id != first.id

            wait_until(another_is_published, PATIENCE, "another call is published", every=0.02)

    def test_a_run_whose_announcement_was_taken_over_is_not_lost(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_retrying", key)
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
            task_runs.retract(key, first.id, using="default")  # As when queued_ttl is over.
            second = stage.send("queued_retrying", key)
            assert second.id != first.id
            for one in (first, second):
                stage.wait_for_log(f"[{one.id}]: lock {key!r} is busy", 3)
            assert stage.send("queued_retrying", key).id == second.id
        assert stage.result(first) == stage.result(second) == f"did {key}"
        assert stage.count(key, "start") == 2

    def test_a_copy_of_a_run_that_has_started_stands_for_nobody(self, stage):
        key = stage.key()
        first = stage.send("queued_retrying", key, hold=True)
        stage.wait_for(key, "start")
        # As when Redis did not answer its retraction.
        task_runs.announce(key, first.id, 60, using="default")
        stage.redeliver(first.id)
        stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 2)
        second = stage.send("queued_retrying", key)
        assert second.id != first.id
        stage.open_gate(key, 2)
        assert stage.result(second) == f"did {key}"
        stage.wait_until_idle()
        assert stage.count(key, "start") == 2

    def test_conflict_deadline_counts_from_the_last_call_that_it_stands_for(self, stage):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send("queued_hurried", key)
            begin = time.monotonic()

            def twice_the_deadline_is_over():
                assert stage.send("queued_hurried", key).id == first.id
                return time.monotonic() - begin > 2 * 6

            wait_until(twice_the_deadline_is_over, every=0.1)
        assert stage.result(first) == f"did {key}"
