"""The watchdog renews what is held: one thread per backend, batched, until release or loss."""

import asyncio
import gc
import logging
import threading
import time

import pytest

from django_redislock import distributed_lock, held
from django_redislock.backends.registry import backends
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.steps import Unanswered
from tests.support.faults import runs
from tests.support.matrix import CLUSTER, MEMORY, everywhere, on_servers, places
from tests.support.waiting import await_until, wait_until
from tests.support.ways import both_ways


def watchdogs():
    """The threads that renew; those of earlier tests' backends may still be at it."""
    return {one for one in threading.enumerate() if one.name.startswith("redislock-watchdog")}


# --- renewing ------------------------------------------------------------------------------------


@pytest.mark.proves("R7")
@pytest.mark.waits
@both_ways
async def test_a_lease_outlives_its_ttl_while_it_is_held(way, place):
    begin = time.monotonic()
    async with way.entered(distributed_lock("lottery", ttl=9)) as lease:
        await way.until(lambda: lease.renewals >= 4)
        # Every third of the ttl, or a little sooner.
        assert time.monotonic() - begin > 9.6
        assert lease.held
        seen = held.get("lottery")
        assert seen.id == lease.id


@pytest.mark.waits
@both_ways
async def test_a_renewal_by_hand_just_before_the_watchdogs_does_not_end_its_renewals(way, place):
    async with way.entered(distributed_lock("lottery", ttl=6)) as lease:
        watchdog, token = backends["default"].watchdog_of(lease.name), lease._token
        await way.until(lambda: token in watchdog._last)
        due = watchdog._last[token]
        # Until the watchdog has looked at it, and put it off.
        while watchdog._last.get(token, due) is due:
            await way.renew(lease)
            await way.sleep(0.01)
        by_hand = lease.renewals
        await way.until(lambda: lease.renewals > by_hand)
        assert lease.held


@pytest.mark.waits
@both_ways
async def test_the_setting_renew_is_what_none_means(way, place):
    place.configure(RENEW=False)
    lease = await way.taken(lock := distributed_lock("lottery", ttl=2))
    await way.until(lambda: held.get("lottery") is None)
    assert lease.renewals == 0
    kept = await way.taken(keeps := distributed_lock("tombola", ttl=5, renew=True))
    await way.until(lambda: kept.renewals)
    assert (keeps.lease, kept.held) == (kept, True)
    assert (lock.lease, lease.held) == (lease, False)


@both_ways
async def test_a_released_lease_is_not_renewed(way, place):
    async with way.entered(distributed_lock("lottery", ttl=4)) as lease:
        pass
    renewals = lease.renewals
    await way.sleep(1.5)  # More than a third.
    assert lease.renewals == renewals
    assert held.get("lottery") is None


@pytest.mark.proves("R7")
@pytest.mark.waits
@both_ways
async def test_a_blocked_body_is_renewed_all_the_same(way, place):
    # As by a query: it blocks the event loop too, but the watchdog has a thread of its own.
    async with way.entered(distributed_lock("lottery", ttl=6)) as lease:
        time.sleep(6.2)
        assert lease.held


# --- one thread ----------------------------------------------------------------------------------


@pytest.mark.proves("R7")
@everywhere
def test_one_thread_renews_the_leases_of_threads_and_tasks(place):
    async def hold(number):
        async with distributed_lock(f"task:{number}", ttl=5) as lease:
            await await_until(lambda: lease.renewals)
            return lease.held

    async def hold_many():
        return await asyncio.gather(*[hold(number) for number in range(10)])

    before = watchdogs()
    with distributed_lock("thread", ttl=5) as lease:
        assert asyncio.run(hold_many()) == [True] * 10
        assert len(watchdogs() - before) == (3 if place.name == CLUSTER else 1)  # One a node.
        assert lease.held
        assert lease.renewals > 0


@pytest.mark.proves("P10")
def test_no_lock_no_thread(place):
    before = watchdogs()
    assert distributed_lock("lottery").locked() is False
    assert watchdogs() <= before


@pytest.mark.waits
def test_the_thread_ends_when_settings_changed_and_the_last_lease_is_over(place):
    before = watchdogs()
    with distributed_lock("lottery", ttl=5) as lease:
        (thread,) = watchdogs() - before
        place.configure(KEY_PREFIX="test-another-prefix")
        wait_until(lambda: lease.renewals)
        assert lease.held
        assert thread.is_alive()
    wait_until(lambda: not thread.is_alive())


# --- what it sends -------------------------------------------------------------------------------


