"""The line of deferred runs: who comes back when, and that the lock is not idle meanwhile."""

import json
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest

from django_redislock import distributed_lock, task_runs
from django_redislock.celery.defer import IN_SLOT, NEAR, Turn, defer, time_in_slot
from django_redislock.jobs import run_job
from django_redislock.lock import Lock
from django_redislock.rules.flows import Busy
from django_redislock.rules.options import Options

pytest_plugins = ["tests.celery.project.stage"]

NAME = "lottery"


def stand(task_id, ticket=0, *, spacing=0.0, permits=1):
    """Stand in the line of a lock that somebody holds."""
    busy = Lock(NAME, Options(wait=0.0)).attempt()
    assert isinstance(busy, Busy)
    how = {"spacing": spacing, "permits": permits, "using": "default"}
    return Turn(*task_runs.stand_in_line(NAME, task_id, ticket, busy, **how), slots=2)


def test_each_keeps_its_place_until_it_leaves(redislock):
    with redislock.simulate_held_by_other(NAME):
        turns = [stand(task_id) for task_id in "abc"]
        assert [turn.before for turn in turns] == [0, 1, 2]
        again = stand("c", turns[2].ticket)
        assert (again.ticket, again.before) == (turns[2].ticket, 2)
        task_runs.leave_line(NAME, "a", using="default")
        assert [stand(task_id).before for task_id in "bcd"] == [0, 1, 2]


def test_a_place_is_not_lost_with_the_server_of_the_locks(redislock):
    with redislock.simulate_held_by_other(NAME, ttl=1000):
        early = stand("early")
        redislock.advance(600)  # Everything that is known of the line has expired.
        assert stand("late").before == 0
        assert stand("early", early.ticket).before == 0
        assert stand("late").before == 1


def test_who_does_not_come_back_is_given_up_soon(redislock):
    with redislock.simulate_held_by_other(NAME, ttl=1000):
        lost = [stand(task_id) for task_id in ("revoked", "expired", "dropped")]
        patient = stand("patient")
        assert patient.before == 3
        redislock.advance(max(turn.seconds for turn in lost) + 5)
        assert stand("patient").before == 0


def test_its_turn_follows_how_long_runs_last(redislock):
    run_job("four seconds", NAME, lambda: redislock.advance(4))
    with redislock.simulate_held_by_other(NAME, ttl=1000):
        assert stand("a").seconds == pytest.approx(4, abs=1)
        assert stand("b").seconds == pytest.approx(5, abs=1)  # "a" may be lost.
        assert stand("c", permits=4).seconds == pytest.approx(3, abs=1)
        redislock.advance(3)
        assert stand("a").seconds == pytest.approx(1, abs=1)
        # Of a run that takes longer than others nothing is known.
        redislock.advance(100)
        assert stand("a").seconds == pytest.approx(10, abs=2)
    with redislock.simulate_held_by_other(NAME, ttl=2):
        assert stand("a").seconds <= 2  # Then the lease of a dead holder is over.


def test_the_end_of_a_cooling_lock_is_known(redislock):
    with distributed_lock(NAME, min_hold=50):
        pass
    assert stand("a", spacing=50).seconds == pytest.approx(50, abs=2)
    redislock.advance(30)
    assert stand("a", spacing=50).seconds == pytest.approx(20, abs=2)


def test_only_those_whose_turn_is_near_wait_for_it_in_their_slot():
    assert Turn(1, 1, NEAR, slots=2).is_near
    assert not Turn(1, 1, NEAR + 0.1, slots=2).is_near
    assert not Turn(1, 2, 0.1, slots=2).is_near


@pytest.mark.parametrize(
    ("limits", "allowed"), [(None, IN_SLOT), ([10, None], 0.5), ([None, 4], 0.2)]
)
def test_a_time_limit_is_not_used_up_by_waiting(own_stage, limits, allowed):
    task = own_stage.task("retrying")
    task.push_request(timelimit=limits)
    try:
        assert time_in_slot(task) == allowed
    finally:
        task.pop_request()


@pytest.mark.parametrize("bound", ["until", "expires"])
def test_the_last_tries_are_in_time_and_not_all_at_the_same_moment(own_stage, monkeypatch, bound):
    task, began = own_stage.task("retrying"), time.time()
    end = datetime.fromtimestamp(began + 40, UTC)
    expires = end.isoformat() if bound == "expires" else None
    for number in range(20):
        if number == 19:
            monkeypatch.setattr(random, "uniform", max)  # The latest that there may be.
        task.push_request(id=f"call-{number}", called_directly=False, args=("a",), expires=expires)
        try:
            until = end.timestamp() if bound == "until" else None
            defer(task, 1000, turn=Turn(1, 500, 1000, 1), until=until)
        finally:
            task.pop_request()
    messages = map(json.loads, own_stage.redis.lrange("celery", 0, -1))
    back = [datetime.fromisoformat(message["headers"]["eta"]) for message in messages]
    assert len(back) == 20
    assert max(back) < end - timedelta(seconds=1)  # The broker and the worker are late by a little.
    assert min(back) > datetime.fromtimestamp(began + 20, UTC)
    assert max(back) - min(back) > timedelta(seconds=2)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_calls_that_come_back_leave_no_lock_idle_and_keep_their_order(own_stage):
    calls, seconds = 40, 0.2
    for _ in range(2):
        own_stage.start(pool="prefork", concurrency=2)
    key = own_stage.key()
    sent = [own_stage.send("retrying", key, seconds=seconds) for _ in range(calls)]
    results = [own_stage.result(one) for one in sent]
    assert Counter(results) == {f"did {key}": calls}

    logs = "".join(worker.log for worker in own_stage.workers)
    assert logs.count("Deferred") < 10 * calls

    began = [event["time"] for event in own_stage.events(key, "start")]
    ended = [event["time"] for event in own_stage.events(key, "end")]
    idle = sum(start - end for end, start in zip(ended, began[1:], strict=False))
    # A tenth of it as a rule; more than twice as much when they came back by chance.
    assert idle < calls * seconds

    order = [one.date_done for one in sent]
    overtaken = sum(first > second for first, second in combinations(order, 2))
    assert overtaken < calls * (calls - 1) / 2 / 3
