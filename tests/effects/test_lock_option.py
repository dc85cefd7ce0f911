"""distributed_lock(atomic=...): lock, transaction, body, commit, release."""

from __future__ import annotations

import re

import pytest
from django.db import connections, transaction

from django_redislock import (
    Lease,
    LockLost,
    LockMisuse,
    LockTimeout,
    StaleFence,
    distributed_lock,
    held,
    signals,
)
from django_redislock.models import Fence
from tests.effects.models import Entry


def write(database, value=0):
    """One write."""
    Entry.objects.using(database).create(fence=0, value=value)


def count(database):
    """How many writes there are."""
    return Entry.objects.using(database).count()


def claim_newer(database):
    """Let a later lease have written."""
    Fence.objects.using(database).update(fence=2**62, lease_id="of another")


# --- the order -----------------------------------------------------------------------------------


@pytest.fixture
def at_release(database):
    """What is committed whenever a lock is released, and whether a transaction is open then."""
    seen = []

    def look(**news):
        seen.append((count(database), connections[database].in_atomic_block))

    signals.lock_released.connect(look)
    yield seen
    signals.lock_released.disconnect(look)


def test_a_block_is_committed_before_the_lock_is_released(locks, database, at_release):
    with distributed_lock("lottery", atomic=database) as lease:
        assert isinstance(lease, Lease)
        assert connections[database].in_atomic_block
        write(database)
    assert at_release == [(1, False)]
    assert Fence.objects.using(database).get().fence == lease.fence


def test_so_is_a_decorated_function(locks, database, at_release):
    @distributed_lock("lottery:{number}", atomic=database)
    def draw(number: int) -> int:
        write(database, number)
        return number

    assert [draw(7), draw(8)] == [7, 8]
    assert at_release == [(1, False), (2, False)]
    names = Fence.objects.using(database).values_list("name", flat=True)
    assert sorted(names) == ["lottery:7", "lottery:8"]


def test_an_exception_rolls_back_and_is_no_success(locks, database):
    lock = distributed_lock("lottery", atomic=database, min_hold=60, wait=0)

    def fail():
        with lock:
            write(database)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert count(database) == 0
    assert not lock.locked()  # A success would have left it cooling.
    with lock:
        write(database)
    assert count(database) == 1
    assert lock.locked()


@pytest.mark.django_db
def test_true_is_the_default_database(locks):
    with distributed_lock("lottery", atomic=True) as lease:
        pass
    assert Fence.objects.using("default").get().fence == lease.fence


def test_false_and_none_are_no_transaction(locks, database):
    for atomic in (False, None):
        with distributed_lock("lottery", atomic=atomic):
            assert not connections[database].in_atomic_block


def test_a_handle_may_be_used_again(locks, database):
    lock = distributed_lock("lottery", atomic=database)
    for number in range(3):
        with lock as lease:
            assert lock.lease is lease
            write(database, number)
    assert count(database) == 3


def test_a_lock_within_the_lock_may_have_the_transaction(locks, database):
    with (
        distributed_lock("lottery") as outer,
        distributed_lock("lottery", reentrant=True, atomic=database) as inner,
    ):
        assert inner is outer
        write(database)
    assert count(database) == 1


# --- who comes too late --------------------------------------------------------------------------


def test_a_stale_fence_leaves_the_lock_free(locks, database, holders):
    lock = distributed_lock("lottery", atomic=database, wait=0)
    with lock:
        pass
    claim_newer(database)
    with pytest.raises(StaleFence), lock:
        pytest.fail("the block must not begin")
    assert not lock.locked()
    assert not connections[database].in_atomic_block


def lose_in_block(name, database):
    """The lease is lost before the commit, and the body takes no notice."""
    with distributed_lock(name, atomic=database) as lease:
        write(database)
        assert held.force_release(name, lease.id)
        with pytest.raises(LockLost):
            lease.ensure_held(verify=True)


def test_a_loss_before_the_commit_rolls_back(locks, database):
    with pytest.raises(LockLost, match="by force"):
        lose_in_block("lottery", database)
    assert count(database) == 0


