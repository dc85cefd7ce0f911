"""Two clusters of django-q2, with real workers."""

import sqlite3
from contextlib import closing

import pytest

from django_redislock import held
from tests.support.waiting import wait_until

pytest_plugins = ["tests.neighbours.programs"]
pytest.importorskip("django_q")

SITE = "tests.neighbours.q_site"


class Results:
    """What a database has: the results of its cluster, and how many messages wait."""

    def __init__(self, database):
        self._database = database

    def ask(self, query):
        with closing(sqlite3.connect(self._database, timeout=30)) as connection:
            return connection.execute(query).fetchall()

    def tasks(self):
        return self.ask("SELECT success, attempt_count FROM django_q_task")

    def waiting(self):
        return self.ask("SELECT count(*) FROM django_q_ormq")[0][0]


@pytest.fixture
def site(program, tmp_path, journal):
    def plan(name, job):
        database = str(tmp_path / name)
        made = program(SITE, database, "plan", job, journal.key)
        assert made.process.wait(60) == 0, made.log
        return database

    return plan


def test_of_two_clusters_with_a_schedule_each_one_runs_the_job(site, program, journal):
    databases = [site(name, "nightly") for name in ("one", "two")]
    for database in databases:
        program(SITE, database, "run", "nightly", journal.key)
    journal.wait_for("start")
    wait_until(lambda: (found := held.record(journal.key)) and found.skips, message="one skips")
    journal.open_gate(2)
    both = [Results(database) for database in databases]
    wait_until(lambda: [one.tasks() for one in both] == [[(1, 1)], [(1, 1)]], message="both end")
    assert len(journal.events("start")) == len(journal.events("end")) == 1


def test_a_message_that_a_cluster_delivers_again_during_its_run_does_not_run_twice(
    site, program, journal
):
    database = site("shared", "careful")
    for _ in range(2):
        program(SITE, database, "run", "careful", journal.key)
    journal.wait_for("start")
    results = Results(database)
    wait_until(lambda: [done for done, _ in results.tasks()] == [0], message="a delivery fails")
    assert results.waiting() == 1
    journal.open_gate(2)
    wait_until(lambda: [done for done, _ in results.tasks()] == [1], message="the run reports")
    wait_until(lambda: results.waiting() == 0, message="the message is gone")
    assert len(journal.events("start")) == len(journal.events("end")) == 1


def test_a_run_that_is_killed_with_its_cluster_is_run_by_the_other_after_the_lease(
    site, program, journal
):
    database = site("shared", "careful")
    first = program(SITE, database, "run", "careful", journal.key)
    journal.wait_for("start")
    second = program(SITE, database, "run", "careful", journal.key)
    second.wait_for_log("ready")
    first.kill()
    journal.wait_for("start", 2)
    journal.open_gate()
    results = Results(database)
    wait_until(lambda: [done for done, _ in results.tasks()] == [1], message="the run reports")
    assert len(journal.events("start")) == 2
    assert held.get(journal.key) is None
