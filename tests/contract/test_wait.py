"""Waiting: how long, in which order, and what is left of those who give up."""

import asyncio
import math
import time

import pytest

from django_redislock import distributed_lock, held
from django_redislock.rules.flows import CONFIRM_WITHIN
from tests.support.interrupts import alarm
from tests.support.matrix import QUORUM, UNSCRIPTED, everywhere, in_turn
from tests.support.others import held_by_other, waiters
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import Blocking, InLoop, both_ways

ASKING_AGAIN = {UNSCRIPTED, QUORUM}  # There nobody queues.

# --- how long ------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("wait", [0, 0.2])
async def test_wait_bounds_the_waiting_for_what_another_holds(way, place, wait):
    lock = distributed_lock("lottery", wait=wait)
    with held_by_other("lottery"):
        start = time.monotonic()
        assert await way.acquire(lock) is False
        assert wait <= time.monotonic() - start < 4  # The setting is 5 s.
        assert lock.lease is None
        assert waiters("lottery") == 0


@pytest.mark.as_permit
@pytest.mark.proves("P6", "R14")
@everywhere
@both_ways
async def test_a_waiter_has_the_lock_as_soon_as_the_holder_releases_it(way, place, if_rung):
    async def wait():
        async with way.entered(distributed_lock("lottery", wait=math.inf)):
            return time.monotonic()

    lock = distributed_lock("lottery", ttl=60)
    assert await way.acquire(lock)
    waiting = way.start(wait)
    with pytest.raises(AssertionError):
        await way.until(waiting.done, 0.1)
    released = time.monotonic()
    await way.release(lock)
    assert await waiting.result() - released < if_rung


@pytest.mark.waits
@both_ways
async def test_a_waiter_has_the_lock_when_a_dead_holders_lease_has_expired(way, place, if_rung):
    start = time.monotonic()
    with held_by_other("lottery", ttl=2):
        async with way.entered(distributed_lock("lottery", wait=HUNG)):
            assert 1.9 < time.monotonic() - start < if_rung


# --- in which order ------------------------------------------------------------------------------


@pytest.mark.proves("P6")
@everywhere
@in_turn
def test_threads_and_tasks_are_served_first_come_first_served(place):
    served = []

    async def take(way, number):
        async with way.entered(distributed_lock("lottery", wait=HUNG)):
            served.append(number)

    with InLoop() as tasks:
        threads = Blocking()
        with distributed_lock("lottery", ttl=60):
            taken = []
            for number in range(6):
                caller = tasks if number % 2 else threads
                taken.append(caller.start(take(caller.way, number)))
                wait_until(lambda: waiters("lottery") == number + 1)  # noqa: B023 - called at once
            assert served == []
        for one in taken:
            one.result(HUNG)
    assert served == [0, 1, 2, 3, 4, 5]


@pytest.mark.as_permit
@pytest.mark.proves("P6", "R14")
@in_turn
@both_ways
async def test_nobody_barges_in_before_those_who_wait(way, place):
    async def wait():
        async with way.entered(distributed_lock("lottery", wait=HUNG)) as lease:
            return lease.fence

    lock = distributed_lock("lottery", wait=0)
    for _ in range(5):
        before = (await way.taken(lock)).fence
        waiting = way.start(wait)
        await way.until(lambda: waiters("lottery") == 1)
        released = time.monotonic()
        await way.release(lock)
        # The lock was handed over in the same instant, so this comes too late, or after the
        # waiter; unless that had no time to say that it is there.
        after = None
        if await way.acquire(lock):
            slow = time.monotonic() - released > CONFIRM_WITHIN
            after = lock.lease.fence
            await way.release(lock)
        assert before < await waiting.result()
        assert after is None or slow or await waiting.result() < after


