"""Looking at held locks and releasing them by force, as programs and operators do."""

import logging
from contextlib import suppress

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock, held
from django_redislock.rules.keys import lock_keys
from tests.support.matrix import (
    MEMORY,
    QUORUM,
    everywhere,
    in_turn,
    needs_scripts,
    on_servers,
    places,
)
from tests.support.others import waiters
from tests.support.servers import KINDS
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

pytestmark = needs_scripts

# What is the same code in each place.
anywhere = places(*KINDS, MEMORY)


def seen(name):
    """The lock, which must be held."""
    found = held.get(name)
    assert found is not None
    return found


# --- looking -------------------------------------------------------------------------------------


@everywhere
@both_ways
async def test_a_held_lock_tells_who_and_how_long(way, place):
    assert (held.get("lottery"), held.list()) == (None, [])
    async with way.entered(distributed_lock("lottery", ttl=20)) as lease:
        await way.sleep(0.05)
        lock = seen("lottery")
        assert (lock.name, lock.alias, lock.state) == ("lottery", "default", "held")
        assert (lock.id, lock.owner) == (lease.id, lease.owner)
        if place.name == QUORUM:  # A server whose answer came too late to count may know a greater.
            assert lock.fence >= lease.fence
        else:
            assert lock.fence == lease.fence
        assert (lock.waiters, lock.renewals) == (0, 0)
        assert lock.held_for == pytest.approx(0.05, abs=5)
        assert lock.expires_in == pytest.approx(20, abs=5)
        await way.renew(lease)
        assert seen("lottery").renewals == 1
    assert held.get("lottery") is None


@everywhere
def test_a_list_is_in_the_order_in_which_the_leases_end_and_says_when_it_is_partial(place):
    handles = [distributed_lock(f"lottery:{ttl}", ttl=ttl) for ttl in (30, 10, 50, 20, 40)]
    assert all(handle.acquire() for handle in handles)
    names = [f"lottery:{ttl}" for ttl in (10, 20, 30, 40, 50)]
    for limit, partial in ((5, False), (3, True)):
        found = held.list(limit=limit)
        assert ([one.name for one in found], found.partial) == (names[:limit], partial)
    assert list(held.list(offset=10**20)) == []
    for handle in handles:
        handle.release()


@anywhere
@pytest.mark.parametrize("look", [held.list, held.every])
def test_a_state_that_there_is_not_is_refused_and_not_nowhere(place, look):
    only = held.Selection(state="overdu")
    with pytest.raises(ValueError, match=r"state must be one of 'held'.*, not 'overdu'"):
        list(look(only=only))


@everywhere
@in_turn
@both_ways
async def test_waiters_are_counted(way, place):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)

    async def wait():
        async with way.entered(distributed_lock("lottery", wait=HUNG)):
            pass

    waiting = []
    for count in range(1, 4):
        waiting.append(way.start(wait))
        await way.until(lambda: waiters("lottery") == count)  # noqa: B023 - called at once
    await way.release(lock)
    for one in waiting:
        await one.result()
    assert held.get("lottery") is None


# --- permits -------------------------------------------------------------------------------------


@everywhere
def test_each_permit_is_a_row_of_its_own_and_is_ended_alone(place):
    permits = [distributed_lock("gpu", limit=3) for _ in range(3)]
    assert all(permit.acquire() for permit in permits)
    rows = {one.name: one for one in held.list()}
    assert {name: one.permit for name, one in rows.items()} == {
        "gpu": "1/3",
        "gpu#2": "2/3",
        "gpu#3": "3/3",
    }
    numbers = {one.lease.id: one.lease.permit for one in permits if one.lease}
    assert {one.id: one.number for one in rows.values()} == numbers
    assert held.force_release("gpu#2", rows["gpu#2"].id)
    assert held.get("gpu#2") is None
    gone = held.detail("gpu#2")
    assert [lease.ended for lease in gone.past] == ["forced"]
    assert sorted(one.name for one in gone.others) == ["gpu", "gpu#3"]
    assert {one.name for one in held.list()} == {"gpu", "gpu#3"}
    for permit in permits:
        with suppress(LockLost):
            permit.release()
    assert held.list() == []


@everywhere
def test_a_lock_that_is_called_as_a_permit_is_never_taken_for_it(place):
    with distributed_lock("gpu#2") as before:
        before.renew()  # So it has a past, which the permit has not.
    with suppress(LockLost), distributed_lock("gpu#2") as lease:
        assert seen("gpu#2").id == lease.id  # Nobody has the permit.
        permits = [distributed_lock("gpu", limit=2) for _ in range(2)]
        assert all(permit.acquire() for permit in permits)
        rows = [(one.name, one.permit) for one in held.list()]
        assert sorted(rows) == [("gpu", "1/2"), ("gpu#2", ""), ("gpu#2", "2/2")]
        (second,) = (one.lease.id for one in permits if one.lease and one.lease.permit == 2)
        assert seen("gpu#2").id == second
        shown = held.detail("gpu#2").lock
        assert shown.id == second
        for name, number, it in (("gpu#2", 1, lease.id), ("gpu", 2, second)):
            exact = held.get(name, permit=number), held.detail(name, permit=number).lock
            assert [one and one.id for one in exact] == [it, it]
        assert held.force_release("gpu#2", lease.id)
        assert sorted(one.permit for one in held.list()) == ["1/2", "2/2"]
        assert held.force_release("gpu#2", second)
        assert [one.name for one in held.list()] == ["gpu"]
        for permit in permits:
            with suppress(LockLost):
                permit.release()


