"""Who holds a lock: one thread or asyncio task, which may nest, but not wait for itself."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_redislock import LockLost, LockMisuse, LockTimeout, distributed_lock
from django_redislock.backends.registry import backends
from tests.support.matrix import MEMORY, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

pytestmark = places(KIND, MEMORY)  # Who holds it is known in the process.


def try_lock(name):
    """Take the lock if it is free or ours, and free it again."""
    lock = distributed_lock(name, wait=0, reentrant=True)
    if taken := lock.acquire():
        lock.release()
    return taken


async def atry_lock(name):
    """See try_lock()."""
    lock = distributed_lock(name, wait=0, reentrant=True)
    if taken := await lock.aacquire():
        await lock.arelease()
    return taken


# --- nesting -------------------------------------------------------------------------------------


@both_ways
async def test_a_reentrant_lock_nests_and_ends_with_the_outermost(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        inner = distributed_lock("lottery", reentrant=True)
        async with way.entered(inner) as nested:
            assert nested is lease
            async with way.entered(distributed_lock("lottery", reentrant=True)) as deeper:
                assert deeper is lease
        assert inner.lease is None
        await way.ensure_held(lease, verify=True)
        assert await way.acquire(inner)
    await way.ensure_held(lease, verify=True)  # The last of the handles ends it, not the first.
    await way.release(inner)
    assert not await way.locked(distributed_lock("lottery"))


@both_ways
async def test_nesting_asks_no_server(way, place):
    with pytest.raises(LockLost):  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")):
            place.lose_data()
            async with way.entered(distributed_lock("lottery", reentrant=True)) as nested:
                assert nested.held


# --- waiting for oneself -------------------------------------------------------------------------


@both_ways
async def test_the_same_thread_or_task_twice_is_misuse(way, place):
    who = {"sync": "this thread", "async": "this asyncio task"}[way.name]
    lock = distributed_lock("lottery", wait=60)
    async with way.entered(lock) as lease:
        for again in (lock, distributed_lock("lottery", wait=60)):
            with pytest.raises(LockMisuse, match=f"'lottery': {who} holds it already") as raised:
                await way.acquire(again)
            assert "reentrant=True" in str(raised.value)
        with pytest.raises(LockMisuse):
            async with way.entered(lock):
                pytest.fail("the block ran")
        assert lock.lease is lease
        await way.ensure_held(lease, verify=True)


@both_ways
async def test_without_a_wait_it_is_busy_for_its_holder_as_for_anybody_else(way, place):
    lock = distributed_lock("lottery", wait=0)
    async with way.entered(lock) as lease:
        for again in (lock, distributed_lock("lottery", "other", wait=0)):
            assert await way.acquire(again) is False
            with pytest.raises(LockTimeout) as raised:
                async with way.entered(again):
                    pytest.fail("the block ran")
            assert raised.value.name == "lottery"
        assert not await way.locked(distributed_lock("other"))
        await way.ensure_held(lease, verify=True)
    assert await way.acquire(lock)
    await way.release(lock)


async def test_a_blocking_acquire_in_the_thread_of_the_loop_whose_task_holds_it_is_misuse(
    place, monkeypatch
):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Refused though it is allowed to block.

    async def block():
        distributed_lock("lottery", wait=60).acquire()

    async with distributed_lock("lottery"):
        with pytest.raises(LockMisuse, match=r"event loop holds it.*async with"):
            await asyncio.create_task(block())


async def test_a_blocking_acquire_in_the_thread_of_another_loop_waits(place, monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def elsewhere():
        return distributed_lock("lottery", wait=0).acquire()

    async with distributed_lock("lottery"):
        assert await asyncio.to_thread(asyncio.run, elsewhere()) is False


# --- who never re-enters -------------------------------------------------------------------------


@both_ways
async def test_another_thread_or_task_never_re_enters_even_if_the_holder_has_ended(way, place):
    lock = distributed_lock("lottery")

    async def try_it():
        return await way.acquire(distributed_lock("lottery", wait=0, reentrant=True))

    async with way.entered(lock):
        assert await way.start(try_it).result() is False
    assert await way.start(lambda: way.acquire(lock)).result()
    for _ in range(5):  # Idents of threads are used again, usually by the next one.
        assert await way.start(try_it).result() is False
    await way.release(lock)


async def test_a_child_task_waits_for_its_parent(place):
    # A child inherits its parent's context variables, but not its locks.
    async with distributed_lock("lottery"):
        child = asyncio.create_task(distributed_lock("lottery", reentrant=True).aacquire())
        done, _ = await asyncio.wait([child], timeout=0.05)
        assert not done
    assert await child is True


async def test_a_task_does_not_re_enter_through_sync_to_async(place):
    async with distributed_lock("lottery") as lease:
        assert await sync_to_async(try_lock)("lottery") is False
        await sync_to_async(lease.ensure_held)(verify=True)
    assert await sync_to_async(try_lock)("lottery") is True


def test_a_thread_does_not_re_enter_through_async_to_sync(place):
    with distributed_lock("lottery") as lease:
        assert async_to_sync(atry_lock)("lottery") is False
        async_to_sync(lease.aensure_held)(verify=True)
    assert async_to_sync(atry_lock)("lottery") is True


async def test_blocking_code_takes_and_frees_a_lock_through_sync_to_async(place):
    lock = distributed_lock("lottery")
    assert await sync_to_async(lock.acquire)()
    assert await sync_to_async(try_lock)("lottery") is True
    assert await atry_lock("lottery") is False
    await sync_to_async(lock.release)()
    assert await atry_lock("lottery") is True


# --- a lost lease counts as not held -------------------------------------------------------------


async def lost(way, place, lock):
    """Take a lock, let the server forget the lease and its holder know; return the lease."""
    lease = await way.taken(lock)
    place.lose_data()
    with pytest.raises(LockLost):
        await way.renew(lease)
    return lease


@both_ways
async def test_a_reentrant_acquire_within_a_lost_lease_raises_lock_lost(way, place):
    lock = distributed_lock("lottery", reentrant=True)
    await lost(way, place, lock)
    for handle in (lock, distributed_lock("lottery", reentrant=True)):
        with pytest.raises(LockLost) as raised:
            await way.acquire(handle)
        assert raised.value.reason == "expired"
    # Nor does it wait for a new holder in the same process.
    other = distributed_lock("lottery", reentrant=True, wait=0)
    assert await way.start(lambda: way.acquire(other)).result()
    with pytest.raises(LockLost):
        await way.acquire(lock)
    await way.release(other)
    with pytest.raises(LockLost):
        await way.release(lock)
    assert await way.acquire(lock)
    await way.release(lock)


@both_ways
async def test_it_nests_in_the_lease_that_is_held_and_not_in_an_earlier_one_that_was_lost(
    way, place
):
    earlier = distributed_lock("lottery")
    await lost(way, place, earlier)
    async with way.entered(distributed_lock("lottery", wait=0)) as lease:
        for names in (("lottery",), ("lottery", "other")):
            async with way.entered(distributed_lock(*names, reentrant=True, wait=0)) as nested:
                assert nested.held
                assert lease in nested.parts
        assert lease.held
        with pytest.raises(LockLost):
            await way.release(earlier)
    async with way.entered(distributed_lock("lottery", wait=0)):
        pass


@both_ways
async def test_within_a_lost_lease_a_plain_acquire_is_no_misuse(way, place):
    lock = distributed_lock("lottery")
    await lost(way, place, lock)
    with held_by_other("lottery"):
        assert await way.acquire(distributed_lock("lottery", wait=0)) is False
    assert await way.acquire(distributed_lock("lottery", wait=0)) is True


@pytest.mark.waits
@both_ways
async def test_a_lease_that_has_run_out_by_the_clock_is_no_misuse_either(way, place):
    lock = distributed_lock("lottery", ttl=2, renew=False)
    lease = await way.taken(lock)
    await way.until(lambda: not lease.held)
    assert await way.acquire(distributed_lock("lottery", wait=HUNG))
    with pytest.raises(LockLost):
        await way.release(lock)


@both_ways
async def test_releasing_a_lost_lease_does_not_forget_the_new_holder(way, place):
    former, new = distributed_lock("lottery"), distributed_lock("lottery")
    await way.start(lambda: lost(way, place, former)).result()
    assert await way.acquire(new)
    with pytest.raises(LockLost):
        await way.release(former)
    with pytest.raises(LockMisuse, match="holds it already"):
        await way.acquire(distributed_lock("lottery"))
    assert await way.acquire(distributed_lock("lottery", reentrant=True))


def test_a_release_hides_no_lease_of_another_thread(place):
    backend = backends["default"]
    former, new = distributed_lock("lottery"), distributed_lock("lottery")
    here = threading.current_thread()
    assert former.acquire()
    place.lose_data()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(new.acquire).result(HUNG)
        answers = []

        class Seen(type(backend.leases)):
            """Lets the other thread look just after a change."""

            def pop(self, *args):
                taken = super().pop(*args)
                if threading.current_thread() is here:
                    answers.append(other.submit(try_lock, "lottery").result(HUNG))
                return taken

        backend.leases = Seen(backend.leases)
        with pytest.raises(LockLost):
            former.release()
        answers.append(other.submit(try_lock, "lottery").result(HUNG))
        other.submit(new.release).result(HUNG)
    assert set(answers) == {True}
    assert "lottery" not in backend.leases


# --- threads that sync_to_async shares -----------------------------------------------------------


async def test_a_task_does_not_nest_in_what_another_task_holds_by_the_same_thread(place):
    lock = distributed_lock("lottery", reentrant=True)
    held, seen = asyncio.Event(), asyncio.Event()

    async def hold():
        assert await sync_to_async(lock.acquire)()
        assert await sync_to_async(try_lock)("lottery")  # By the same task.
        assert await sync_to_async(lambda: lock.lease)() is not None
        held.set()
        await seen.wait()
        await sync_to_async(lock.release)()

    async def enter():
        await held.wait()
        for reentrant in (True, False):
            other = distributed_lock("lottery", reentrant=reentrant)
            with pytest.raises(LockMisuse, match="another asyncio task holds it by the thread"):
                await sync_to_async(other.acquire)()
        assert await sync_to_async(lambda: lock.lease)() is None
        seen.set()

    await asyncio.gather(hold(), enter())
    assert await sync_to_async(try_lock)("lottery")


@pytest.mark.parametrize("served", [True, False], ids=["a call of a thread", "a thread itself"])
def test_within_one_call_a_lock_nests_also_by_way_of_the_loop(served, place):
    def nest():
        with distributed_lock("lottery") as lease:
            with distributed_lock("lottery", reentrant=True) as nested:
                assert nested is lease
            assert async_to_sync(sync_to_async(try_lock))("lottery")
            # The last call that the thread has served is another one by now.
            assert try_lock("lottery")

    if served:
        asyncio.run(sync_to_async(nest)())
    else:
        nest()


# --- tasks begun by the holder of a shared thread ------------------------------------------------


@asynccontextmanager
async def held_by_calls(lock):
    """Hold it from one call of sync_to_async to another one."""
    assert await sync_to_async(lock.acquire)()
    try:
        yield
    finally:
        await sync_to_async(lock.release)()


async def refused(lock):
    """Of the caller, neither an acquire nor a look at its lease finds that of another."""
    assert not await sync_to_async(try_lock)("lottery")
    with pytest.raises(LockMisuse, match="another asyncio task holds it by the thread"):
        await sync_to_async(distributed_lock("lottery", reentrant=True).acquire)()
    assert await sync_to_async(lambda: lock.lease)() is None


async def test_a_task_begun_by_the_holder_is_another_one(place):
    lock = distributed_lock("lottery")
    async with held_by_calls(lock):
        await asyncio.create_task(refused(lock))
        assert await sync_to_async(try_lock)("lottery")
        assert await sync_to_async(lambda: lock.lease)() is not None


async def test_nor_does_it_inherit_the_lock_of_a_task_that_has_ended(place):
    lock = distributed_lock("lottery")

    async def acquire():
        await sync_to_async(lock.acquire)()
        return asyncio.create_task(refused(lock))

    await (await asyncio.create_task(acquire()))
    await sync_to_async(lock.release)()


async def test_a_task_begun_within_the_call_that_holds_it_is_another_one(place):
    lock = distributed_lock("lottery")

    async def begin():
        assert await sync_to_async(try_lock)("lottery")
        await asyncio.create_task(refused(lock))

    def hold():
        with lock:
            async_to_sync(begin)()
            assert try_lock("lottery")

    await sync_to_async(hold)()


def test_so_is_one_that_calls_a_thread_that_holds_it_itself(place):
    lock = distributed_lock("lottery")

    async def begin():
        assert await sync_to_async(try_lock)("lottery")
        await asyncio.create_task(refused(lock))

    for _ in range(2):  # At first, the thread has never been lent.
        with lock:
            async_to_sync(begin)()
            assert try_lock("lottery")
