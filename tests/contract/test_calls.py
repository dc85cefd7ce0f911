"""How many Python calls a cycle makes: each costs more than the line that makes it.

A cycle takes the lock and releases it, in a process in which it is not the first one. If it is
contended, another process has the lock before, and hands it over. Counted are the calls of
functions of this package, its files, and how often the way leads from one to another; a coroutine
that goes on counts as a call. Who makes the way longer must say here that it is so.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from asgiref.sync import SyncToAsync

import django_redislock
from django_redislock import distributed_lock, single_instance
from django_redislock.backends.redis.calling import Caller, FirstSteps
from django_redislock.conf import Conf
from django_redislock.rules import flows
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.forms import Attempt, release
from django_redislock.rules.options import Options, terms_of
from django_redislock.rules.stored import NO_MARKERS, DoneMarkers, Owner
from tests.support.others import against_rival, queued, release_form, rival
from tests.support.waiting import HUNG, wait_until

PACKAGE = str(Path(django_redislock.__file__).parent)
WARM = 20  # Cycles after which nothing is done for the first time.
CALLER = Caller("default", "redislock", "process")


@pytest.fixture(autouse=True)
def serves_no_coroutine(monkeypatch):
    """After a test in which sync_to_async has used this thread, each grant would look for that."""
    monkeypatch.delattr(SyncToAsync.threadlocal, "main_event_loop", raising=False)


class Way(NamedTuple):
    """How long the way of one cycle is."""

    calls: int
    files: int
    switches: int  # From one file to another.


class Trace:
    """Follows the calls of this thread. Others, as the watchdog's, are not seen."""

    def __init__(self):
        self._files = []

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self._files.append(frame.f_code.co_filename)

    @property
    def way(self):
        files = self._files
        switches = sum(one != other for one, other in pairwise(files))
        return Way(len(files), len(set(files)), switches)


def one_is_at_most(ways, calls, files, switches):
    """Whether one is so short. In others the garbage collector has run, or an answer was late."""
    return any(
        way.calls <= calls and way.files <= files and way.switches <= switches for way in ways
    )


def test_a_cycle_is_a_short_way(locks):
    locks.on(locks.server, TTL=60)
    ways = []
    for _ in range(WARM):
        with Trace() as trace, distributed_lock("lottery"):
            pass
        ways.append(trace.way)
    assert one_is_at_most(ways, calls=34, files=10, switches=23), ways


def test_a_run_of_a_job_is_a_short_way(locks):
    locks.on(locks.server, TTL=60)

    @single_instance
    def job():
        pass

    ways = []
    for _ in range(WARM):
        with Trace() as trace:
            job()
        ways.append(trace.way)
    assert one_is_at_most(ways, calls=47, files=14, switches=33), ways


async def test_an_awaited_run_of_a_job_is_a_short_way(locks):
    locks.on(locks.server, TTL=60)

    @single_instance
    async def job():
        pass

    ways = []
    for _ in range(WARM):
        with Trace() as trace:
            await job()
        ways.append(trace.way)
    assert one_is_at_most(ways, calls=63, files=14, switches=41), ways


async def test_a_cycle_of_a_task_is_a_short_way(locks):
    locks.on(locks.server, TTL=60)
    ways = []
    for _ in range(WARM):
        with Trace() as trace:
            async with distributed_lock("lottery"):
                pass
        ways.append(trace.way)
    assert one_is_at_most(ways, calls=43, files=10, switches=26), ways


@contextmanager
def handed_over_by(other, locks):
    """Let another process hold the lock until this one waits for it."""
    lock = rival("lottery")
    assert other.submit(lock.acquire).result(HUNG)

    def release():
        wait_until(lambda: queued(locks, "lottery"), every=0.001)
        lock.release()

    released = other.submit(release)
    yield
    released.result(HUNG)


def test_a_contended_cycle_is_a_short_way(locks, settings):
    locks.on(locks.server, TTL=60)
    ways = []
    with against_rival(locks, settings), ThreadPoolExecutor(1) as other:
        for _ in range(WARM):
            with handed_over_by(other, locks), Trace() as trace, distributed_lock("lottery"):
                pass
            ways.append(trace.way)
    assert one_is_at_most(ways, calls=56, files=14, switches=37), ways


async def test_a_contended_cycle_of_a_task_is_a_short_way(locks, settings):
    locks.on(locks.server, TTL=60)
    ways = []
    with against_rival(locks, settings), ThreadPoolExecutor(1) as other:
        for _ in range(WARM):
            with handed_over_by(other, locks), Trace() as trace:
                async with distributed_lock("lottery"):
                    pass
            ways.append(trace.way)
    assert one_is_at_most(ways, calls=69, files=15, switches=44), ways


@pytest.mark.parametrize("wait", [0.0, 5.0])
@pytest.mark.parametrize("renew", [True, False])
@pytest.mark.parametrize(
    "markers", [NO_MARKERS, DoneMarkers(once=True, run="a-run", retention="1/2")]
)
def test_a_form_is_the_call_that_its_flow_begins_with(wait, renew, markers):
    unused = None  # A command is made without a connection.
    steps = FirstSteps(CALLER, unused, unused, set(), ring_apart=False)
    terms = terms_of(Options(wait=wait, renew=renew, max_hold=math.inf), Conf(alias="default"))
    form = Attempt("lottery", Owner(host="web-1", pid=7), terms, 0, markers)
    (call,) = islice(flows.acquire(form, 0.0), 1)
    channel = "redislock:bell:process:1"
    sent = steps.command(form) + b"$%d\r\n%s\r\n" % (len(channel), channel.encode())
    assert sent == CALLER.packed(call, channel)
    assert (call.within, bool(call.listening)) == (terms.one_try, form.waits)

    told = steps.confirmation(form)
    assert told == CALLER.packed(
        flows.confirmation(form.name, form.token, terms.first_ttl, terms.renews), ""
    )

    noted = {"ended": "done", "once": wait, "retention": "1/2"}
    runs = RunMarker("a-run", 60.0), RunMarker("a-run", 0.0), None
    for noted in {}, *({**noted, "run": run} for run in runs):
        form = release_form("lottery", form.token, form.id, form.owner, **noted)
        (call,) = islice(release(form), 1)
        assert steps.command(form) == CALLER.packed(call, "")
