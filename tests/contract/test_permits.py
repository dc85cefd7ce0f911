"""So many at a time: limit=N, each with a permit that is a lease of its own; and several limits
as one, per key and in total, all or none, in the order given.
"""

import random
import threading
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from django_redislock import (
    InvalidLockName,
    Limit,
    LockLost,
    LockMisuse,
    LockTimeout,
    clock,
    distributed_lock,
    held,
    single_instance,
    single_instance_task,
    take_up,
)
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts
from django_redislock.rules.forms import release
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.stored import DoneMarkers, Owner
from tests.support.attempts import attempt
from tests.support.matrix import MEMORY, everywhere, in_turn, needs_records, needs_scripts, places
from tests.support.others import release_form, waiters
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

pytestmark = pytest.mark.no_permit("its locks have limits of their own")

ASKED = {"ttl": 30, "operation_timeout": HUNG, "limit": 2}
ACME, ALL = Limit("export:acme", 2), Limit("export", 3)


def gpu(limit=2, **options):
    return distributed_lock("gpu", limit=limit, **{"wait": 0, **options})


def export(*limits, **options):
    return distributed_lock(limits=limits, **{"wait": 0, **options})


def refused(lock):
    """What another thread is told that wants it."""
    with pytest.raises(LockTimeout) as raised:
        in_thread(lock.__enter__).result(HUNG)
    return raised.value.name


def is_full(limit):
    return export(limit).locked()


def permit_of(lock):
    """The permit that somebody has by this handle."""
    (entry,) = lock._entries
    return entry.lease.permit if entry.lease else None


@everywhere
@both_ways
async def test_so_many_hold_it_at_a_time_and_no_more(way, place):
    leases = []
    async with AsyncExitStack() as stack:
        for _ in range(3):
            leases += [await stack.enter_async_context(way.entered(gpu(3)))]
        assert sorted(lease.permit or 0 for lease in leases) == [1, 2, 3]
        assert len({lease.fence for lease in leases}) == len({lease.id for lease in leases}) == 3
        assert await way.locked(gpu(3))
        assert refused(gpu(3)) == "gpu"
        for lease in leases:
            await way.ensure_held(lease, verify=True)
        await way.renew(leases[1])
    assert not await way.locked(gpu(3))


@everywhere
@both_ways
async def test_a_permit_that_was_released_is_free_and_no_other(way, place):
    first, second = gpu(), gpu()
    assert await way.acquire(first)
    assert await way.acquire(second)
    lease = second.lease
    await way.release(second)
    third = gpu()
    assert await way.acquire(third)
    assert third.lease.permit == lease.permit
    assert third.lease.fence > lease.fence
    for lock in (first, third):
        await way.release(lock)


@both_ways
async def test_one_permit_that_is_lost_is_no_loss_of_another(way, place):
    first, second = gpu(), gpu()
    assert await way.acquire(first)
    assert await way.acquire(second)
    leases = {lock.lease.permit: (lock, lock.lease) for lock in (first, second) if lock.lease}
    place.lapse("gpu")  # The first permit has the key of a lock without a limit.
    lost, lease = leases[1]
    with pytest.raises(LockLost):
        await way.renew(lease)
    kept, lease = leases[2]
    await way.ensure_held(lease, verify=True)
    await way.release(kept)
    with pytest.raises(LockLost):
        await way.release(lost)


@in_turn
def test_waiters_are_served_in_turn_over_all_permits(caller, locks):
    first, second = gpu(), gpu()
    assert first.acquire()
    assert second.acquire()
    waiting = [gpu(wait=HUNG) for _ in range(3)]
    futures = [caller.begin_waiting(lock, locks) for lock in waiting]
    for freed, served in ((second, 0), (first, 1), (waiting[0], 2)):
        number = permit_of(freed)
        freed.release() if freed in {first, second} else caller.release(freed)
        assert futures[served].result(HUNG)
        assert permit_of(waiting[served]) == number
        assert not any(future.done() for future in futures[served + 1 :])
    for lock in waiting[1:]:
        caller.release(lock)


