"""``manage.py locks explain``: what became of a call, from what is known."""

import re

import pytest
from django.db import connection

from django_redislock import distributed_lock, held, task_runs
from django_redislock.completed_runs import CompletedRun
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.management import explain
from django_redislock.rules.flows import Busy, RunMarker
from django_redislock.rules.options import Options
from tests.operations.test_locks_command import locks_command
from tests.operations.test_once_command import add_run
from tests.support.matrix import needs_scripts

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks"), needs_scripts]

ID = "5a0ae5a5-5e6c-4a0e-8d0e-0f0f0f0f0f0f"
OF_OTHER = Options(ttl=10, using="other")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def run(name, task_id):
    """Run a task, as far as locks see one."""
    with (
        busy_with(Activity(task="lottery.tasks.draw", task_id=task_id)),
        Lock(name, Options(ttl=10), RunMarker(task_id, 60)),
    ):
        pass


def stand_in_line(name, task_id):
    busy = Lock(name, Options(wait=0.0)).attempt()
    assert isinstance(busy, Busy)
    task_runs.stand_in_line(name, task_id, 0, busy, spacing=0.0, permits=1, using="default")


def test_a_name_is_explained_oldest_first():
    add_run("lottery", 90)
    run("lottery", ID)
    held.pause("lottery", 60, by="ann", reason="upgrade")
    outcome = locks_command("explain", "lottery")
    assert outcome.status == 0
    *facts, rest = outcome.out.splitlines()
    assert all(re.match(rf"{TIME}  ", fact) for fact in facts)
    assert facts == sorted(facts, key=lambda fact: fact[:19])
    assert "was completed in database 'default'" in facts[0]
    got = rf"lottery\.tasks\.draw\[{ID}\] on \S+ got the lock \(lease \w+, fence \d+\)\."
    assert re.search(rf"{got} It ended well at {TIME}, after 0\.\d s\.$", facts[1])
    # The record says no more of this run than its lease does.
    assert len(facts) == 3
    assert "ann has paused the lock, because of 'upgrade' (lease " in facts[-1]
    assert rest == "No more is known. Records are kept for 30 d 0 h."

    held.resume("lottery", by="bob")
    *_, over, _ = locks_command("explain", "lottery").out.splitlines()
    assert "ann paused the lock, because of 'upgrade' (lease " in over
    assert re.search(rf"\. The pause ended at {TIME}, after \d\.\d s\.$", over)


def test_a_task_is_found_by_its_id_under_any_lock_of_any_alias(settings):
    settings.REDISLOCK = settings.REDISLOCK | {
        "other": settings.REDISLOCK["default"] | {"KEY_PREFIX": "other"}
    }
    run("lottery", "another")
    with busy_with(Activity(task="lottery.tasks.draw", task_id=ID)), Lock("raffle", OF_OTHER):
        found = locks_command("explain", ID, "--json").json
        assert {fact["lock"] for fact in found["facts"]} == {"raffle"}
        assert {fact["task_id"] for fact in found["facts"]} == {ID}
        assert "  raffle: lottery.tasks.draw[" in locks_command("explain", ID).out
        assert locks_command("explain", ID, "--alias", "default").status == 1


def test_a_name_with_a_limit_is_explained_over_all_its_permits():
    with distributed_lock("gpu", limit=2):
        with (
            busy_with(Activity(task="lottery.tasks.draw", task_id=ID)),
            Lock("gpu", Options(limit=2), RunMarker(ID, 60)),
        ):
            explained = locks_command("explain", "gpu").out
            assert explained.count(f"draw[{ID}]") == 1
        assert re.search(rf"{ID}\] on \S+ got permit 2 of 2 ", explained)
        assert "got permit 1 of 2 (lease " in explained
        # It is over, and permit 2 is free: its past is told all the same.
        for what in ("gpu", ID):
            explained = locks_command("explain", what).out
            assert re.search(rf"{ID}\] on \S+ got permit 2 of 2 .* It ended well", explained)


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


def test_a_job_is_explained_over_all_its_locks():
    run("lottery", ID)
    assert "It ended well" in locks_command("explain", "lottery.tasks.draw", "--job").out


def test_a_job_is_explained_with_its_completed_runs(monkeypatch):
    for number in range(3):
        add_run(f"lottery:{number}", 90 - number)
    add_run("other", task="other.tasks.draw")
    told = locks_command("explain", "lottery.tasks.draw", "--job", "--json").json
    assert [one["lock"] for one in told["facts"]] == [f"lottery:{number}" for number in range(3)]
    monkeypatch.setattr(explain, "MOST_EXAMINED", 2)
    told = locks_command("explain", "lottery.tasks.draw", "--job", "--json").json
    assert [one["lock"] for one in told["facts"]] == ["lottery:1", "lottery:2"]
    assert told["notes"] == ["Only the last 2 completed runs were looked at."]


