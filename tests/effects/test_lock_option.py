"""distributed_lock(atomic=...): lock, transaction, body, commit, release."""

from __future__ import annotations

import re

import pytest
from django.db import connections, transaction

from django_redislock import (
    LockLost,
    LockMisuse,
    LockTimeout,
    StaleFence,
    distributed_lock,
    held,
    signals,
    single_instance,
    single_instance_task,
)
from django_redislock.models import Fence
from tests.effects.conftest import refusal
from tests.effects.models import Entry
from tests.support.databases import on_sqlite
from tests.support.others import held_by_other
from tests.support.ways import both_ways


def write(database, value=0):
    Entry.objects.using(database).create(fence=0, value=value)


def count(database):
    """How many writes there are."""
    return Entry.objects.using(database).count()


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


def test_a_block_is_committed_before_the_lock_is_released_and_its_handle_used_again(
    locks, database, at_release
):
    lock = distributed_lock("lottery", atomic=database)
    for number in range(3):
        with lock as lease:
            assert lock.lease is lease
            assert connections[database].in_atomic_block
            write(database, number)
    assert at_release == [(1, False), (2, False), (3, False)]
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
def test_true_is_the_default_database_and_false_and_none_are_no_transaction(locks):
    with distributed_lock("lottery", atomic=True) as lease:
        pass
    assert Fence.objects.using("default").get().fence == lease.fence
    for atomic in (False, None):
        with distributed_lock("lottery", atomic=atomic), transaction.atomic(durable=True):
            pass
    assert Fence.objects.using("default").get().fence == lease.fence


@on_sqlite
def test_a_lock_within_the_lock_may_have_the_transaction(locks, database):
    with (
        distributed_lock("lottery") as outer,
        distributed_lock("lottery", reentrant=True, atomic=database) as inner,
    ):
        assert inner is outer
        write(database)
    assert count(database) == 1


# --- who comes too late --------------------------------------------------------------------------


def test_a_stale_fence_leaves_the_lock_free(locks, database):
    lock = distributed_lock("lottery", atomic=database, wait=0)
    with lock:
        pass
    Fence.objects.using(database).update(fence=2**62, lease_id="of another")
    refusal(lock, StaleFence)
    assert not lock.locked()
    assert not connections[database].in_atomic_block


def test_a_loss_before_the_commit_rolls_back(locks, database):
    """The body takes no notice of it."""

    def lose_in_block():
        with distributed_lock("lottery", atomic=database) as lease:
            write(database)
            assert held.force_release("lottery", lease.id)
            with pytest.raises(LockLost):
                lease.ensure_held(verify=True)

    with pytest.raises(LockLost, match="by force"):
        lose_in_block()
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


@on_sqlite
def test_in_a_transaction_it_is_refused_before_the_lock_is_asked_for(locks, database):
    with transaction.atomic(using=database):
        refusal(distributed_lock("lottery", atomic=database), match="is open already")
    assert locks.keys() == []


@on_sqlite
def test_a_busy_lock_begins_no_transaction(locks, database):
    with held_by_other("lottery"):
        refusal(distributed_lock("lottery", atomic=database, wait=0), LockTimeout)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: distributed_lock("lottery", atomic=True),
        lambda: single_instance_task(atomic=True)(lambda: None),
    ],
    ids=["lock", "task"],
)
def test_a_project_without_a_database_is_told_so(locks, monkeypatch, make):
    monkeypatch.setitem(connections.settings, "default", {"ENGINE": "django.db.backends.dummy"})
    with pytest.raises(ValueError, match=r"not 'default'\. DATABASES has none"):
        make()


@both_ways
async def test_what_has_no_block_that_would_end_the_transaction_shows_the_right_line(way, locks):
    lock = distributed_lock("lottery", atomic=True)
    with pytest.raises(LockMisuse, match=re.escape("`with lock.lease.atomic():`")):
        await way.acquire(lock)
    if way.name == "async":
        with pytest.raises(LockMisuse, match="sync_to_async, and write `with`"):
            await lock.__aenter__()
    assert locks.keys() == []


def test_a_coroutine_function_is_refused_where_it_is_decorated(locks):
    async def draw(): ...

    with pytest.raises(TypeError, match=r"draw\(\): Django has no asynchronous transactions"):
        distributed_lock("lottery", atomic=True)(draw)


def interrupt_the_claim(execute, sql, *rest):
    """As Ctrl-C while it is on its way."""
    if "django_redislock_fence" in sql:
        raise KeyboardInterrupt
    return execute(sql, *rest)


@pytest.mark.parametrize("broken", ["the table", "the connection"])
def test_a_transaction_that_does_not_begin_leaves_no_lock(locks, make_database, broken):
    database = make_database("effects", migrate=broken != "the table")
    lock = distributed_lock("lottery", atomic=database, wait=0)
    if broken == "the table":
        refusal(lock)
    else:
        with connections[database].execute_wrapper(interrupt_the_claim):
            refusal(lock, KeyboardInterrupt)
    assert not lock.locked()
    assert lock.lease is None
    assert not connections[database].in_atomic_block


# --- durable jobs --------------------------------------------------------------------------------


def test_a_durable_call_does_the_work_of_a_holder_that_has_died(locks, db):
    locks.configure(TTL=1.5, WAIT=0)

    @single_instance("lottery:{day}", durable=True)
    def draw(day):
        return "drawn"

    @single_instance("lottery:{day}", durable=True, wait=0.1)
    def draw_soon(day):
        return "drawn"

    with held_by_other("lottery:0", ttl=1.5):
        assert draw_soon(0)["skipped"] == "busy"
        assert draw(0) == "drawn"
        assert draw(0)["skipped"] == "done"