@on_servers
def test_a_foreign_key_hides_no_other_permit(place):
    permits = [distributed_lock("gpu", limit=2) for _ in range(2)]
    assert all(permit.acquire() for permit in permits)
    place.locks.redis.set(lock_keys(place.locks.prefix, "gpu", 1).lock, "foreign", px=60_000)
    shown = held.detail("gpu")
    assert (shown.lock.state, [one.name for one in shown.others]) == ("foreign", ["gpu#2"])
    for permit in permits:
        with suppress(LockLost):
            permit.release()


@on_servers
def test_a_permit_whose_holder_nobody_can_read_has_its_number(place):
    place.locks.redis.set(lock_keys(place.locks.prefix, "gpu", 2).lock, "somebody's", px=60_000)
    lock = seen("gpu#2")
    assert (lock.state, lock.permit, lock.key) == ("foreign", "2/?", ("gpu", 2))


def test_listing_scans_no_keys(locks):
    with distributed_lock("lottery"):
        locks.redis.config_resetstat()
        assert len(held.list()) == 1
        used = set(locks.redis.info("commandstats"))
    assert not used & {"cmdstat_scan", "cmdstat_keys"}


@on_servers
def test_a_silent_server_is_unavailable(place, make_proxy):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    proxy.refuse()
    for look in (held.list, lambda: held.get("lottery"), lambda: force_release("0" * 16)):
        with pytest.raises(LockUnavailable):
            look()


# --- releasing by force --------------------------------------------------------------------------


def force_release(id, **options):  # noqa: A002
    """End the lease of the lottery that has this id."""
    return held.force_release("lottery", id, **options)


@pytest.mark.proves("P9")
@everywhere
@both_ways
async def test_force_release_frees_the_lock_and_its_holder_learns_why(way, place):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    assert force_release(seen("lottery").id) is True
    assert held.get("lottery") is None
    assert held.list() == []
    with pytest.raises(LockLost) as raised:
        await way.release(lock)
    assert raised.value.reason == "forced"


@pytest.mark.proves("P9")
@both_ways
async def test_force_release_never_touches_a_newer_lease(way, place):
    async with way.entered(distributed_lock("lottery")):
        old = seen("lottery")
    async with way.entered(distributed_lock("lottery")) as lease:
        assert force_release(old.id) is False
        await way.ensure_held(lease, verify=True)
    assert force_release(lease.id) is False


@both_ways
async def test_force_release_ends_a_cooling_lock(way, place):
    async with way.entered(distributed_lock("lottery", min_hold=60)) as lease:
        pass
    assert force_release(lease.id) is True
    assert held.get("lottery") is None


@everywhere
@in_turn
@both_ways
async def test_force_release_hands_the_lock_to_the_next_waiter(way, place):
    lock = distributed_lock("lottery", ttl=60)
    assert await way.acquire(lock)
    waiting = way.start(lambda: way.acquire(distributed_lock("lottery", wait=HUNG)))
    await way.until(lambda: waiters("lottery") == 1)
    force_release(seen("lottery").id)
    assert await waiting.result() is True


@pytest.mark.proves("P9")
def test_an_id_that_is_none_releases_nothing(place):
    with distributed_lock("lottery") as lease:
        for odd in ("", "0", "x" * 5000, "|", "*"):
            assert force_release(odd) is False
        lease.ensure_held(verify=True)


@anywhere
def test_the_audit_log_tells_who_released_what(place, caplog):
    caplog.set_level(logging.INFO, "django_redislock.audit")
    with pytest.raises(LockLost), distributed_lock("lottery") as lease:  # noqa: PT012 - by leaving the block
        force_release(lease.id, by="ann")
        force_release(lease.id, by="bob")
    first, second = (one for one in caplog.records if one.name == "django_redislock.audit")
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.INFO)
    for part in ("lottery", "default", lease.id, str(lease.owner), "ann"):
        assert part in first.getMessage()
    assert "bob" in second.getMessage()


def test_neither_looks_nor_releases_change_a_lock_of_another_alias(place, settings):
    before = place.setting()
    settings.REDISLOCK = {"default": before, "other": {**before, "KEY_PREFIX": "test-another"}}
    with distributed_lock("lottery") as lease:
        assert held.get("lottery", using="other") is None
        assert held.list(using="other") == []
        assert force_release(lease.id, using="other") is False
        lease.ensure_held(verify=True)
