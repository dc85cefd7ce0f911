"""One handle, many threads or tasks: each acquire has a lease of its own, and ends only that."""

import asyncio
import gc
import threading
from contextlib import asynccontextmanager, nullcontext

import pytest

from django_redislock import LockLost, LockMisuse, distributed_lock
from django_redislock.backends.registry import backends
from tests.support.backends import PATIENT
from tests.support.matrix import MEMORY, places
from tests.support.servers import KIND
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import both_ways, in_thread

pytestmark = places(KIND, MEMORY)  # What a handle keeps in mind is the same everywhere.


@asynccontextmanager
async def entered_elsewhere(way, lock):
    """Meanwhile another thread or task is in a block of *lock*, and has it at its end."""
    entered, done = threading.Event(), threading.Event()

    async def entry():
        async with way.entered(lock) as lease:
            entered.set()
            await way.until(done.is_set)
            await way.ensure_held(lease, verify=True)

    holder = way.start(entry)
    await way.until(entered.is_set)
    yield
    done.set()
    await holder.result()


@pytest.mark.parametrize(("names", "limit"), [(["lottery"], None), (["gpu", "disk"], 3)])
@both_ways
async def test_each_thread_or_task_waits_its_turn_on_one_handle(way, place, names, limit):
    lock = distributed_lock(*names, limit=limit, wait=HUNG)
    inside, counts = [], []

    async def count():
        async with way.entered(lock) as lease:
            inside.append(lease)
            counts.append(len(inside))
            await way.sleep(0.005)
            assert lock.lease is lease
            inside.remove(lease)
        assert lock.lease is None

    others = [way.start(count) for _ in range(5)]
    for other in others:
        await other.result()
    assert max(counts) <= (limit or 1)
    assert lock.lease is None
    assert not await way.locked(lock)


def test_who_leaves_hides_no_lease_of_another_thread(locks):
    lock = distributed_lock("lottery")

    class Leaving:
        """As that of another thread, which leaves its block while this one looks for its own."""

        block = False

        @property
        def over(self):
            if self in lock._entries:
                lock._entries.remove(self)
            return True

    assert lock.acquire()
    lock._entries.insert(0, Leaving())
    lock.release()
    assert not lock.locked()


@pytest.mark.waits
@both_ways
async def test_a_waiter_that_gives_up_leaves_the_lease_of_the_other_alone(way, place):
    lock = distributed_lock("lottery", wait=4)
    async with entered_elsewhere(way, lock):
        assert await way.acquire(lock) is False


async def test_a_cancelled_waiter_leaves_the_lease_of_another_task_alone(place):
    lock = distributed_lock("lottery", wait=10)
    leases = []
    let_go = asyncio.Event()

    async def entry():
        async with lock as lease:
            leases.append(lease)
            await let_go.wait()

    tasks = [asyncio.create_task(entry()) for _ in range(2)]
    await await_until(lambda: leases)
    (waiter,) = [task for task in tasks if task is not leases[0].holder()]
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await leases[0].aensure_held(verify=True)
    let_go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(leases) == 1
    assert not await lock.alocked()


@pytest.mark.proves("P3")
@both_ways
async def test_leaving_after_a_loss_does_not_end_the_lease_of_the_next(way, place):
    lock, lost, done = distributed_lock("lottery"), threading.Event(), threading.Event()

    async def lose():
        async with way.entered(lock) as lease:
            place.lose_data()
            with pytest.raises(LockLost):
                await way.renew(lease)
            lost.set()
            await way.until(done.is_set)

    first = way.start(lose)
    await way.until(lost.is_set)
    async with way.entered(lock) as lease:
        done.set()
        with pytest.raises(LockLost):
            await first.result()
        assert lock.lease is lease
        await way.ensure_held(lease, verify=True)


