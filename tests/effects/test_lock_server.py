"""The lock's server has forgotten a holder: after a failover, or with its clock set back too."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from django_redislock import LockError, StaleFence, distributed_lock
from django_redislock.models import Fence
from tests.effects.models import Entry, written
from tests.support.databases import on_sqlite
from tests.support.test_servers import can_shift_clocks
from tests.support.waiting import HUNG

pytestmark = pytest.mark.slow

HOUR = 3600


def draw(database):
    """Take the lock and write under its fence, which is returned."""
    with distributed_lock("lottery", wait=0, atomic=database) as lease:
        Entry.objects.using(database).create(fence=lease.fence)
    return lease.fence


# --- a failover ----------------------------------------------------------------------------------


def test_of_two_holders_after_a_failover_the_later_one_writes_and_the_earlier_one_is_refused(
    locks, server_kind, make_server, database, in_threads
):
    master = make_server(server_kind, repl_diskless_sync_delay=0)
    replica = make_server(server_kind, replicaof=f"{master.host} {master.port}")
    locks.on(master, TTL=60)
    before = draw(database)  # The replica is told of this one.
    client = master.client()
    client.set("written", 1)
    assert client.wait(1, int(HUNG * 1000)) == 1
    replica.client().replicaof("NO", "ONE")  # And not of the next.
    lock = distributed_lock("lottery", wait=0)
    assert lock.acquire()
    early = lock.lease
    try:
        locks.on(replica, TTL=60)
        with ThreadPoolExecutor(1) as thread:
            newer = thread.submit(in_threads(draw), database).result(HUNG)
        early.ensure_held()  # By all that it knows.
        with pytest.raises(StaleFence) as stale, early.atomic(database):
            pytest.fail("the block must not begin")
        assert (stale.value.fence, stale.value.newer) == (early.fence, newer)
        assert written(database) == [before, newer]
    finally:
        with suppress(LockError):
            lock.release()


# --- a clock that was set back -------------------------------------------------------------------

needs_clock = pytest.mark.skipif(not can_shift_clocks(), reason="needs Linux and a C compiler")


@pytest.fixture
def moved(locks, server_kind, make_server):
    """A server whose clock can be set, for the locks of this test."""
    server = make_server(server_kind, movable_clock=True)
    locks.on(server)
    return server


@needs_clock
@on_sqlite
def test_a_clock_that_is_set_back_alone_leaves_fences_growing(moved, database):
    fences = []
    for shift in (0, -HOUR, -2 * HOUR, 0):
        moved.shift_clock(shift)
        fences += [draw(database), draw(database)]
    assert fences == sorted(set(fences)) == written(database)


@needs_clock
@pytest.mark.parametrize("cure", ["the clock is set right", "its row is deleted"])
def test_after_a_loss_of_data_with_the_clock_behind_nobody_writes_until_it_is_cured(
    moved, locks, database, cure
):
    newer = draw(database)
    moved.shift_clock(-HOUR)
    locks.redis.flushall()
    for _ in range(2):
        with pytest.raises(StaleFence) as stale:
            draw(database)
        assert stale.value.newer == newer
        assert newer - stale.value.fence > HOUR / 2 * 1e6
        assert not distributed_lock("lottery").locked(), "whoever failed left it free"
    assert written(database) == [newer]

    if cure == "the clock is set right":
        moved.shift_clock(0)
    else:
        Fence.objects.using(database).all().delete()
    assert [newer, draw(database), draw(database)] == written(database)
