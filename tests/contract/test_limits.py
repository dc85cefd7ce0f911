"""Several limits as one: per key and in total, all or none, in the order given."""

import threading

import pytest

from django_redislock import (
    InvalidLockName,
    Limit,
    LockMisuse,
    LockTimeout,
    distributed_lock,
    held,
    single_instance,
    single_instance_task,
)
from tests.support.matrix import MEMORY, in_turn, places
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

ACME, ALL = Limit("export:acme", 2), Limit("export", 3)


def elsewhere(*limits):
    """Limits that another thread has taken, and that are to be released here."""
    lock = distributed_lock(limits=limits, wait=0)
    assert in_thread(lock.acquire).result(HUNG)
    return lock


def is_full(limit):
    return distributed_lock(limits=[limit]).locked()


def test_each_has_a_permit_and_the_narrow_one_keeps_no_others_out(place):
    other, third = Limit("export:other", 2), Limit("export:third", 2)
    taken = [elsewhere(ACME, ALL)]
    with distributed_lock(limits=[ACME, ALL], wait=0) as lease:
        assert lease.names == ("export:acme", "export")
        assert lease.permit is None
        assert all(part.permit in {1, 2, 3} for part in lease.parts)
    taken.append(elsewhere(ACME, ALL))
    with pytest.raises(LockTimeout) as raised:
        distributed_lock(limits=[ALL, ACME], wait=0).__enter__()
    assert raised.value.name == "export:acme"
    assert not is_full(ALL)  # What was granted is given back.
    taken.append(elsewhere(other, ALL))
    with pytest.raises(LockTimeout) as raised:
        distributed_lock(limits=[Limit("export:third", 1), ALL], wait=0).__enter__()
    assert raised.value.name == "export"
    assert not is_full(third)
    for lock in taken:
        lock.release()
    assert not any(map(is_full, (ACME, ALL, other)))


@in_turn
@both_ways
async def test_who_waits_for_the_narrow_one_does_not_hold_the_wide_one(way, place):
    narrow, wide = Limit("export:acme", 1), Limit("export", 2)
    first = distributed_lock(limits=[narrow, wide])
    assert await way.acquire(first)

    async def export():
        async with way.entered(distributed_lock(limits=[narrow, wide], wait=HUNG)) as lease:
            return len(lease.parts)

    waiting = way.start(export)
    await way.until(lambda: any(lock.waiters for lock in held.list()) or waiting.done())
    async with way.entered(
        distributed_lock(limits=[Limit("export:other", 1), wide], wait=HUNG)
    ) as other:
        assert other.held
        assert not waiting.done()
    await way.release(first)
    assert await waiting.result() == 2


