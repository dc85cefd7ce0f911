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
from django.core.management import call_command
from django.db.transaction import atomic, set_rollback
from kombu.exceptions import ContentDisallowed, EncodeError

from django_redislock import LockMisuse, distributed_lock, task_runs
from django_redislock.celery import SingleInstanceTask
from django_redislock.celery import queued as arguments
from django_redislock.rules import scripts
from tests.celery.project import PATIENCE
from tests.celery.project.app import make_app, schema
from tests.celery.project.tasks import Order
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]

LATER = {"countdown": 2}  # So that a worker does not start a call before the next one is made.


def waiting(stage):
    """How many messages wait in the queue."""
    return int(stage.redis.llen("celery"))


def said(stage, key):
    """With what the bodies ran."""
    return [one["what"] for one in stage.events(key, "what")]


def kept(stage, call):
    """Whether the server keeps arguments for this call."""
    return any(stage.redis.hexists(runs, f"last:{call.id}") for runs in runs_of(stage))


def runs_of(stage):
    return list(stage.redis.scan_iter("*:runs"))


def next_published(task, *args, **options):
    """Call until a call is published, since none stands for it any more."""

    def publish():
        call = task.apply_async(args, **options)
        return call if call.published else None

    return wait_until(publish, PATIENCE, "another call is published", every=0.02)


def new_task(stage, base=SingleInstanceTask, **options):
    """A task that tasks.py does not have: an older version reads that too, see tests/upgrades."""

    def sync(): ...

    options = {"unique_queued": True, **options}
    return stage.app.task(name=stage.key(), base=base, single_instance=options)(sync)


@pytest.fixture
def workers_proxy(own_stage, settings, make_server, make_proxy):
    """Between Redis and a worker of the test's own, which has started; callers pass it by."""
    server = make_server()
    proxy = make_proxy(server)
    own_stage.redislock["default"]["LOCATION"] = proxy.url
    own_stage.start()
    settings.REDISLOCK = {"default": {"LOCATION": server.url}}
    return proxy


