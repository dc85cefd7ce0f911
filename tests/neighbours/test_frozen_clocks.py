"""freezegun and time-machine: locks go on while the clock of a test stands still."""

import asyncio
import datetime as dt
import time
from concurrent.futures import ThreadPoolExecutor

import freezegun
import pytest

from django_redislock import LockTimeout, distributed_lock
from tests.support.waiting import HUNG

time_machine = pytest.importorskip("time_machine")

THEN = dt.datetime(2027, 1, 1, tzinfo=dt.UTC)
FROZEN = {
    "freezegun": lambda: freezegun.freeze_time(THEN, real_asyncio=True),
    "time-machine": lambda: time_machine.travel(THEN, tick=False),
}


@pytest.fixture(params=FROZEN)
def frozen(request, locks):
    """Stop the clock; the locks are on a real server."""
    return FROZEN[request.param]()


@pytest.fixture
def holder():
    """Run a function in a thread of its own: one thread may not wait for what it holds."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda function: thread.submit(function).result(HUNG)


def test_under_a_frozen_clock_a_lease_is_renewed_and_a_wait_ends(frozen, locks, holder):
    with frozen, distributed_lock("lottery", ttl=0.6) as lease:
        before = time.time()
        with pytest.raises(LockTimeout):
            holder(lambda: distributed_lock("lottery", wait=1.2).__enter__())
        assert lease.held
        lease.ensure_held(verify=True)
        assert time.time() == before, "the clock stands still"


async def test_under_a_frozen_clock_async_locks_are_renewed_and_a_wait_ends(frozen, locks):
    async def wait_in_vain():
        with pytest.raises(LockTimeout):
            async with distributed_lock("lottery", wait=1.2):
                pytest.fail("it is held")

    with frozen:
        async with distributed_lock("lottery", ttl=0.6) as lease:
            await asyncio.create_task(wait_in_vain())
            await lease.aensure_held(verify=True)
            assert time.time() == THEN.timestamp()


def test_a_jump_of_the_clock_neither_ends_nor_prolongs_a_lease(locks):
    with time_machine.travel(THEN, tick=False) as clock:
        with distributed_lock("lottery", ttl=30) as lease:
            clock.shift(3600)
            assert 0 < lease.expires_in <= 30
            clock.shift(-7200)
            assert 0 < lease.expires_in <= 30
            lease.ensure_held(verify=True)
        assert not distributed_lock("lottery").locked()
