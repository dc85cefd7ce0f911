"""Django's tasks, or those of its backport, with real workers of django-tasks-db."""

import json
import sqlite3
from contextlib import closing

import pytest

from django_redislock import held
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.neighbours.programs"]
pytest.importorskip("django_tasks_db")

SITE = "tests.neighbours.tasks_site"


def results(database):
    """The states of all tasks, and what the successful ones returned."""
    query = "SELECT status, return_value FROM django_tasks_database_dbtaskresult"
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        rows = connection.execute(query).fetchall()
    return [(status, json.loads(value or "null")) for status, value in rows]


def test_of_two_workers_one_runs_and_the_lock_of_a_killed_one_passes_on(
    program, journal, locks, tmp_path
):
    database = str(tmp_path / "tasks.sqlite3")
    queued = program(SITE, database, *["load", journal.key] * 2, "load_after", journal.key)
    assert queued.process.wait(HUNG) == 0, queued.log
    first = program(SITE, database, "work")
    journal.wait_for("start")
    owner = str(held.get(journal.key).owner)
    program(SITE, database, "work")

    def states():
        return sorted(status for status, _ in results(database))

    # The second skips, the third waits.
    wait_until(lambda: states() == ["RUNNING", "RUNNING", "SUCCESSFUL"], message="one skips")
    skipped = {"skipped": "busy", "lock": journal.key, "holder": owner}
    assert ("SUCCESSFUL", skipped) in results(database)
    wait_until(lambda: held.get(journal.key).waiters == 1, message="one waits")
    assert len(journal.events("start")) == 1
    first.kill()
    journal.wait_for("start", 2)
    journal.open_gate()
    # Nobody runs the killed one again: django-tasks-db does not.
    wait_until(lambda: states() == ["RUNNING", "SUCCESSFUL", "SUCCESSFUL"], message="it ends")
    assert len(journal.events("end")) == 1
    assert held.get(journal.key) is None
