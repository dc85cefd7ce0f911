"""APScheduler in each of gunicorn's workers."""

import os
import signal
from collections import Counter

import pytest

from tests.support.waiting import wait_until

pytest_plugins = ["tests.neighbours.programs"]
pytest.importorskip("apscheduler")
pytest.importorskip("gunicorn")


def test_of_four_workers_with_a_scheduler_each_one_runs_the_job_at_each_tick(program, journal):
    program(
        *("gunicorn", "--workers", "4", "--bind", "127.0.0.1:0", "--no-control-socket"),
        "tests.neighbours.apscheduler_site:application",
        TESTS_KEY=journal.key,
    )

    def workers():
        return {one["pid"] for one in journal.events("tick")}

    def contended():
        """Ticks at which several workers wanted to draw, and are through."""
        ticks = Counter(one["tick"] for one in journal.events("tock"))
        return {tick for tick, number in ticks.items() if number > 1}

    wait_until(lambda: len(workers()) == 4 and contended(), message="four schedulers tick")
    before = contended()
    os.kill(min(workers()), signal.SIGKILL)
    wait_until(lambda: len(workers()) == 5, message="gunicorn replaces a worker")
    wait_until(lambda: len(contended() - before) > 1, message="the schedulers go on")

    def draws():
        return Counter(one["tick"] for one in journal.events("draw"))

    ticks = contended()
    wait_until(lambda: ticks <= set(draws()), message="all of these are drawn")
    assert set(draws().values()) == {1}
