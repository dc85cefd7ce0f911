"""LeaderScheduler: of several beats one sends, whatever becomes of them."""

import itertools
import json
import os
import random
import signal
import time

import pytest

from django_redislock import held
from django_redislock.rules import scripts
from tests.support.clocks import WallClock
from tests.support.faults import takes
from tests.support.nursery import environment_for
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = pytest.mark.slow

LOCK = "celery-beat:tests"
SCHEDULER = "django_redislock.celery.beat:LeaderScheduler"
EVERY = 0.2  # Seconds between two slots.
TTL = 1.0
SLOTS = {
    "noon": {"key": "", "every": EVERY, "late": 0.0},
    "beat_leader_scheduler": "tests.celery.project.ledger:Ledger",
}
TAKEOVERS = int(os.environ.get("TAKEOVERS", "50"))


class Beats:
    """``celery beat`` processes, each with a network of its own, and what they have sent."""

    def __init__(self, stage, new_proxy, folder):
        self._stage = stage
        self._new_proxy = new_proxy
        self._folder = folder
        self._numbers = itertools.count()
        self.all = []

    def start(self, *, ttl=TTL, clock=None, **conf):
        proxy = self._new_proxy()
        location = proxy.url.rpartition("/")[0] + "/" + self._stage.url.rpartition("/")[2]
        schedule = str(self._folder / f"schedule-{next(self._numbers)}")
        beat = self._stage.run(
            *("beat", "--scheduler", SCHEDULER, "--schedule", schedule),
            environment=environment_for() | (clock.environment if clock else {}),
            redislock={"default": {"LOCATION": location, "OPTIONS": {"socket_timeout": 2.0}}},
            beat_leader_ttl=ttl,
            **(conf or SLOTS),
        )
        beat.proxy = proxy
        self.all.append(beat)
        return beat

    def end(self, beat):
        self.all.remove(beat)
        beat.close()
        beat.proxy.close()

    def leader(self, *others):
        """The beat that leads and has sent something since, once it is none of *others*."""
        not_these = {beat.pid for beat in others}

        def found():
            lock = held.get(LOCK)
            pid = lock.owner.pid if lock is not None else None
            if pid in not_these or [one["pid"] for one in self.sent[-1:]] != [pid]:
                return None
            return next((beat for beat in self.all if beat.pid == pid), None)

        return wait_until(found, HUNG, "another beat leads, and sends", every=0.01)

    def take_over(self, leader):
        """Return once another beat has sent something, which must be soon."""
        with takes(at_most=TTL + 2):
            self.leader(leader)

    def wait_for_more(self, times=2):
        """Return once a beat has sent something, so many times."""
        least = len(self.sent) + times
        # One with a clock of its own is no fork, and takes long to begin on a busy machine.
        wait_until(lambda: len(self.sent) >= least, 2 * HUNG, "a beat sends", every=0.01)

    @property
    def sent(self):
        """All that was sent, in this order: its slot, when, and by which process."""
        messages = reversed(self._stage.redis.lrange("celery", 0, -1))
        return [json.loads(one)["headers"] for one in messages]

    def assert_no_slot_twice(self):
        slots = [one["slot"] for one in self.sent]
        assert len(slots) == len(set(slots)), self.report()

    def report(self):
        return "\n\n".join(f"{beat.pid}\n{beat.log}" for beat in self.all)


@pytest.fixture
def beats(own_stage, celery_server, make_proxy, tmp_path):
    beats = Beats(own_stage, lambda: make_proxy(celery_server), tmp_path)
    yield beats
    report = beats.report()
    for beat in list(beats.all):
        beats.end(beat)
    assert "Traceback" not in report, report


# --- what becomes of a leader --------------------------------------------------------------------


def kill(beats, leader):
    """It dies, and another one is started later."""
    leader.signal(signal.SIGKILL)
    beats.take_over(leader)
    beats.end(leader)
    beats.start()


def stop(beats, leader):
    """It stands still, wherever it is, and goes on when another one leads."""
    leader.signal(signal.SIGSTOP)
    beats.take_over(leader)
    leader.signal(signal.SIGCONT)


