"""A lease whose renewals are unanswered tells so while there is time, once in each danger."""

import logging
import threading
import time
from contextlib import suppress

import pytest

from django_redislock import LockLost, distributed_lock, signals
from tests.contract.test_signals import received
from tests.support.faults import slack
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

pytestmark = pytest.mark.waits

TTL = 12.0
KINDS = {
    "plain": lambda: distributed_lock("lottery", ttl=TTL),
    "permit": lambda: distributed_lock("lottery", ttl=TTL, limit=2),
    "joint": lambda: distributed_lock("lottery", "tombola", ttl=TTL),
}


@pytest.mark.parametrize("kind", KINDS)
@both_ways
async def test_each_danger_is_told_once_while_the_lease_is_held(way, locks, proxy, kind, caplog):
    locks.on(proxy)
    told = []

    def tell(lease):
        told.append((lease, lease.held, lease.expires_in, threading.current_thread().name))

    with received(signals.lease_endangered) as got, caplog.at_level(logging.WARNING):
        async with way.entered(KINDS[kind]()) as lease:
            lease.on_endangered(tell)
            for dangers in (1, 2):
                proxy.blackhole()
                await way.until(lambda dangers=dangers: len(told) == dangers)
                await way.until(lambda dangers=dangers: len(got) == dangers * len(lease.parts))
                # Not again by the tries that follow in the same danger.
                await way.sleep(TTL / 12)
                assert len(told) == dangers
                renewals = lease.renewals
                proxy.heal()
                await way.until(lambda renewals=renewals: lease.renewals > renewals)
            assert lease.held
    for of, is_held, left, thread in told:
        assert (of, is_held, thread) == (lease, True, "redislock-endangered")
        assert TTL / 4 - slack() < left <= TTL / 2
    for one in got:
        assert one["lease"] in lease.parts
        assert 0 < one["left"] <= TTL / 2
        assert one["template"] == one["lease"].name
    records = [one for one in caplog.records if "is endangered" in one.message]
    # Each part tells in a thread of its own, so one may overtake the other.
    warned = sorted((one.levelname, vars(one)["lock"]) for one in records if vars(one)["lock"])
    assert warned == sorted(("WARNING", part["lease"].name) for part in got)


@both_ways
async def test_who_asks_late_is_told_at_once_and_left_says_how_early(way, locks, proxy):
    locks.on(proxy)
    told = []
    lock = distributed_lock("lottery", ttl=TTL)
    with suppress(LockLost):  # A slow machine may renew too late.
        assert await way.acquire(lock)
        lease = lock.lease
        lease.on_endangered(lambda lease: told.append(("late", lease.expires_in)), left=0.2)
        lease.on_endangered(lambda lease: told.append(("early", lease.expires_in)), left=0.6)
        proxy.blackhole()
        await way.until(lambda: told)
        lease.on_endangered(lambda lease: told.append(("now", threading.get_ident())), left=0.9)
        assert told[1:] == [("now", threading.get_ident())]
        await way.until(lambda: len(told) == 3)
        proxy.heal()
        await way.until(lambda: lease.renewals or not lease.held)
        await way.release(lock)
    assert [which for which, _ in told] == ["early", "now", "late"]
    assert told[0][1] <= 0.6 * TTL
    assert told[2][1] <= 0.2 * TTL


def test_what_ends_as_planned_is_in_no_danger(locks, proxy):
    locks.on(proxy)
    told = []
    lock = distributed_lock("lottery", ttl=1, renew=False)
    assert lock.acquire()
    lease = lock.lease
    lease.on_endangered(told.append, left=0.99)
    proxy.blackhole()
    lost = threading.Event()
    lease.on_lost(lambda lease: lost.set())
    assert lost.wait(HUNG)
    assert told == []
    proxy.heal()


def test_a_callback_that_hangs_or_fails_delays_nobody(locks, proxy, caplog):
    locks.on(proxy)
    go_on, told = threading.Event(), threading.Event()
    with distributed_lock("lottery", ttl=TTL) as lease:
        lease.on_endangered(lambda lease: go_on.wait(HUNG))
        lease.on_endangered(lambda lease: 1 / 0)
        lease.on_endangered(lambda lease: told.set())
        proxy.blackhole()
        assert told.wait(HUNG)
        proxy.heal()
        deadline = time.monotonic() + HUNG
        while not lease.renewals and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lease.held
        go_on.set()
    (record,) = [one for one in caplog.records if "An on_endangered callback" in one.message]
    assert record.exc_info
    assert vars(record)["fence"] == lease.fence


@pytest.mark.parametrize("left", [0, 1, -0.5, True, "0.5", float("nan")])
def test_left_is_a_part_of_the_ttl(locks, left):
    says = r"^left must be more than 0 and less than 1, not"
    with distributed_lock("lottery") as lease, pytest.raises(ValueError, match=says):
        lease.on_endangered(print, left=left)
