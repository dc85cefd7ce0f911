"""LeaderScheduler: of several beats one sends, whatever becomes of them."""

import itertools
import json
import os
import random
import signal
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from django_redislock import held
from django_redislock.rules import scripts
from tests.support.clocks import WallClock
from tests.support.faults import takes
from tests.support.nursery import environment_for, start_python
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.celery.project.stage"]

LOCK = "celery-beat:tests"
EVERY = 0.2  # Seconds between two slots.
TTL = 1.0
SLOTS = {
    "noon": {"key": "", "every": EVERY, "late": 0.0},
    "beat_leader_scheduler": "tests.celery.project.ledger:Ledger",
}
TAKEOVERS = int(os.environ.get("TAKEOVERS", "50"))


class Beat:
    """A ``celery beat`` process, which reaches the locks by a network of its own."""

    def __init__(self, stage, proxy, ttl, clock, **conf):
        self.proxy = proxy
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._directory = tempfile.TemporaryDirectory()
        location = proxy.url.rpartition("/")[0] + "/" + stage.url.rpartition("/")[2]
        redislock = {"default": {"LOCATION": location, "OPTIONS": {"socket_timeout": 2.0}}}
        command = ["-A", "tests.celery.project.app", "beat", "--loglevel", "INFO"]
        command += ["--scheduler", "django_redislock.celery.beat:LeaderScheduler"]
        command += ["--schedule", str(Path(self._directory.name) / "schedule")]
        with Path(os.devnull).open() as nothing:
            self.process = start_python(
                "celery.__main__:main",
                *command,
                files=(nothing.fileno(), self._log.fileno(), self._log.fileno()),
                environment=environment_for()
                | {
                    "TESTS_CELERY": json.dumps({**stage.conf, "beat_leader_ttl": ttl, **conf}),
                    "TESTS_REDISLOCK": json.dumps(redislock),
                    "TESTS_JOURNAL": stage.url,
                }
                | (clock.environment if clock else {}),
            )

    @property
    def pid(self):
        return self.process.pid

    @property
    def log(self):
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        self.process.kill()
        self.process.wait(HUNG)
        self.proxy.close()
        self._log.close()
        self._directory.cleanup()


class Beats:
    """Several beats of one project, and what they have sent."""

    def __init__(self, stage, new_proxy):
        self._stage = stage
        self._new_proxy = new_proxy
        self.all = []

    def start(self, *, ttl=TTL, clock=None, **conf):
        beat = Beat(self._stage, self._new_proxy(), ttl, clock, **(conf or SLOTS))
        self.all.append(beat)
        return beat

    def end(self, beat):
        self.all.remove(beat)
        beat.close()

    def leader(self, *others):
        """The beat that leads and has sent something since, once it is none of *others*."""
        not_these = {beat.pid for beat in others}

        def found():
            lock = held.get(LOCK)
            pid = lock.owner.pid if lock is not None else None
            if pid in not_these or self.last_sender != pid:
                return None
            return next((beat for beat in self.all if beat.pid == pid), None)

        return wait_until(found, HUNG, "another beat leads, and sends", every=0.01)

    def take_over(self, leader):
        """Return once another beat has sent something, which must be soon."""
        with takes(at_most=TTL + 2):
            self.leader(leader)

    def wait_for_standby(self):
        """Return once a beat is there that can take over."""
        wait_until(lambda: waiters(LOCK), HUNG, "a beat stands by", every=0.01)

    @property
    def last_sender(self):
        newest = self._stage.redis.lindex("celery", 0)
        return read(newest)["pid"] if newest else None

    def wait_for_more(self, times=1):
        """Return once a beat has sent something, so many times."""
        least = len(self.sent) + times
        # One with a clock of its own is no fork, and takes long to begin on a busy machine.
        wait_until(lambda: len(self.sent) >= least, 2 * HUNG, "a beat sends", every=0.01)

    @property
    def sent(self):
        """All that was sent, in this order: its slot, when, and by which process."""
        return [read(one) for one in reversed(self._stage.redis.lrange("celery", 0, -1))]

    def report(self):
        return "\n\n".join(f"{beat.pid}\n{beat.log}" for beat in self.all)


