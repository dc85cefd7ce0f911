"""limit=N: a lock that N may hold at a time, each with a permit that is a lease of its own."""

import threading
from contextlib import AsyncExitStack

import pytest

from django_redislock import (
    InvalidLockName,
    LockLost,
    LockMisuse,
    LockTimeout,
    clock,
    distributed_lock,
    held,
    take_up,
)
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts
from django_redislock.rules.forms import release
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.stored import DoneMarkers, Owner
from tests.support.attempts import attempt
from tests.support.matrix import everywhere, in_turn, needs_records, needs_scripts, places
from tests.support.others import release_form
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

pytestmark = pytest.mark.no_permit("its locks have limits of their own")

ASKED = {"ttl": 30, "operation_timeout": HUNG, "limit": 2}


def gpu(limit=2, **options):
    return distributed_lock("gpu", limit=limit, **{"wait": 0, **options})


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
        with pytest.raises(LockTimeout):
            in_thread(gpu(3).__enter__).result(HUNG)
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
    waiters = [gpu(wait=HUNG) for _ in range(3)]
    futures = [caller.begin_waiting(lock, locks) for lock in waiters]
    for freed, served in ((second, 0), (first, 1), (waiters[0], 2)):
        number = permit_of(freed)
        freed.release() if freed in {first, second} else caller.release(freed)
        assert futures[served].result(HUNG)
        assert permit_of(waiters[served]) == number
        assert not any(future.done() for future in futures[served + 1 :])
    for lock in waiters[1:]:
        caller.release(lock)


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
async def test_a_decorated_function_runs_so_many_times_at_once(way, place):
    permits = []

    def body(card):
        lease = next(one for one in backends["default"].leases.of(f"gpu:{card}"))
        permits.append(lease.permit)

    function = way.function(body)
    decorated = distributed_lock("gpu:{card}", limit=2, wait=0)(function)
    await way.call(decorated, 7)
    assert permits in ([1], [2])  # On a quorum it is any of them.


@both_ways
async def test_a_permit_cools_down_alone(way, place):
    lock = gpu(min_hold=60)
    assert await way.acquire(lock)
    await way.release(lock)
    assert not await way.locked(gpu())
    async with way.entered(gpu()) as lease:
        assert lease.permit is not None
        with pytest.raises(LockTimeout):
            in_thread(gpu().__enter__).result(HUNG)


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
        with pytest.raises(LockTimeout):
            in_thread(gpu().__enter__).result(HUNG)
        with take_up(baton) as next_lease:
            assert next_lease.permit == lease.permit == 2
            assert next_lease.fence > lease.fence
            assert next_lease.owner.limit == 2


@pytest.mark.parametrize("limit", [0, -1, 1001, True, 2.0, "2"])
def test_a_limit_is_a_number_of_permits(limit):
    with pytest.raises(ValueError, match="limit must be an integer, 1 to 1000, not"):
        distributed_lock("gpu", limit=limit)


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
        for limit in (2, 3):
            with pytest.raises(LockTimeout):
                in_thread(gpu(limit).__enter__).result(HUNG)


@both_ways
async def test_with_a_limit_of_one_the_same_is_sent_as_without(way, locks, proxy):
    locks.on(proxy)
    async with way.entered(distributed_lock("warm-up")):
        pass  # It brings the connection and the scripts.
    sent = []
    for limit in (None, 1):
        name = f"gpu:{limit or 0}"
        async with way.entered(distributed_lock(name, limit=limit)) as lease:
            own = (lease._token, lease.id, name)
        sent.append([])
        for command in proxy.log[-2:]:
            assert command.name == "EVALSHA"
            words = b" ".join(command.args)
            for one in own:
                words = words.replace(one.encode(), b"?")
            sent[-1].append(words)
    assert sent[0] == sent[1]


@pytest.mark.proves("R15")
@both_ways
async def test_a_cycle_of_a_permit_is_two_round_trips(way, locks, proxy):
    locks.on(proxy)
    async with way.entered(gpu(10)):
        pass  # It brings the connection and the scripts.
    async with way.entered(gpu(10)), way.entered(gpu(10)):
        before = len(proxy.log)
        async with way.entered(gpu(10)) as lease:
            assert lease.permit == 3
        sent = [(command.name, command.args[0].decode()) for command in proxy.log[before:]]
    assert sent == [
        ("EVALSHA", scripts.ACQUIRE_PERMIT.sha),
        ("EVALSHA", scripts.RELEASE.sha),
    ]


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


def test_threads_are_never_more_than_there_are_permits(place):
    most, holders, guard = [0], set(), threading.Lock()

    def work(number):
        for _ in range(5):
            with gpu(3, wait=HUNG) as lease:
                with guard:
                    holders.add((number, lease.permit))
                    most[0] = max(most[0], len(holders))
                    assert len({permit for _, permit in holders}) == len(holders)
                assert lease.held
                with guard:
                    holders.remove((number, lease.permit))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
        assert not thread.is_alive()
    assert 1 <= most[0] <= 3
