"""``manage.py locks explain``: what became of a call, from what is known. See tests/golden too."""

import re

import pytest
from django.db import connection

from django_redislock import held, task_runs
from django_redislock.completed_runs import CompletedRun
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.management import explain
from django_redislock.rules.flows import Busy, RunMarker
from django_redislock.rules.options import Options
from tests.operations.commands import locks_command, ran
from tests.operations.test_once_command import add_run
from tests.support.matrix import needs_scripts

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks"), needs_scripts]

TASK = "lottery.tasks.draw"
ID = "5a0ae5a5-5e6c-4a0e-8d0e-0f0f0f0f0f0f"
OF_OTHER = Options(ttl=10, using="other")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def stand_in_line(name, task_id):
    busy = Lock(name, Options(wait=0.0)).attempt()
    assert isinstance(busy, Busy)
    task_runs.stand_in_line(name, task_id, 0, busy, spacing=0.0, permits=1, using="default")


def test_a_task_is_found_by_its_id_under_any_lock_of_any_alias(settings):
    settings.REDISLOCK = settings.REDISLOCK | {
        "other": settings.REDISLOCK["default"] | {"KEY_PREFIX": "other"}
    }
    ran("lottery", "another", TASK)
    with busy_with(Activity(task=TASK, task_id=ID)), Lock("raffle", OF_OTHER, RunMarker(ID, 60)):
        found = locks_command("explain", ID, "--json").json
        assert {(fact["lock"], fact["task_id"]) for fact in found["facts"]} == {("raffle", ID)}
        assert "  raffle: lottery.tasks.draw[" in locks_command("explain", ID).out
        assert locks_command("explain", ID, "--alias", "default").status == 1
    story = locks_command("explain", TASK, "--job").out
    assert story.count("It ended well") == 2
    assert locks_command("explain", TASK, "--job", "--alias", "other").out in story


def test_calls_without_a_lease_are_explained():
    task_runs.announce("lottery", "announced", 60, delay=30, using="default")
    held.pause("lottery", 60, by="ann")
    for task_id in ("first", "second"):
        stand_in_line("lottery", task_id)
    story = locks_command("explain", "lottery").out
    assert re.search(rf"call announced is .* until {TIME} .* not run before {TIME}\.", story)
    assert re.search(
        rf"call first was deferred.*Now it is the first, and it comes back by {TIME}", story
    )
    (fact,) = locks_command("explain", "second", "--json").json["facts"]
    assert (fact["lock"], fact["task_id"]) == ("lottery", "second")
    assert "1 run stands before it" in fact["says"]
    assert "announced" in locks_command("explain", "announced").out


def test_a_job_is_explained_with_its_completed_runs(monkeypatch):
    for number in range(3):
        add_run(f"lottery:{number}", 90 - number)
    add_run("other", task="other.tasks.draw")
    told = locks_command("explain", TASK, "--job", "--json").json
    assert [one["lock"] for one in told["facts"]] == [f"lottery:{number}" for number in range(3)]
    monkeypatch.setattr(explain, "MOST_EXAMINED", 2)
    told = locks_command("explain", TASK, "--job", "--json").json
    assert [one["lock"] for one in told["facts"]] == ["lottery:1", "lottery:2"]
    assert told["notes"] == ["Only the last 2 completed runs were looked at."]


def test_a_job_of_which_a_silent_node_may_know_more_is_not_told_in_full(monkeypatch):
    ran("lottery", ID, TASK)
    records = held.records

    def without_one(**how):
        found = records(**how)
        found.silent = ["10.0.0.9:7001"]
        return found

    monkeypatch.setattr(held, "records", without_one)
    for job, told in ((TASK, "It ended well"), ("shop.nothing", "")):
        outcome = locks_command("explain", job, "--job")
        assert (outcome.status, told in outcome.out) == (3, True)
        assert "10.0.0.9:7001" in outcome.err


def test_a_task_under_several_permits_of_a_lock_is_told_of_once(monkeypatch):
    monkeypatch.setattr(explain, "LOOKED_AT_ONCE", 1)
    with (
        Lock("gpu", Options(ttl=10, limit=2)),
        busy_with(Activity(task=TASK, task_id=ID)),
        Lock("gpu", Options(ttl=10, limit=2)),
    ):
        assert len(locks_command("explain", ID, "--json").json["facts"]) == 1


def test_completed_runs_are_looked_for_where_they_are_said_to_be(settings):
    class Elsewhere:
        def db_for_read(self, *_, **__):
            return "elsewhere"

    add_run("lottery", 90)
    settings.DATABASE_ROUTERS = [Elsewhere()]
    assert "was completed in database 'default'" in locks_command("explain", "lottery").out


@pytest.mark.django_db(transaction=True)
def test_a_database_without_the_table_is_told_once():
    with connection.schema_editor() as editor:
        editor.delete_model(CompletedRun)
    try:
        outcome = locks_command("explain", "never-seen")
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(CompletedRun)
    assert outcome.status == 1
    assert outcome.err.count("Database 'default' cannot tell of completed runs.") == 1
