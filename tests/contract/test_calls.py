"""How many Python calls a cycle makes: each costs more than the line that makes it.

A cycle takes the lock and releases it, in a process in which it is not the first one. If it is
contended, another process has the lock before, and hands it over. Counted are the calls of
functions of this package, its files, and how often the way leads from one to another; a coroutine
that goes on counts as a call. Who makes the way longer must say here that it is so.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import islice

import pytest
from asgiref.sync import SyncToAsync

from django_redislock import distributed_lock, single_instance
from django_redislock.backends.redis.calling import Caller, FirstSteps
from django_redislock.conf import Conf
from django_redislock.rules import flows
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.forms import Attempt, release
from django_redislock.rules.options import Options, terms_of
from django_redislock.rules.stored import NO_MARKERS, DoneMarkers, Owner
from tests.support.calls import counted_calls
from tests.support.others import against_rival, queued, release_form, rival
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways

WARM = 20  # Cycles after which nothing is done for the first time.
CALLER = Caller("default", "redislock", "process")
# Calls, files, and steps from one file to another, by what is done and by which way.
AT_MOST = {
    "a lock": {"sync": (34, 10, 23), "async": (43, 10, 26)},
    "a contended lock": {"sync": (56, 14, 37), "async": (69, 15, 44)},
    "a job": {"sync": (47, 14, 33), "async": (63, 14, 41)},
}


@pytest.fixture(autouse=True)
def serves_no_coroutine(monkeypatch):
    """After a test in which sync_to_async has used this thread, each grant would look for that."""
    monkeypatch.delattr(SyncToAsync.threadlocal, "main_event_loop", raising=False)


@contextmanager
def handed_over(locks):
    """Let another process hold the lock until this one waits for it."""
    lock = rival("lottery")

    def release():
        wait_until(lambda: queued(locks, "lottery"), every=0.001)
        lock.release()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire).result(HUNG)
        other.submit(release)
        yield


@pytest.mark.parametrize("what", AT_MOST)
@both_ways
async def test_a_cycle_is_a_short_way(way, what, locks, settings):
    locks.on(locks.server, TTL=60)

    def nothing():
        pass

    job, found = single_instance(way.function(nothing)), []
    with against_rival(locks, settings):
        for _ in range(WARM):
            before = handed_over(locks) if what == "a contended lock" else nullcontext()
            with before, counted_calls() as calls:
                if what == "a job":
                    await way.call(job)
                else:
                    async with way.entered(distributed_lock("lottery")):
                        pass
            found.append((len(calls), calls.files, calls.switches))
    # In others the garbage collector has run, or an answer was late.
    most = AT_MOST[what][way.name]
    assert any(
        all(is_ <= at_most for is_, at_most in zip(one, most, strict=True)) for one in found
    ), found


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
