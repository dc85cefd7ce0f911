"""A quorum keeps locks only: what becomes of jobs there, and which words say so."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.urls import reverse

from django_redislock import distributed_lock, held, single_instance, single_instance_task
from django_redislock.backends.registry import backends
from django_redislock.celery.beat import LeaderScheduler
from django_redislock.management.single_instance import SingleInstanceMixin
from tests.support.celery_app import celery_app
from tests.support.stored import NAME

pytestmark = pytest.mark.places("quorum")
NO_RECORDS = "REDISLOCK['default'] is a quorum, which keeps no records of runs."
TO_WRITE = 'Write using="runs" there'


@single_instance(NAME, min_hold=60)
def draw():
    return "drawn"


def never():
    raise AssertionError("no body may start")


def test_a_job_runs_and_is_skipped_and_leaves_no_record(place):
    assert draw() == "drawn"
    assert draw()["skipped"] == "cooling"
    assert held.force_release(NAME, held.get(NAME).id)
    with distributed_lock(NAME):
        assert draw()["skipped"] == "busy"
    left = place.keys()
    kept = {key.rpartition(b":")[2].decode() for key in left}
    assert not kept & {"runs", "ran", "finished", "done"}
    assert (held.records(), held.record(NAME), held.job("draw")) == ([], None, None)


def test_an_option_that_needs_records_is_refused_with_the_line_to_write(place):
    class Command(SingleInstanceMixin, BaseCommand):
        single_instance = {"name": NAME, "once": 60}

    refused = single_instance(NAME, once=60)(draw.__wrapped__)
    for run in (refused, lambda: call_command(Command())):
        with pytest.raises(ImproperlyConfigured, match="once=60 needs records") as caught:
            run()
        assert TO_WRITE in str(caught.value)
    newest = single_instance(NAME, on_conflict="replace")(draw.__wrapped__)
    with pytest.raises(ImproperlyConfigured, match='on_conflict="replace" needs records'):
        newest()
    with celery_app(broker_url="memory://"):
        for option in ({"unique_queued": True}, {"debounce": 5}):
            task = single_instance_task(key=NAME, name=f"{option}", **option)(never)
            with pytest.raises(ImproperlyConfigured, match=f"{next(iter(option))} needs records"):
                task.delay()
        task = single_instance_task(key=NAME, give_up_after=3, acks_late=True)(never)
        task.push_request(id="the-id", called_directly=False, args=(), kwargs={})
        with pytest.raises(ImproperlyConfigured, match="give_up_after needs records of runs"):
            task.run()
    assert held.get(NAME) is None


def test_the_settings_of_records_are_refused(place):
    for key in ("RECORDS", "RECORDS_FOR"):
        setting = place.setting()
        place.configure(**{key: 1000})
        with pytest.raises(ImproperlyConfigured, match=f"must leave {key} out"):
            backends["default"]
        place._settings.REDISLOCK = {"default": setting}


def test_a_beat_that_keeps_its_times_there_does_not_start(place):
    with celery_app() as app, pytest.raises(ImproperlyConfigured, match="keeps no records of runs"):
        LeaderScheduler(app)


@pytest.mark.django_db
def test_the_commands_say_in_one_sentence_that_there_are_no_records(place, capsys):
    draw()
    call_command("locks", "runs")
    assert capsys.readouterr().err.splitlines() == [NO_RECORDS]
    with pytest.raises(CommandError, match="keeps no records of runs"):
        call_command("locks", "runs", "--no-success-for", "1h", "--fail")
    call_command("locks", "metrics", "--no-doctor")
    metrics = capsys.readouterr().out
    assert metrics.startswith(f"# {NO_RECORDS}\n# HELP ")
    assert "redislock_job" not in metrics
    assert "redislock_records" not in metrics
    call_command("locks", "explain", NAME)
    assert NO_RECORDS in capsys.readouterr().out


@pytest.mark.django_db
def test_so_does_the_page(place, admin_client):
    page = admin_client.get(reverse("admin:django_redislock_heldlock_changelist"))
    assert NO_RECORDS.replace("'", "&#x27;") in page.content.decode()
