"""A Rate: at most so many starts in a time, for all programs together, alone or beside limits."""

import asyncio
import math
import os
import time

import pytest

from django_redislock import (
    Limit,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    Rate,
    distributed_lock,
    held,
    joint_handle,
    signals,
    single_instance,
)
from django_redislock.backends.registry import backends
from django_redislock.lock import JointLock
from django_redislock.options import lock_options
from tests.contract.test_signals import received
from tests.support.matrix import QUORUM, in_turn, places, unscripted
from tests.support.others import waiters
from tests.support.waiting import HUNG, await_until
from tests.support.ways import both_ways, in_thread

pytestmark = in_turn

HOURLY = Rate("geo", "1/h")
TENTHS = Rate("geo", "10/s")  # 0.1 s apart.
SLACK = 0.02  # Seconds by which two clocks that count differ, and a thread comes late.


def start(*limits, **options):
    with distributed_lock(limits=limits, **{"wait": 0, **options}) as lease:
        return lease


def due_in(*limits):
    """Seconds until a start of these limits is due."""
    with pytest.raises(LockTimeout) as raised:
        start(*limits)
    return raised.value.expires_in


# --- one rate ---------------------------------------------------------------------------------


@both_ways
async def test_a_start_is_taken_and_not_given_back_at_the_end(way, place):
    lock = distributed_lock(limits=[HOURLY], wait=0)
    async with way.entered(lock):
        pass
    with pytest.raises(LockTimeout) as raised:
        async with way.entered(lock):
            raise AssertionError("too many")
    error = raised.value
    assert error.rate
    assert error.name == "geo"
    assert 3590 < error.expires_in <= 3600
    says = f"Rate 'geo' has no start left; the next one is due in {error.expires_in:.1f} s."
    assert str(error) == says


@both_ways
async def test_it_has_no_lease_that_could_end(way, place):
    lock = distributed_lock(limits=[HOURLY], wait=0)
    async with way.entered(lock) as lease:
        assert (lease.held, lease.fence, lease.fences, lease.names) == (True, None, {}, ("geo",))
        assert lease.expires_in == math.inf
        assert lease.lost_reason is None
        await way.ensure_held(lease, verify=True)
        await way.renew(lease)
        assert await way.locked(lock) is False
    assert not [name for name in backends["default"].leases if name == "geo"]


@both_ways
async def test_waiters_start_in_turn_each_when_its_start_is_due(way, place):
    begun, started = time.monotonic(), []

    async def work():
        async with way.entered(distributed_lock(limits=[TENTHS], wait=HUNG)):
            started.append(time.monotonic() - begun)

    waiting = [way.start(work) for _ in range(6)]
    for one in waiting:
        await one.result()
    assert all(at >= 0.1 * number - SLACK for number, at in enumerate(sorted(started)))


def test_a_wait_that_would_be_in_vain_ends_at_once_and_takes_nothing(place):
    start(HOURLY)
    before = time.monotonic()
    for _ in range(5):
        with pytest.raises(LockTimeout) as raised:
            start(HOURLY, wait=60)
        assert 3590 < raised.value.expires_in <= 3600
    assert time.monotonic() - before < 30


async def test_a_cancelled_waiter_takes_no_start(place):
    await distributed_lock(limits=[HOURLY], wait=0).aacquire()
    lasting = distributed_lock(limits=[HOURLY], wait=3 * 3600)
    first, second = (asyncio.create_task(lasting.aacquire()) for _ in range(2))
    await await_until(lambda: waiters("geo") == 2)
    waiting = (await asyncio.to_thread(held.detail, "geo")).waiters
    assert {one.owner.pid for one in waiting} == {os.getpid()}
    first.cancel()
    await asyncio.wait([first])
    assert waiters("geo") == 1
    assert 3500 < (await asyncio.to_thread(due_in, HOURLY)) - 3600 <= 3600
    second.cancel()
    await asyncio.wait([second])
    assert 3500 < await asyncio.to_thread(due_in, HOURLY) <= 3600


def interrupted(*_):
    yield from ()
    raise KeyboardInterrupt


