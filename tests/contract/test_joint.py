"""Several locks as one: all are taken or none, whatever the order they are written in."""

import asyncio
import math
from contextlib import asynccontextmanager

import pytest

from django_redislock import (
    InvalidLockName,
    Lease,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    distributed_lock,
    held,
    signals,
)
from django_redislock.rules import scripts
from django_redislock.rules.lease_state import certain_for
from tests.contract.test_signals import received
from tests.support.matrix import MEMORY, everywhere, in_turn, needs_scripts, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.stored import keys_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways

FROM, TO = "account:1", "account:2"
BOUNDS = pytest.mark.parametrize("bound", [{"max_hold": 1}, {"renew": False}], ids=str)


async def is_locked(way, *names):
    return [await way.locked(distributed_lock(name)) for name in names]


@asynccontextmanager
async def while_busy(way, work, busy=TO):
    """*work* runs beside the block, and waits for the lock *busy* until its end."""
    taken = distributed_lock(busy, ttl=60)
    assert await way.acquire(taken)
    begun = way.start(work)
    await way.until(lambda: any(one.waiters for one in held.list()) or begun.done())
    yield begun
    await way.release(taken)


# --- all or none ---------------------------------------------------------------------------------


@everywhere
@both_ways
async def test_the_block_holds_all_and_then_they_are_free(way, place):
    lock = distributed_lock(TO, FROM, TO)
    async with way.entered(lock) as lease:
        assert isinstance(lease, Lease)
        assert lease.held
        assert lock.lease is lease
        assert lease.names == (FROM, TO)
        assert list(lease.fences) == [FROM, TO]
        assert lease.fence == max(lease.fences.values())
        assert await is_locked(way, FROM, TO) == [True, True]
        assert await way.locked(lock)
        await way.ensure_held(lease, verify=True)
        await way.renew(lease, 90)
        assert (lease.ttl, lease.renewals) == (90, 2)
    assert not lease.held
    assert lock.lease is None
    with pytest.raises(LockMisuse, match="holds no lease"):
        await way.release(lock)
    assert not await way.locked(lock)
    assert await is_locked(way, FROM, TO) == [False, False]


@both_ways
async def test_if_one_is_taken_none_is(way, place):
    for busy in (FROM, TO):
        with held_by_other(busy, ttl=60):
            assert not await way.acquire(distributed_lock(FROM, TO, wait=0))
            with pytest.raises(LockTimeout) as raised:
                async with way.entered(distributed_lock(TO, FROM, wait=0.05)):
                    pytest.fail("the block ran")
            others = {FROM, TO} - {busy}
            assert await is_locked(way, *others) == [False]
        assert raised.value.name == busy
        assert raised.value.holder == "another-host:1 simulated"


@both_ways
async def test_one_wait_is_for_all_together(way, place):
    first, last = distributed_lock(FROM, ttl=60), distributed_lock("account:3", ttl=60)
    assert await way.acquire(first)
    assert await way.acquire(last)

    async def transfer():
        async with way.entered(distributed_lock("account:3", TO, FROM, wait=HUNG)) as lease:
            assert lease.held
            return lease.fences

    transferring = way.start(transfer)
    await way.release(first)
    await way.release(last)
    assert list(await transferring.result()) == [FROM, TO, "account:3"]


@in_turn
@both_ways
async def test_nobody_who_waits_for_a_lock_holds_a_later_one(way, place):
    async def transfer():
        async with way.entered(distributed_lock(FROM, TO, wait=HUNG)) as lease:
            return lease.held

    async with (
        while_busy(way, transfer, FROM) as transferring,
        way.entered(distributed_lock(TO, wait=HUNG)),
    ):
        assert not transferring.done()
    assert await transferring.result()


# --- the handle ----------------------------------------------------------------------------------


@places(KIND, MEMORY)
@both_ways
async def test_the_fields_of_each_name_are_the_arguments(way, place):
    def transfer(source, target=2):
        return sorted(lock.name for lock in held.list())

    lock = distributed_lock("account:{target}", "account:{source}", "bank")
    locked = lock(way.function(transfer))
    assert await way.call(locked, 1) == [FROM, TO, "bank"]
    assert await way.call(locked, 2) == [TO, "bank"]


@places(KIND, MEMORY)
@both_ways
async def test_who_holds_one_of_them_already_is_told_so_at_once(way, place):
    async with way.entered(distributed_lock(TO)):
        with pytest.raises(LockMisuse, match=f"{TO}.*holds it already"):
            await way.acquire(distributed_lock(FROM, TO))
        assert await is_locked(way, FROM) == [False]