def test_a_job_is_explained_over_all_aliases_that_answer(settings):
    settings.REDISLOCK = settings.REDISLOCK | {
        "other": settings.REDISLOCK["default"] | {"KEY_PREFIX": "other"},
        "down": {"LOCATION": "redis://127.0.0.1:1/0"},
    }
    with (
        busy_with(Activity(task="lottery.tasks.draw", task_id=ID)),
        Lock("raffle", OF_OTHER, RunMarker(ID, 60)),
    ):
        pass
    outcome = locks_command("explain", "lottery.tasks.draw", "--job")
    assert "It ended well" in outcome.out
    assert outcome.status == 3
    assert "down" in outcome.err
    alone = locks_command("explain", "lottery.tasks.draw", "--job", "--alias", "other")
    assert (alone.status, alone.out) == (0, outcome.out)


def test_a_job_of_which_a_silent_node_may_know_more_is_not_told_in_full(monkeypatch):
    run("lottery", ID)
    records = held.records

    def without_one(**how):
        found = records(**how)
        found.silent = ["10.0.0.9:7001"]
        return found

    monkeypatch.setattr(held, "records", without_one)
    for job, told in (("lottery.tasks.draw", "It ended well"), ("shop.nothing", "")):
        outcome = locks_command("explain", job, "--job")
        assert (outcome.status, told in outcome.out) == (3, True)
        assert "10.0.0.9:7001" in outcome.err


def test_a_task_under_several_permits_of_a_lock_is_told_of_once(monkeypatch):
    monkeypatch.setattr(explain, "LOOKED_AT_ONCE", 1)
    with (
        Lock("gpu", Options(ttl=10, limit=2)),
        busy_with(Activity(task="lottery.tasks.draw", task_id=ID)),
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


def test_a_pause_that_has_not_begun_is_told_as_one():
    with distributed_lock("lottery"):
        held.pause("lottery", 60, by="ann", reason="upgrade")
        told = locks_command("explain", "lottery").out
    assert "ann will pause the lock, because of 'upgrade', as soon as" in told


def test_nothing_is_no_name():
    for args in (["explain", ""], ["explain", "", "--job"]):
        outcome = locks_command(*args)
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err == "Name a lock, a job, or the id of a task."


def test_what_nobody_knows_is_said_in_one_line():
    outcome = locks_command("explain", "never-seen")
    assert (outcome.status, outcome.out) == (1, "")
    known = "Celery has no result backend that could tell of it."
    assert outcome.err == f"Nothing is known of never-seen. {known}"


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


def test_nothing_odd_reaches_the_terminal():
    name = "a\u202eb"
    with busy_with(Activity(task="draw\x1b[2J", task_id=ID)), distributed_lock(name):
        for outcome in (locks_command("explain", name), locks_command("explain", ID)):
            assert outcome.status == 0
            assert outcome.out.replace("\n", "").isprintable()
    assert locks_command("explain", "never\x1b[2J").err.isprintable()


def test_a_server_that_does_not_answer_hides_no_other(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "silent": {"LOCATION": "redis://127.0.0.1:1/0"}}
    run("lottery", ID)
    outcome = locks_command("explain", ID)
    assert (outcome.status, outcome.out[19:31]) == (3, "  lottery: l")
    assert outcome.err.startswith("The server 127.0.0.1:1 (silent) cannot answer: ")
    outcome = locks_command("explain", "lottery", "--alias", "silent")
    assert (outcome.status, outcome.out) == (3, "")


@pytest.mark.parametrize("what", [[ID], ["lottery.tasks.draw", "--job"]])
def test_an_alias_with_a_wrong_setting_hides_no_other(settings, what):
    one = settings.REDISLOCK["default"]
    run("lottery", ID)
    settings.REDISLOCK = {"default": {**one, "TTL": "soon"}, "other": one}
    outcome = locks_command("explain", *what)
    assert outcome.status == 3
    assert "It ended well" in outcome.out
    assert outcome.err.startswith("REDISLOCK['default']['TTL'] must be a number of seconds")
    settings.REDISLOCK = {"default": {**one, "TTL": "soon"}}
    assert locks_command("explain", *what).status == 2
