"""11. the lottery: every server starts it at noon, one draws.

Four workers stand for four servers. Each consumes a queue of its own, into which the task is put
at noon, by clocks that differ by up to 100 ms. A draw takes 20 ms, so a server whose clock is late
would find a plain lock free again.
"""

import random
import time
from collections import Counter

import pytest

from tests.support.waiting import HUNG

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVERS = [f"server-{number}" for number in range(1, 5)]
SKEW = 0.1  # Seconds by which the clocks of the servers differ.
APART = 8.0  # Seconds from noon to noon; min_hold is 4, so a busy machine may be late by 3.9.


def draws_per_noon(stage, task, noons, apart):
    """Let noon come again and again: who drew how often, and how the runs ended."""
    for name in SERVERS:
        stage.start("--queues", name, ready=False)
    for worker in stage.workers:
        worker.wait_ready()
    key = stage.key()
    rng = random.Random(11)
    begin = time.monotonic() + 0.2
    schedule = sorted(
        (begin + noon * apart + rng.uniform(0, SKEW), noon, server)
        for noon in range(noons)
        for server in SERVERS
    )
    results = []
    for due, noon, server in schedule:
        time.sleep(max(0.0, due - time.monotonic()))
        results.append(stage.send(task, key, queue=server, noon=noon))
    outcomes = Counter(
        outcome["skipped"] if isinstance(outcome := result.get(timeout=HUNG), dict) else "drew"
        for result in results
    )
    return Counter(event["noon"] for event in stage.events(key, "draw")), outcomes


def test_11_the_lottery_is_drawn_once_every_noon(own_stage):
    draws, outcomes = draws_per_noon(own_stage, "lottery", noons := 3, APART)
    assert draws == dict.fromkeys(range(noons), 1)
    # A clock that is late finds the lock held, or cooling.
    assert outcomes.pop("drew") == noons
    assert outcomes.keys() <= {"busy", "cooling"}
    assert outcomes.total() == 3 * noons


def test_11_the_lottery_needs_more_than_a_plain_lock(own_stage):
    draws, _ = draws_per_noon(own_stage, "hasty_lottery", noons := 4, 1.0)
    assert sum(draws.values()) > noons
