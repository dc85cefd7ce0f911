"""The keys of a lock are not what they should be: said at once, and nothing is done by half."""

import time
from contextlib import suppress

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock
from django_redislock.rules.keys import Keys, index_key
from tests.support.backends import PATIENT
from tests.support.faults import takes
from tests.support.matrix import everywhere
from tests.support.others import add_rival, rival
from tests.support.stored import NAME, immortal, keys_of, value_of
from tests.support.waiting import wait_until


@pytest.fixture
def locks(locks, settings):
    """Nobody waits unless told to."""
    locks.configure(TTL=6, WAIT=0, OPTIONS=PATIENT)
    add_rival(settings, locks)
    yield locks
    assert immortal(locks) == []


# Another type


def spoil(locks, field):
    """Put something of another type in the place of one of the lock's keys."""
    key = getattr(keys_of(locks), field)
    locks.redis.delete(key)
    if field in {"queue", "finished", "runs", "line", "due", "fence", "held", "ran"}:
        locks.redis.set(key, "spoiled")
    else:
        locks.redis.rpush(key, "spoiled")
    locks.redis.expire(key, 60)


def contents(locks):
    """All that the server has, byte for byte, but for what is there for lists.

    That is the index, and the timeline, where a holder is noted once somebody meets it for a while.
    """
    hints = {index_key(locks.prefix).encode(), keys_of(locks).past.encode()}
    return {key: locks.redis.dump(key) for key in set(locks.keys()) - hints}


each_key = pytest.mark.parametrize("field", Keys._fields)


@pytest.mark.proves("R12")
@each_key
@pytest.mark.parametrize("wait", [0, 5])
def test_r12_an_acquire_meets_a_key_of_another_type(wait, field, locks):
    spoil(locks, field)
    before = contents(locks)
    lock = distributed_lock(NAME, wait=wait)
    if field in {"lock", "queue", "fence"}:
        with takes(at_most=0.5), pytest.raises(LockUnavailable, match="WRONGTYPE") as caught:
            lock.acquire()
        assert NAME in str(caught.value)
        assert contents(locks) == before
    else:  # It is not needed here; of the index it is said that it never fails an operation.
        assert lock.acquire()
        lock.release()


@pytest.mark.proves("R12")
@everywhere
@each_key
def test_r12_a_waiter_meets_a_key_of_another_type(field, locks):
    with suppress(LockLost, LockUnavailable), rival(ttl=30):
        spoil(locks, field)
        before = contents(locks)
        lock = distributed_lock(NAME, wait=0.3)
        if field in {"lock", "queue"}:
            with takes(at_most=0.25), pytest.raises(LockUnavailable, match="WRONGTYPE"):
                lock.acquire()
            assert contents(locks) == before
        else:
            assert not lock.acquire()


@pytest.mark.proves("R12")
@everywhere
@each_key
def test_r12_a_renewal_and_a_release_meet_a_key_of_another_type(field, locks):
    lock = distributed_lock(NAME, renew=False)
    lock.acquire()
    spoil(locks, field)
    if field == "lock":
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            lock.lease.renew()
    else:
        lock.lease.renew()
        assert lock.lease.held
    before = contents(locks)
    if field in {"lock", "queue"}:
        with takes(at_most=0.5), pytest.raises(LockUnavailable, match="WRONGTYPE"):
            lock.release()
        assert contents(locks).keys() == before.keys()
        assert (
            contents(locks)[getattr(keys_of(locks), field).encode()]
            == before[getattr(keys_of(locks), field).encode()]
        )
    else:
        lock.release()
        assert value_of(locks) is None


# Another value


def test_a_lease_whose_expiry_was_taken_away_gets_it_back_with_its_renewal(locks):
    with distributed_lock(NAME):
        locks.redis.persist(keys_of(locks).lock)
        wait_until(lambda: locks.redis.pttl(keys_of(locks).lock) > 0)


@pytest.mark.proves("R9")
@pytest.mark.parametrize("mark", ["-inf", "-1", "0.5", "inf"])
def test_r9_a_fence_mark_of_nonsense_does_not_lower_the_fence(mark, caller, locks):
    before = time.time_ns() // 1000
    locks.redis.zadd(keys_of(locks).fence, {"last": mark})
    with caller.block(distributed_lock(NAME)) as lease:
        assert before - 1_000_000 < lease.fence < 2**63
