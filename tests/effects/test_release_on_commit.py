"""release_on_commit on servers whose transactions overlap.

The rest is in contract/test_transactions.py: on SQLite, which has one writer at a time.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from django.db import Error, OperationalError, connections, transaction

from django_redislock import Limit, distributed_lock, held
from tests.effects.models import Entry
from tests.support.databases import LEVELS, MARIADB, POSTGRES, on_postgres, on_servers
from tests.support.orders import OnPurpose
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until

LOCKING = (MARIADB, "serializable")


@pytest.fixture
def other():
    """A thread that wants the same lock."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def kept():
    """A lock that is released by the end of the transaction."""
    return distributed_lock("lottery", wait=HUNG, release_on_commit=True)


def entries(database):
    """How many writes this transaction sees."""
    return Entry.objects.using(database).count()


def draw_if_nobody_has(database, lock, work=int):
    """What a new user writes; *work* is what is done before the commit. Return what was found."""
    with transaction.atomic(using=database):
        with lock:
            found = entries(database)
            if not found:
                Entry.objects.using(database).create(fence=0)
        work()
    return found


@on_servers
@pytest.mark.parametrize("is_committed", [True, False], ids=["commit", "rollback"])
def test_the_next_holder_reads_what_was_committed(locks, database, other, in_threads, is_committed):
    others = []

    def somebody_draws_too():
        others.append(other.submit(in_threads(draw_if_nobody_has), database, kept()))
        wait_until(lambda: waiters("lottery"))
        if not is_committed:
            raise OnPurpose

    with suppress(OnPurpose):
        assert draw_if_nobody_has(database, kept(), work=somebody_draws_too) == 0
    assert others[0].result(HUNG) == is_committed
    assert entries(database) == 1


@on_servers
def test_without_it_both_find_nothing_and_both_draw(locks, database, other, in_threads):
    found = []

    def somebody_draws_too():
        lock = distributed_lock("lottery", wait=HUNG)
        found.append(other.submit(in_threads(draw_if_nobody_has), database, lock).result(HUNG))

    found.append(draw_if_nobody_has(database, distributed_lock("lottery"), work=somebody_draws_too))
    assert found == [0, 0]
    assert entries(database) == 2


@on_postgres
@pytest.mark.parametrize(
    "wanted",
    [
        distributed_lock("gpu", limit=2, wait=0, release_on_commit=True),
        distributed_lock("a", "b", wait=0, release_on_commit=True),
        distributed_lock(limits=[Limit("a:1", 2), Limit("a", 3)], wait=0, release_on_commit=True),
    ],
    ids=["permit", "several names", "limits"],
)
def test_a_permit_and_several_locks_are_kept_through_savepoints_to_the_end(locks, database, wanted):
    def kept_now():
        return {one.name for one in held.list()}

    for outcome in ("commit", "rollback"):
        with suppress(OnPurpose), transaction.atomic(using=database):
            with suppress(OnPurpose), transaction.atomic(using=database):
                with wanted as lease:
                    taken = set(lease.fences)
                raise OnPurpose  # It ends a savepoint, and not the transaction.
            assert (kept_now(), lease.held) == (taken, True)
            with wanted as again:  # The transaction goes on with what it has: no second permit.
                assert again.fences == lease.fences
            assert kept_now() == taken
            if outcome == "rollback":
                raise OnPurpose
        assert kept_now() == set()


def disconnect(database):
    """Have the server end the connection of this thread, as when it is restarted."""
    connection = connections[database]
    ask, end = {
        POSTGRES: ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
        MARIADB: ("SELECT connection_id()", "KILL %s"),
    }[MARIADB if connection.vendor == "mysql" else POSTGRES]
    with connection.cursor() as cursor:
        cursor.execute(ask)
        (number,) = cursor.fetchone()
    with connection.copy().cursor() as cursor:
        cursor.execute(end, [number])
        cursor.connection.close()


@on_servers
@pytest.mark.parametrize("noticed", ["by a statement", "at the commit"])
def test_a_lost_connection_releases_it_and_nothing_is_written(locks, database, noticed):
    def lose_the_connection():
        assert held.get("lottery") is not None
        disconnect(database)
        if noticed == "by a statement":
            entries(database)

    with pytest.raises(Error):
        draw_if_nobody_has(database, kept(), work=lose_the_connection)
    assert held.get("lottery") is None
    assert entries(database) == 0
    assert draw_if_nobody_has(database, kept()) == 0


@pytest.mark.parametrize(
    ("database_kind", "level"),
    # On MariaDB, readers of that last level lock what they read, and the writer waits for them.
    [(kind, level) for kind in (POSTGRES, MARIADB) for level in LEVELS if (kind, level) != LOCKING],
)
def test_a_transaction_that_was_open_before_the_lock_was_granted_may_read_what_was_before(
    locks, make_database, other, in_threads, level
):
    database = make_database("effects", isolation=level)

    def draw():
        return draw_if_nobody_has(database, kept())

    with transaction.atomic(using=database):
        before = entries(database)
        other.submit(in_threads(draw)).result(HUNG)
        with kept():
            after = entries(database)
    assert (before, after) == (0, 1 if level == "read committed" else 0)
    with transaction.atomic(using=database), kept():
        assert entries(database) == 1, "taken before the first query"


@on_postgres
@pytest.mark.parametrize("gives_up", ["the waiter", "the pool"])
def test_a_waiter_with_the_only_connection_of_a_pool_keeps_it_from_the_holder(
    locks, make_database, other, in_threads, gives_up
):
    """As docs/databases.md says: until one of them gives up."""
    wait, timeout = (1, HUNG) if gives_up == "the waiter" else (HUNG, 1)
    database = make_database("pooled", pool={"min_size": 1, "max_size": 1, "timeout": timeout})

    def hold():
        with distributed_lock("lottery"):
            held_now.set()
            return entries(database)

    held_now = threading.Event()
    try:
        with transaction.atomic(using=database):
            entries(database)
            holder = other.submit(in_threads(hold))
            assert held_now.wait(HUNG)
            lock = distributed_lock("lottery", wait=wait)
            assert lock.acquire() is (gives_up == "the pool")
        connections[database].close()
        if gives_up == "the waiter":
            assert holder.result(HUNG) == 0
        else:
            with pytest.raises(OperationalError):
                holder.result(HUNG)
            lock.release()
    finally:
        connections[database].close_pool()
