"""``manage.py locks once``: which runs a database knows to be completed. It asks no lock server."""

import logging
import re
from datetime import timedelta
from itertools import count

import pytest
from django.db import connections
from django.utils import timezone

from django_redislock.models import CompletedRun, Fence
from tests.operations.test_locks_command import answers, locks_command
from tests.support.databases import on_sqlite

__all__ = ["answers"]  # A fixture.

pytestmark = pytest.mark.django_db

DAY = 86_400.0
_fences = count(1)


def add_run(name, ago=60.0, *, using="default", **fields):
    """A run that was completed so many seconds ago."""
    alias = fields.pop("alias", "default")
    fence = next(_fences)
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


def test_the_list_shows_the_latest_first():
    add_run("old", 3 * DAY)
    new = add_run("new", 3630)
    outcome = locks_command("once")
    assert outcome == locks_command("once", "list")
    header, first, second = outcome.out.splitlines()
    assert header.split() == ["NAME", "COMPLETED", "BY", "TASK", "FENCE"]
    assert re.split("  +", first) == [
        "new",
        "1 h 00 min ago",
        f"web-1:7 {new.task_id}",
        "lottery.tasks.draw",
        str(new.fence),
    ]
    assert second.startswith("old   3 d 0 h ago")


def test_an_empty_list_is_said_so():
    assert locks_command("once").out == "Database 'default' has no completed run.\n"
    add_run("lottery")
    outcome = locks_command("once", "list", "--search", "raffle")
    assert outcome.out == "Database 'default' has no such completed run.\n"
    assert locks_command("once", "list", "--search", "raffle", "--json").json == []


def test_json_has_these_keys():
    run = add_run("lottery", 90, task_id="")
    (printed,) = locks_command("once", "list", "--json").json
    assert 90 <= printed.pop("ago") < 90 + 60
    assert printed == {
        "name": "lottery",
        "alias": "default",
        "task": "lottery.tasks.draw",
        "task_id": None,
        "place": "web-1:7",
        "fence": run.fence,
        "lease": run.lease_id,
        "at": round(run.completed_at.timestamp(), 3),
    }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--older-than", "1d"], ["old"]),
        (["--search", "NEW"], ["new"]),
        (["--search", "raffle.draw"], ["old"]),
        (["--search", "id of the old"], ["old"]),
        (["--search", "raffle", "--older-than", "10d"], []),
        (["--limit", "1"], ["new"]),
    ],
)
def test_options_choose_among_the_runs(options, names):
    add_run("new")
    add_run("old", 3 * DAY, task="raffle.draw", task_id="id of the old one")
    outcome = locks_command("once", "list", "--json", *options)
    assert [one["name"] for one in outcome.json] == names
    assert bool(outcome.err) == ("--limit" in options)


def test_options_may_stand_before_and_after_the_second_act():
    add_run("new")
    add_run("old", 3 * DAY)
    for arguments in (["--older-than", "1d"], ["--older-than", "1d", "list"]):
        (one,) = locks_command("once", "--json", "--database", "default", *arguments).json
        assert one["name"] == "old"
    assert locks_command("once", "--database", "archive").status == 2


def test_aliases_are_shown_if_there_are_several(settings):
    settings.REDISLOCK = {**settings.REDISLOCK, "other": settings.REDISLOCK["default"]}
    add_run("lottery")
    add_run("raffle", alias="other")
    assert locks_command("once").out.split()[:2] == ["NAME", "ALIAS"]
    (only,) = locks_command("once", "list", "--alias", "other", "--json").json
    assert only["alias"] == "other"


def test_nothing_that_somebody_wrote_moves_the_cursor_or_hides():
    add_run("a\u202eb", task_id="\x1b[2J", task="t\u2028t", place="h\x07:1")
    out = locks_command("once").out
    assert all(char.isprintable() or char == "\n" for char in out)
    assert r"$'a\342\200\256b'" in out


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


def test_a_no_and_a_dry_run_forget_nothing(answers, audit):
    add_run("lottery", 2 * DAY)
    answers("n")
    for which in ("lottery", "--older-than=1d"):
        outcome = locks_command("once", "forget", which)
        assert (outcome.status, outcome.err) == (1, "Nothing was forgotten.")
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


def test_names_that_are_not_known_are_told():
    add_run("lottery")
    outcome = locks_command("once", "forget", "lottery", "raffle", "a b", "--yes")
    assert outcome.status == 1
    assert outcome.err.splitlines() == [
        "Database 'default' has no completed run of raffle.",
        "Database 'default' has no completed run of 'a b'.",
    ]
    assert known() == []


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


def test_json_says_how_many(answers):
    add_run("lottery", 2 * DAY)
    add_run("raffle")
    answers("y")
    outcome = locks_command("once", "forget", "--older-than", "1d", "--json")
    assert outcome.json == {"forgotten": 1}
    assert "Forget 1 completed run older than 1 d 0 h? [y/N]" in outcome.err
    assert locks_command("once", "forget", "raffle", "--json", "--yes").json == {"forgotten": 1}


@pytest.mark.parametrize("which", [[], ["lottery", "--older-than", "1d"]])
def test_forget_wants_to_know_what_is_meant(which):
    outcome = locks_command("once", "forget", "--yes", *which)
    assert outcome == (2, "", "Say which runs: NAME..., or --older-than TIME.")


def test_a_run_is_forgotten_whichever_alias_its_lock_had():
    add_run("lottery", alias="jobs")
    assert locks_command("once", "forget", "lottery", "--yes", "--alias", "default").status == 1
    assert locks_command("once", "forget", "lottery", "--yes").status == 0
    assert known() == []


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


@pytest.mark.parametrize("act", [["list"], ["forget", "x", "--yes"], ["forget", "--older-than=1d"]])
@on_sqlite
def test_a_database_without_the_table_says_how_to_make_it(act, make_database):
    archive = make_database("archive", migrate=False)
    outcome = locks_command("once", *act, "--database", archive)
    assert outcome.status == 2
    assert outcome.err.startswith("Database 'archive' has no table of completed runs. Run `manage")
    assert "migrate django_redislock --database=archive" in outcome.err


@on_sqlite
def test_a_database_that_does_not_answer_is_said_so(make_database, tmp_path):
    archive = make_database("archive")
    connections[archive].close()
    connections[archive].settings_dict["NAME"] = str(tmp_path / "no" / "such.sqlite3")
    outcome = locks_command("once", "list", "--database", archive)
    assert outcome.status == 3
    assert "The database 'archive' cannot answer: unable to open" in outcome.err


def test_an_unknown_alias_of_either_kind_is_refused():
    outcome = locks_command("once", "list", "--database", "archive")
    assert outcome.status == 2
    assert "--database must be the alias of a database, not 'archive'" in outcome.err
    assert locks_command("once", "list", "--alias", "archive").status == 2


def test_a_name_may_be_typed_in_another_form_of_the_same_letters():
    add_run("lottery:\u00fcber")
    assert locks_command("once", "forget", "lottery:u\u0308ber", "--yes").status == 0
    assert known() == []


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
