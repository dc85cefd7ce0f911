"""LeaderScheduler in one process: what a new leader knows, and what is said of wrong settings."""

import logging
import os
from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest import mock
from zoneinfo import ZoneInfo

import pytest
from celery.beat import PersistentScheduler, Scheduler, SchedulingError
from celery.schedules import crontab, schedstate, schedule
from django.core.exceptions import ImproperlyConfigured

from django_redislock import held, task_runs
from django_redislock.celery.beat import LeaderScheduler
from django_redislock.jobs.run import run_job
from django_redislock.rules import scripts
from tests.support.celery_app import celery_app
from tests.support.nursery import environment_for
from tests.support.others import held_by_other
from tests.support.processes import python
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

LOCK = "celery-beat:tests"
LONDON = ZoneInfo("Europe/London")


class Clock:
    """What the schedules go by, and a beat."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.time = datetime(2026, 11, 23, 12, tzinfo=UTC)
        self.passed = 0.0

    def __reduce__(self):
        return "clock"  # PersistentScheduler pickles schedules, and with them their clock.

    def now(self):
        return self.time

    def advance(self, **by):
        self.set(**by)
        self.passed += timedelta(**by).total_seconds()

    def set(self, **by):
        """Set it, or look at that of another machine: no time passes."""
        self.time += timedelta(**by)


clock = Clock()


class Sender(Scheduler):
    """The wrapped scheduler: it notes what it sends."""

    refuses = False

    def apply_async(self, entry, **kwargs):
        if self.refuses:
            raise SchedulingError("the broker refuses")
        self.sent.append(entry.name)


class Keeper(Sender, PersistentScheduler):
    """The same, with a file."""


@pytest.fixture(autouse=True)
def begun():
    """Each test begins at the same time, whatever time another one has left."""
    clock.begin()


@contextmanager
def application(monkeypatch):
    """An application with a schedule, whose beats end with it."""
    steady = SimpleNamespace(now=lambda: clock.passed)
    monkeypatch.setattr("django_redislock.celery.beat.clock", steady)
    with celery_app(
        broker_url="memory://",
        beat_leader_scheduler=f"{__name__}:Sender",
        beat_schedule={
            "hourly": {"task": "tidy", "schedule": schedule(3600, nowfun=clock.now)},
            "at noon": {"task": "draw", "schedule": crontab("0", "12", nowfun=clock.now)},
        },
    ) as app:
        app.beats = []
        yield app
        for scheduler in app.beats:
            scheduler.close()


@pytest.fixture
def app(redislock, monkeypatch):
    """Locks are in memory."""
    with application(monkeypatch) as app:
        yield app


@pytest.fixture
def app_on_server(locks, monkeypatch):
    with application(monkeypatch) as app:
        yield app


def beat(app, **options):
    """A beat that begins now; its first tick leads or stands by."""
    scheduler = LeaderScheduler(app=app, **options)
    scheduler.sent = []
    app.beats.append(scheduler)
    return scheduler


def end(scheduler):
    scheduler.app.beats.remove(scheduler)
    scheduler.close()


def leading(app, *, hours=1, **options):
    """A beat that leads, and has not looked since some hours, when it had nothing to send."""
    scheduler = beat(app, **options)
    assert tick(scheduler) == []
    clock.advance(hours=hours)
    return scheduler


def tick(scheduler):
    """What it sends until nothing is due."""
    scheduler.sent.clear()
    while scheduler.tick() == 0 and scheduler._leads:
        pass
    return list(scheduler.sent)


def with_entries(app, **entries):
    """Put more of them into the schedule: their schedules, which go by the clock of the tests."""
    more = {name: {"task": "look", "schedule": when} for name, when in entries.items()}
    app.conf.beat_schedule = {**app.conf.beat_schedule, **more}


def each(seconds):
    return schedule(seconds, nowfun=clock.now)


def test_a_new_leader_sends_what_was_missed_and_nothing_that_was_sent(app):
    first = leading(app)
    assert tick(first) == ["hourly"]
    clock.advance(minutes=59)
    second = beat(app)  # By itself, it would send the next one in an hour.
    end(first)
    assert tick(second) == []
    clock.advance(minutes=1)
    assert tick(second) == ["hourly"]
    end(second)
    clock.advance(minutes=1)
    assert tick(first) == []  # It leads again, and would have sent it a minute ago.


def test_an_entry_that_is_read_again_with_an_old_time_does_not_hold_up_the_others(app):
    """Celery 5.6 looks at no other entry while one at the head says that it is not due."""
    with_entries(app, minutely=each(60))
    second = beat(app)
    first = leading(app)
    assert set(tick(first)) >= {"hourly", "minutely"}
    end(first)
    assert tick(second) == []
    # The leader before did not write it to the database, which is read every five minutes.
    second.schedule["hourly"].last_run_at -= timedelta(hours=3)
    second.old_schedulers = None
    assert tick(second) == []
    clock.advance(minutes=1)
    assert tick(second) == ["minutely"]


def test_entries_that_are_paused_or_that_a_stopped_beat_is_about_to_send_hold_up_no_others(app):
    names = [f"paused {number}" for number in range(9)]
    with_entries(app, **dict.fromkeys([*names, "last"], each(3600)), minutely=each(60))
    scheduler = leading(app)
    for name in names:
        held.pause(f"{LOCK}:{name}", 600, by="ops")
    with held_by_other(f"{LOCK}:hourly"):
        assert sorted(tick(scheduler)) == ["last", "minutely"]
        for _ in range(2):
            clock.advance(minutes=1)
            assert tick(scheduler) == ["minutely"]
    for name in names:
        held.resume(f"{LOCK}:{name}")
    clock.advance(seconds=2)
    assert sorted(tick(scheduler)) == ["hourly", *names]


def test_what_a_plain_beat_has_sent_meanwhile_is_not_sent_again(app, tmp_path):
    """Of a roll-back to it and back, with the same file."""
    app.conf.beat_leader_scheduler = f"{__name__}:Keeper"
    file = str(tmp_path / "schedule")
    leader = leading(app, schedule_filename=file)
    assert tick(leader) == ["hourly"]
    end(leader)
    plain = Keeper(app=app, schedule_filename=file)
    plain.sent = []
    clock.advance(hours=1)
    while plain.tick() == 0:
        pass
    assert plain.sent == ["hourly"]
    plain.close()
    clock.advance(seconds=7)
    again = beat(app, schedule_filename=file)
    assert tick(again) == []
    clock.advance(hours=1)
    assert tick(again) == ["hourly"]


@pytest.mark.parametrize("ahead", [0.3, 3630, 3 * 3630])
def test_a_leader_whose_clock_was_ahead_silences_no_other_and_its_noon_is_not_sent_again(
    app, ahead
):
    clock.time = datetime(2026, 11, 23, 11, 59, 59, 900_000, tzinfo=UTC)
    with_entries(app, minutely=crontab(nowfun=clock.now), often=each(10))
    first = beat(app)
    tick(first)
    clock.advance(seconds=0.2)
    assert sorted(tick(first)) == ["at noon", "minutely"]
    end(first)
    clock.set(seconds=-ahead)
    second = beat(app)
    assert tick(second) == []
    sent = Counter()
    for _ in range(int(ahead // 2) + 60):
        clock.advance(seconds=2)
        sent.update(tick(second))
    seconds = ahead + 120
    assert sent["often"] == pytest.approx(seconds / 10, rel=0.25)
    assert sent["minutely"] == pytest.approx(seconds / 60, abs=1.1)
    assert sent["at noon"] == 0
    clock.advance(days=1)
    assert "at noon" in tick(second)


class Untold(schedule):
    """Says only whether it is due, and not when it will be."""

    def is_due(self, last_run_at):
        return schedstate(is_due=clock.now() - last_run_at >= self.run_every, next=60)

    def remaining_estimate(self, last_run_at):
        raise NotImplementedError


def test_a_schedule_that_tells_no_due_time_is_sent_and_holds_up_no_others(app):
    with_entries(app, untold=Untold(600, nowfun=clock.now))
    first = leading(app)
    assert sorted(tick(first)) == ["hourly", "untold"]
    end(first)
    second = beat(app)
    assert tick(second) == []
    clock.advance(hours=1)
    assert sorted(tick(second)) == ["hourly", "untold"]


def test_after_the_clock_was_set_back_entries_are_sent_again_soon_but_noon_only_once(
    app, monkeypatch
):
    steady = SimpleNamespace(time=lambda: in_london().timestamp())
    monkeypatch.setattr("django_redislock.celery.beat.time", steady)
    clock.time = datetime(2026, 11, 23, 11, 59, 59, 900_000, tzinfo=UTC)
    with_entries(app, minutely=crontab(nowfun=clock.now))
    scheduler = beat(app)
    tick(scheduler)
    clock.advance(seconds=0.2)
    assert sorted(tick(scheduler)) == ["at noon", "minutely"]
    clock.set(hours=-1)
    sent = Counter()
    for _ in range(70):
        clock.advance(minutes=1)
        sent.update(tick(scheduler))
    assert sent == {"minutely": 70}  # "hourly" was never sent, and is due at 13:00.


def in_london():
    return clock.time.astimezone(LONDON)


def test_in_a_clock_hour_that_comes_twice_each_due_time_is_sent_once(app):
    app.conf.timezone = "Europe/London"
    with_entries(
        app,
        minutely=crontab(nowfun=in_london),
        half=crontab("*/30", nowfun=in_london),
        nightly=crontab("30", "1", nowfun=in_london),
        often=schedule(600, nowfun=in_london),
    )
    clock.time = datetime(2026, 10, 25, 0, 40, tzinfo=LONDON).astimezone(UTC)
    first = leading(app, hours=1 / 6)
    assert sorted(tick(first)) == ["minutely", "often"]
    end(first)
    clock.advance(minutes=75)
    assert f"{in_london():%H:%M %Z}" == "01:05 GMT"
    second = beat(app)
    sent = Counter(tick(second))
    assert sent == {"minutely": 1, "half": 1, "nightly": 1, "often": 1}
    while in_london().hour < 3:
        clock.advance(seconds=30)
        sent.update(tick(second))
    often = sent.pop("often")  # Celery before 5.7 adds to the time on the wall.
    assert 6 <= often <= 13
    # At 01:05, each of 02:00 to 02:59, and 03:00.
    assert sent == {"minutely": 62, "half": 4, "nightly": 1, "hourly": 1}


def test_records_of_other_jobs_drive_out_no_time_of_a_sending(app_on_server, locks):
    locks.configure(RECORDS=1)
    second, first = beat(app_on_server), leading(app_on_server)
    assert tick(first) == ["hourly"]
    for number in range(3):
        run_job(f"job {number}", f"lock {number}", lambda: None)
    assert task_runs.record(f"{LOCK}:hourly") is None
    end(first)
    assert tick(second) == []
    clock.advance(hours=1)
    assert tick(second) == ["hourly"]


def test_the_record_of_an_entry_says_which_beat_has_sent_it_and_what_the_broker_has_refused(app):
    scheduler = leading(app)
    scheduler.refuses = True
    assert tick(scheduler) == []
    record = task_runs.record(f"{LOCK}:hourly")
    assert (record.last_failure is None, record.last_success) == (False, None)
    scheduler.refuses = False
    clock.advance(hours=1)
    assert tick(scheduler) == ["hourly"]
    record = task_runs.record(f"{LOCK}:hourly")
    assert record.last_success.owner.pid == os.getpid()
    assert not record.under_way


def test_what_cannot_be_noted_is_sent_all_the_same(app, redislock, monkeypatch):
    scheduler = leading(app)
    with ExitStack() as outage:

        def send_in_an_outage(entry, **kwargs):
            outage.enter_context(redislock.simulate_unavailable())
            scheduler.sent.append(entry.name)

        monkeypatch.setattr(Sender, "apply_async", lambda _, *a, **k: send_in_an_outage(*a, **k))
        assert tick(scheduler) == ["hourly"]


def test_a_beat_that_does_not_know_yet_that_another_leads_sends_nothing_twice(app):
    second, first = beat(app), leading(app)
    lock = held.get(LOCK)
    held.force_release(LOCK, lock.id)
    assert in_thread(lambda: tick(second)).result(HUNG) == ["hourly"]
    assert tick(first) == []
    record = task_runs.record(f"{LOCK}:hourly")
    assert not record.last_unended
    clock.advance(hours=1)
    assert in_thread(lambda: tick(second)).result(HUNG) == ["hourly"]
    end(second)


def test_only_the_leader_sends_and_a_standby_is_soon_done_with_a_tick(app, caplog):
    caplog.set_level(logging.INFO)
    second, first = beat(app), leading(app)
    for _ in range(2):
        assert in_thread(second.tick).result(HUNG) == 0
    assert second.sent == []
    assert caplog.text.count("This beat stands by") == 1
    assert caplog.text.count("This beat leads") == 1
    assert 0 <= first.tick() <= 1


def test_while_the_server_does_not_answer_nothing_is_sent_and_then_it_is_and_each_outage_is_told(
    app, redislock, caplog
):
    text = "This beat sends nothing"
    scheduler = leading(app)
    for outages in (1, 2):
        with redislock.simulate_unavailable():
            for _ in range(3):
                assert tick(scheduler) == []
        clock.advance(seconds=2)
        assert tick(scheduler) == ["hourly"]  # It still leads.
        assert caplog.text.count(f"{text} that is due") == outages
        clock.advance(hours=1)
    with redislock.simulate_unavailable():
        redislock.advance(60)  # Its term is over.
        for _ in range(3):
            assert tick(scheduler) == []
        assert scheduler.tick() > 0  # A server that refuses at once must not keep it busy.
        assert caplog.text.count(f"{text} until it leads") == 1
    assert tick(scheduler) == ["hourly"]


def test_what_nobody_knows_to_be_written_down_is_not_sent(app_on_server, locks, proxy):
    locks.on(proxy, TTL=3)
    scheduler = leading(app_on_server)
    proxy.rule_for_script(scripts.CONCLUDE.sha, "cut_before", times=2)
    assert tick(scheduler) == []

    def sent_later():
        clock.advance(seconds=2)
        return tick(scheduler)

    assert wait_until(sent_later) == ["hourly"]  # Once the lock is free that was not released.


def test_what_was_written_down_is_not_sent_by_a_beat_that_does_not_lead_any_more(app, caplog):
    scheduler = leading(app)
    entry = scheduler.schedule["hourly"]
    assert scheduler.is_due(entry)[0]
    end(scheduler)
    scheduler.apply_entry(entry)
    assert scheduler.sent == []
    clock.advance(hours=1)
    assert not scheduler.is_due(entry)[0]
    assert "hourly was due, but is not sent" in caplog.text


@pytest.mark.parametrize("name", ["x" * 300, "a\nb", "{}*"])
def test_an_entry_may_have_any_name(app, name):
    app.conf.beat_schedule = {name: app.conf.beat_schedule["hourly"]}
    assert tick(leading(app)) == [name]


def test_the_banner_names_the_lock_and_asks_nobody(app, redislock, tmp_path):
    app.conf.beat_leader_scheduler = None
    file = str(tmp_path / "schedule")
    with redislock.simulate_unavailable():
        scheduler = LeaderScheduler(app=app, schedule_filename=file, lazy=True)
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
def test_a_wrong_setting_is_named(app, conf, says):
    app.conf.update(conf)
    (setting,) = conf
    with pytest.raises(ImproperlyConfigured, match=f"Celery's setting {setting}.*") as error:
        LeaderScheduler(app=app)
    assert says in str(error.value)


# --- django-celery-beat ---------------------------------------------------------------------------


def beats_on_a_database():
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

    class Database(DatabaseScheduler):
        def apply_async(self, entry, **kwargs):
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
        app.beats = []
        first, second = beat(app), beat(app)
        print(sorted(tick(first)))
        PeriodicTask.objects.filter(name="hourly").update(last_run_at=ago)  # It was not synced.
        first._term.__exit__(None, None, None)  # Nor closed: as if it was killed.
        print(sorted(tick(second)))
        second.close()

        # A week ago, a leader sends two more.
        for name in ("disabled", "made anew"):
            row = PeriodicTask.objects.create(name=name, task="tidy", interval=hour)
            PeriodicTask.objects.filter(pk=row.pk).update(last_run_at=ago - timedelta(days=7))
        week_ago = timezone.now() - timedelta(days=7)
        with mock.patch("django_celery_beat.models.now", return_value=week_ago):
            third = beat(app)
            print(sorted(tick(third)))
            third.close()
        for change in ({"enabled": False}, {"enabled": True}):
            row = PeriodicTask.objects.get(name="disabled")
            vars(row).update(change)
            row.save()
        PeriodicTask.objects.get(name="made anew").delete()
        PeriodicTask.objects.create(name="made anew", task="tidy", interval=hour)
        print(sorted(tick(beat(app))))


@pytest.mark.slow
def test_a_schedule_in_the_database_is_sent_by_one_beat():
    redislock = '{"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}'
    code = f"from {__name__} import beats_on_a_database as run; run()"
    ran = python("-c", code, env=environment_for() | {"TESTS_REDISLOCK": redislock})
    assert ran.stdout.splitlines() == [
        "['clocked', 'hourly', 'once']",
        "[]",
        "['disabled', 'made anew']",
        "[]",
    ]