def test_an_interrupted_acquire_leaves_no_reserved_start(place, monkeypatch):
    start(HOURLY)
    reserved = {}
    lock = JointLock((Limit("jobs", 1), HOURLY), lock_options(wait=0), reserved=reserved)
    for _ in range(2):  # It comes back, and keeps its place.
        lock.attempt()
        assert 7190 < due_in(HOURLY) <= 7200
    monkeypatch.setattr(joint_handle, "_give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.attempt()
    monkeypatch.undo()
    assert not reserved
    assert 3590 < due_in(HOURLY) <= 3600


def test_an_interrupted_release_gives_no_start_back(place, monkeypatch):
    lock = distributed_lock(limits=[Limit("jobs", 1), HOURLY], wait=0)
    with pytest.raises(KeyboardInterrupt), lock:
        monkeypatch.setattr(joint_handle.JointHandle, "_release", interrupted)
    monkeypatch.undo()
    assert not distributed_lock("jobs", limit=1).locked()
    assert 3590 < due_in(HOURLY) <= 3600


def test_a_loss_of_redis_ends_no_body_and_gives_one_burst_more(locks):
    with distributed_lock(limits=[HOURLY], wait=0) as lease:
        locks.redis.delete(*locks.keys())
        lease.ensure_held(verify=True)
    start(HOURLY)
    assert due_in(HOURLY) > 3590


# --- beside locks and other rates ---------------------------------------------------------------


def test_beside_limits_it_is_all_or_none(place):
    locks, slow = [Limit("geo:acme", 1), Limit("all", 2)], Rate("geo", "1/h", burst=2)
    with distributed_lock(limits=[slow, *locks], wait=0) as lease:
        assert lease.names == ("geo:acme", "all", "geo")
        assert list(lease.fences) == ["geo:acme", "all"]
        assert lease.fence == max(lease.fences.values())
        for _ in range(3):
            refused = in_thread(distributed_lock(limits=[slow, *locks], wait=0).acquire)
            assert refused.result(HUNG) is False
    start(slow, *locks)  # The refused ones have taken no start.
    assert due_in(slow, *locks) > 3590
    assert not distributed_lock(limits=locks).locked()  # No start was due, so no lock is taken.


def test_a_start_of_a_rate_is_given_back_if_another_rate_has_none(place):
    narrow, wide = Rate("geo:acme", "1/h", burst=2), HOURLY
    start(wide)
    for _ in range(5):
        with pytest.raises(LockTimeout, match="'geo'"):
            start(narrow, wide)
    start(narrow)
    start(narrow)
    assert due_in(narrow) > 3590


def test_a_waiter_for_a_start_holds_its_locks_and_nobody_polls(place):
    start(TENTHS)
    with distributed_lock(limits=[Limit("one", 1), TENTHS], wait=HUNG) as lease:
        assert lease.held
        assert distributed_lock("one").locked()


def test_a_start_is_no_acquire_or_release_to_receivers(place):
    lock = distributed_lock(limits=[Limit("one", 1), HOURLY], wait=0)
    with received(signals.lock_acquired) as acquired, received(signals.lock_released) as released:
        lock.attempt()
        lock.undo()  # As a run does that is given back.
    assert [one["lease"].name for one in acquired] == ["one"]
    assert [one["lease"].name for one in released] == ["one"]


# --- above functions --------------------------------------------------------------------------


def test_above_a_function_name_and_rate_are_made_of_the_arguments(place):
    plans = {"acme": "2/h", "small": (1, 3600)}

    @distributed_lock(limits=[Rate("geo:{tenant}", lambda tenant: plans[tenant], burst=1)], wait=0)
    def look_up(tenant):
        return tenant

    assert look_up("acme") == "acme"
    assert look_up("small") == "small"
    for tenant, seconds in (("acme", 1800), ("small", 3600)):
        with pytest.raises(LockTimeout) as raised:
            look_up(tenant)
        assert raised.value.name == f"geo:{tenant}"
        assert seconds - 10 < raised.value.expires_in <= seconds


def test_a_job_without_a_start_is_skipped_and_says_when_the_next_is_due(place, caplog):
    @single_instance(limits=[HOURLY])
    def look_up():
        return "looked"

    assert look_up() == "looked"
    skipped = look_up()
    assert skipped["skipped"] == "busy"
    assert 3590 < skipped["expires_in"] <= 3600
    assert "holder" not in skipped
    assert "is a rate, and its next start is due in" in caplog.text


# --- lists ------------------------------------------------------------------------------------


def test_lists_show_the_starts_left_and_pauses(place):
    rate = Rate("geo", "1/h", burst=2)
    start(rate)
    (row,) = held.list()
    assert (row.name, row.state, row.starts_left, row.expires_in) == ("geo", "rate", 1, 0)
    held.pause("geo", 60, by="an operator", reason="the provider asks us to wait")
    with pytest.raises(LockTimeout, match="paused by an operator: the provider asks us to wait"):
        start(rate)
    (paused,) = held.list()
    assert paused.state == "paused"
    held.resume("geo")
    start(rate)
    (row,) = held.list()
    assert (row.state, row.starts_left, row.waiters) == ("rate", 0, 0)
    assert 3500 < row.expires_in <= 3600
    assert held.detail("geo").waiters == []


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"ttl": 5}, {"renew": False}, {"atomic": True}, {"max_hold": 9}]
)
def test_options_of_a_lease_are_refused_where_there_are_only_rates(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} has no effect: under a Rate nothing is held"):
        distributed_lock(limits=[HOURLY], **option)


@places(QUORUM)
def test_a_quorum_counts_no_starts_and_says_so(place):
    with pytest.raises(LockMisuse, match="is a quorum, where no server alone counts starts"):
        start(HOURLY)


@unscripted
def test_without_scripts_there_are_no_rates_and_the_error_says_so(place):
    with pytest.raises(LockUnavailable, match="rates"):
        start(HOURLY)