class TestWithoutWorker:
    """Nothing starts, so everything waits."""

    def test_a_second_call_returns_the_first_one_and_publishes_nothing(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.delay(key)
        again = [task.delay(key), task.delay(key, fail=True)]
        assert [one.published for one in (first, *again)] == [True, False, False]
        assert {one.id for one in again} == {first.id}
        assert task.delay(own_stage.key()).published
        assert task.apply_async((key,), task_id=own_stage.key()).published
        assert waiting(own_stage) == 3
        own_stage.start()  # The callers get the result of the first call, with its arguments.
        assert own_stage.result(again[1]) == f"did {key}"
        own_stage.app.conf.task_always_eager = True
        assert task.delay(key).published

    def test_two_tasks_with_one_key_do_not_take_each_others_calls(self, own_stage):
        key, newest = own_stage.key(), own_stage.task("queued_newest")
        first = own_stage.send("queued_retrying", key)
        other = newest.delay(key, "its own")
        assert own_stage.send("queued_retrying", key).id == first.id
        another = newest.delay(key, "also its own")
        assert len({first.id, other.id, another.id}) == waiting(own_stage) == 3
        own_stage.start()
        for call in (first, other, another):
            assert own_stage.result(call) == f"did {key}"
        assert sorted(said(own_stage, key)) == ["also its own", "its own"]

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
        assert task.apply_async((key,), **how).published
        assert task.delay(key).published
        again = task.apply_async((key,), **how)
        assert again.published == ("headers" not in how), "the last way counts, the first headers"

    def test_the_way_counts_that_routes_choose_and_the_priority_that_a_call_inherits(
        self, own_stage
    ):
        key, other, task = own_stage.key(), own_stage.key(), own_stage.task("queued")
        own_stage.app.conf.task_routes = [
            lambda name, args, kwargs, options, task=None: {"queue": f"of {args[0]} {kwargs}"}
        ]
        calls = [task.delay(key), task.delay(key), task.delay(key, seconds=1)]
        assert [one.published for one in calls] == [True, False, True]

        own_stage.app.conf.task_inherit_parent_priority = True
        first, parent = task.delay(other), own_stage.task("skipping")
        run = {"id": "parent", "called_directly": False, "delivery_info": {"priority": 9}}
        parent.push_request(**run)
        _task_stack.push(parent)
        try:
            inherits = [task.delay(other), task.delay(other)]
        finally:
            _task_stack.pop()
            parent.pop_request()
        calls = [first, *inherits, task.delay(other)]
        assert [one.published for one in calls] == [True, True, False, True]

    def test_headers_of_traces_are_no_other_headers_and_queued_headers_says_which_count(
        self, own_stage
    ):
        key, task = own_stage.key(), own_stage.task("queued")
        task.delay(key)
        traced = {"traceparent": "00-1-2-00", "sentry-trace": "1", "baggage": "x", "headers": {}}
        assert not task.apply_async((key,), headers=traced).published

        task = new_task(own_stage, key="sync", queued_headers=["_schema_name"])
        headers = [
            {"_schema_name": "a", "request": "1"},
            {"_schema_name": "a", "request": "2"},
            {"_schema_name": "b", "request": "1"},
            {"request": "1"},
        ]
        published = [task.apply_async(headers=one).published for one in headers]
        assert published == [True, False, True, True]

    def test_a_base_class_that_publishes_later_publishes_without_asking(self, own_stage):
        later = []

        class Committing(own_stage.app.Task):
            abstract = True

            def apply_async(self, *args, **options):
                later.append(lambda: super(Committing, self).apply_async(*args, **options))

        base = type("Both", (SingleInstanceTask, Committing), {"abstract": True})
        task = new_task(own_stage, base)
        assert task.delay() is task.delay() is None
        assert waiting(own_stage) == 0
        for publish in later:
            publish()
        assert waiting(own_stage) == 2

    def test_it_ends_with_queued_ttl(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_briefly")
        first = task.delay(key)
        assert task.delay(key).id == first.id
        next_published(task, key)

    @pytest.mark.parametrize("how", ["of the task", "countdown", "eta", "seconds", "when", "UTC"])
    def test_which_counts_from_when_it_is_due_or_when_its_message_expires(self, own_stage, how):
        """RabbitMQ drops a message that has expired, and tells no worker."""
        due, lives = timedelta(seconds=60), timedelta(seconds=6)
        now = datetime.now(tz=ZoneInfo("Asia/Kolkata"))
        options = {
            "of the task": {},
            "countdown": {"countdown": due.seconds},
            "eta": {"eta": now + due},
            "seconds": {"expires": lives.seconds},
            "when": {"expires": now + lives},
            "UTC": {"expires": (now + lives).astimezone(UTC).replace(tzinfo=None)},
        }[how]
        names = {"of the task": "queued_perishable", "countdown": "queued_briefly"}
        name = names.get(how) or ("queued_briefly" if how == "eta" else "queued")
        key, task = own_stage.key(), own_stage.task(name)
        first = task.apply_async((key,), **options)
        if name != "queued_briefly":
            # One that expires earlier changes nothing.
            assert task.apply_async((key,), expires=1).id == first.id
        (calls,) = task_runs.calls([key])
        assert calls.queued == first.id
        longest = 6 + (60 if name == "queued_briefly" else 0)
        assert longest - 6 < calls.queued_until - calls.server_time <= longest

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
        calls = [task.apply_async((key,), **how) for how in (worse, worse, {}, {}, worse)]
        assert [one.published for one in calls] == [True, False, True, False, False]
        assert {one.id for one in calls[3:]} == {calls[2].id}

    def test_a_call_that_cannot_be_made_leaves_nothing(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued")
        with pytest.raises(EncodeError):
            task.delay(key, what=object())
        with pytest.raises(TypeError):
            task.delay()
        assert waiting(own_stage) == 0
        assert task.delay(key).published

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
        assert own_stage.send("queued", key).published

    def test_a_call_is_published_that_something_depends_on_or_that_does_not_ask_or_finds_no_redis(
        self, own_stage, settings
    ):
        key = own_stage.key()
        queued, append = own_stage.task("queued"), own_stage.task("append")
        queued.delay(key)
        chain(queued.s(key), append.s(1))()
        queued.apply_async((key,), link=append.s(1))
        own_stage.app.send_task(queued.name, (key,))
        assert not queued.delay(key).published
        settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
        assert queued.delay(key).published
        assert waiting(own_stage) == 5

    @pytest.mark.parametrize("by_task", [False, True])
    def test_a_call_whose_result_is_kept_and_one_whose_is_not_stand_for_none_of_the_other_kind(
        self, own_stage, by_task
    ):
        key, task = own_stage.key(), own_stage.task("queued_quiet" if by_task else "queued")
        calls = [
            task.apply_async((key,), ignore_result=one)
            for one in (not by_task, None, not by_task, by_task)
        ]
        assert [one.published for one in calls] == [True, True, True, False]
        assert calls[3].id == calls[1].id


def _tells_of_revocations():
    """Whether a worker stores that a call was revoked as soon as it hears of it (Celery 5.7)."""
    return "mark_as_revoked" in inspect.getsource(control)


@pytest.mark.slow
class TestWithWorker:
    """What waits no longer may be called again."""

    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_a_call_that_never_starts_is_forgotten(self, own_stage, how):
        own_stage.start()
        key, queued = own_stage.key(), own_stage.task("queued")
        if how == "expired":
            later = {}
            queued.apply_async((key,), expires=-1)
        else:
            # The first one stands for no earlier one.
            later = {"eta": datetime.now(UTC) + timedelta(seconds=4)}
            first = queued.apply_async((key,), **later)
            own_stage.wait_for_log(f"[{first.id}] received")
            first.revoke()
        second = next_published(queued, key, **later)
        assert own_stage.result(second) == f"did {key}"
        own_stage.wait_for_log("Discarding revoked task")

    @pytest.mark.parametrize(
        ("waits", "through"),
        [("in the queue", "result"), ("in a worker", "control"), ("deferred", "result")],
    )
    def test_a_call_made_after_one_was_revoked_runs(self, own_stage, waits, through):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        later = {"countdown": 4} if waits == "in a worker" else {}
        own_stage.start(*(["--queues", "another"] if waits == "in the queue" else []))
        with distributed_lock(key) if waits == "deferred" else nullcontext():
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
        ran = said(own_stage, key)
        assert (ran[-1], len(ran)) == ("third", 2 if waits == "in the queue" else 1)

    @pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's.
    def test_a_call_whose_end_the_server_was_not_told_stands_for_no_others_if_its_result_says_so(
        self, own_stage, monkeypatch, caplog
    ):
        key, task = own_stage.key(), own_stage.task("queued")
        first = task.delay(key)
        task.backend.mark_as_failure(first.id, ValueError("as when only Redis is down"))
        second = task.delay(key)
        assert second.published

        def refuse(*args):
            raise ConnectionError("refused")

        monkeypatch.setattr(task.backend, "get_state", refuse)
        assert task.delay(key).id == second.id, "if no result can be read, it counts as waiting"
        assert "still waits in the queue is not known: refused" in caplog.text

    @pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
    def test_after_a_purge_calls_are_published_once_the_announced_ones_are_forgotten(
        self, request, own_stage, broker
    ):
        if broker == "rabbitmq":
            own_stage.use_broker(request.getfixturevalue("rabbit"))
        key = own_stage.key()
        lost = own_stage.send("queued", key)
        assert own_stage.app.control.purge() == 1
        assert own_stage.send("queued", key).id == lost.id
        call_command("locks", "clean", "--queued", "--task", own_stage.task("queued").name)
        call = own_stage.send("queued", key)
        assert call.published
        own_stage.start()
        assert own_stage.result(call) == f"did {key}"

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
        for _ in range(2):
            assert own_stage.result(own_stage.send("queued", key)) == f"did {key}"
        assert own_stage.count(key, "start") == 2

    def test_a_call_of_whose_start_the_server_was_not_told_is_forgotten_at_its_end(
        self, own_stage, workers_proxy
    ):
        for name, fails in (("queued", "fail"), ("queued_newest", "crash")):
            for is_bad in (False, True):
                key, task = own_stage.key(), own_stage.task(name)
                args = (key, "what") if name == "queued_newest" else (key,)
                rule = workers_proxy.rule_for_script(scripts.RETRACT.sha, "cut_before", times=None)
                first = task.delay(*args, hold=True, **{fails: is_bad})
                own_stage.wait_for(key, "start")
                assert task.delay(*args).id == first.id, "it is dropped"
                assert rule.hits
                own_stage.wait_for_log(f"is not published with the key {key!r}")
                workers_proxy.clear_rules()
                own_stage.open_gate(key)
                first.get(timeout=PATIENCE, propagate=False)
                next_published(task, *args)

    def test_a_call_stands_for_others_if_it_is_delivered_again_after_its_process_has_ended(
        self, own_stage
    ):
        worker = own_stage.start()
        key = own_stage.key()
        first = own_stage.send("queued_exiting_late", key)
        worker.wait()
        assert own_stage.send("queued_exiting_late", key).id == first.id

    def test_each_tenants_call_runs_in_its_schema_with_its_arguments(self, own_stage):
        """Messages carry the schema of their caller, as with tenant-schemas-celery."""

        def by_app(task, tenant, *args):
            token = schema.set(tenant)
            try:
                return task.delay(*args)
            finally:
                schema.reset(token)

        def by_caller(task, tenant, *args):
            return task.apply_async(args, headers={"_schema_name": tenant})

        with make_app({**own_stage.conf, "of_tenants": True}) as app:
            sent = {}
            for name in ("queued_of_tenant", "queued_in_schema"):
                task = app.tasks[own_stage.task(name).name]
                for call in (by_app, by_caller):
                    key = own_stage.key()
                    first, other = call(task, "a", key, "first"), call(task, "b", key, "other")
                    assert other.published
                    assert call(task, "a", key, "second").id == first.id
                    sent[key] = first, other
            app.pool.force_close_all()
        own_stage.start(of_tenants=True)
        for key, calls in sent.items():
            assert [own_stage.result(one) for one in calls] == [f"did {key}"] * 2
            ran = {(one["schema"], one["what"]) for one in own_stage.events(key, "what")}
            assert ran == {("a", "second"), ("b", "other")}


class TestNewest:
    """With "newest", the call that waits runs with what the last one says."""

    def test_the_last_call_wins_and_says_what_is_shown(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        first = task.delay(key, "first")
        assert task.delay(key, "second").id == first.id
        hidden = {"argsrepr": "(hidden)", "kwargsrepr": "{}"}
        assert task.apply_async((key, "third"), {"fail": True}, **hidden).id == first.id
        assert waiting(own_stage) == 1
        assert kept(own_stage, first)
        own_stage.start(pool="prefork")
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert said(own_stage, key) == ["third", "third"], "its retry has them too"
        assert kept(own_stage, first), "for a second delivery of the first try"
        for ran in own_stage.events(key, "what"):
            assert (ran["args"], ran["kwargs"]) == ([key, "third"], {"fail": True})
            assert ran["shown"] == ["(hidden)", "{}"]

    @pytest.mark.usefixtures("worker")
    def test_also_while_it_is_put_off_and_no_longer_when_its_body_has_started(self, stage):
        key, task = stage.key(), stage.task("queued_newest")
        with distributed_lock(key):
            first = task.delay(key, "first")
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 2)
            assert task.delay(key, "second", hold=True).id == first.id
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 4)
        stage.wait_for(key, "start")
        third = task.delay(key, "third")
        assert third.id != first.id
        stage.open_gate(key)
        assert stage.result(first) == stage.result(third) == f"did {key}"
        assert said(stage, key) == ["second", "third"]

    @pytest.mark.parametrize(
        ("task", "how", "put_off", "times", "is_kept"),
        [
            ("queued_newest", {"reject": True}, ": lock '{}' is busy", 2, False),
            ("queued_newest_raising", {}, " retry: Retry in", 1, True),
            ("queued_newest_pleading", {}, " retry: Retry in", 1, False),
        ],
        ids=["it has the broker deliver it again", "Celery retries it", "a function retries it"],
    )
    def test_also_if(self, own_stage, task, how, put_off, times, is_kept):
        key, call = own_stage.key(), own_stage.task(task)
        first = call.delay(key, "first")
        assert call.delay(key, "second", **how).id == first.id
        with distributed_lock(key):
            own_stage.start()
            own_stage.wait_for_log(f"[{first.id}]{put_off.format(key)}", 2)
        assert own_stage.result(first) == f"did {key}"
        own_stage.wait_until_idle()
        assert said(own_stage, key) == ["second"] * times
        assert kept(own_stage, first) == is_kept

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
        assert said(own_stage, key) == ["second"] * (1 if waits else 2)
        assert not kept(own_stage, first)

    def test_also_if_it_is_delivered_twice_and_the_first_run_fails(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        first = task.delay(key, "first")
        assert task.delay(key, "second", hold=True, crash=True).id == first.id
        own_stage.start()  # It does one thing after another.
        own_stage.wait_for(key, "start")
        own_stage.redeliver(first.id)
        own_stage.open_gate(key, 2)
        own_stage.wait_for(key, "what", 2)
        own_stage.wait_until_idle()
        assert said(own_stage, key) == ["second", "second"]
        assert not kept(own_stage, first)

    @pytest.mark.usefixtures("worker")
    def test_also_if_it_fails_before_its_run_and_is_delivered_twice(self, stage):
        key, task = stage.key(), stage.task("queued_newest_refusing")
        first = task.apply_async((key, "first"), **LATER)
        assert task.apply_async((key, "second"), **LATER).id == first.id
        with pytest.raises(ValueError, match="as asked"):
            stage.result(first)
        stage.wait_until_idle()
        assert kept(stage, first)
        assert task.delay(key, "third").id != first.id

    @pytest.mark.usefixtures("worker")
    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_what_was_kept_for_a_call_that_never_starts_goes_with_it(self, stage, how):
        key, task = stage.key(), stage.task("queued_newest")
        # The first one outlives the second.
        terms = [{"expires": 8}, {"expires": 1}] if how == "expired" else [{}, {}]
        with distributed_lock(key):
            first = task.apply_async((key, "first"), **terms[0])
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy")
            assert task.apply_async((key, "second"), **terms[1]).id == first.id
            if how == "revoked":
                first.revoke()
            wait_until(lambda: not kept(stage, first), PATIENCE, "it is forgotten", every=0.05)
        third = task.delay(key, "third")
        assert stage.result(third) == f"did {key}"
        assert said(stage, key) == ["third"]

    def test_if_the_server_loses_them_it_has_its_own(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        first = task.delay(key, "first")
        assert task.delay(key, "second").id == first.id
        own_stage.redis.delete(*runs_of(own_stage))
        own_stage.start()
        assert own_stage.result(first) == f"did {key}"
        assert said(own_stage, key) == ["first"]

    def test_a_call_that_is_too_long_to_be_kept_is_published(self, own_stage):
        key, task = own_stage.key(), own_stage.task("queued_newest")
        calls = [task.delay(key, what) for what in ("first", "x" * 65_536, "third")]
        assert [one.published for one in calls] == [True, True, False]
        assert calls[2].id == calls[1].id

    def test_a_call_that_could_not_be_made_or_that_is_not_newest_keeps_nothing(self, own_stage):
        key, other, task = own_stage.key(), own_stage.key(), own_stage.task("queued_newest")
        calls = [task.delay(key, "first"), own_stage.send("queued", other)]
        with pytest.raises(EncodeError):
            task.delay(key, "second", seconds=object())
        with pytest.raises(TypeError):
            task.delay(key)
        assert own_stage.send("queued", other, fail=True).id == calls[1].id
        assert not any(kept(own_stage, one) for one in calls)

    def test_a_call_with_another_limit_does_not_give_a_run_its_arguments(self, own_stage):
        stage = own_stage
        key, task = stage.key(), stage.task("queued_newest_limited")
        first, *others = task.delay(key, "a"), task.delay(key, "b"), task.delay(key, "a", number=2)
        assert first.id not in {other.id for other in others}
        assert task.delay(key, "a", more="later").id == first.id
        stage.start()
        for call in (first, *others):
            assert stage.result(call)
        for ran in stage.events(key, "what"):
            assert ran["locks"] == [key, f"{key}:{ran['what'][0]}"]
        assert sorted(said(stage, key)) == [["a", 1, "later"], ["a", 2, ""], ["b", 1, ""]]

    @pytest.mark.usefixtures("worker")
    @pytest.mark.parametrize("name", ["queued_fickle", "queued_fickle_limited"])
    def test_arguments_that_name_another_lock_in_the_worker_are_not_run_with(self, stage, name):
        key, task = stage.key(), stage.task(name)
        first = task.apply_async((key, key), **LATER)
        assert task.apply_async((key, Order(key)), **LATER).id == first.id
        with pytest.raises(LockMisuse):
            stage.result(first)
        assert stage.count(key, "start") == 0
        assert stage.result(task.delay(key, key)) == f"did {key}"

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
        (runs,) = runs_of(own_stage)
        found = own_stage.redis.hget(runs, f"last:{first.id}").partition(b"|")[2]
        assert arguments.unpacked(own_stage.app, found).args == [{"pk": 2}]


@pytest.mark.usefixtures("worker")
class TestPutOff:
    """A run that goes back to the broker still waits in the queue, and stands for later calls."""

    def test_of_many_calls_during_one_run_one_more_runs(self, stage):
        key, first = stage.begin("queued_retrying")
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

    @pytest.mark.parametrize("task", ["queued_waiting", "queued_impatient"])
    def test_also_if_it_waits_in_a_worker_and_when_that_wait_is_over(self, stage, task):
        key = stage.key()
        with distributed_lock(key):
            first = stage.send(task, key)
            stage.wait_for_waiter(key)
            if task == "queued_impatient":
                stage.wait_for_log(f"Deferred {stage.task(task).name}[{first.id}]", 2)
            assert stage.send(task, key).id == first.id
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

    @pytest.mark.parametrize(
        ("task", "arguments"),
        [
            ("queued_order", lambda key: [Order(key)]),
            ("queued_parts", lambda key: [key, (1, 2)]),
            *((f"queued_{how}", lambda key: [key]) for how in ("refusing", "ignoring")),
            *((f"queued_{how}", lambda key: [key]) for how in ("answering", "rejecting")),
            ("queued_exiting", lambda key: [key]),
        ],
    )
    def test_or_until_it_ends_before_its_run_or_with_a_key_that_looks_different_by_then(
        self, stage, task, arguments
    ):
        args = arguments(stage.key())
        stage.task(task).delay(*args)
        next_published(stage.task(task), *args)

    @pytest.mark.parametrize("how", ["expired", "revoked"])
    def test_or_until_it_is_given_up_in_the_queue(self, stage, how):
        key, task = stage.key(), stage.task("queued_retrying")
        with distributed_lock(key):
            first = task.apply_async((key,), expires=8 if how == "expired" else None)
            stage.wait_for_log(f"[{first.id}]: lock {key!r} is busy", 2)
            if how == "revoked":
                first.revoke()
            stage.wait_for_log(f"Discarding revoked task: {task.name}[{first.id}]")
            next_published(task, key)

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
        key, first = stage.begin("queued_retrying")
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

    @pytest.mark.parametrize("place", ["last in a chain", "callback", "of a chosen id"])
    def test_a_call_that_is_looked_for_under_its_own_id_is_published(self, stage, place):
        key, append = stage.key(), stage.task("append")
        stage.task("queued").apply_async((key,), countdown=60)
        queued = stage.task("queued").si(key)
        if place == "last in a chain":
            sought = chain(append.si(1, 2), queued)()
        else:
            queued.set(task_id=stage.key())
            sought = stage.app.AsyncResult(queued.options["task_id"])
            if place == "callback":
                append.apply_async((1, 2), link=queued)
            else:
                queued.apply_async()
        assert stage.result(sought) == f"did {key}"
