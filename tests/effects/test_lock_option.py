"""distributed_lock(atomic=...): lock, transaction, body, commit, release."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Locks
    from tests.effects.conftest import Holders
    from tests.support.databases import MakeDatabase


def write(database: str, value: int = 0) -> None:
    """One write."""
    Entry.objects.using(database).create(fence=0, value=value)


def count(database: str) -> int:
    """How many writes there are."""
    return Entry.objects.using(database).count()


def claim_newer(database: str) -> None:
    """Let a later lease have written."""
    Fence.objects.using(database).update(fence=2**62, lease_id="of another")


# --- the order -----------------------------------------------------------------------------------


@pytest.fixture
def at_release(database: str) -> Iterator[list[tuple[int, bool]]]:
    """What is committed whenever a lock is released, and whether a transaction is open then."""
    seen: list[tuple[int, bool]] = []

    def look(**news: Any) -> None:
        seen.append((count(database), connections[database].in_atomic_block))

    signals.lock_released.connect(look)
    yield seen
    signals.lock_released.disconnect(look)


def test_a_block_is_committed_before_the_lock_is_released(
    locks: Locks, database: str, at_release: list[tuple[int, bool]]
) -> None:
    with distributed_lock("lottery", atomic=database) as lease:
        assert isinstance(lease, Lease)
        assert connections[database].in_atomic_block
        write(database)
    assert at_release == [(1, False)]
    assert Fence.objects.using(database).get().fence == lease.fence


def test_so_is_a_decorated_function(
    locks: Locks, database: str, at_release: list[tuple[int, bool]]
) -> None:
    @distributed_lock("lottery:{number}", atomic=database)
    def draw(number: int) -> int:
        write(database, number)
        return number

    assert [draw(7), draw(8)] == [7, 8]
    assert at_release == [(1, False), (2, False)]
    names = Fence.objects.using(database).values_list("name", flat=True)
    assert sorted(names) == ["lottery:7", "lottery:8"]


def test_an_exception_rolls_back_and_is_no_success(locks: Locks, database: str) -> None:
    lock = distributed_lock("lottery", atomic=database, min_hold=60, wait=0)

    def fail() -> None:
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
def test_true_is_the_default_database(locks: Locks) -> None:
    with distributed_lock("lottery", atomic=True) as lease:
        pass
    assert Fence.objects.using("default").get().fence == lease.fence


def test_false_and_none_are_no_transaction(locks: Locks, database: str) -> None:
    for atomic in (False, None):
        with distributed_lock("lottery", atomic=atomic):  # type: ignore[arg-type]
            assert not connections[database].in_atomic_block


def test_a_handle_may_be_used_again(locks: Locks, database: str) -> None:
    lock = distributed_lock("lottery", atomic=database)
    for number in range(3):
        with lock as lease:
            assert lock.lease is lease
            write(database, number)
    assert count(database) == 3


def test_a_lock_within_the_lock_may_have_the_transaction(locks: Locks, database: str) -> None:
    with (
        distributed_lock("lottery") as outer,
        distributed_lock("lottery", reentrant=True, atomic=database) as inner,
    ):
        assert inner is outer
        write(database)
    assert count(database) == 1


# --- who comes too late --------------------------------------------------------------------------


def test_a_stale_fence_leaves_the_lock_free(locks: Locks, database: str, holders: Holders) -> None:
    lock = distributed_lock("lottery", atomic=database, wait=0)
    with lock:
        pass
    claim_newer(database)
    with pytest.raises(StaleFence), lock:
        pytest.fail("the block must not begin")
    assert not lock.locked()
    assert not connections[database].in_atomic_block


def lose_in_block(name: str, database: str) -> None:
    """The lease is lost before the commit, and the body takes no notice."""
    with distributed_lock(name, atomic=database) as lease:
        write(database)
        assert held.force_release(name, lease.id)
        with pytest.raises(LockLost):
            lease.ensure_held(verify=True)


def test_a_loss_before_the_commit_rolls_back(locks: Locks, database: str) -> None:
    with pytest.raises(LockLost, match="by force"):
        lose_in_block("lottery", database)
    assert count(database) == 0


def test_a_loss_after_the_commit_is_logged_and_not_raised(
    locks: Locks, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    # LockLost would say that nothing was written, and whoever tries again would write twice.
    with distributed_lock("lottery", atomic=database) as lease:
        write(database)
        transaction.on_commit(
            lambda: held.force_release("lottery", lease.id) or None, using=database
        )
    assert count(database) == 1
    assert "Left the block of lock 'lottery'" in caplog.text


# --- what is refused -----------------------------------------------------------------------------


def test_in_a_transaction_it_is_refused_before_the_lock_is_asked_for(
    locks: Locks, database: str
) -> None:
    lock = distributed_lock("lottery", atomic=database)
    with (
        transaction.atomic(using=database),
        pytest.raises(LockMisuse, match="is open already"),
        lock,
    ):
        pytest.fail("the block must not begin")
    assert locks.keys() == []


def test_a_busy_lock_begins_no_transaction(locks: Locks, database: str, spawn: Any) -> None:
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
def test_what_is_no_database_is_refused_where_it_is_written(
    locks: Locks, atomic: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        distributed_lock("lottery", atomic=atomic)


def test_a_project_without_a_database_is_told_so(
    locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings, "default", {"ENGINE": "django.db.backends.dummy"})
    with pytest.raises(ValueError, match=r"not 'default'\. DATABASES has none"):
        distributed_lock("lottery", atomic=True)


@pytest.mark.parametrize("method", ["acquire", "aacquire"])
async def test_acquire_has_no_block_that_would_end_the_transaction(
    locks: Locks, method: str
) -> None:
    lock = distributed_lock("lottery", atomic=True)
    with pytest.raises(LockMisuse, match=re.escape("`with lock.lease.atomic():`")):
        await getattr(lock, method)() if method == "aacquire" else lock.acquire()
    assert locks.keys() == []


async def test_async_with_is_refused_with_the_right_line(locks: Locks) -> None:
    with pytest.raises(LockMisuse, match="sync_to_async, and write `with`"):
        async with distributed_lock("lottery", atomic=True):
            pytest.fail("the block must not begin")
    assert locks.keys() == []


def test_a_coroutine_function_is_refused_where_it_is_decorated(locks: Locks) -> None:
    async def draw() -> None: ...

    with pytest.raises(TypeError, match=r"draw\(\): Django has no asynchronous transactions"):
        distributed_lock("lottery", atomic=True)(draw)


@pytest.mark.parametrize("broken", ["the table", "the connection"])
def test_a_transaction_that_does_not_begin_leaves_no_lock(
    locks: Locks, make_database: MakeDatabase, broken: str
) -> None:
    database = make_database("effects", migrate=broken != "the table")
    lock = distributed_lock("lottery", atomic=database, wait=0)
    interrupts: Callable[..., Any] = _interrupt if broken == "the connection" else _pass_on
    with (
        connections[database].execute_wrapper(interrupts),
        pytest.raises((LockMisuse, KeyboardInterrupt)),
        lock,
    ):
        pytest.fail("the block must not begin")
    assert not lock.locked()
    assert lock.lease is None
    assert not connections[database].in_atomic_block


def _interrupt(execute: Any, sql: str, *rest: Any) -> Any:
    """As Ctrl-C while the claim is on its way."""
    if "django_redislock_fence" in sql:
        raise KeyboardInterrupt
    return execute(sql, *rest)


def _pass_on(execute: Any, *args: Any) -> Any:
    return execute(*args)