def test_a_loss_after_the_commit_is_logged_and_not_raised(locks, database, caplog):
    # LockLost would say that nothing was written, and whoever tries again would write twice.
    with distributed_lock("lottery", atomic=database) as lease:
        write(database)
        transaction.on_commit(
            lambda: held.force_release("lottery", lease.id) or None, using=database
        )
    assert count(database) == 1
    assert "Left the block of lock 'lottery'" in caplog.text


# --- what is refused -----------------------------------------------------------------------------


def test_in_a_transaction_it_is_refused_before_the_lock_is_asked_for(locks, database):
    lock = distributed_lock("lottery", atomic=database)
    with (
        transaction.atomic(using=database),
        pytest.raises(LockMisuse, match="is open already"),
        lock,
    ):
        pytest.fail("the block must not begin")
    assert locks.keys() == []


def test_a_busy_lock_begins_no_transaction(locks, database, spawn):
    child = spawn(
        "from django_redislock import distributed_lock\n"
        "with distributed_lock('lottery'): say('held'); hear()"
    )
    assert child.read() == "held"
    with pytest.raises(LockTimeout), distributed_lock("lottery", atomic=database, wait=0):
        pytest.fail("the block must not begin")
    assert not connections[database].in_atomic_block


@pytest.mark.parametrize(
    ("atomic", "message"),
    [
        ("defualt", "atomic must be the alias of a database, not 'defualt'. DATABASES has"),
        (1, "atomic must be True or the alias of a database, not 1."),
        ("", "atomic must be True or the alias of a database, not ''."),
        (["default"], "atomic must be True or the alias of a database, not ['default']."),
    ],
)
def test_what_is_no_database_is_refused_where_it_is_written(locks, atomic, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        distributed_lock("lottery", atomic=atomic)


def test_a_project_without_a_database_is_told_so(locks, monkeypatch):
    monkeypatch.setitem(connections.settings, "default", {"ENGINE": "django.db.backends.dummy"})
    with pytest.raises(ValueError, match=r"not 'default'\. DATABASES has none"):
        distributed_lock("lottery", atomic=True)


@pytest.mark.parametrize("method", ["acquire", "aacquire"])
async def test_acquire_has_no_block_that_would_end_the_transaction(locks, method):
    lock = distributed_lock("lottery", atomic=True)
    with pytest.raises(LockMisuse, match=re.escape("`with lock.lease.atomic():`")):
        await getattr(lock, method)() if method == "aacquire" else lock.acquire()
    assert locks.keys() == []


async def test_async_with_is_refused_with_the_right_line(locks):
    with pytest.raises(LockMisuse, match="sync_to_async, and write `with`"):
        async with distributed_lock("lottery", atomic=True):
            pytest.fail("the block must not begin")
    assert locks.keys() == []


def test_a_coroutine_function_is_refused_where_it_is_decorated(locks):
    async def draw(): ...

    with pytest.raises(TypeError, match=r"draw\(\): Django has no asynchronous transactions"):
        distributed_lock("lottery", atomic=True)(draw)


@pytest.mark.parametrize("broken", ["the table", "the connection"])
def test_a_transaction_that_does_not_begin_leaves_no_lock(locks, make_database, broken):
    database = make_database("effects", migrate=broken != "the table")
    lock = distributed_lock("lottery", atomic=database, wait=0)
    interrupts = _interrupt if broken == "the connection" else _pass_on
    with (
        connections[database].execute_wrapper(interrupts),
        pytest.raises((LockMisuse, KeyboardInterrupt)),
        lock,
    ):
        pytest.fail("the block must not begin")
    assert not lock.locked()
    assert lock.lease is None
    assert not connections[database].in_atomic_block


def _interrupt(execute, sql, *rest):
    """As Ctrl-C while the claim is on its way."""
    if "django_redislock_fence" in sql:
        raise KeyboardInterrupt
    return execute(sql, *rest)


def _pass_on(execute, *args):
    return execute(*args)
