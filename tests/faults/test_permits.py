"""What befalls a holder of a later permit: its key is not that of a lock without a limit."""

import pytest

from django_redislock import LockLost, LockMisuse, LockUnavailable, distributed_lock, held
from tests.support.faults import in_fork, lease_of, takes
from tests.support.others import add_rival, queued
from tests.support.processes import hear, say
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = pytest.mark.no_permit("its locks have permits")

NAME = "gpu"


def gpu(limit=2, **options):
    return distributed_lock(NAME, limit=limit, **{"wait": 0, **options})


def work(ttl):
    """In a child: hold a permit until told otherwise, and say what became of it."""
    try:
        with gpu(ttl=ttl) as lease:
            say(lease.permit)
            hear()
            say([lease.held, lease.lost_reason])
    except LockLost as lost:
        say(lost.reason)


@pytest.mark.proves("P2")
def test_the_permit_of_a_killed_holder_goes_to_the_first_waiter_after_one_ttl(locks, spawn):
    with gpu(ttl=60) as first:
        child = spawn(work, 3)
        assert child.read() == 2
        waiter = gpu(wait=HUNG)
        waiting = in_thread(waiter.acquire)
        wait_until(lambda: queued(locks, NAME))
        child.kill()
        with takes(at_most=3):
            assert waiting.result(HUNG)
        lease = lease_of(waiter)
        assert (first.permit, lease.permit) == (1, 2)
        assert first.held
        waiter.release()
    assert [lock.name for lock in held.list()] == []


@pytest.mark.proves("P1", "P3")
def test_a_holder_of_a_permit_that_was_stopped_beyond_its_lease_knows_it(locks, spawn):
    with gpu(ttl=60) as first:
        child = spawn(work, 1)
        assert child.read() == 2
        child.stop()
        with gpu(wait=HUNG) as lease:
            assert lease.permit == 2
            child.cont()
            child.send("go on")
            assert child.read() == [False, "expired"]
            assert child.read() in {"expired", "taken"}
            lease.ensure_held(verify=True)
        first.ensure_held(verify=True)


@pytest.mark.proves("R11")
@pytest.mark.waits
def test_a_permit_that_no_replica_acknowledges_is_refused_and_free(locks, make_server):
    server = make_server(repl_diskless_sync_delay=0)
    replica = make_server(server.kind, replicaof=f"{server.host} {server.port}")
    locks.on(server, REPLICAS_ACK=1, TTL=12)
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
    locks.redis.set(f"{locks.prefix}:written", 1, ex=60)
    wait_until(lambda: locks.redis.wait(1, 100) == 1)
    with gpu() as first:
        with replica.paused(), pytest.raises(LockUnavailable, match=f"{NAME}.*replicas"):
            gpu().acquire()
        assert [lock.id for lock in held.list()] == [first.id]
        with gpu(wait=HUNG) as second:
            assert (first.permit, second.permit) == (1, 2)


@pytest.mark.proves("R8")
def test_a_forked_child_has_no_permit_of_its_parent_and_takes_another_one(locks, settings):
    add_rival(settings, locks)

    def in_child():
        told = [second.held, lock.locked()]
        try:
            lock.release()
        except LockMisuse:
            told.append("refused")
        with gpu(3) as own:
            return [*told, own.permit]

    with gpu(3) as first:
        lock = gpu(3)
        assert lock.acquire()
        second = lock.lease
        assert second is not None
        assert in_fork(in_child) == [False, False, "refused", 3]
        for lease, permit in ((first, 1), (second, 2)):
            lease.ensure_held(verify=True)
            assert lease.permit == permit
        lock.release()
