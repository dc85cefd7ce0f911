"""Event loops come and go, in whatever way: their connections go with them."""

import asyncio
import gc
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from weakref import ref

import pytest
import uvloop
from asgiref.sync import async_to_sync

from django_redislock import LockTimeout, distributed_lock
from django_redislock.backends.quorum import servers as quorum_servers
from django_redislock.backends.redis.pool import _Loop
from django_redislock.rules.flows import CONFIRM_WITHIN
from tests.support.backends import UNHURRIED
from tests.support.matrix import CLUSTER, MEMORY, QUORUM, SECURED, SENTINEL, everywhere, places
from tests.support.servers import KIND
from tests.support.stored import NAME
from tests.support.waiting import HUNG, wait_until

# What is said of loops that nobody has ended properly, of their tasks and of their connections, is
# for whoever did that.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LOOPS = 8


@pytest.fixture(autouse=True)
def nothing_of_them_is_left_to_collect(monkeypatch):
    """Loops that a test drops end in it: what is said of them would be said in a later test."""
    made = []
    make = asyncio.new_event_loop

    def made_loop():
        loop = make()
        made.append(ref(loop))
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", made_loop)
    yield
    wait_until(lambda: gc.collect() >= 0 and not any(loop() for loop in made))


async def take(name):
    async with distributed_lock(name):
        pass


def run(name):
    asyncio.run(take(name))


def call(name):
    async_to_sync(take)(name)


def close(name):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(take(name))
    loop.close()


def close_uvloop(name):
    # One that is only dropped is kept by uvloop itself, whatever was done in it.
    loop = uvloop.new_event_loop()
    loop.run_until_complete(take(name))
    loop.close()


def drop(name):
    asyncio.new_event_loop().run_until_complete(take(name))


async def begin_waiting(lock):
    """Take the lock, and leave a task behind that waits for it."""
    assert await lock.aacquire()
    task = asyncio.create_task(take(lock.name))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()


def drop_with_a_waiter(name):
    lock = distributed_lock(name)
    asyncio.new_event_loop().run_until_complete(begin_waiting(lock))
    lock.release()


def close_with_a_waiter(name):
    lock = distributed_lock(name)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin_waiting(lock))
    loop.close()
    lock.release()


def descriptors():
    """How many files and connections of this process are open."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@everywhere
@places(KIND, SECURED, MEMORY, SENTINEL, CLUSTER, QUORUM)  # Others differ in what a server allows.
@pytest.mark.parametrize(
    "use_loop",
    [run, call, close, close_uvloop, drop, drop_with_a_waiter, close_with_a_waiter],
)
def test_of_a_loop_that_has_ended_no_connection_stays(use_loop, place):
    use_loop("first")
    before = descriptors()
    for number in range(LOOPS):
        use_loop(f"lottery-{number}")
    # Less than one of each: that of blocking code to another node of a cluster may be new.
    wait_until(lambda: descriptors() < before + LOOPS)


def test_nor_does_a_loop_that_is_dropped_while_a_silent_server_of_a_quorum_is_dialed(
    make_quorum, monkeypatch
):
    monkeypatch.setattr(quorum_servers, "DIAL_AGAIN_AFTER", 0.0)
    quorum = make_quorum()
    quorum.configure(socket_timeout=1.0)
    quorum.proxies[1].blackhole()
    # From now on nobody waits for the silent one. Not dropped: what its end raises, should the
    # garbage collector end it while the next loop handles an error, would refer to that error, by
    # which pytest would keep the next loop until the test is over.
    run("first")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(take("lottery"))
    dropped = ref(loop)
    del loop
    # The end of a dial that was under way may keep its loop for one collection more.
    wait_until(lambda: gc.collect() >= 0 and dropped() is None)


@pytest.mark.proves("P6")
@pytest.mark.parametrize("wait", [0, HUNG])
def test_first_come_is_first_served_from_the_first_acquire_of_a_loop_on(wait, locks, monkeypatch):
    """Others come in each moment from the one on in which the connection is there.

    A waiter loses its turn if its process stands still for a second, so such a round is no proof.
    """
    locks.configure(OPTIONS=UNHURRIED)
    order = []
    times = []
    tasks = []
    adopt = _Loop.adopt

    async def come(number):
        with suppress(LockTimeout):
            async with distributed_lock(NAME, wait=wait if number else HUNG):
                order.append(number)
                times.append(time.monotonic())

    async def come_in_turn():
        for number in range(1, 30):
            tasks.append(asyncio.create_task(come(number)))
            await asyncio.sleep(0)

    def adopting(loop, connection):
        adopt(loop, connection)
        tasks.append(asyncio.create_task(come_in_turn()))

    async def all_come():
        await come(0)
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks)

    monkeypatch.setattr(_Loop, "adopt", adopting)
    with distributed_lock(NAME):  # So the server knows the scripts.
        pass
    proofs = 0
    while proofs < 3:
        order.clear()
        tasks.clear()
        times[:] = [time.monotonic()]
        asyncio.run(all_come())
        assert order[0] == 0
        assert len(order) == 30 or wait == 0
        if max(after - before for before, after in pairwise(times)) < CONFIRM_WITHIN:
            assert order == sorted(order)
            proofs += 1