@pytest.mark.proves("P5")
@both_ways
async def test_a_loss_is_told_at_the_end_of_its_block_whatever_was_acquired_meanwhile(way, place):
    lock = distributed_lock("lottery")
    with pytest.raises(LockLost):  # noqa: PT012
        async with way.entered(lock) as lease:
            place.lose_data()
            with pytest.raises(LockLost):
                await way.renew(lease)
            async with way.entered(lock) as inner:
                assert inner.held
            assert not await way.locked(lock)  # That block has ended its own lease.
            assert await way.acquire(lock)
            assert lock.lease is not lease
    # What was acquired is still held, since nobody has released it.
    await way.ensure_held(lock.lease, verify=True)
    await way.release(lock)


@both_ways
async def test_what_is_released_and_acquired_again_in_a_block_ends_with_it(way, place):
    lock = distributed_lock("lottery")
    async with way.entered(lock):
        await way.release(lock)
        assert lock.lease is None
        assert not await way.locked(lock)
        assert await way.acquire(lock)
        assert lock.lease is not None
    assert lock.lease is None
    assert not await way.locked(lock)


@both_ways
async def test_a_block_that_was_released_within_a_block_leaves_the_outer_one_alone(way, place):
    lock = distributed_lock("lottery", reentrant=True)
    async with way.entered(lock) as lease:
        async with way.entered(lock):
            await way.release(lock)
        await way.ensure_held(lease, verify=True)
    assert not await way.locked(lock)


@pytest.mark.no_permit("it has a limit of its own")
@both_ways
async def test_what_is_acquired_here_can_be_released_there(way, place):
    lock = distributed_lock("lottery", limit=2)
    for beside in (nullcontext(), entered_elsewhere(way, lock)):
        async with beside:
            assert await way.start(lambda: way.acquire(lock)).result()
            assert lock.lease is None
            assert "held by another thread or asyncio task" in repr(lock)
            await way.release(lock)
            with pytest.raises(LockMisuse, match="holds no lease"):
                await way.release(lock)
        assert lock._entries == []


@pytest.mark.parametrize("names", [("lottery",), ("lottery", "other")], ids=len)
@pytest.mark.parametrize("reentrant", [False, True])
@both_ways
async def test_a_release_by_one_without_a_lease_never_ends_the_block_of_another(
    way, place, names, reentrant
):
    lock = distributed_lock(*names, wait=0, reentrant=reentrant)
    async with entered_elsewhere(way, lock):
        assert lock.lease is None
        assert await way.acquire(lock) is False
        with pytest.raises(LockMisuse, match="only after acquire\\(\\) has returned True"):
            await way.release(lock)
        assert await way.acquire(distributed_lock("lottery", wait=0)) is False
    assert not await way.locked(lock)


@both_ways
async def test_of_several_leases_of_others_none_is_released_by_guess(way, place):
    lock = distributed_lock("lottery")
    assert await way.start(lambda: way.acquire(lock)).result()
    place.lapse("lottery")
    assert await way.start(lambda: way.acquire(lock)).result()
    with pytest.raises(LockMisuse, match="several leases"):
        await way.release(lock)
    assert await way.locked(lock)


async def test_a_block_is_left_in_another_task_unless_it_is_not_known_what_to_end(place, caplog):
    """As an asynchronous fixture does, or a framework's start and end."""
    lock = distributed_lock("lottery")

    async def enter():
        await asyncio.create_task(lock.__aenter__())

    async def leave(error=None):
        await asyncio.create_task(lock.__aexit__(error and type(error), error, None))

    await enter()
    assert await lock.alocked()
    await leave()
    assert not await lock.alocked()
    await enter()
    place.lapse("lottery")
    await enter()
    with pytest.raises(LockMisuse, match="several leases"):
        await leave()
    await leave(ValueError("of the body"))
    assert "Left the block of lock 'lottery': " in caplog.text


