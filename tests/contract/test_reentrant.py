"""Who holds a lock: one thread or asyncio task, which may nest, but not wait for itself."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_redislock import LockLost, LockMisuse, LockTimeout, distributed_lock
from django_redislock.backends.registry import backends
from tests.support.others import held_by_other
from tests.support.waiting import HUNG
from tests.support.ways import both_ways


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


def run_in_thread(function):
    """Run a function in a new thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


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
    assert not await way.locked(distributed_lock("lottery"))


@both_ways
async def test_the_last_of_two_nested_handles_ends_the_lease(way, place):
    first, second = (distributed_lock("lottery", reentrant=True) for _ in range(2))
    assert await way.acquire(first)
    assert await way.acquire(second)
    await way.release(first)
    await way.ensure_held(second.lease, verify=True)
    await way.release(second)
    assert not await way.locked(first)


@both_ways
async def test_nesting_asks_no_server(way, place):
    with pytest.raises(LockLost):  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")):
            place.lose_data()
            async with way.entered(distributed_lock("lottery", reentrant=True)) as nested:
                assert nested.held


# --- waiting for oneself -------------------------------------------------------------------------


@both_ways
async def test_the_same_handle_twice_is_misuse(way, place):
    lock = distributed_lock("lottery", wait=60)
    async with way.entered(lock) as lease:
        with pytest.raises(LockMisuse, match=r"'lottery'.*holds it already"):
            await way.acquire(lock)
        with pytest.raises(LockMisuse):
            async with way.entered(lock):
                pytest.fail("the block ran")
        assert lock.lease is lease
        await way.ensure_held(lease, verify=True)


@both_ways
async def test_the_same_thread_or_task_twice_is_misuse(way, place):
    who = {"sync": "this thread", "async": "this asyncio task"}[way.name]
    async with way.entered(distributed_lock("lottery")):
        with pytest.raises(LockMisuse, match=f"'lottery': {who} holds it already") as raised:
            await way.acquire(distributed_lock("lottery", wait=60))
        assert "reentrant=True" in str(raised.value)


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
async def test_another_thread_or_task_never_re_enters(way, place):
    other = distributed_lock("lottery", wait=0, reentrant=True)
    async with way.entered(distributed_lock("lottery")):
        assert await way.start(lambda: way.acquire(other)).result() is False


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


def test_a_thread_that_has_ended_leaves_its_lease_to_nobody(place):
    # Idents of threads are used again, and that of the next one usually is the same.
    lock = distributed_lock("lottery")
    answers = []
    run_in_thread(lock.acquire)
    for _ in range(5):
        run_in_thread(lambda: answers.append(try_lock("lottery")))
    assert answers == [False] * 5
    lock.release()


async def test_a_task_that_has_ended_leaves_its_lease_to_nobody(place):
    lock = distributed_lock("lottery")
    await asyncio.create_task(lock.aacquire())
    answers = [await asyncio.create_task(atry_lock("lottery")) for _ in range(5)]
    assert answers == [False] * 5
    await lock.arelease()


# --- a lost lease counts as not held -------------------------------------------------------------


async def lose(way, place, lease):
    """Let the server forget the lease, and let its holder know."""
    place.lose_data()
    with pytest.raises(LockLost):
        await way.renew(lease)


@both_ways
async def test_a_reentrant_acquire_within_a_lost_lease_raises_lock_lost(way, place):
    lock = distributed_lock("lottery", reentrant=True)
    assert await way.acquire(lock)
    await lose(way, place, lock.lease)
    for handle in (lock, distributed_lock("lottery", reentrant=True)):
        with pytest.raises(LockLost) as raised:
            await way.acquire(handle)
        assert raised.value.reason == "expired"
    with pytest.raises(LockLost):
        await way.release(lock)
    assert await way.acquire(lock)
    await way.release(lock)


@both_ways
async def test_nor_does_it_wait_for_the_new_holder_in_the_same_process(way, place):
    lock, other, nested = (distributed_lock("lottery", reentrant=True, wait=0) for _ in range(3))
    assert await way.acquire(lock)
    await lose(way, place, lock.lease)
    assert await way.start(lambda: way.acquire(other)).result()
    for handle in (lock, nested):
        with pytest.raises(LockLost):
            await way.acquire(handle)


@both_ways
async def test_it_nests_in_the_lease_that_is_held_and_not_in_an_earlier_one_that_was_lost(
    way, place
):
    earlier = distributed_lock("lottery")
    assert await way.acquire(earlier)
    await lose(way, place, earlier.lease)
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
    assert await way.acquire(lock)
    await lose(way, place, lock.lease)
    with held_by_other("lottery"):
        assert await way.acquire(distributed_lock("lottery", wait=0)) is False
    assert await way.acquire(distributed_lock("lottery", wait=0)) is True


@pytest.mark.waits
@both_ways
async def test_a_lease_that_has_run_out_by_the_clock_is_no_misuse_either(way, place):
    lock = distributed_lock("lottery", ttl=2, renew=False)
    assert await way.acquire(lock)
    lease = lock.lease
    await way.until(lambda: not lease.held)
    assert await way.acquire(distributed_lock("lottery", wait=HUNG))
    with pytest.raises(LockLost):
        await way.release(lock)


@both_ways
async def test_releasing_a_lost_lease_does_not_forget_the_new_holder(way, place):
    lost, new = distributed_lock("lottery"), distributed_lock("lottery")

    async def acquire():
        await way.acquire(lost)
        return lost.lease

    lease = await way.start(acquire).result()
    await lose(way, place, lease)
    assert await way.acquire(new)
    with pytest.raises(LockLost):
        await way.release(lost)
    with pytest.raises(LockMisuse, match="holds it already"):
        await way.acquire(distributed_lock("lottery"))
    assert await way.acquire(distributed_lock("lottery", reentrant=True))


def test_a_release_hides_no_lease_of_another_thread(place):
    backend = backends["default"]
    lost, new = distributed_lock("lottery"), distributed_lock("lottery")
    here = threading.current_thread()
    assert lost.acquire()
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
            lost.release()
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


async def test_within_one_call_a_lock_nests_also_by_way_of_the_loop(place):
    def nest():
        with distributed_lock("lottery") as lease:
            with distributed_lock("lottery", reentrant=True) as nested:
                assert nested is lease
            assert async_to_sync(sync_to_async(try_lock))("lottery")
            # The last call that the thread has served is another one by now.
            assert try_lock("lottery")

    await sync_to_async(nest)()


def test_what_a_thread_holds_itself_nests_in_calls_that_it_serves(place):
    with distributed_lock("lottery"):
        assert async_to_sync(sync_to_async(try_lock))("lottery")
        assert try_lock("lottery")


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
