"""give_up_after: a call that kills its worker each time is not started for ever."""

import signal

import pytest
from celery import chord
from celery.exceptions import Ignore, Reject, Retry
from django.core.management import call_command

from django_redislock import LockUnavailable, distributed_lock, held, signals, task_runs
from django_redislock.celery import RunAbandoned, single_instance_task
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.keys import lock_keys
from tests.celery.project import LOST_SOON, PATIENCE
from tests.support.celery_app import celery_app
from tests.support.hearing import heard
from tests.support.proxy import Proxy
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]


@pytest.mark.slow
@pytest.mark.timeout(120)
class TestKilled:
    """Real processes that kill themselves."""

    @pytest.mark.row("give-up")
    def test_it_ends_after_three_kills_and_the_errback_of_its_chord_runs(self, own_stage):
        own_stage.start(pool="prefork", concurrency=2, **LOST_SOON)
        key, limited, failing = own_stage.key(), own_stage.key(), own_stage.key()
        deadly = own_stage.task("deadly")
        errback = own_stage.task("note_error").s(key)
        body = own_stage.task("collect").s().on_error(errback)
        other = own_stage.task("skipping").s(own_stage.key())
        sent = chord([deadly.s(key), other])(body)
        also = own_stage.task("deadly_limited").delay(limited)

        assert "RunAbandoned" in own_stage.wait_for(key, "error")["says"]
        first = sent.parent.results[0]
        abandoned = [one.get(timeout=PATIENCE, propagate=False) for one in (first, also)]
        assert [type(one) for one in abandoned] == [RunAbandoned] * 2
        assert (abandoned[0].task_id, abandoned[0].lock, abandoned[0].starts) == (first.id, key, 3)
        assert f"[{first.id}] was abandoned: it was started 3 times" in str(abandoned[0])
        own_stage.wait_until_idle()
        assert (own_stage.count(key, "start"), own_stage.count(limited, "start")) == (3, 2)
        (told,) = own_stage.events(key, "abandoned")
        assert (told["task_id"], told["starts"]) == (first.id, 3)
        for name, sender in ((key, first), (limited, also)):
            record = held.record(name)
            assert record.last_abandoned.owner.task_id == sender.id
            assert record.last_failure is None
        # Nothing is left in the way of others.
        assert own_stage.result(own_stage.send("skipping", key)) == f"did {key}"

        # A failure that the worker sees is no kill.
        sent = deadly.delay(failing, "kill", "fail", "kill", "end")
        assert own_stage.result(sent) == f"did {failing}"
        assert own_stage.count(failing, "start") == 4

    def test_a_retry_that_the_silent_lock_server_does_not_hear_of_is_no_kill(
        self, own_stage, celery_server
    ):
        with Proxy(celery_server) as network:
            own_stage.redislock["default"]["LOCATION"] = own_stage.url.replace(
                f":{celery_server.port}/", f":{network.port}/"
            )
            own_stage.start(pool="prefork")
            key = own_stage.key()
            sent = own_stage.task("deadly_once").delay(key, "retry", "end")
            own_stage.wait_for(key, "start")
            network.refuse()
            own_stage.open_gate(key)
            own_stage.wait_for_log(f"Left the block of lock {key!r}")
            network.heal()
            assert own_stage.result(sent) == f"did {key}"

    @pytest.mark.parametrize("limit_of", ["message", "worker"])
    def test_an_end_by_the_hard_time_limit_is_a_kill(self, own_stage, limit_of):
        limit = {"message": "60", "worker": "1"}[limit_of]
        own_stage.start("--time-limit", limit, pool="prefork", **LOST_SOON)
        key = own_stage.key()
        time_limit = {"time_limit": 1} if limit_of == "message" else {}
        own_stage.task("overrunning").apply_async((key,), **time_limit)
        assert own_stage.wait_for(key, "abandoned")["starts"] == 2
        own_stage.wait_until_idle()
        assert own_stage.count(key, "start") == 2

    def test_a_shutdown_that_requeues_the_message_is_no_kill(self, own_stage):
        first = own_stage.start(pool="prefork")
        key = own_stage.key()
        own_stage.task("deadly").delay(key, "hold")
        own_stage.wait_for(key, "start")
        starts = lock_keys("redislock", key).starts
        wait_until(lambda: own_stage.redis.zcard(starts) == 1, PATIENCE, "it is counted")
        first.signal(signal.SIGQUIT)
        first.wait()
        assert own_stage.redis.zcard(starts) == 0
        assert own_stage.redis.llen("celery") == 1


# --- what counts, in one process: starts are counted as those of a worker that was killed ---------


@pytest.fixture
def app():
    """An application whose results this process can see."""
    with celery_app(result_backend="cache+memory://", broker_url="memory://") as app:
        yield app


@pytest.fixture
def told():
    """What receivers of the signal are told."""
    with heard(signals.task_abandoned) as told:
        yield told


def make(body=lambda: "done", **options):
    """Make a task whose body does as it is told."""
    options = {"name": "draw", "key": "lottery", "acks_late": True, "give_up_after": 3, **options}

    def run():
        return body()

    return single_instance_task(**options)(run)


def kill(times, task_id="the-id"):
    """Have a call start this often in workers that are killed: nobody says that it has ended."""
    marker = RunMarker(f"{task_id}/:0.0", 90_000)
    for _ in range(times):
        with distributed_lock("where it was") as lease:
            task_runs.count_start("lottery", marker, lease, using="default")