def test_never_more_than_the_limits_under_load(place):
    running, seen, most = dict.fromkeys(("a", "b", "all"), 0), [], threading.Lock()

    def export(tenant):
        limits = [Limit(f"export:{tenant}", 2), Limit("export", 3)]
        for _ in range(4):
            with distributed_lock(limits=limits, wait=HUNG):
                for count in (tenant, "all"):
                    with most:
                        running[count] += 1
                        seen.append((count, running[count]))
                for count in (tenant, "all"):
                    with most:
                        running[count] -= 1

    threads = [threading.Thread(target=export, args=(one,), daemon=True) for one in "aabb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HUNG)
        assert not thread.is_alive(), "a deadlock"
    assert max(count for which, count in seen if which == "all") <= 3
    assert max(count for which, count in seen if which != "all") <= 2


@in_turn
@both_ways
async def test_names_and_numbers_are_made_of_the_arguments(way, place):
    plans = {"acme": 2, "other": 3}

    def export(tenant, *, size=1):
        return sorted((lock.name, lock.owner.limit) for lock in held.list())

    lock = distributed_lock(
        limits=[
            Limit("export:{tenant}", lambda tenant: plans[tenant]),
            Limit("export", lambda **arguments: 10 * arguments["size"]),
        ]
    )
    exported = lock(way.function(export))
    assert await way.call(exported, "acme") == [("export", 10), ("export:acme", 2)]
    assert await way.call(exported, tenant="other", size=2) == [
        ("export", 20),
        ("export:other", 3),
    ]
    plans["acme"] = 0
    with pytest.raises(ValueError, match=r"number of Limit\('export:acme'\).*1 to 1000, not 0"):
        await way.call(exported, "acme")


@both_ways
async def test_several_names_with_a_limit_have_it_each(way, place):
    async with (
        way.entered(distributed_lock("gpu", "disk", limit=2)) as lease,
        way.entered(distributed_lock("gpu", "disk", limit=2)) as other,
    ):
        for part, theirs in zip(lease.parts, other.parts, strict=True):
            assert {part.permit, theirs.permit} == {1, 2}
        assert await way.locked(distributed_lock("gpu", limit=2))


def test_what_makes_no_sense_is_refused(place):
    for limits in ([], {}, "export", 3):
        with pytest.raises(ValueError, match="limits must be a list of at least one Limit"):
            distributed_lock(limits=limits)
    with pytest.raises(ValueError, match="limits must be a list of Limit and Rate, and one is"):
        distributed_lock(limits=["export"])
    with pytest.raises(ValueError, match="'export' twice"):
        distributed_lock(limits=[ALL, Limit("export", 2)])
    for beside in ({"limit": 2}, {}):
        with pytest.raises(ValueError, match="leave out names and limit"):
            distributed_lock(*([] if beside else ["export"]), limits=[ALL], **beside)
    with pytest.raises(InvalidLockName):
        Limit("", 2)
    with pytest.raises(InvalidLockName, match="#"):
        distributed_lock(limits=[Limit("gpu#2", 2)])
    with pytest.raises(InvalidLockName, match=r"name 'export': .* 'nobody'"):
        distributed_lock(limits=[Limit("export", lambda nobody: 2)])(lambda tenant: tenant)
    for by_place in (int, lambda tenant, /: 2):
        with pytest.raises(ValueError, match=r"Limit\('export'\) .* no arguments by name"):
            distributed_lock(limits=[Limit("export", by_place)])(lambda tenant: tenant)

    async def counts():
        return 2

    with pytest.raises(ValueError, match="coroutine function"):
        Limit("export", counts)
    with pytest.raises(LockMisuse, match="function of arguments, and a block has none"):
        distributed_lock(limits=[Limit("export", lambda: 2)]).acquire()
    same = distributed_lock(limits=[Limit("export:{tenant}", 2), Limit("export:acme", 2)])
    with pytest.raises(ValueError, match="'export:acme' twice"):
        same(lambda tenant: tenant)("acme")


@both_ways
async def test_the_same_name_without_a_limit_is_refused(way, place):
    async with way.entered(distributed_lock(limits=[ACME, ALL])):
        pass
    with pytest.raises(LockMisuse, match=r"same\s+limit wherever"):
        await way.acquire(distributed_lock("export", wait=0))


@places(MEMORY)  # One: a task is made once.
@pytest.mark.parametrize("decorate", [distributed_lock, single_instance, single_instance_task])
def test_a_number_with_a_default_counts_what_is_passed_in_kwargs(place, decorate):
    def plan_of(plan="free"):
        return {"free": 1, "pro": 10}[plan]

    def taken(**options):
        (one,) = held.list()
        return one.owner.limit or 1

    def taken_too(**options):
        return taken(**options)

    export = decorate(limits=[Limit("export", plan_of)])(taken)
    assert export(plan="pro") == 10
    assert export(plan="free") == export() == 1
    export = decorate(limits=[Limit("export", lambda plan: {"pro": 10}[plan])])(taken_too)
    assert export(plan="pro", size="2") == 10
    with pytest.raises(InvalidLockName, match="names 'plan'; the arguments are size"):
        export(size="2")
