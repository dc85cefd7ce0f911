"""once_per: a task whose work is done once in each period; durable, with all that this needs."""

import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab
from django.contrib.auth.models import Group

from django_redislock import (
    Skipped,
    completed_runs,
    distributed_lock,
    held,
    single_instance,
    single_instance_task,
)
from django_redislock.celery import SingleInstanceTask
from django_redislock.celery.checks import check_tasks
from django_redislock.celery.message import HEADER, carried
from tests.support.celery_app import EAGER, celery_app
from tests.support.stored import keys_of

pytestmark = pytest.mark.usefixtures("locks")

TODAY = ":2026-11-28"
NOON = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
DAY = 86_400


@pytest.fixture(autouse=True)
def app():
    with celery_app(**EAGER) as app:
        yield app


def carrying(at):
    """The headers of a message of a call that was made at this time."""
    return {HEADER: {"at": at}}


def called(task, at):
    """The result of a call that was made at this time, whenever it runs."""
    return task.apply(headers=carrying(at)).result


def once_a_day(**options):
    """A task whose first run fails, and the names of the locks of its runs."""
    runs = []

    @single_instance_task(name="draw", once_per="day", **options)
    def draw():
        runs.append(held.list()[0].name)
        if len(runs) == 1:
            raise ValueError

    draw.runs = runs  # Of the task of the current application.
    return draw, runs


def test_the_work_of_a_day_is_done_once_whoever_comes_later_or_failed_before():
    draw, runs = once_a_day()
    with distributed_lock("draw" + TODAY):  # As somebody takes it by hand.
        assert called(draw, NOON)["skipped"] == "busy"
    assert isinstance(called(draw, NOON), ValueError)
    assert called(draw, NOON) is None
    skipped = called(draw, NOON + 3600)
    assert (skipped["skipped"], skipped["lock"]) == ("done", "draw" + TODAY)
    assert called(draw, NOON + DAY) is None
    assert runs == ["draw" + TODAY, "draw" + TODAY, "draw:2026-11-29"]


@pytest.mark.parametrize(("options", "seconds"), [({}, 2 * DAY), ({"once": DAY}, DAY)])
def test_a_success_is_remembered_a_day_longer_than_its_period_or_as_long_as_once_says(
    locks, options, seconds
):
    draw, _ = once_a_day(**options)
    assert isinstance(called(draw, NOON), ValueError)
    assert called(draw, NOON) is None
    remembered = locks.redis.pttl(keys_of(locks, "draw" + TODAY).done) / 1000
    assert seconds - 60 < remembered <= seconds


def test_a_period_counts_by_the_time_zone_of_the_project(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    draw, _ = once_a_day()
    evening = datetime(2026, 11, 28, 15, 30, tzinfo=UTC).timestamp()
    assert draw.lock_name((), {}, evening) == "draw:2026-11-29"


@pytest.mark.parametrize("option", [None, "countdown", "eta", "retries"])
def test_a_message_says_when_its_call_was_made_or_is_due_also_that_of_a_retry(app, option):
    app.conf.update(task_always_eager=False, broker_url="memory://")
    draw, _ = once_a_day()
    now = time.time()
    options, due = {
        None: ({}, now),
        "countdown": ({"countdown": 5 * DAY}, now + 5 * DAY),
        "eta": ({"eta": datetime.fromtimestamp(now + 5 * DAY, UTC)}, now + 5 * DAY),
        "retries": ({"headers": carrying(NOON), "retries": 1, "countdown": DAY}, NOON),
    }[option]
    draw.apply_async(**options)
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=10)
        message.ack()
    assert abs(carried(message.headers)["at"] - due) < 60


def test_a_message_without_a_time_or_with_nonsense_counts_when_it_comes():
    draw, runs = once_a_day()
    for at in (None, "noon", float("inf"), -5):
        draw.apply(headers={HEADER: {"at": at}})
    assert runs == [draw.lock_name((), {})] * 2  # The first one has failed.


