"""``manage.py locks once``: which runs a database knows to be completed. It asks no lock server."""

import logging
from datetime import timedelta
from itertools import count

import pytest
from django.db import connections
from django.utils import timezone

from django_redislock.models import CompletedRun, Fence
from tests.operations.commands import locks_command
from tests.support.databases import on_sqlite

pytestmark = pytest.mark.django_db

DAY = 86_400.0
_fences = count(1)


def add_run(name, ago=60.0, *, using="default", **fields):
    """A run that was completed so many seconds ago."""
    alias = fields.pop("alias", "default")
    fence = fields.pop("fence", None) or next(_fences)
    return CompletedRun.objects.using(using).create(
        **{
            "key": Fence.key_of(name),
            "name": name,
            "alias": alias,
            "task": "lottery.tasks.draw",
            "task_id": f"id-{fence}",
            "place": "web-1:7",
            "fence": fence,
            "lease_id": f"{fence:016x}",
            "completed_at": timezone.now() - timedelta(seconds=ago),
            **fields,
        }
    )


def known(using="default"):
    return sorted(CompletedRun.objects.using(using).values_list("name", flat=True))


# --- list -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--older-than", "1d"], ["old"]),
        (["--search", "NEW"], ["new"]),
        (["--search", "raffle.draw"], ["old"]),
        (["--search", "id of the old"], ["old"]),
        (["--search", "raffle", "--older-than", "10d"], []),
        (["--limit", "1"], ["new"]),
        ([], ["new", "old"]),
    ],
)
def test_options_choose_among_the_runs_and_the_latest_is_the_first(options, names):
    assert locks_command("once").out == "Database 'default' has no completed run.\n"
    add_run("old", 3 * DAY, task="raffle.draw", task_id="id of the old one")
    add_run("new")
    outcome = locks_command("once", "list", "--json", *options)
    assert [one["name"] for one in outcome.json] == names
    assert bool(outcome.err) == ("--limit" in options)


def test_options_may_stand_before_and_after_the_second_act():
    add_run("new")
    add_run("old", 3 * DAY)
    for arguments in (["--older-than", "1d"], ["--older-than", "1d", "list"]):
        (one,) = locks_command("once", "--json", "--database", "default", *arguments).json
        assert one["name"] == "old"


def test_runs_under_locks_of_all_aliases_are_shown_and_forgotten_unless_one_is_named(settings):
    settings.REDISLOCK = {**settings.REDISLOCK, "other": settings.REDISLOCK["default"]}
    add_run("lottery:\u00fcber")
    add_run("raffle", alias="other")
    assert locks_command("once").out.split()[:2] == ["NAME", "ALIAS"]
    (only,) = locks_command("once", "list", "--alias", "other", "--json").json
    assert only["alias"] == "other"
    assert locks_command("once", "forget", "raffle", "--yes", "--alias", "default").status == 1
    # A name may be typed in another form of the same letters.
    assert locks_command("once", "forget", "raffle", "lottery:u\u0308ber", "--yes").status == 0
    assert known() == []


# --- forget ---------------------------------------------------------------------------------------


@pytest.fixture
def audit(caplog):
    """What the log for audits was told."""

    def told():
        return [one.getMessage() for one in caplog.records if one.name == "django_redislock.audit"]

    caplog.set_level(logging.INFO, "django_redislock.audit")
    return told


def test_forget_shows_the_runs_asks_and_tells_the_audit_log(answers, audit):
    run = add_run("lottery")
    add_run("raffle")
    answers("y")
    outcome = locks_command("once", "forget", "lottery", "--reason", "drawn by mistake")
    assert outcome.status == 0
    assert run.task_id in outcome.out
    assert "Forget 1 completed run? [y/N] " in outcome.out
    assert outcome.out.endswith("Forgot 1 completed run.\n")
    assert known() == ["raffle"]
    (line,) = audit()
    assert line.startswith(f"Lock 'lottery' (default): run 'web-1:7 {run.task_id}' in database")
    assert "by manage.py locks'" in line
    assert line.endswith("reason 'drawn by mistake'")
    outcome = locks_command("once", "forget", "raffle", "--json")
    assert outcome.json == {"forgotten": 1}
    assert "Forget 1 completed run? [y/N]" in outcome.err