def cut_off(beats, leader):
    """It reaches no lock server, until another one leads."""
    leader.proxy.blackhole()
    beats.take_over(leader)
    leader.proxy.heal(deliver=True)


@pytest.mark.timeout(60 + 10 * TAKEOVERS)
def test_no_slot_is_sent_twice_and_none_waits_long_whatever_becomes_of_leaders(beats):
    """``TAKEOVERS=1000`` for more of them."""
    for _ in range(3):
        beats.start()
    beats.leader()
    for become in itertools.islice(itertools.cycle([kill, stop, cut_off]), TAKEOVERS):
        wait_until(lambda: waiters(LOCK), HUNG, "a beat stands by", every=0.01)
        leader = beats.leader()
        time.sleep(random.uniform(0, EVERY))  # Anywhere between two slots.
        become(beats, leader)
    beats.assert_no_slot_twice()


def test_a_write_that_arrives_after_a_takeover_sends_nothing(beats):
    first = beats.start()
    beats.leader()
    beats.start()
    rule = first.proxy.rule_for_script(scripts.CONCLUDE.sha, "hold")
    rule.wait()  # It writes down that it is about to send.
    first.proxy.blackhole()
    beats.leader(first)
    first.proxy.heal(deliver=True)
    assert first.proxy.forward_held() == 1
    wait_until(lambda: "This beat stands by" in first.log, HUNG, "it knows that another one leads")
    beats.assert_no_slot_twice()


def test_a_beat_that_is_told_to_end_lets_another_lead_at_once(beats):
    """And so does one that stands by, though it waits for the lock."""
    for _ in range(3):
        beats.start(ttl=HUNG)
    for _ in range(2):
        leader = beats.leader()
        leader.signal(signal.SIGTERM)
        assert leader.wait() == 0
        beats.leader(leader)  # Long before the ttl is over.
        beats.end(leader)
    standby = beats.start(ttl=HUNG)
    wait_until(lambda: "This beat stands by" in standby.log, HUNG, "it stands by")
    standby.signal(signal.SIGTERM)
    assert standby.wait() == 0
    gaps = [after["at"] - before["at"] for before, after in itertools.pairwise(beats.sent)]
    assert max(gaps) < HUNG / 2


def test_a_clock_that_is_an_hour_ahead_silences_nobody_when_it_is_set_back_nor_after_a_takeover(
    beats, tmp_path
):
    clock = WallClock(tmp_path)
    clock.shift(3600)
    second = {"beat_schedule": {"often": {"task": "look", "schedule": 1.0}}}
    first = beats.start(clock=clock, **second)
    beats.wait_for_more()
    clock.shift(-3600)
    beats.wait_for_more()
    clock.shift(3600)
    beats.wait_for_more()
    beats.end(first)
    beats.start(**second)
    beats.wait_for_more()


# --- the worker's beat ----------------------------------------------------------------------------


def test_a_worker_does_not_take_the_scheduler_for_the_name_of_a_file(own_stage):
    """What ``-S`` is to ``celery beat`` is ``--scheduler`` to ``celery worker``."""
    worker = own_stage.start("-B", "-S", SCHEDULER, ready=False)
    assert worker.wait() == 1
    assert f"Write --scheduler {SCHEDULER}" in worker.log
    assert "Traceback" not in worker.log


def test_of_two_workers_with_a_beat_one_sends(own_stage, tmp_path):
    for number in range(2):
        own_stage.start(
            *("-B", "--scheduler", SCHEDULER, "--schedule", str(tmp_path / f"schedule-{number}")),
            beat_schedule={"often": {"task": "no.such.task", "schedule": 1.0}},
        )
    first, second = own_stage.workers
    wait_until(lambda: held.get(LOCK), HUNG, "a beat leads")

    def sends(worker):
        return "Sending due task often" in worker.log

    wait_until(lambda: any(map(sends, own_stage.workers)), HUNG, "a beat sends")
    leader, standby = (first, second) if sends(first) else (second, first)
    wait_until(lambda: "This beat stands by" in standby.log, HUNG, "the other stands by")
    assert not sends(standby)
    leader.kill()
    wait_until(lambda: sends(standby), HUNG, "the other sends")