def test_calls_of_two_periods_do_not_stand_for_each_other_in_the_queue(app):
    app.conf.update(task_always_eager=False, broker_url="memory://")
    draw, _ = once_a_day(unique_queued=True, on_conflict="retry")
    results = [draw.apply_async(countdown=days * DAY) for days in (2, 2, 3)]
    assert [result.published for result in results] == [True, False, True]


@pytest.mark.django_db(transaction=True)
def test_durable_stands_for_what_outlives_kills_and_a_loss_of_redis(locks):
    @single_instance_task(name="draw", once_per="day", durable=True)
    def draw():
        Group.objects.create(name="winners")

    options = draw.single_instance_options
    assert (options.atomic, options.once) == ("default", "database")
    assert (options.on_conflict, options.on_unavailable) == ("retry", "retry")
    assert draw.acks_late
    assert draw.reject_on_worker_lost
    assert called(draw, NOON) is None
    locks.redis.flushall()
    assert called(draw, NOON)["skipped"] == "done"
    assert Group.objects.count() == 1
    (run,) = completed_runs.CompletedRun.objects.all()
    assert run.name == "draw" + TODAY


def test_each_of_what_durable_stands_for_may_be_said_otherwise_and_a_class_may_be_durable():
    class Durable(SingleInstanceTask):
        abstract = True
        single_instance = {"durable": True, "once_per": "hour", "conflict_deadline": 60}

    @single_instance_task(
        name="draw", key="draw:{number}", durable=True, on_conflict="skip", acks_late=False
    )
    def draw(number): ...

    @single_instance_task(name="of class", base=Durable, on_unavailable="raise")
    def of_class(): ...

    options = draw.single_instance_options
    assert (options.on_conflict, options.once, draw.acks_late) == ("skip", "database", False)
    options = of_class.single_instance_options
    assert (options.on_unavailable, options.once, of_class.acks_late) == ("raise", "database", True)
    assert options.conflict_deadline == 60, "it serves an option that durable stands for"


@pytest.mark.parametrize("decorator", [single_instance, single_instance_task])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"durable": True}, "Add once_per"),
        ({"once_per": "week"}, 'once_per must be "day", "hour" or a timedelta'),
        ({"once_per": timedelta(hours=5)}, "a part of a day"),
        ({"once_per": 3600}, "timedelta"),
        ({"once_per": "day", "once": 60}, "Leave once out"),
        ({"once_per": "day", "limit": 2}, "exclude each other"),
        ({"once_per": "day", "durable": True, "atomic": False}, "needs atomic"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(decorator, options, says):
    with pytest.raises(ValueError, match=says):

        @decorator(**options)
        def job(): ...


def test_a_function_is_run_once_a_day_too():
    runs = []

    @single_instance("tidy", once_per="day")
    def tidy():
        runs.append(1)

    assert tidy() is None
    again = tidy()
    assert isinstance(again, Skipped)
    assert again["lock"] == tidy.lock_name() == f"tidy:{datetime.now(ZoneInfo('UTC')):%Y-%m-%d}"
    assert runs == [1]


@pytest.mark.parametrize(
    ("hour", "minute", "zone", "every", "warned"),
    [
        (0, 0, "UTC", "day", True),
        (23, 59, "UTC", "day", True),
        (0, 5, "UTC", "day", False),
        (12, 0, "UTC", "hour", True),
        (23, 0, "Europe/Berlin", "day", True),  # Midnight in winter, to a beat in UTC.
        (0, 0, "Europe/Berlin", "day", False),
    ],
)
def test_a_schedule_at_the_border_of_two_periods_is_pointed_out(
    app, settings, hour, minute, zone, every, warned
):
    settings.TIME_ZONE = zone
    app.conf.timezone = "UTC"

    @single_instance_task(name="draw", once_per=every, acks_late=True)
    def draw(): ...

    app.conf.beat_schedule = {
        "lottery": {"task": "draw", "schedule": crontab(hour=hour, minute=minute)},
        "other": {"task": "another", "schedule": crontab(hour=0, minute=0)},
        "often": {"task": "draw", "schedule": 60.0},
    }
    found = [one for one in check_tasks(None) if one.id == "django_redislock.W062"]
    assert bool(found) is warned
    assert all("lottery" in one.msg for one in found)