def test_a_release_that_is_interrupted_within_a_block_leaves_the_next_owner_alone(
    locks, monkeypatch
):
    lock = distributed_lock("lottery", wait=10)
    meeting, leave = threading.Event(), threading.Event()
    backend, interrupts = backends["default"], [KeyboardInterrupt]
    begin, run = backend.begin, backend.run

    def interrupted_first_step(form):
        begin(form)
        if form.reply is not None:
            interrupt()

    def interrupted_flow(*args):
        result = run(*args)
        interrupt()
        return result

    def interrupt():
        if threading.current_thread() is threading.main_thread() and interrupts:
            assert meeting.wait(HUNG)
            raise interrupts.pop()

    def work():
        with lock as lease:
            meeting.set()
            assert leave.wait(HUNG)
            lease.ensure_held()  # If it was handed over, its confirmation may not be read yet.
            return lease.held

    others = []

    def body():
        with lock:
            others.append(in_thread(work))
            monkeypatch.setattr(backend, "begin", interrupted_first_step)
            monkeypatch.setattr(backend, "run", interrupted_flow)
            lock.release()

    with pytest.raises(KeyboardInterrupt):
        body()
    monkeypatch.undo()
    leave.set()
    assert others[0].result(HUNG)
    assert lock._entries == []


@pytest.mark.waits
def test_leases_that_were_left_to_run_out_do_not_fill_the_memory(locks, monkeypatch):
    monkeypatch.setattr("django_redislock.handle.MOST_ENTRIES", 3)
    locks.configure(OPTIONS=PATIENT)
    lock = distributed_lock("lottery", ttl=1, renew=False, wait=HUNG)
    for _ in range(6):
        assert lock.acquire()
        lease = lock.lease
        wait_until(lambda lease=lease: not lease.held)
    assert len(lock._entries) <= 4


@pytest.mark.parametrize("over", [True, False])
def test_leases_that_nobody_released_leave_nothing_in_this_process(over, locks):
    locks.configure(OPTIONS=PATIENT)
    names = [f"once-{number}" for number in range(5)]
    for name in names:
        lock = distributed_lock(name, ttl=1 if over else 30, renew=False)
        assert lock.acquire()
        lease = lock.lease
        if over:
            wait_until(lambda lease=lease: lease.lost_reason)
        del lock, lease
    gc.collect()
    # The watchdog has one while it looks at it.
    wait_until(lambda: not set(names) & set(backends["default"].leases))


def of_the_ended(caplog):
    """The warnings about threads and tasks that have ended and hold a lock."""
    return [text for text in caplog.messages if "has ended without releasing it" in text]


@pytest.mark.waits
def test_a_lease_outlives_its_thread_as_long_as_its_handle_is_kept_and_says_so(locks, caplog):
    """Somebody else may release it; whoever wants an end to it sets max_hold."""
    lock = distributed_lock("lottery", ttl=6)
    leases = []

    def acquire():
        assert lock.acquire()
        assert lock.lease is not None
        leases.append(lock.lease)

    in_thread(acquire).result(HUNG)
    gc.collect()
    before = leases[0].renewals
    wait_until(lambda: of_the_ended(caplog) and leases[0].renewals > before)
    (warning,) = of_the_ended(caplog)
    assert "'lottery'" in warning
    assert "max_hold" in warning
    lock.release()
    assert not lock.locked()


@pytest.mark.waits
def test_a_block_that_its_task_never_left_is_renewed_and_says_so(locks, caplog):
    """As in a streaming response whose client is gone: Django leaves it to the collector."""

    async def parts():
        async with distributed_lock("lottery", ttl=6):
            yield b"a"
            yield b"b"

    async def respond(stream):
        await anext(stream)

    async def serve():
        stream = parts()
        task = asyncio.create_task(respond(stream))
        await task
        await await_until(lambda: of_the_ended(caplog))
        assert await distributed_lock("lottery").alocked()
        await stream.aclose()
        assert task.done()

    asyncio.run(serve())
    assert len(of_the_ended(caplog)) == 1
    assert not distributed_lock("lottery").locked()
