"""debounce: many calls become one run, a while after the last of them."""

import time
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from django_redislock import distributed_lock, single_instance_task, task_runs
from django_redislock.celery import SingleInstanceTask
from tests.support.celery_app import EAGER, celery_app
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage", "tests.celery.project.rabbit"]

EARLY = 0.1  # Seconds by which two clocks' readings may differ.


def said(stage, key):
    """With what the bodies ran."""
    return [one["what"] for one in stage.events(key, "what")]


def call_until(stage, key, is_over, every=0.2):
    """Call the task again and again: the results, and when each call was made."""
    results, times = [], []
    while not is_over(len(results)):
        times.append(time.time())
        results.append(stage.task("debounced").delay(key, len(results)))
        time.sleep(every)  # What is tried is calls with a pause between them.
    return results, times


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_many_calls_are_one_message_and_one_run_so_long_after_the_last(request, own_stage, broker):
    if broker == "rabbitmq":
        own_stage.use_broker(request.getfixturevalue("rabbit"))
    own_stage.start()
    key = own_stage.key()
    results, times = call_until(own_stage, key, lambda made: made == 8)
    ((name, calls),) = task_runs.announced(using="default").locks
    assert (str(name), calls.queued) == (key, results[0].id)
    assert own_stage.result(results[-1]) == f"did {key}"
    assert [one.published for one in results] == [True] + [False] * 7
    assert {one.id for one in results} == {results[0].id} == {*own_stage.published}
    assert said(own_stage, key) == [7]
    # A call that a busy machine delays until the one before it is due meets the run as it starts.
    late = max(after - before for before, after in pairwise(times)) - 0.2
    assert own_stage.events(key, "what")[0]["time"] - times[-1] > 1 - EARLY - late
    assert task_runs.announced(using="default").locks == []


@pytest.mark.usefixtures("worker")
def test_debounce_max_bounds_how_long_later_calls_put_it_off(stage):
    key = stage.key()
    _, times = call_until(stage, key, lambda made: stage.count(key, "what"))
    ran = stage.events(key, "what")[0]["time"]
    assert ran - times[0] > 3 - EARLY
    assert ran - times[-1] < 1, "calls went on until then"


@pytest.mark.usefixtures("worker")
def test_a_call_made_during_the_run_is_followed_by_another_run(stage):
    key, task = stage.key(), stage.task("debounced_briefly")
    first = task.delay(key, "first", hold=True)
    stage.wait_for(key, "start")
    second = task.delay(key, "second")
    assert second.published
    stage.wait_for_log(f"Deferred {task.name}[{second.id}]: lock {key!r} is busy")
    assert task.delay(key, "third").id == second.id, "it still stands for others"
    stage.open_gate(key)
    assert stage.result(first) == stage.result(second) == f"did {key}"
    assert said(stage, key) == ["first", "third"]


def test_after_a_purge_a_call_is_published_anew_once_the_lost_one_is_overdue(own_stage):
    key, task = own_stage.key(), own_stage.task("debounced_briefly")
    lost = task.delay(key, "lost")
    assert own_stage.app.control.purge() == 1
    assert task.delay(key, "also lost").id == lost.id

    def published():
        result = task.delay(key, "found")
        return result if result.published else None

    found = wait_until(published, message="a call is published")
    own_stage.start()
    assert own_stage.result(found) == f"did {key}"
    assert said(own_stage, key) == ["found"]


def test_a_loss_of_the_locks_redis_before_the_run_leaves_the_run(own_stage):
    key, task = own_stage.key(), own_stage.task("debounced_briefly")
    call = task.delay(key, "first")
    task.delay(key, "second")
    own_stage.redis.delete(*own_stage.redis.scan_iter("redislock*"))
    another = task.delay(key, "third")
    assert another.published
    own_stage.start()
    assert own_stage.result(call) == own_stage.result(another) == f"did {key}"
    assert said(own_stage, key) == ["first", "third"]


def test_a_long_wait_is_made_in_hops_that_are_no_tries(own_stage):
    # No hop is longer than half of it: else the broker would deliver the message again.
    own_stage.configure(broker_transport_options={"visibility_timeout": 0.8})
    key = own_stage.key()
    made, call = time.time(), own_stage.task("debounced").delay(key, "it")
    eta = datetime.fromisoformat(own_stage.published[call.id]["eta"])
    assert (eta - datetime.now(UTC)).total_seconds() < 0.5
    own_stage.start()
    assert own_stage.result(call) == f"did {key}"
    (ran,) = own_stage.events(key, "what")
    assert ran["time"] - made > 1 - EARLY
    assert all("Deferred" not in worker.log for worker in own_stage.workers)