@pytest.mark.proves("R7")
@pytest.mark.waits
def test_many_leases_are_renewed_by_one_connection_in_batches(locks, proxy):
    locks.on(proxy)
    handles = [distributed_lock(f"lottery:{number}", ttl=18) for number in range(50)]
    assert all(handle.acquire() for handle in handles)
    wait_until(lambda: all(handle.lease.renewals for handle in handles))
    assert len({run.link for run in runs(proxy, scripts.RENEW)}) == 1
    for handle in handles:
        handle.release()


def test_an_idle_watchdog_sends_nothing(locks, proxy):
    locks.on(proxy)
    with distributed_lock("lottery", ttl=60):
        for number in range(20):
            with distributed_lock(f"tombola:{number}", ttl=60):
                pass
        assert not runs(proxy, scripts.RENEW)


@places(MEMORY)
def test_acquires_do_not_wake_it(place, monkeypatch):
    with distributed_lock("lottery", ttl=60):
        pass
    watchdog, woken = backends["default"].watchdog_of("lottery"), []
    take_in = watchdog._take_in

    def note():
        woken.append(1)
        take_in()

    watchdog._bell.put(None)
    wait_until(lambda: not watchdog._last)  # Its thread runs, and has no lease to wait for.
    monkeypatch.setattr(watchdog, "_take_in", note)
    for number in range(200):
        with distributed_lock(f"tombola:{number}", ttl=60):
            pass
        time.sleep(0.001)  # In which it could wake.
    assert len(woken) < 10


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.waits
@on_servers
def test_trouble_with_one_lease_costs_no_other_its_renewal(place):
    bad, good = distributed_lock("tombola", ttl=5), distributed_lock("lottery", ttl=5)
    assert bad.acquire()
    with good as lease:
        key = lock_keys(place.locks.prefix, "tombola").lock
        place.locks.redis.delete(key)
        place.locks.redis.lpush(key, "of the wrong type")
        wait_until(lambda: not bad.lease.held)
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
        assert lease.held


@pytest.fixture
def answering(monkeypatch):
    """Let the watchdog's renewals be answered by a function instead of the server."""

    def answer(by=None):
        renewer = backends["default"].watchdog_of("lottery")._renewer
        monkeypatch.setattr(renewer, "renew_many", by or type(renewer).renew_many.__get__(renewer))

    return answer


@pytest.mark.proves("R7")
def test_a_bug_does_not_end_it(place, answering, caplog):
    with distributed_lock("lottery", ttl=5) as lease:
        calls = []

        def fail_twice(steps):
            calls.append(steps)
            if len(calls) == 2:
                answering()
            raise ZeroDivisionError("a bug")

        answering(fail_twice)
        wait_until(lambda: lease.renewals)
        assert lease.held
    assert "watchdog met an error; it goes on" in caplog.text


@pytest.mark.proves("R7")
@pytest.mark.waits
def test_a_handler_of_logs_that_raises_ends_no_renewals_and_hides_no_loss(place, answering):
    """The record of a renewal that failed meets it, and so does the one about its exception."""
    told, lost = [], []

    class Broken(logging.Handler):
        def emit(self, record):
            if threading.current_thread() in watchdogs():
                told.append(record.getMessage())
                raise ZeroDivisionError("of a handler")

    def silent(steps):
        return [Unanswered("silent", 0.0, 0.0) for _ in steps]

    log, broken = logging.getLogger("django_redislock"), Broken()
    log.addHandler(broken)
    try:
        lock = distributed_lock("lottery", ttl=6)
        assert lock.acquire()
        lease = lock.lease
        answering(silent)
        wait_until(lambda: told)
        answering()
        wait_until(lambda: lease.renewals)
        assert lease.held
        lease.on_lost(lost.append)
        answering(silent)
        wait_until(lambda: lost)
    finally:
        log.removeHandler(broken)


@pytest.mark.waits
def test_a_bug_within_a_batch_does_not_make_it_renew_twice_from_then_on(place, monkeypatch, caplog):
    with distributed_lock("lottery", ttl=6) as lease:
        watchdog = backends["default"].watchdog_of("lottery")
        watch, calls = watchdog.watch, []

        def fail_once(lease, due):
            watch(lease, due)
            calls.append(lease)
            if len(calls) == 1:
                raise ZeroDivisionError("a bug")

        monkeypatch.setattr(watchdog, "watch", fail_once)
        wait_until(lambda: len(calls) >= 2)
        wait_until(lambda: "watchdog met an error; it goes on" in caplog.text)

        def entries():
            every = [one for queue in [*watchdog._queues.values()] for one in [*queue.entries]]
            return sum(one.token == lease._token and watchdog._counts(one) for one in every)

        # There is none while it is being renewed.
        assert wait_until(entries) == 1


