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
from tests.support.waiting import HUNG, wait_until


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
def test_r12_a_release_meets_a_key_of_another_type(field, locks):
    lock = distributed_lock(NAME, renew=False)
    lock.acquire()
    spoil(locks, field)
    before = contents(locks)
    if field in {"lock", "queue"}:
        with takes(at_most=0.5), pytest.raises(LockUnavailable, match="WRONGTYPE"):
            lock.release()
        assert contents(locks) == before
    else:
        lock.release()
        assert value_of(locks) is None


@each_key
def test_a_renewal_meets_a_key_of_another_type(field, locks):
    with suppress(LockLost), distributed_lock(NAME, renew=False) as lease:
        spoil(locks, field)
        if field == "lock":
            with pytest.raises(LockUnavailable, match="WRONGTYPE"):
                lease.renew()
        else:
            lease.renew()
            assert lease.held


# Another value


@pytest.mark.parametrize("wait", [0, 5])
@pytest.mark.no_permit("the other permit may be had later")
def test_a_key_without_expiry_is_an_error_at_once_and_never_busy(wait, caller, locks):
    locks.redis.set(keys_of(locks).lock, "by hand")
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match="no expiry") as caught:
        caller.acquire(distributed_lock(NAME, wait=wait))
    assert NAME in str(caught.value)
    assert value_of(locks) == b"by hand"
    locks.redis.delete(keys_of(locks).lock)


def test_a_foreign_value_that_expires_is_busy_until_then(caller, locks):
    locks.redis.set(keys_of(locks).lock, b"\xff not ours |||||", ex=60)
    assert caller.acquire(distributed_lock(NAME)) is False
    locks.redis.expire(keys_of(locks).lock, 1)
    assert caller.acquire(distributed_lock(NAME, wait=HUNG))


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