def read(message):
    return dict(json.loads(message)["headers"])


@pytest.fixture
def beats(own_stage, celery_server, make_proxy):
    beats = Beats(own_stage, lambda: make_proxy(celery_server))
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


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * TAKEOVERS)
def test_no_slot_is_sent_twice_and_none_waits_long_whatever_becomes_of_leaders(beats):
    """``TAKEOVERS=1000`` for more of them."""
    for _ in range(3):
        beats.start()
    beats.leader()
    for become in itertools.islice(itertools.cycle([kill, stop, cut_off]), TAKEOVERS):
        beats.wait_for_standby()
        leader = beats.leader()
        time.sleep(random.uniform(0, EVERY))  # Anywhere between two slots.
        become(beats, leader)
    slots = [one["slot"] for one in beats.sent]
    assert len(slots) == len(set(slots)), beats.report()


@pytest.mark.slow
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
    sent = [one["slot"] for one in beats.sent]
    assert len(sent) == len(set(sent)), beats.report()


@pytest.mark.slow
def test_a_beat_that_is_told_to_end_lets_another_lead_at_once(beats):
    """And so does one that stands by, though it waits for the lock."""
    first, second, third = (beats.start(ttl=HUNG) for _ in range(3))
    for _ in range(2):
        leader = beats.leader()
        leader.signal(signal.SIGTERM)
        assert leader.process.wait() == 0
        beats.leader(leader)  # Long before the ttl is over.
        beats.end(leader)
    (last,) = beats.all
    assert last in {first, second, third}
    standby = beats.start(ttl=HUNG)
    wait_until(lambda: "This beat stands by" in standby.log, HUNG, "it stands by")
    standby.signal(signal.SIGTERM)
    assert standby.process.wait() == 0
    gaps = [after["at"] - before["at"] for before, after in itertools.pairwise(beats.sent)]
    assert max(gaps) < HUNG / 2


# --- clocks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clock_that_is_an_hour_ahead_silences_nobody_when_it_is_set_back_nor_after_a_takeover(
    beats, tmp_path
):
    clock = WallClock(tmp_path)
    clock.shift(3600)
    second = {"beat_schedule": {"often": {"task": "look", "schedule": 1.0}}}
    first = beats.start(clock=clock, **second)
    beats.wait_for_more(2)
    clock.shift(-3600)
    beats.wait_for_more(2)
    clock.shift(3600)
    beats.wait_for_more(2)
    beats.end(first)
    beats.start(**second)
    beats.wait_for_more(2)


@pytest.mark.slow
def test_in_an_hour_that_comes_twice_a_crontab_is_sent_once(beats, tmp_path):
    clock = WallClock(tmp_path)
    summer_time_is_over = datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp() - time.time()
    clock.shift(summer_time_is_over + 300)
    beats.start(clock=clock, minute="*", timezone="Europe/London")
    beats.wait_for_more()  # For 01:06, which was an hour ago; and not for those up to 01:59.
    clock.shift(summer_time_is_over + 3600)
    beats.wait_for_more()
    assert len(beats.sent) == 2


# --- the worker's beat ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_does_not_take_the_scheduler_for_the_name_of_a_file(own_stage):
    """What ``-S`` is to ``celery beat`` is ``--scheduler`` to ``celery worker``."""
    name = "django_redislock.celery.beat:LeaderScheduler"
    worker = own_stage.start("-B", "-S", name, ready=False)
    assert worker.wait() == 1
    assert f"Write --scheduler {name}" in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.slow
def test_of_two_workers_with_a_beat_one_sends(own_stage, tmp_path):
    for number in range(2):
        own_stage.start(
            *("-B", "--scheduler", "django_redislock.celery.beat:LeaderScheduler"),
            *("--schedule", str(tmp_path / f"schedule-{number}")),
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