@places(KIND, MEMORY)
@both_ways
async def test_a_lease_without_a_limit_has_no_permit(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.permit is None
        assert "permit" not in repr(lease)
    async with way.entered(gpu(1)) as lease:
        assert lease.permit == 1


@both_ways
async def test_a_reentrant_acquire_is_of_the_same_permit(way, place):
    async with way.entered(gpu()) as lease:
        async with way.entered(gpu(reentrant=True)) as nested:
            assert nested is lease
        async with way.entered(gpu()) as other:
            assert other.permit != lease.permit
            with pytest.raises(LockMisuse, match="holds all of its 2 permits already"):
                await way.acquire(gpu(wait=60))
            assert not await way.acquire(gpu(wait=0))


@needs_scripts
@pytest.mark.parametrize("lost", [0, 1])
@both_ways
async def test_a_reentrant_acquire_is_of_a_permit_that_is_held(way, place, lost):
    both = gpu(), gpu()
    assert [await way.acquire(one) for one in both] == [True, True]
    leases = [one.lease for one in both]
    assert held.force_release("gpu", leases[lost].id, permit=leases[lost].permit)
    with pytest.raises(LockLost):
        await way.renew(leases[lost])
    async with way.entered(gpu(reentrant=True)) as nested:
        assert nested is leases[1 - lost]
    with pytest.raises(LockLost):
        await way.release(both[lost])
    await way.release(both[1 - lost])


@both_ways
async def test_a_permit_cools_down_alone(way, place):
    lock = gpu(min_hold=60)
    assert await way.acquire(lock)
    await way.release(lock)
    assert not await way.locked(gpu())
    async with way.entered(gpu()) as lease:
        assert lease.permit is not None
        assert refused(gpu())


@pytest.mark.proves("P1")
@needs_scripts
@places("redis", "valkey", "memory", "cluster")
def test_a_late_try_ends_no_lease_in_use_because_others_have_done_the_work(place):
    backend = backends["default"]

    def acquire(letter):
        asked = {"markers": DoneMarkers(True, "", ""), **ASKED}
        wanted = attempt("gpu", letter * 32, letter * 16, Owner(host="web"), **asked)
        return backend.run(flows.acquire(wanted, clock.now()))

    granted, theirs = acquire("a"), acquire("b")
    by = "gpu", "b" * 32, "b" * 16, Owner(host="web")
    done = release_form(*by, once=60, ended="done", permit=theirs.permit)
    assert backend.run(release(done)) is None
    assert isinstance(acquire("c"), flows.Done)
    again = acquire("a")
    assert (again.fence, again.permit) == (granted.fence, granted.permit)
    seen = held.get("gpu", permit=granted.permit)
    assert seen.id == "a" * 16


@needs_records
@pytest.mark.parametrize("is_once", [True, False], ids=["once", "run"])
def test_work_that_is_done_is_known_while_all_permits_are_held(place, *, is_once):
    backend, retention = backends["default"], "1000000/10/40"
    owner = Owner(host="web", task_id="a-run")
    markers = DoneMarkers(is_once, "" if is_once else "a-run", retention)
    asked = {"markers": markers, **ASKED}
    wanted = attempt("gpu", "t" * 32, "a" * 16, owner, **asked)
    grant = backend.run(flows.acquire(wanted, clock.now()))
    assert isinstance(grant, flows.Granted)
    done = release_form(
        *("gpu", wanted.token, wanted.id, owner),
        once=60 * is_once,
        run=None if is_once else flows.RunMarker("a-run", 60),
        ended="done",
        retention=retention,
        permit=grant.permit,
    )
    assert backend.run(release(done)) is None
    again = attempt("gpu", "u" * 32, "b" * 16, owner, **asked)
    expected = flows.Done if is_once else flows.Finished
    with gpu(), gpu():
        assert isinstance(backend.run(flows.acquire(again, clock.now())), expected)
    held.pause("gpu", 60, by="ops", reason="")
    assert isinstance(backend.run(flows.acquire(again, clock.now())), expected)


@needs_scripts
@places("redis", "valkey", "memory", "cluster")
def test_the_permit_of_a_baton_is_taken_up(place):
    with gpu(), gpu() as lease:
        baton = lease.hand_over()
        assert refused(gpu())
        with take_up(baton) as next_lease:
            assert next_lease.permit == lease.permit == 2
            assert next_lease.fence > lease.fence
            assert next_lease.owner.limit == 2


@pytest.mark.parametrize("limit", [0, -1, 1001, True, 2.0, "2"])
def test_a_limit_is_a_number_of_permits(limit):
    with pytest.raises(ValueError, match="limit must be an integer, 1 to 1000, not"):
        gpu(limit)


def test_the_name_of_a_lock_with_permits_does_not_look_like_one_of_them():
    with pytest.raises(InvalidLockName, match="ends in # and a number"):
        gpu().__class__("gpu#2", gpu()._options)
    assert distributed_lock("gpu#2").name == distributed_lock("gpu#2", limit=1).name == "gpu#2"


@pytest.mark.parametrize(("limit", "other"), [(2, None), (None, 2), (1, None)])
def test_the_same_name_with_and_without_a_limit_is_refused(place, limit, other):
    with distributed_lock("gpu", limit=limit, wait=0):
        pass
    with pytest.raises(LockMisuse, match="Write the same limit wherever the lock is taken"):
        distributed_lock("gpu", limit=other, wait=0).acquire()


def test_two_limits_of_one_name_are_accepted_and_the_greater_one_counts(place):
    # A number may be a function, of a tenant's plan, say; and the plan may change.
    with gpu(2) as first, gpu(2) as second, gpu(3) as third:
        assert {one.permit for one in (first, second, third)} == {1, 2, 3}
        assert refused(gpu(2)) == refused(gpu(3)) == "gpu"


@both_ways
async def test_no_look_at_a_permit_awaits_that_at_another(way, locks, proxy):
    locks.on(proxy)
    assert not await way.locked(gpu(3))
    before = len(proxy.log)
    assert not await way.locked(gpu(3))  # The first one is free, and yet all have been sent.
    sent = [(command.name, command.args[0].decode()) for command in proxy.log[before:]]
    assert sent == [("EVALSHA", scripts.LOOK.sha)] * 3


@pytest.mark.proves("R1", "P4")
@both_ways
async def test_a_grant_whose_answer_is_lost_is_no_second_permit(way, locks, proxy):
    locks.on(proxy)
    async with way.entered(gpu(3)):
        proxy.rule_for_script(scripts.ACQUIRE_PERMIT.sha, "cut_after")
        async with way.entered(gpu(3)) as lease:
            assert lease.permit == 2
        permits = {key.rpartition(b":")[2] for key in locks.keys() if b":lock" in key}  # noqa: SIM118
        assert permits <= {b"lock"}


@pytest.mark.proves("R4")
@pytest.mark.parametrize("known", [False, True], ids=["lost unseen", "expired"])
@both_ways
async def test_an_acquire_that_arrives_once_more_after_its_lease_is_over_leaves_no_permit_taken(
    way, locks, proxy, known
):
    locks.on(proxy)
    other, lock = gpu(3), gpu(3, ttl=1 if known else 30, renew=False)
    assert await way.acquire(other)
    assert await way.acquire(lock)
    assert lock.lease.permit == 2
    acquire = proxy.commands("EVALSHA")[-1]
    locks.redis.delete(lock_keys(locks.prefix, "gpu").of_permit(2).lock)
    if known:
        lease = lock.lease
        await way.until(lambda: not lease.held)
    await way.release(other)
    locks.redis.execute_command("EVALSHA", *acquire.args)  # It gets the first permit.
    assert len(held.list()) == 1
    with pytest.raises(LockLost):
        await way.release(lock)
    assert held.list() == []


# --- several limits ------------------------------------------------------------------------------


def test_each_has_a_permit_and_the_narrow_one_keeps_no_others_out(place):
    def taken(*limits):
        """By another thread, and to be released here."""
        lock = export(*limits)
        assert in_thread(lock.acquire).result(HUNG)
        return lock

    other = Limit("export:other", 2)
    locks = [taken(ACME, ALL)]
    with export(ACME, ALL) as lease:
        assert lease.names == ("export:acme", "export")
        assert lease.permit is None
        assert all(part.permit in {1, 2, 3} for part in lease.parts)
    locks.append(taken(ACME, ALL))
    assert refused(export(ALL, ACME)) == "export:acme"
    assert not is_full(ALL)  # What was granted is given back.
    locks.append(taken(other, ALL))
    assert refused(export(Limit("export:third", 1), ALL)) == "export"
    assert not is_full(Limit("export:third", 2))
    for lock in locks:
        lock.release()
    assert not any(map(is_full, (ACME, ALL, other)))


@in_turn
@both_ways
async def test_who_waits_for_the_narrow_one_does_not_hold_the_wide_one(way, place):
    narrow, wide = Limit("export:acme", 1), Limit("export", 2)
    first = export(narrow, wide)
    assert await way.acquire(first)

    async def work():
        async with way.entered(export(narrow, wide, wait=HUNG)) as lease:
            return len(lease.parts)

    waiting = way.start(work)
    await way.until(lambda: waiters("export:acme") or waiting.done())
    async with way.entered(export(Limit("export:other", 1), wide, wait=HUNG)) as other:
        assert other.held
        assert not waiting.done()
    await way.release(first)
    assert await waiting.result() == 2


@places(KIND, MEMORY)
@both_ways
async def test_names_and_numbers_are_made_of_the_arguments(way, place):
    plans = {"acme": 2, "other": 3}

    def body(tenant, *, size=1):
        return sorted((lock.name, lock.owner.limit) for lock in held.list())

    exported = export(
        Limit("export:{tenant}", lambda tenant: plans[tenant]),
        Limit("export", lambda **arguments: 10 * arguments["size"]),
    )(way.function(body))
    assert await way.call(exported, "acme") == [("export", 10), ("export:acme", 2)]
    expected = [("export", 20), ("export:other", 3)]
    assert await way.call(exported, tenant="other", size=2) == expected
    plans["acme"] = 0
    with pytest.raises(ValueError, match=r"number of Limit\('export:acme'\).*1 to 1000, not 0"):
        await way.call(exported, "acme")


@both_ways
async def test_several_names_with_a_limit_have_it_each(way, place):
    def lock():
        return distributed_lock("gpu", "disk", limit=2)

    async with way.entered(lock()) as lease, way.entered(lock()) as other:
        for part, theirs in zip(lease.parts, other.parts, strict=True):
            assert {part.permit, theirs.permit} == {1, 2}
        assert await way.locked(gpu())


def test_what_makes_no_sense_is_refused():
    for limits in ([], {}, "export", 3):
        with pytest.raises(ValueError, match="limits must be a list of at least one Limit"):
            distributed_lock(limits=limits)
    with pytest.raises(ValueError, match="limits must be a list of Limit and Rate, and one is"):
        export("export")
    with pytest.raises(ValueError, match="'export' twice"):
        export(ALL, Limit("export", 2))
    for names, beside in (((), {"limit": 2}), (("export",), {})):
        with pytest.raises(ValueError, match="leave out names and limit"):
            distributed_lock(*names, limits=[ALL], **beside)
    with pytest.raises(InvalidLockName, match="#"):
        export(Limit("gpu#2", 2))
    with pytest.raises(InvalidLockName, match=r"name 'export': .* 'nobody'"):
        export(Limit("export", lambda nobody: 2))(lambda tenant: tenant)
    with pytest.raises(ValueError, match=r"Limit\('export'\) .* no arguments by name"):
        export(Limit("export", int))(lambda tenant: tenant)
    with pytest.raises(LockMisuse, match="function of arguments, and a block has none"):
        export(Limit("export", lambda: 2)).acquire()
    with pytest.raises(ValueError, match="'export:acme' twice"):
        export(Limit("export:{tenant}", 2), ACME)(lambda tenant: tenant)("acme")


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

    exported = decorate(limits=[Limit("export", plan_of)])(taken)
    assert exported(plan="pro") == 10
    assert exported(plan="free") == exported() == 1
    exported = decorate(limits=[Limit("export", lambda plan: {"pro": 10}[plan])])(taken_too)
    assert exported(plan="pro", size="2") == 10
    with pytest.raises(InvalidLockName, match="names 'plan'; the arguments are size"):
        exported(size="2")


# --- under load ----------------------------------------------------------------------------------

NAMES = ["account:0", "account:1", "account:2", "account:3"]


def in_any_order(choice):
    return distributed_lock(*choice.sample(NAMES, k=choice.randint(2, 4)), wait=HUNG)


def of_three(choice):
    return gpu(3, wait=HUNG)


def of_a_tenant_and_in_total(choice):
    return export(Limit(f"export:{choice.choice('ab')}", 2), ALL, wait=HUNG)


@pytest.mark.parametrize(
    ("lock", "most"),
    [
        (in_any_order, dict.fromkeys(NAMES, 1)),
        (of_three, {"gpu": 3}),
        (of_a_tenant_and_in_total, {"export:a": 2, "export:b": 2, "export": 3}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_under_load_nobody_waits_for_ever_and_never_too_many_hold_it(place, lock, most):
    running, highest, guard = Counter(), Counter(), threading.Lock()

    def work(seed):
        choice = random.Random(seed)
        for _ in range(4):
            with lock(choice) as lease:
                with guard:
                    running.update(lease.names)
                    for name in lease.names:
                        highest[name] = max(highest[name], running[name])
                assert lease.held
                with guard:
                    running.subtract(lease.names)

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(7)]
    for thread in threads:
        thread.result(2 * HUNG)
    assert all(1 <= highest[name] <= most[name] for name in most)
    assert not any(distributed_lock(name, limit=number).locked() for name, number in most.items())