@places(KIND, MEMORY)
@both_ways
async def test_reentrant_nests_what_is_held_and_takes_the_rest(way, place):
    async with way.entered(distributed_lock(FROM)) as outer:
        async with way.entered(distributed_lock(TO, FROM, reentrant=True)) as lease:
            assert lease.fences[FROM] == outer.fence
            async with way.entered(distributed_lock(FROM, TO, reentrant=True)) as inner:
                assert inner.fences == lease.fences
            assert lease.held
        assert outer.held
        assert await is_locked(way, FROM, TO) == [True, False]


@needs_scripts
@both_ways
async def test_min_hold_keeps_each_of_them(way, place):
    async with way.entered(distributed_lock(FROM, TO, min_hold=60)):
        pass
    assert await is_locked(way, FROM, TO) == [True, True]


@places(KIND, MEMORY)
@both_ways
async def test_operators_see_each_name_and_what_it_belongs_to(way, place):
    async with way.entered(distributed_lock(TO, FROM)):
        assert {lock.name: lock.owner.names for lock in held.list()} == dict.fromkeys(
            (FROM, TO), f"{FROM}, {TO}"
        )
    async with way.entered(distributed_lock(FROM)):
        assert [lock.owner.names for lock in held.list()] == [""]


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "name"), [("forced", FROM), ("expired", TO)])
@both_ways
async def test_with_one_of_them_all_is_lost(way, place, how, name):
    lost = []
    lock = distributed_lock(FROM, TO, ttl=10 if how == "forced" else 0.6)
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(lost.append)
    if how == "forced":
        for part in lease.parts:
            place.force_release(part)
        with pytest.raises(LockLost):
            await way.ensure_held(lease, verify=True)
    else:
        place.lapse(TO)
    await way.until(lambda: lost)  # Its renewal has found out.
    assert not lease.held
    assert lease.lost_reason == how
    if how == "expired":
        assert lease.parts[0].held
        assert await is_locked(way, FROM) == [True]  # Until the block ends.
    with pytest.raises(LockLost) as raised:
        await way.release(lock)
    assert (raised.value.name, raised.value.reason) == (name, how)
    assert lost == [lease]
    assert await is_locked(way, FROM, TO) == [False, False]


@both_ways
async def test_what_is_left_after_a_loss_is_free_at_the_end_of_the_block(way, place):
    lock = distributed_lock(FROM, TO)

    async def transfer():
        async with way.entered(lock) as lease:
            place.force_release(lease.parts[1])
            assert await is_locked(way, FROM) == [True]

    with pytest.raises(LockLost) as raised:
        await transfer()
    assert raised.value.name == TO
    assert await is_locked(way, FROM, TO) == [False, False]
    assert await way.acquire(lock)  # The handle has forgotten it.
    await way.release(lock)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "error", "says"),
    [
        ((), {}, TypeError, "needs the name of the lock, or several"),
        ((FROM, 30), {}, TypeError, r"distributed_lock\('report', ttl=30, wait=5\)"),
        ((), {"name": FROM}, TypeError, "the name by position"),
        ((FROM, TO), {"using": ["default", "other"]}, ValueError, r"using must be one .* blocks"),
        ((FROM, ""), {}, InvalidLockName, "empty"),
        ((FROM, "x" * 201), {}, InvalidLockName, "200"),
    ],
)
def test_what_is_no_name_is_refused(names, options, error, says):
    with pytest.raises(error, match=says):
        distributed_lock(*names, **options)


def test_a_field_that_is_no_argument_is_refused():
    with pytest.raises(InvalidLockName, match="'nobody'"):
        distributed_lock(FROM, "account:{nobody}")(lambda source: source)


@places(KIND, MEMORY)
def test_its_lease_cannot_be_handed_over(place):
    with distributed_lock(FROM, TO) as lease:
        for hand_over in (lease.hand_over, lambda: asyncio.run(lease.ahand_over())):
            with pytest.raises(LockMisuse, match="Take each lock by a distributed_lock"):
                hand_over()
        assert lease.held


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.proves("R1", "R4", "R6")
@both_ways
async def test_a_lost_reply_is_asked_for_again(way, locks, proxy):
    locks.on(proxy, TTL=60)
    async with way.entered(distributed_lock(FROM, TO)):
        pass
    proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after", times=1)
    async with way.entered(distributed_lock(FROM, TO)) as lease:
        assert lease.held
        proxy.rule_for_script(scripts.RELEASE.sha, "cut_after", times=1)
    assert await is_locked(way, FROM, TO) == [False, False]