def deliver(task, task_id="the-id", **request):
    """Run a task as for a message of a broker."""
    task.push_request(id=task_id, called_directly=False, args=(), kwargs={}, **request)
    try:
        return task.run()
    finally:
        task.pop_request()


def deliver_in_vain(task, error=RunAbandoned):
    with pytest.raises(error) as raised:
        deliver(task)
    return raised.value


@pytest.mark.usefixtures("redislock", "app")
class TestCounting:
    def test_it_is_abandoned_with_a_signal_a_record_and_a_free_lock(self, told, capsys):
        started = []
        task = make(lambda: started.append("started"), autoretry_for=(Exception,))
        deliver(task, "an earlier id")
        call_command("locks", "runs")
        assert "ABANDONED" not in capsys.readouterr().out
        kill(3)
        error = deliver_in_vain(task)
        assert str(error).startswith("draw[the-id] was abandoned")
        assert "3 times" in str(error)
        assert started == ["started"]
        assert not distributed_lock("lottery").locked()
        (news,) = told
        assert news["sender"].name == "draw"
        assert (news["name"], news["using"]) == ("lottery", "default")
        assert (news["task_id"], news["starts"]) == ("the-id", 3)
        record = held.record("lottery")
        assert (record.last_failure, record.skips) == (None, 0)
        assert (record.under_way, record.last_unended) == ((), None)
        assert list(record.last) == ["success", "abandoned"]
        call_command("locks", "runs")
        headers, row = capsys.readouterr().out.splitlines()
        assert headers.split()[-1] == "ABANDONED"
        assert row.endswith(" ago")
        call_command("locks", "show", "lottery")
        says = ", because it was started 3 times and never ended, "
        assert says in capsys.readouterr().out
        assert says in str(record.last_abandoned)
        # The next call is nobody else's business.
        deliver(task, "another-id")
        assert started == ["started"] * 2

    @pytest.mark.parametrize("end", [ValueError, Retry, Ignore, SystemExit])
    def test_an_end_that_the_worker_sees_counts_no_more(self, end):
        def body():
            raise end

        task = make(body, give_up_after=1)
        for _ in range(3):
            deliver_in_vain(task, end)

    @pytest.mark.parametrize("end", [SystemExit, ValueError])
    def test_an_end_after_the_hard_time_limit_counts_also_if_the_body_raises_on_its_way_out(
        self, end
    ):
        def body():
            try:
                raise SystemExit  # As a worker's child does on SIGTERM.
            finally:
                raise end

        task = make(body, give_up_after=1)
        with pytest.raises(end):
            deliver(task, timelimit=(0.1, None))
        deliver_in_vain(task)

    def test_a_retry_begins_to_count_anew_and_what_no_broker_delivers_is_not_counted(self):
        kill(3)
        task = make()
        assert deliver(task, retries=1) == "done"
        assert task() == task.apply(task_id="the-id").get() == "done"

    @pytest.mark.parametrize(
        "options",
        [
            {"limit": 2},
            {"unique_queued": True, "on_conflict": "retry"},
            {"on_conflict": "wait", "wait": 5, "min_hold": 60},
            {"once": 60},
        ],
    )
    def test_with_other_options(self, options):
        task = make(**options)
        kill(3)
        deliver_in_vain(task)
        # That was no success, and the lock is free.
        assert deliver(task, "another-id") == "done"

    @pytest.mark.django_db(transaction=True)
    def test_with_once_in_the_database(self):
        task = make(atomic=True, once="database")
        kill(3)
        deliver_in_vain(task)
        assert deliver(task, "another-id") == "done"
        # The work is done now, so it is not abandoned.
        assert deliver(task)["skipped"] == "done"

    def test_a_run_that_finds_the_lock_busy_has_not_started(self, redislock):
        task = make(give_up_after=1)
        with redislock.simulate_held_by_other("lottery"):
            for _ in range(3):
                assert deliver(task)["skipped"] == "busy"
        assert deliver(task) == "done"

    def test_a_duplicate_of_an_abandoned_call_is_reported_once(self, told):
        task = make()
        kill(3)
        abandoned = deliver_in_vain(task)
        deliver_in_vain(task)  # Nobody has stored a result so far.
        task.backend.mark_as_failure("the-id", abandoned)
        deliver_in_vain(task, Ignore)
        assert len(told) == 2

    def test_a_call_runs_although_its_start_cannot_be_counted(self, monkeypatch, caplog):
        def unavailable(name, *args, **kwargs):
            raise LockUnavailable(name)

        monkeypatch.setattr(task_runs, "count_start", unavailable)
        assert deliver(make()) == "done"
        assert "The start of draw[the-id] is not noted" in caplog.text

    def test_counts_are_forgotten_when_no_duplicate_is_recognised_any_more(self, redislock):
        task = make()
        kill(3)
        redislock.advance(task.redelivered_after + 86_401)
        assert deliver(task) == "done"


@pytest.mark.parametrize("end", [ValueError, Reject])
def test_an_end_that_the_silent_server_does_not_hear_of_counts_no_more_once_it_answers(
    make_server, settings, end, app
):
    server = make_server()
    settings.REDISLOCK = {"default": {"LOCATION": server.url}}

    def body():
        server.pause()
        raise end

    deliver_in_vain(make(body, give_up_after=1, ttl=0.5), end)
    server.resume()
    with server.client() as client:
        starts = lock_keys("redislock", "lottery").starts
        wait_until(lambda: not client.exists(starts), HUNG, "it is counted no more")
