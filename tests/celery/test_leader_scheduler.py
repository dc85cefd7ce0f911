"""LeaderScheduler in one process: what a new leader knows, and what is said of wrong settings."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from celery.beat import PersistentScheduler, Scheduler
from celery.schedules import crontab, schedule
from django.core.exceptions import ImproperlyConfigured

from django_redislock import held, task_runs
from django_redislock.celery.beat import LeaderScheduler
from django_redislock.rules import scripts
from tests.support.celery_app import celery_app
from tests.support.nursery import environment_for
from tests.support.processes import python
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery import Celery

    from django_redislock.testing import LockTestKit
    from tests.conftest import Locks
    from tests.support.proxy import Proxy

LOCK = "celery-beat:tests"


class Clock:
    """What the schedules go by."""

    def __init__(self) -> None:
        self.time = datetime(2026, 11, 23, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def advance(self, **by: float) -> None:
        self.time += timedelta(**by)


clock = Clock()


class Sender(Scheduler):  # type: ignore[misc] # Celery has no types
    """The wrapped scheduler: it notes what it sends."""

    sent: list[str]

    def apply_async(self, entry: Any, **kwargs: Any) -> None:
        self.sent.append(entry.name)


@pytest.fixture
def app_anywhere() -> Iterator[Celery]:
    """An application with a schedule; the test says where its locks are."""
    with celery_app(
        broker_url="memory://",
        beat_leader_scheduler=f"{__name__}:Sender",
        beat_schedule={
            "hourly": {"task": "tidy", "schedule": schedule(3600, nowfun=clock.now)},
            "at noon": {"task": "draw", "schedule": crontab("0", "12", nowfun=clock.now)},
        },
    ) as app:
        yield app


@pytest.fixture
def app(redislock: LockTestKit, app_anywhere: Celery) -> Celery:
    """The same, with locks in memory."""
    return app_anywhere


def beat(app: Celery) -> Any:
    """A beat that begins now; its first tick leads or stands by."""
    scheduler: Any = LeaderScheduler(app=app)
    scheduler.sent = []
    return scheduler


def tick(*schedulers: Any) -> list[str]:
    """What they send until nothing is due."""
    for one in schedulers:
        one.sent.clear()
        while one.tick() == 0 and one._leads:
            pass
    return [name for one in schedulers for name in one.sent]


def test_a_new_leader_sends_what_was_missed_and_nothing_that_was_sent(app: Celery) -> None:
    first = beat(app)
    assert tick(first) == []
    clock.advance(hours=1)
    assert tick(first) == ["hourly"]
    clock.advance(minutes=59)
    second = beat(app)  # By itself, it would send the next one in an hour.
    first.close()
    assert tick(second) == []
    clock.advance(minutes=1)
    assert tick(second) == ["hourly"]
    second.close()
    clock.advance(minutes=1)
    assert tick(first) == []  # It leads again, and would have sent it a minute ago.
    first.close()


def test_a_crontab_is_sent_once_although_the_next_leader_has_a_clock_that_is_late(
    app: Celery,
) -> None:
    clock.time = datetime(2026, 11, 23, 11, 59, 59, 500_000, tzinfo=UTC)
    first, second = beat(app), beat(app)
    tick(first)
    clock.advance(seconds=0.6)
    assert "at noon" in tick(first)
    first.close()
    clock.advance(seconds=-0.3)
    assert tick(second) == []
    clock.advance(seconds=0.5)
    assert tick(second) == []
    clock.advance(days=1)
    assert "at noon" in tick(second)
    second.close()


def test_an_entry_that_is_read_again_with_an_old_time_does_not_hold_up_the_others(
    app: Celery,
) -> None:
    """Celery 5.6 looks at no other entry while one at the head says that it is not due."""
    each_minute = {"task": "look", "schedule": schedule(60, nowfun=clock.now)}
    app.conf.beat_schedule = {**app.conf.beat_schedule, "each minute": each_minute}
    first, second = beat(app), beat(app)
    tick(first)
    clock.advance(hours=1)
    assert set(tick(first)) >= {"hourly", "each minute"}
    first.close()
    assert tick(second) == []
    # The leader before did not write it to the database, which is read every five minutes.
    second.schedule["hourly"].last_run_at -= timedelta(hours=3)
    second.old_schedulers = None
    assert tick(second) == []
    clock.advance(minutes=1)
    assert tick(second) == ["each minute"]
    second.close()


def test_a_beat_that_does_not_know_yet_that_another_leads_sends_nothing_twice(
    app: Celery,
) -> None:
    first, second = beat(app), beat(app)
    tick(first)
    clock.advance(hours=1)
    lock = held.get(LOCK)
    assert lock is not None
    held.force_release(LOCK, lock.id)
    assert in_thread(lambda: tick(second)).result(HUNG) == ["hourly"]
    assert tick(first) == []
    record = task_runs.record(f"{LOCK}:hourly")
    assert record is not None
    assert not record.last_unended
    clock.advance(hours=1)
    assert in_thread(lambda: tick(second)).result(HUNG) == ["hourly"]
    second.close()
    first.close()


def test_only_the_leader_sends_and_a_standby_is_soon_done_with_a_tick(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, second = beat(app), beat(app)
    tick(first)
    clock.advance(hours=1)
    for _ in range(2):
        assert in_thread(second.tick).result(HUNG) == 0
    assert second.sent == []
    assert caplog.text.count("This beat stands by") == 1
    assert caplog.text.count("This beat leads") == 1
    assert 0 <= first.tick() <= 1
    first.close()


def test_while_the_server_does_not_answer_nothing_is_sent_and_then_it_is(
    app: Celery, redislock: LockTestKit, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = beat(app)
    tick(scheduler)
    clock.advance(hours=1)
    with redislock.simulate_unavailable():
        for _ in range(3):
            assert tick(scheduler) == []
        redislock.advance(60)  # Its term is over.
        for _ in range(3):
            assert tick(scheduler) == []
        assert scheduler.tick() > 0  # A server that refuses at once must not keep it busy.
        text = "This beat sends nothing"
        assert caplog.text.count(f"{text} that is due") == 1
        assert caplog.text.count(f"{text} until it leads") == 1
    assert tick(scheduler) == ["hourly"]
    scheduler.close()


def test_each_outage_is_told_once(
    app: Celery, redislock: LockTestKit, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = beat(app)
    tick(scheduler)
    for outages in (1, 2):
        clock.advance(hours=1)
        with redislock.simulate_unavailable():
            for _ in range(3):
                assert tick(scheduler) == []
        clock.advance(seconds=2)
        assert tick(scheduler) == ["hourly"]  # It still leads.
        assert caplog.text.count("This beat sends nothing that is due") == outages
    scheduler.close()


def test_what_nobody_knows_to_be_written_down_is_not_sent(
    app_anywhere: Celery, locks: Locks, proxy: Proxy
) -> None:
    locks.on(proxy, TTL=3)
    scheduler = beat(app_anywhere)
    tick(scheduler)
    clock.advance(hours=1)
    proxy.rule_for_script(scripts.CONCLUDE.sha, "cut_before", times=2)
    assert tick(scheduler) == []

    def sent_later() -> list[str]:
        clock.advance(seconds=2)
        return tick(scheduler)

    assert wait_until(sent_later) == ["hourly"]  # Once the lock is free that was not released.
    scheduler.close()


def test_what_was_written_down_is_not_sent_by_a_beat_that_does_not_lead_any_more(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = beat(app)
    tick(scheduler)
    clock.advance(hours=1)
    entry = scheduler.schedule["hourly"]
    assert scheduler.is_due(entry)[0]
    scheduler.close()
    scheduler.apply_entry(entry)
    assert scheduler.sent == []
    clock.advance(hours=1)
    assert not scheduler.is_due(entry)[0]
    assert "hourly was due, but is not sent" in caplog.text


def test_the_record_of_an_entry_says_which_beat_has_sent_it_when(app: Celery) -> None:
    scheduler = beat(app)
    tick(scheduler)
    clock.advance(hours=1)
    tick(scheduler)
    record = task_runs.record(f"{LOCK}:hourly")
    assert record is not None
    assert record.last_success is not None
    assert record.last_success.owner.task_id == clock.time.isoformat()
    assert not record.under_way
    scheduler.close()


@pytest.mark.parametrize("name", ["x" * 300, "a\nb", "{}*"])
def test_an_entry_may_have_any_name(app: Celery, name: str) -> None:
    app.conf.beat_schedule = {name: app.conf.beat_schedule["hourly"]}
    scheduler = beat(app)
    tick(scheduler)
    clock.advance(hours=1)
    assert tick(scheduler) == [name]
    scheduler.close()


def test_the_banner_names_the_lock_and_asks_nobody(
    app: Celery, redislock: LockTestKit, tmp_path: Path
) -> None:
    app.conf.beat_leader_scheduler = None
    file = str(tmp_path / "schedule")
    with redislock.simulate_unavailable():
        scheduler: Any = LeaderScheduler(app=app, schedule_filename=file, lazy=True)
        assert isinstance(scheduler, PersistentScheduler)
        assert scheduler.info == f"    . db -> {file}\n    . leader -> {LOCK}"


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"beat_leader_scheduler": "no.such:Scheduler"}, "cannot be imported: No module"),
        ({"beat_leader_scheduler": "celery.beat:NoScheduler"}, "cannot be imported"),
        ({"beat_leader_scheduler": "builtins:dict"}, "is no subclass of celery.beat.Scheduler"),
        (
            {"beat_leader_scheduler": "django_redislock.celery.beat:LeaderScheduler"},
            "Name the scheduler that it is to wrap",
        ),
        ({"beat_leader_ttl": "soon"}, "beat_leader_ttl must be a number of seconds"),
        ({"beat_leader_ttl": 0}, "beat_leader_ttl must be at least"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(app: Celery, conf: dict[str, Any], says: str) -> None:
    app.conf.update(conf)
    (setting,) = conf
    with pytest.raises(ImproperlyConfigured, match=f"Celery's setting {setting}.*") as error:
        LeaderScheduler(app=app)
    assert says in str(error.value)


# --- django-celery-beat ---------------------------------------------------------------------------


def two_beats_on_a_database() -> None:
    """In a child: of a schedule in the database, each slot is sent once, and one-offs are too."""
    from django.conf import settings
    from django.core.management import call_command

    settings.INSTALLED_APPS += ["django_celery_beat"]
    settings.MIGRATION_MODULES = {"django_celery_beat": None}
    import django

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
    from django.utils import timezone
    from django_celery_beat.models import ClockedSchedule, IntervalSchedule, PeriodicTask
    from django_celery_beat.schedulers import DatabaseScheduler

    class Database(DatabaseScheduler):  # type: ignore[misc] # it has no types
        def apply_async(self, entry: Any, **kwargs: Any) -> None:
            self.sent.append(entry.name)

    hour = IntervalSchedule.objects.create(every=1, period="hours")
    past = ClockedSchedule.objects.create(clocked_time=timezone.now())
    ago = timezone.now() - timedelta(hours=2)
    for name, when in (
        ("hourly", {"interval": hour}),
        ("once", {"interval": hour, "one_off": True}),
        ("clocked", {"clocked": past, "one_off": True}),
    ):
        row = PeriodicTask.objects.create(name=name, task="tidy", **when)
        PeriodicTask.objects.filter(pk=row.pk).update(last_run_at=ago)
    with celery_app(broker_url="memory://", result_expires=None) as app:
        app.conf.beat_leader_scheduler = Database
        first, second = beat(app), beat(app)
        print(sorted(tick(first)))
        PeriodicTask.objects.filter(name="hourly").update(last_run_at=ago)  # It was not synced.
        first._term.__exit__(None, None, None)  # Nor closed: as if it was killed.
        print(sorted(tick(second)))


@pytest.mark.slow
def test_a_schedule_in_the_database_is_sent_by_one_beat() -> None:
    redislock = '{"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}'
    code = f"from {__name__} import two_beats_on_a_database as run; run()"
    ran = python("-c", code, env=environment_for() | {"TESTS_REDISLOCK": redislock})
    assert ran.stdout.splitlines() == ["['clocked', 'hourly', 'once']", "[]"]