@pytest.mark.proves("P4", "R4")
@pytest.mark.no_permit("one permit whose key is not ours leaves the others to be had")
@both_ways
async def test_no_answer_for_one_of_them_is_no_busy_and_leaves_nothing(way, locks, proxy):
    locks.on(proxy, TTL=60, UNAVAILABLE_AFTER=0)
    async with way.entered(distributed_lock(FROM, TO)):
        pass
    key = keys_of(locks, TO).lock
    locks.redis.rpush(key, "a list")
    with pytest.raises(LockUnavailable) as raised:
        await way.acquire(distributed_lock(FROM, TO, wait=0))
    assert raised.value.name == TO
    locks.redis.delete(key)
    assert await is_locked(way, FROM, TO) == [False, False]


@places(KIND, MEMORY)
@BOUNDS
@both_ways
async def test_max_hold_and_renew_count_from_when_all_are_held(way, place, bound):
    async def transfer():
        async with way.entered(distributed_lock(FROM, TO, ttl=1, wait=HUNG, **bound)) as lease:
            first, last = lease.parts
            assert lease.held
            assert first.id == waiting.id
            assert first.auto_renew is last.auto_renew is ("max_hold" in bound)
            assert first.hold_until >= last.granted_at + bound.get("max_hold", math.inf)
            assert first.deadline >= last.granted_at + certain_for(1)

    def first_of_both():
        return next((one for one in held.list() if one.name == FROM), None)

    with received(signals.lock_lost) as lost:
        async with while_busy(way, transfer) as transferring:
            # After four renewals, each after 0.3 s at least, max_hold or the ttl would be over.
            await way.until(lambda: transferring.done() or first_of_both().renewals >= 4)
            waiting = first_of_both()
        await transferring.result()
    assert lost == []


@BOUNDS
def test_what_was_held_for_a_while_ends_with_max_hold_or_renew(place, bound):
    with held_by_other(TO, ttl=1):
        lease = distributed_lock(FROM, TO, ttl=1, wait=HUNG, **bound).__enter__()
    wait_until(lambda: lease.lost_reason)
    with pytest.raises(LockLost, match=r"max_hold of 1 s|renew is False, and its ttl of 1 s"):
        lease.ensure_held()
    wait_until(lambda: not distributed_lock(FROM, TO).locked())


@places(KIND, MEMORY)
@both_ways
async def test_a_lease_that_was_lost_while_another_lock_was_awaited_is_taken_again(way, place):
    async def transfer():
        async with way.entered(distributed_lock(FROM, TO, max_hold=60, wait=HUNG)) as lease:
            return lease.held

    async with while_busy(way, transfer) as transferring:
        (first,) = (one for one in held.list() if one.name == FROM)
        assert held.force_release(FROM, first.id)
    assert await transferring.result()


@pytest.mark.proves("P1", "P5")
@places(KIND, MEMORY)
@both_ways
async def test_a_lease_of_an_outer_block_that_was_lost_while_another_lock_was_awaited_raises(
    way, place
):
    leases = []

    async def transfer():
        async with way.entered(distributed_lock(FROM, reentrant=True, max_hold=0.5)) as outer:
            leases.append(outer)
            async with way.entered(distributed_lock(FROM, TO, reentrant=True, wait=HUNG)):
                leases.append("the body ran")

    async with while_busy(way, transfer) as transferring:
        await way.until(lambda: leases[0].lost_reason or transferring.done())
    with pytest.raises(LockLost, match="max_hold"):
        await transferring.result()
    assert len(leases) == 1
    assert await is_locked(way, FROM, TO) == [False, False]


def test_a_max_hold_that_is_less_than_the_drift_of_the_ttl_can_be_begun(place):
    with (
        received(signals.lock_lost) as lost,
        held_by_other(TO, ttl=1),
        distributed_lock(FROM, TO, ttl=600, max_hold=5, wait=HUNG) as lease,
    ):
        assert lease.held
    assert lost == []


def test_when_all_are_held_max_hold_begins_though_the_server_is_silent_for_a_moment(locks, proxy):
    locks.on(proxy, UNAVAILABLE_AFTER=HUNG)
    assert not distributed_lock(FROM, TO).locked()  # It has learned the scripts.
    with held_by_other(TO, ttl=1):
        proxy.rule_for_script(scripts.RENEW.sha, "cut_before", times=4)
        with distributed_lock(FROM, TO, ttl=60, max_hold=60, wait=HUNG) as lease:
            assert lease.held


def test_a_lease_without_renewals_does_not_run_out_while_another_lock_is_awaited(place):
    with (
        held_by_other(TO, ttl=2),
        distributed_lock(FROM, TO, ttl=0.5, renew=False, wait=HUNG) as lease,
    ):
        assert lease.held
