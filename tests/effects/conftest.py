"""Several holders of one lock at once, as after a server has lost its data; tasks in eager mode."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from django_redislock import LockError, LockMisuse, distributed_lock
from tests.support.celery_app import EAGER, celery_app


def refusal(block, error=LockMisuse, match=None):
    """The error that a block is refused with before it begins."""
    with pytest.raises(error, match=match) as refused, block:
        pytest.fail("the block must not begin")
    return refused.value


@pytest.fixture
def holders(locks):
    """Make leases of the lock "lottery", in the order of their fences, that all say "held"."""
    held = []

    def make(number):
        for _ in range(number):
            locks.redis.flushall()
            lock = distributed_lock("lottery", ttl=60, wait=0)
            with ThreadPoolExecutor(1) as thread:  # One thread may not hold a lock twice.
                assert thread.submit(lock.acquire).result()
                lease = thread.submit(lambda lock=lock: lock.lease).result()
            held.append((lock, lease))
        leases = [lease for _, lease in held]
        assert all(lease.held for lease in leases)
        assert sorted({lease.fence for lease in leases}) == [lease.fence for lease in leases]
        return leases

    yield make
    for lock, _ in held:
        with suppress(LockError):
            lock.release()


@pytest.fixture
def eager_app():
    """An application in eager mode. The shared tasks of a test end with it."""
    with celery_app(**EAGER) as app:
        yield app