@pytest.mark.usefixtures("worker")
def test_calls_made_while_a_run_waits_for_the_lock_put_it_off_again(stage):
    key = stage.key()
    with distributed_lock(key):
        first = stage.task("debounced").delay(key, "first")
        stage.wait_for_waiter(key)
        assert not stage.task("debounced").delay(key, "second").published
        made = time.time()
    assert stage.result(first) == f"did {key}"
    assert said(stage, key) == ["second"]
    assert stage.events(key, "what")[0]["time"] - made > 1 - EARLY


@pytest.mark.usefixtures("worker")
def test_what_stands_alone_is_published_and_runs_at_once(stage):
    key, task = stage.key(), stage.task("debounced")
    waits = task.delay(key, "waits")
    alone = task.apply_async((key, "alone"), task_id=stage.key())
    assert waits.published
    assert alone.published
    assert stage.result(alone) == stage.result(waits) == f"did {key}"
    assert said(stage, key) == ["alone", "waits"]


# --- what is said where the line is written, and in eager mode ------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"debounce_max": 5}, "debounce_max needs debounce"),
        ({"debounce": 5, "debounce_max": 4}, "debounce_max=4 is less than debounce=5"),
        ({"debounce": 0}, "debounce must be at least 0.001 seconds"),
        ({"debounce": 5, "unique_queued": True}, "debounce needs unique_queued='newest'"),
        ({"debounce": 5, "unique_queued": False}, "debounce needs unique_queued='newest'"),
        ({"debounce": 5, "on_conflict": "skip"}, 'debounce and on_conflict="skip" exclude'),
        ({"debounce": 5, "once": 60}, "debounce excludes once"),
        ({"debounce": 5, "once_per": "day"}, "debounce excludes once"),
        ({"debounce": 5, "once_per": "day", "durable": True}, "debounce excludes once"),
        ({"debounce": 5, "expires": 60}, "debounce and expires exclude each other"),
    ],
)
def test_what_does_not_go_together_is_refused_at_import(options, says):
    with pytest.raises(ValueError, match=says):
        single_instance_task(**options)(lambda: None)


def options_of_subclass(base, **options):
    """The options of a class of tasks that has *options*, and whose base has others."""
    Base = type("Base", (SingleInstanceTask,), {"single_instance": base})  # noqa: N806
    body = {"single_instance": options, "run": lambda self: None}
    return type("Later", (Base,), body).single_instance_options


def test_what_it_stands_for_can_be_overridden_and_overrides_what_a_class_says_of_its_queue():
    mine = {"on_conflict": "raise", "queued_ttl": 7, "debounce": 8}
    ours = options_of_subclass({"debounce": 5, "debounce_max": 9}, **mine)
    assert (ours.unique_queued, ours.on_conflict, ours.queued_ttl) == ("newest", "raise", 7)
    assert (ours.debounce, ours.debounce_max) == (8, 9)
    queued = {"unique_queued": True, "queued_ttl": 9, "on_conflict": "skip"}
    assert options_of_subclass(queued, debounce=5).unique_queued == "newest"
    assert options_of_subclass(queued, on_conflict="replace").unique_queued is False


def test_a_call_does_not_say_itself_when_it_runs(locks):
    with celery_app(broker_url="memory://"):

        @single_instance_task(name="reindex", debounce=5)
        def reindex(): ...

        for how in ({"countdown": 9}, {"eta": datetime.now(UTC)}, {"expires": 9}):
            with pytest.raises(ValueError, match=f"cannot say {next(iter(how))}: debounce"):
                reindex.apply_async(**how)
        with distributed_lock("reindex") as lease:
            baton = lease.hand_over(within=5)
        with pytest.raises(ValueError, match="cannot take a baton"):
            reindex.delay(baton=baton)


def test_in_eager_mode_each_call_runs_at_once(locks):
    runs = []
    with celery_app(**EAGER):

        @single_instance_task(name="reindex", debounce=5, debounce_max=9)
        def reindex(what):
            runs.append(what)

        assert reindex.delay(1).published
        reindex.apply((2,))
    assert runs == [1, 2]