@pytest.mark.proves("R7")
@pytest.mark.waits
@on_servers
@both_ways
async def test_a_lease_survives_an_outage_that_ends_before_its_deadline(
    way, place, make_proxy, caplog
):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    async with way.entered(distributed_lock("lottery", ttl=6)) as lease:
        await way.until(lambda: lease.renewals)
        proxy.refuse()
        await way.until(lambda: "Could not renew" in caplog.text)
        proxy.heal()
        count = lease.renewals
        await way.until(lambda: lease.renewals > count)
        assert lease.held
    warned = [one for one in caplog.records if "Could not renew" in one.getMessage()]
    # A machine that stands still for a while may have had such trouble before, too.
    assert {one.levelno for one in warned} == {logging.WARNING}
    assert "'lottery'" in warned[0].getMessage()


@pytest.mark.proves("R7")
@pytest.mark.waits
@both_ways
async def test_a_lease_dropped_after_its_renewals_is_not_renewed_any_more(way, place):
    lock = distributed_lock("lottery", ttl=6)
    lease = await way.taken(lock)
    while not lease.renewals:
        assert lease.lost_reason is None
        await way.sleep(0.05)
    del lock, lease
    gc.collect()
    await way.until(lambda: held.get("lottery") is None)


def test_a_thread_that_cannot_start_is_started_later(place, monkeypatch, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("redislock-watchdog"):
            raise RuntimeError("can't start new thread")
        start(thread)

    lock = distributed_lock("lottery", ttl=5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert lock.acquire()
    assert "Cannot start the thread that renews lock 'lottery'" in caplog.text
    with distributed_lock("tombola", ttl=5) as lease:
        wait_until(lambda: lease.renewals)
    lock.release()


@pytest.mark.proves("R7")
@pytest.mark.waits
def test_a_long_socket_timeout_leaves_time_for_a_second_try(locks, proxy):
    locks.on(proxy, OPTIONS={"socket_timeout": 20})
    with distributed_lock("lottery", ttl=12) as lease:
        proxy.rule_for_script(scripts.RENEW.sha, "hang_before")
        wait_until(lambda: lease.renewals)
        assert lease.held


@pytest.mark.proves("R7")
def test_what_is_over_costs_the_watchdog_nothing(locks, monkeypatch):
    monkeypatch.setattr("django_redislock.backends.watchdog.MOST_NEW", 50)

    def kept():
        watchdog = backends["default"].watchdog_of("lottery")
        queues = [*watchdog._queues.values()]
        return len(watchdog._new) + sum(len(queue.entries) for queue in queues)

    locks_due_at_different_times = [
        distributed_lock(f"short-{number}", ttl=3600 + number) for number in range(300)
    ]
    with distributed_lock("held", ttl=3600) as lease:
        for lock in locks_due_at_different_times:  # Over before the watchdog has seen them.
            with lock:
                pass
        wait_until(lambda: kept() < 100)
        for _ in range(4):  # Over only after that.
            assert all(lock.acquire() for lock in locks_due_at_different_times)
            wait_until(lambda: kept() > 250)
            for lock in locks_due_at_different_times:
                lock.release()
        assert kept() < 800
        assert lease.held


@pytest.mark.proves("R7")
@pytest.mark.waits
@pytest.mark.parametrize("late", [False, True])
def test_a_try_for_a_long_lease_leaves_time_for_short_ones(late, locks, proxy):
    locks.on(proxy)
    short = [distributed_lock(f"tombola:{ttl}", ttl=ttl) for ttl in (3, 3.5)]
    with distributed_lock("lottery", ttl=60) as lease:
        assert all(lock.acquire() for lock in short)
        wait_until(lambda: all(lock.lease.renewals for lock in short))
        if late:  # Then they are acquired when the try has begun.
            for lock in short:
                lock.release()
        # Half-open is the connection that renews, as one is whose state a firewall has dropped.
        hung = proxy.rule_for_script(scripts.RENEW.sha, "hang_before")
        renewals = lease.renewals
        backends["default"].watchdog_of("lottery").watch(lease, 0)  # As if it were due.
        hung.wait()
        if late:
            assert all(lock.acquire() for lock in short)
        leases = [lock.lease for lock in short]
        counts = [one.renewals for one in leases]
        wait_until(lambda: lease.renewals > renewals)
        wait_until(lambda: all(a.renewals > b for a, b in zip(leases, counts, strict=True)))
        assert all(one.held for one in leases)