@pytest.mark.as_permit
@in_turn
@both_ways
async def test_a_lapsed_lock_goes_to_who_waits_not_to_who_comes(way, place):
    with held_by_other("lottery", ttl=60):
        waiting = way.start(lambda: way.acquire(distributed_lock("lottery", wait=HUNG)))
        await way.until(lambda: waiters("lottery") == 1)
        place.lapse("lottery")
        assert await way.acquire(distributed_lock("lottery", wait=0)) is False
        assert await waiting.result() is True


@pytest.mark.as_permit
@both_ways
async def test_of_those_who_start_together_everybody_has_a_turn_without_delay(way, place, if_rung):
    fences = []

    async def take():
        async with way.entered(distributed_lock("lottery", wait=HUNG)) as lease:
            fences.append(lease.fence)

    start = time.monotonic()
    for other in [way.start(take) for _ in range(8)]:
        await other.result()
    assert place.name in ASKING_AGAIN or time.monotonic() - start < if_rung
    assert len(fences) == 8
    assert fences == sorted(set(fences))


# --- giving up -----------------------------------------------------------------------------------


@pytest.mark.as_permit
@in_turn
@both_ways
async def test_who_gives_up_leaves_the_queue(way, place, if_rung):
    async def wait():
        return await way.acquire(distributed_lock("lottery", wait=HUNG))

    with held_by_other("lottery"):
        patient = way.start(wait)
        await way.until(lambda: waiters("lottery") == 1)
        impatient = way.start(lambda: way.acquire(distributed_lock("lottery", wait=1)))
        await way.until(lambda: waiters("lottery") == 2 or impatient.done())
        assert await impatient.result() is False
        assert waiters("lottery") == 1
    start = time.monotonic()
    assert await patient.result() is True
    assert time.monotonic() - start < if_rung


@pytest.mark.proves("R4")
@everywhere
async def test_a_cancelled_task_leaves_nothing_behind(place):
    with held_by_other("lottery"):
        waiting = asyncio.create_task(distributed_lock("lottery").aacquire())
        await _let_wait(place)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiters("lottery") == 0
    assert held.get("lottery") is None
    assert await distributed_lock("lottery", wait=0).aacquire() is True


@everywhere
async def test_a_task_cancelled_while_it_is_served_passes_the_lock_on(place):
    async def take(lock):
        async with lock:
            await asyncio.sleep(0)

    # At each of the moments of a hand-over.
    for yields in range(12):
        lock = distributed_lock("lottery")
        await lock.aacquire()
        waiting = asyncio.create_task(take(distributed_lock("lottery", wait=30)))
        await _let_wait(place)
        await lock.arelease()
        for _ in range(yields):
            await asyncio.sleep(0)
        in_time = waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() is in_time
        assert await distributed_lock("lottery", wait=0).alocked() is False


class Interrupted(Exception):
    """As Celery's soft time limit and Ctrl-C: raised by a signal handler."""


# The others are what the connection to a server raises, too.
@pytest.mark.parametrize("error", [Interrupted, TimeoutError, ConnectionResetError, OSError])
@everywhere
def test_an_exception_raised_in_a_waiting_thread_leaves_nothing_behind(place, error):
    with alarm(error) as set_alarm, held_by_other("lottery"):
        with pytest.raises(error):  # noqa: PT012 - it may come at once
            set_alarm(0.1)
            distributed_lock("lottery").acquire()
        assert waiters("lottery") == 0
    assert distributed_lock("lottery", wait=0).acquire() is True


async def _let_wait(place):
    """Return when one waits; where nobody queues, after a moment."""
    if place.name in ASKING_AGAIN:
        await asyncio.sleep(0.05)
    else:
        await await_until(lambda: waiters("lottery") == 1)


@everywhere
async def test_many_tasks_wait_on_one_connection(place):
    async def take():
        async with distributed_lock("lottery", wait=HUNG) as lease:
            return lease.fence

    fences = await asyncio.gather(*[take() for _ in range(30)])
    assert len(set(fences)) == 30