def test_a_no_and_a_dry_run_forget_nothing(answers, audit):
    add_run("lottery", 2 * DAY)
    answers("n")
    for which, runs in {"lottery": "run", "--older-than=1d": "run older than 1 d 0 h"}.items():
        outcome = locks_command("once", "forget", which)
        assert (outcome.status, outcome.err) == (1, "Nothing was forgotten.")
        assert outcome.out.endswith(f"Forget 1 completed {runs}? [y/N] ")
        outcome = locks_command("once", "forget", which, "--dry-run")
        assert outcome.out.endswith("Would forget 1 completed run.\n")
    assert known() == ["lottery"]
    assert audit() == []


def test_a_run_that_has_completed_meanwhile_is_not_forgotten(monkeypatch):
    run = add_run("lottery")

    def answer():
        run.delete()
        add_run("lottery")
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert locks_command("once", "forget", "lottery").out.endswith("Forgot 0 completed runs.\n")
    assert known() == ["lottery"]


def test_by_age_all_older_ones_are_forgotten_in_one_statement(audit, django_assert_num_queries):
    add_run("new", 29 * DAY)
    for number in range(20):
        add_run(f"lottery:{number}", 31 * DAY)
    with django_assert_num_queries(2):  # One counts, for the question.
        outcome = locks_command("once", "forget", "--older-than", "30d", "--yes")
    assert outcome == (0, "Forgot 20 completed runs.\n", "")
    assert known() == ["new"]
    (line,) = audit()
    assert line.startswith("All runs completed before ")
    assert "(20) in database 'default' forgotten by" in line


# --- databases ------------------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize("chosen", [["lottery"], ["--older-than", "30s"]], ids=" ".join)
def test_what_is_forgotten_is_committed_also_with_autocommit_off(chosen, make_database):
    archive = make_database("archive")
    add_run("lottery", using=archive)
    connection = connections[archive]
    connection.set_autocommit(False)
    outcome = locks_command("once", "forget", *chosen, "--yes", "--database", archive)
    connection.rollback()  # As when the process ends.
    connection.set_autocommit(True)
    assert outcome.out.endswith("Forgot 1 completed run.\n")
    assert known(archive) == []


@on_sqlite
def test_each_database_has_its_own(make_database):
    archive = make_database("archive")
    add_run("lottery", using=archive)
    assert "no completed run" in locks_command("once").out
    assert "lottery" in locks_command("once", "list", "--database", archive).out
    assert locks_command("once", "forget", "lottery", "--yes").status == 1
    outcome = locks_command("once", "forget", "lottery", "--yes", "--database", archive)
    assert outcome.out.endswith("Forgot 1 completed run.\n")
    assert known(archive) == []


@on_sqlite
def test_a_database_without_the_table_says_how_to_make_it(make_database):
    archive = make_database("archive", migrate=False)
    for act in (["list"], ["forget", "x", "--yes"], ["forget", "--older-than=1d"]):
        outcome = locks_command("once", *act, "--database", archive)
        assert outcome.status == 2
        says = "Database 'archive' has no table of completed runs. Run `manage"
        assert outcome.err.startswith(says)
        assert "migrate django_redislock --database=archive" in outcome.err


@on_sqlite
def test_a_database_that_does_not_answer_is_said_so(make_database, tmp_path):
    archive = make_database("archive")
    connections[archive].close()
    connections[archive].settings_dict["NAME"] = str(tmp_path / "no" / "such.sqlite3")
    outcome = locks_command("once", "list", "--database", archive)
    assert outcome.status == 3
    assert "The database 'archive' cannot answer: unable to open" in outcome.err


class Replicas:
    """A router that reads from a replica."""

    def db_for_read(self, model, **hints):
        return "replica" if model is CompletedRun else None


@on_sqlite
def test_what_is_forgotten_is_deleted_where_it_was_written(make_database, settings):
    replica = make_database("replica")
    for using in ("default", replica):
        add_run("lottery", using=using)
        add_run("raffle", 2 * DAY, using=using)
    settings.DATABASE_ROUTERS = [Replicas()]
    CompletedRun.objects.prune(timezone.now() - timedelta(days=1))
    assert (known("default"), known(replica)) == (["lottery"], ["lottery", "raffle"])
    CompletedRun.objects.forget()
    assert (known("default"), known(replica)) == ([], ["lottery", "raffle"])
