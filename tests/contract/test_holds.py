"""max_hold ends a lease that is renewed for ever; min_hold keeps a lock after its work is done."""

import time
from datetime import timedelta

import pytest

from django_redislock import LockLost, LockTimeout, distributed_lock, held
from tests.support.faults import takes
from tests.support.matrix import everywhere, in_turn, needs_scripts
from tests.support.others import waiters
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

# --- max_hold ------------------------------------------------------------------------------------


@pytest.mark.waits
@both_ways
async def test_a_lease_is_renewed_until_max_hold_and_not_longer(way, place):
    lock = distributed_lock("lottery", ttl=4.5, max_hold=6)
    with takes(at_least=5.8, at_most=6):
        assert await way.acquire(lock)
        lease = lock.lease
        await way.until(lambda: not lease.held)
    assert lease.lost_reason == "expired"
    with pytest.raises(LockLost):
        await way.renew(lease)
    assert await way.acquire(distributed_lock("lottery", wait=HUNG))
    with pytest.raises(LockLost):
        await way.release(lock)


@both_ways
@pytest.mark.parametrize(
    ("options", "over"),
    [
        ({"max_hold": 1.2}, "its max_hold of 1.2 s was over"),
        ({"ttl": 4.5, "max_hold": 5}, "its max_hold of 5 s was over"),
        ({"ttl": 1.2, "renew": False}, "renew is False, and its ttl of 1.2 s was over"),
    ],
    ids=str,
)
async def test_a_loss_names_the_setting_that_ended_the_lease(way, place, options, over, caplog):
    lock = distributed_lock("lottery", **options)
    with pytest.raises(LockLost, match=over) as lost:  # noqa: PT012
        async with way.entered(lock) as lease:
            await way.until(lambda: lease.lost_reason)
            await way.until(lambda: over in caplog.text)
    assert lost.value.reason == "expired"


@both_ways
async def test_max_hold_below_ttl_shortens_the_first_grant(way, place):
    limit = timedelta(seconds=5)
    async with way.entered(distributed_lock("lottery", ttl=10, max_hold=limit)) as lease:
        assert lease.ttl == 10
        assert 0 < lease.expires_in <= 5
        seen = held.get("lottery")
        assert 0 < seen.expires_in <= 5


@both_ways
async def test_the_last_renewal_is_shortened_to_end_at_max_hold(way, place):
    async with way.entered(distributed_lock("lottery", ttl=20, max_hold=20.2)) as lease:
        await way.sleep(0.5)
        await way.renew(lease)
        seen = held.get("lottery")
        # Not 20, which would be 0.3 too long.
        assert seen.expires_in <= 19.7
        assert lease.expires_in <= 19.7
        assert lease.expires_in > 1


# --- min_hold ------------------------------------------------------------------------------------


@pytest.mark.waits
@both_ways
async def test_after_a_success_the_lock_cools_until_min_hold(way, place):
    # min_hold may well exceed the ttl.
    lock = distributed_lock("lottery", ttl=4, min_hold=5, wait=0)
    start = time.monotonic()
    async with way.entered(lock) as lease:
        pass
    assert not lease.held
    assert await way.locked(lock)
    assert not await way.acquire(lock)
    seen = held.get("lottery")
    assert (seen.state, seen.id) == ("cooling", lease.id)
    await way.until(lambda: held.get("lottery") is None)
    assert time.monotonic() - start > 4.95
    assert await way.acquire(lock)
    await way.release(lock, success=False)


@both_ways
async def test_while_it_cools_the_holder_is_the_last_owner(way, place):
    async with way.entered(distributed_lock("lottery", min_hold=60)) as lease:
        pass
    with pytest.raises(LockTimeout) as raised:
        async with way.entered(distributed_lock("lottery", wait=0)):
            pytest.fail("the block ran")
    assert raised.value.holder == str(lease.owner)
    assert raised.value.cooling
    assert raised.value.expires_in == pytest.approx(60, abs=10)
    # It cannot be brought back.
    with pytest.raises(LockLost):
        await way.renew(lease)
    with pytest.raises(LockLost):
        await way.ensure_held(lease, verify=True)
    assert held.get("lottery").state == "cooling"


@needs_scripts
@pytest.mark.parametrize("names", [("lottery",), ("lottery", "other")], ids=len)
@pytest.mark.parametrize("is_first", [True, False])
@both_ways
async def test_of_nested_acquires_each_success_counts_whichever_ends_last(
    way, place, is_first, names
):
    keeps = distributed_lock(*names, min_hold=60, reentrant=True)
    other = distributed_lock(*names, min_hold=0.001, reentrant=True)
    for success in (False, True):
        for lock in (keeps, other):
            assert await way.acquire(lock)
        if not is_first:
            await way.release(other)
        await way.release(keeps, success=success)
        if is_first:
            await way.release(other, success=False)
        if not success:
            await way.until(lambda: not held.list())
    assert [one.state for one in held.list()] == ["cooling"] * len(names)


@both_ways
async def test_min_hold_counts_from_the_grant(way, place):
    async with way.entered(distributed_lock("lottery", min_hold=0.1)):
        start = time.monotonic()  # Not before: on a busy machine the way to the grant is long.
        await way.until(lambda: time.monotonic() - start > 0.15)
    assert not await way.locked(distributed_lock("lottery"))


@both_ways
async def test_a_failure_skips_min_hold_and_a_release_counts_as_a_success(way, place):
    lock = distributed_lock("lottery", min_hold=60)
    with pytest.raises(ZeroDivisionError):
        async with way.entered(lock):
            raise ZeroDivisionError
    assert not await way.locked(lock)
    assert await way.acquire(lock)
    await way.release(lock, success=False)
    assert not await way.locked(lock)
    assert await way.acquire(lock)
    await way.release(lock)  # It counts as a success.
    assert await way.locked(lock)


@pytest.mark.waits
@everywhere
@in_turn
@both_ways
async def test_who_waits_has_the_lock_as_soon_as_it_has_cooled(way, place, if_rung):
    lock = distributed_lock("lottery", ttl=20, min_hold=3)

    async def wait():
        async with way.entered(distributed_lock("lottery", wait=HUNG)):
            return time.monotonic()

    start = time.monotonic()
    async with way.entered(lock):
        waiter = way.start(wait)
        await way.until(lambda: waiters("lottery") == 1)
    assert 2.9 < await waiter.result() - start < if_rung
