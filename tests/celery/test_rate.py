"""A task under a Rate: a call that finds no start goes back to the broker until one is due."""

import signal
import time
from bisect import bisect

import pytest

from django_redislock import Rate, distributed_lock
from tests.support.faults import LEAST_SLACK, slack
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]

SLACK = 0.05  # Seconds for which a start lies in a worker before its body says so.


def test_of_200_calls_at_once_none_is_lost_and_they_come_as_fast_as_the_rate_allows(own_stage):
    stage = own_stage
    for _ in range(2):
        stage.start()
    key, calls, each = stage.key(), 200, 0.025
    sent = [stage.send("rated", key, rate="40/s") for _ in range(calls)]
    assert [stage.result(one) for one in sent] == [f"did {key}"] * calls
    times = sorted(event["time"] for event in stage.events(key, "start"))
    assert len(times) == calls
    ideal = (calls - 1) * each
    busy = slack() - LEAST_SLACK  # Nothing, unless others want the processors.
    assert ideal - SLACK <= times[-1] - times[0] < 1.3 * ideal + busy
    for number in (1, 10, 50):  # In no time are there more starts than the rate allows.
        for begin, end in zip(times, times[number:], strict=False):
            assert end - begin > number * each - SLACK - each


@pytest.mark.usefixtures("worker")
def test_a_call_keeps_its_start_while_others_come(stage):
    key = stage.key()
    with distributed_lock(limits=[Rate(key, "0.1/s")], wait=0):
        pass
    first = stage.send("rated", key, rate="0.1/s")
    stage.wait_for_log(f"[{first.id}]: lock {key!r} is a rate, and its next start is due")
    for _ in range(5):
        assert not distributed_lock(limits=[Rate(key, "0.1/s")], wait=0).acquire()
    assert stage.result(first) == f"did {key}"
    (message,) = [stage.published[first.id]]
    assert "reserved" not in message.get("redislock", {})  # Only its own later ones say so.


@pytest.mark.usefixtures("worker")
def test_each_call_is_deferred_once_and_not_more(stage):
    key = stage.key()
    sent = [stage.send("rated", key, rate="4/s") for _ in range(6)]
    for one in sent:
        stage.result(one)
    log, name = stage.workers[0].log, stage.task("rated").name
    assert max(log.count(f"Deferred {name}[{one.id}]") for one in sent) == 1


def test_calls_that_come_late_together_start_a_few_at_a_time(own_stage):
    stage, calls = own_stage, 30
    workers = [stage.start(pool="threads", concurrency=8) for _ in range(2)]
    key = stage.key()
    sent = [stage.send("rated", key, rate="5/s") for _ in range(calls)]
    stage.wait_for(key, "start", 5)
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    due = time.time() + 4.0
    wait_until(lambda: time.time() > due, message="twenty starts are due")
    for worker in workers:
        worker.signal(signal.SIGCONT)
    assert [stage.result(one) for one in sent] == [f"did {key}"] * calls
    times = sorted(event["time"] for event in stage.events(key, "start"))
    at_once = [bisect(times, at + 1.0) - place for place, at in enumerate(times)]
    # The burst, five in a second, two and a half that may be late; and what a busy machine delays.
    assert max(at_once) <= 12
