"""lease.atomic(): the transaction that a late holder cannot write in, on real databases."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import pytest
from asgiref.sync import sync_to_async
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from django_redislock import LockLost, StaleFence, distributed_lock, held
from django_redislock.models import Fence
from tests.effects.conftest import refusal
from tests.effects.models import Counter, Entry, written
from tests.support.databases import (
    KINDS,
    LEVELS,
    MARIADB,
    POSTGRES,
    SQLITE,
    await_blocked,
    on_mariadb,
    on_postgres,
    on_sqlite,
    router,
)
from tests.support.waiting import HUNG

# What the lock's own server does is proven elsewhere.


def write(database, lease, value=0):
    Entry.objects.using(database).create(fence=lease.fence, value=value)


def enter(lease, database):
    """A transaction that does nothing more than to claim the fence."""
    with lease.atomic(database):
        pass


def fence_of(database, name="lottery"):
    return Fence.objects.using(database).get(name=name)


def execute(database, sql, *params):
    with connections[database].cursor() as cursor:
        cursor.execute(sql, params)


# --- what it does --------------------------------------------------------------------------------


def test_of_several_names_every_fence_is_claimed(locks, database):
    names = "account:1", "account:2"
    with distributed_lock(*reversed(names), atomic=database) as lease:
        write(database, lease)
    assert written(database) == [lease.fence]
    assert {name: fence_of(database, name).fence for name in names} == lease.fences
    with distributed_lock(*names) as late:
        newer = late.fences[names[1]] + 1
        Fence.objects.using(database).filter(name=names[1]).update(fence=newer)
        stale = refusal(late.atomic(database), StaleFence)
    assert (stale.name, stale.newer) == (names[1], newer)
    assert fence_of(database, names[0]).fence == lease.fences[names[0]]  # It is rolled back.


def test_each_block_is_committed_and_the_fence_of_its_lease_is_claimed(locks, database):
    with distributed_lock("lottery") as lease:
        for _ in range(3):
            with lease.atomic(database):
                write(database, lease)
    assert written(database) == [lease.fence] * 3
    row = fence_of(database)
    assert (row.alias, row.fence, row.lease_id) == ("default", lease.fence, lease.id)
    assert row.claimed_at is not None


def test_the_claim_is_the_first_statement_and_the_only_one_that_is_added(locks, database):
    for _ in range(2):  # The first time it makes the row as well.
        with (
            distributed_lock("lottery") as lease,
            CaptureQueriesContext(connections[database]) as sent,
            lease.atomic(database),
        ):
            write(database, lease)
    sqls = [one["sql"] for one in sent if one["sql"] not in {"BEGIN", "COMMIT"}]
    assert sqls[0].split()[1].strip('"`') == "django_redislock_fence"
    assert [sql.split()[0] for sql in sqls] == ["UPDATE", "INSERT"]


def test_savepoints_within_it_are_django_s_business(locks, database):
    with distributed_lock("lottery", atomic=database) as lease:
        write(database, lease, 1)
        with suppress(ZeroDivisionError), transaction.atomic(using=database):
            write(database, lease, 2)
            raise ZeroDivisionError
        with transaction.atomic(using=database):
            savepoint = transaction.savepoint(using=database)
            break_by_a_read(database, lease)  # It breaks no more than the savepoint.
            transaction.savepoint_rollback(savepoint, using=database)
    assert written(database) == [lease.fence]


def test_locks_whose_names_differ_little_have_rows_of_their_own(locks, database):
    for name in ("report", "Report", "report ", "é", "e"):
        with distributed_lock(name) as lease:
            enter(lease, database)
    assert Fence.objects.using(database).count() == 5


# --- how it may fail -----------------------------------------------------------------------------


def divide_by_zero(database, lease):
    raise ZeroDivisionError


def catch_an_error(database, lease):
    there = Entry.objects.using(database).get()
    with suppress(IntegrityError):
        Entry.objects.using(database).create(position=there.position, fence=1)


def close_the_connection(database, lease):
    connections[database].close()


def set_rollback(database, lease):
    transaction.set_rollback(True, using=database)


def read_from_nowhere(database, lease):
    execute(database, "SELECT 1 FROM nowhere")


def break_by_a_read(database, lease):
    with suppress(DatabaseError):
        read_from_nowhere(database, lease)


def break_by_a_conflict(database, lease):
    there = Entry.objects.using(database).get()
    sql = "INSERT OR ROLLBACK INTO effects_entry (position, fence, value) VALUES (%s, 0, 0)"
    with suppress(DatabaseError):
        execute(database, sql, there.position)


def lose_the_lease(database, lease):
    assert held.force_release("lottery", lease.id)
    with suppress(LockLost):
        lease.ensure_held(verify=True)


def break_a_deferred_constraint(database, lease):
    sql = "REFERENCES effects_entry (position) DEFERRABLE INITIALLY DEFERRED"
    execute(database, f"CREATE TABLE child (parent bigint {sql})")
    execute(database, "INSERT INTO child VALUES (4711)")


# What Django or the database would roll back in silence. A task would count as a success, and its
# work as done.
UNTOLD = TransactionManagementError, "rolled back, though its block has ended"
ENDS = [
    (divide_by_zero, KINDS, ZeroDivisionError, None),
    (catch_an_error, KINDS, *UNTOLD),
    (close_the_connection, KINDS, *UNTOLD),
    (set_rollback, KINDS, *UNTOLD),
    (read_from_nowhere, KINDS, DatabaseError, "nowhere"),
    # PostgreSQL would answer the commit with a rollback, and no driver calls that an error.
    (break_by_a_read, [POSTGRES], *UNTOLD),
    (break_by_a_conflict, [SQLITE], *UNTOLD),
    (lose_the_lease, KINDS, LockLost, "by force"),
    (break_a_deferred_constraint, [SQLITE, POSTGRES], IntegrityError, None),  # MariaDB defers none.
]


@pytest.mark.parametrize(
    ("database_kind", "end", "error", "says"),
    [(kind, end, *how) for end, kinds, *how in ENDS for kind in kinds],
)
def test_a_block_that_is_not_committed_is_an_error_and_leaves_neither_write_nor_claim(
    locks, database, end, error, says
):
    def draw():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            write(database, lease)
            end(database, lease)

    with pytest.raises(error, match=says):
        draw()
    assert written(database) == []
    assert fence_of(database).fence == 0


@on_mariadb
def test_what_follows_a_caught_deadlock_is_not_committed_without_the_claim(
    locks, database, in_threads
):
    """MariaDB has rolled back all before it, and begins a transaction with the next statement."""
    Counter.objects.using(database).bulk_create([Counter(name="a"), Counter(name="b")])
    counters = Counter.objects.using(database).select_for_update()
    has_first = threading.Event()

    def draw():
        with distributed_lock("lottery", atomic=database) as lease:
            write(database, lease, 1)
            counters.get(name="a")
            has_first.set()
            with suppress(OperationalError):
                counters.get(name="b")
            write(database, lease, 2)

    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic(using=database):
            # The one that has written less is the victim.
            Entry.objects.using(database).bulk_create([Entry(fence=0) for _ in range(100)])
            counters.get(name="b")
            drawing = thread.submit(in_threads(draw))
            assert has_first.wait(HUNG)
            await_blocked(database)
            counters.get(name="a")
        with pytest.raises(TransactionManagementError, match="rolled back, though its block"):
            drawing.result(HUNG)
    assert set(written(database)) == {0}


# --- who comes too late --------------------------------------------------------------------------


def test_of_two_holders_after_flushall_the_earlier_one_is_refused_once_the_later_has_written(
    holders, database
):
    early, late = holders(2)
    for lease in (early, late):
        with lease.atomic(database):
            write(database, lease)
    stale = refusal(early.atomic(database), StaleFence)
    assert (stale.name, stale.fence, stale.newer) == ("lottery", early.fence, late.fence)
    assert written(database) == [early.fence, late.fence]
    assert fence_of(database).lease_id == late.id


def test_two_leases_with_the_same_fence_do_not_pass_for_one(locks, database):
    # As after a failover with the clock set back; here another lease has written with our fence.
    with distributed_lock("lottery") as lease:
        enter(lease, database)
        Fence.objects.using(database).update(lease_id="of another")
        refusal(lease.atomic(database), StaleFence)


def test_a_lease_that_is_over_begins_nothing(locks, database):
    with distributed_lock("lottery") as lease:
        pass
    with CaptureQueriesContext(connections[database]) as sent:
        refusal(lease.atomic(database), LockLost, "it was released")
    assert len(sent) == 0


@on_mariadb
def test_what_a_testcase_has_read_before_does_not_hide_a_newer_fence(
    locks, make_database, in_threads
):
    database = make_database("effects", isolation="repeatable read")

    def overtake():
        assert Fence.objects.using(database).update(fence=2**62) == 1

    with distributed_lock("lottery") as lease:
        enter(lease, database)
    of_the_testcase = transaction.atomic(using=database)
    of_the_testcase._from_testcase = True
    with of_the_testcase, distributed_lock("lottery") as lease:
        assert fence_of(database).fence < lease.fence
        with ThreadPoolExecutor(1) as thread:
            thread.submit(in_threads(overtake)).result(HUNG)
        refusal(lease.atomic(database), StaleFence)


# --- many at once --------------------------------------------------------------------------------


def increment(database, lease, start):
    """Read a number and write one more, as one of many; return what came of it."""
    start.wait(HUNG)
    try:
        with lease.atomic(database):
            counter = Counter.objects.using(database).get()
            counter.value += 1
            counter.save()
            write(database, lease, counter.value)
    except StaleFence:
        return "stale"
    except OperationalError as error:
        return "not serializable" if "serialize" in str(error) else str(error)
    return "done"


@pytest.mark.parametrize(
    ("database_kind", "level"), [(SQLITE, ""), *product((POSTGRES, MARIADB), LEVELS)]
)
def test_of_many_at_once_no_update_is_lost_and_nobody_writes_after_a_later_lease(
    holders, make_database, in_threads, database_kind, level
):
    # On SQLite, a transaction that reads first fails with "database is locked" if another one has
    # written since. Ours begins with its write, so it waits in line.
    database = make_database("effects", isolation=level)
    leases = holders(6)
    Counter.objects.using(database).create()
    start = threading.Barrier(len(leases))
    with ThreadPoolExecutor(len(leases)) as pool:
        work = in_threads(lambda lease: increment(database, lease, start))
        outcomes = list(pool.map(work, leases))

    done = outcomes.count("done")
    assert done
    assert Counter.objects.using(database).get().value == done
    fences = written(database)
    assert len(fences) == done
    by_value = Entry.objects.using(database).order_by("value").values_list("fence", flat=True)
    assert list(by_value) == sorted(fences), "a late holder has written after a later one"
    # The newest is refused by nobody; it can only lose to the database.
    assert outcomes[-1] != "stale"
    locks_rows = (database_kind, level) == (MARIADB, "repeatable read")
    if locks_rows or level in {"", "read committed"}:
        assert set(outcomes) <= {"done", "stale"}


@on_postgres
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_where_a_snapshot_is_final_an_overlap_is_the_databases_error_and_the_next_try_is_judged(
    holders, make_database, in_threads, level
):
    database = make_database("effects", isolation=level)
    earliest, early, late = holders(3)
    enter(earliest, database)  # So that there is a row.
    with ThreadPoolExecutor(1) as thread:
        with late.atomic(database):
            first_try = thread.submit(in_threads(enter), early, database)
            await_blocked(database)
        with pytest.raises(OperationalError, match="could not serialize"):
            first_try.result(HUNG)
        with pytest.raises(StaleFence):
            thread.submit(in_threads(enter), early, database).result(HUNG)


@pytest.mark.parametrize(
    ("database_kind", "level"),
    [
        (POSTGRES, "read committed"),
        (MARIADB, "read committed"),
        (MARIADB, "repeatable read"),  # Its snapshot is that of the first read, after the claim.
    ],
)
def test_a_claim_waits_for_the_transaction_of_the_holder_before(
    holders, make_database, in_threads, level
):
    database = make_database("effects", isolation=level)
    early, late = holders(2)

    def work():
        with late.atomic(database):
            return Entry.objects.using(database).count()

    with ThreadPoolExecutor(1) as thread:
        with early.atomic(database):
            write(database, early)
            seen = thread.submit(in_threads(work))
            await_blocked(database)
        assert seen.result(HUNG) == 1, "the later holder reads what the earlier one has written"


@on_sqlite
def test_on_sqlite_a_database_that_stays_locked_is_its_own_error(
    holders, make_database, in_threads
):
    database = make_database("effects", timeout=0.1)
    early, late = holders(2)
    with early.atomic(database), ThreadPoolExecutor(1) as thread:
        refused = thread.submit(in_threads(enter), late, database)
        with pytest.raises(OperationalError, match="database is locked"):
            refused.result(HUNG)


# --- what is refused -----------------------------------------------------------------------------


def test_inside_a_transaction_it_shows_the_right_order(locks, database):
    with transaction.atomic(using=database), distributed_lock("lottery") as lease:
        said = str(refusal(lease.atomic(database)))
    assert f"with distributed_lock('lottery', atomic={database!r}):" in said
    assert "ATOMIC_REQUESTS" in said
    with distributed_lock("lottery") as lease, lease.atomic(database):
        refusal(lease.atomic(database), match="is open already")  # It does not nest.


def test_where_autocommit_is_off_nothing_would_be_committed(locks, database):
    transaction.set_autocommit(False, using=database)
    try:
        with distributed_lock("lottery") as lease:
            refusal(lease.atomic(database), match="autocommit of database 'effects' is off")
    finally:
        transaction.rollback(using=database)
        transaction.set_autocommit(True, using=database)


def test_a_missing_table_is_said_with_the_command_that_makes_it(locks, make_database):
    database = make_database("effects", migrate=False)
    with distributed_lock("lottery") as lease:
        misuse = refusal(
            lease.atomic(database), match="migrate django_redislock --database=effects"
        )
    assert isinstance(misuse.__cause__, DatabaseError)


@on_mariadb
def test_a_database_without_transactions_is_refused(locks, make_database):
    database = make_database("effects", init_command="SET default_storage_engine = MyISAM")
    with distributed_lock("lottery") as lease:
        refusal(lease.atomic(database), match="has no transactions")


@on_sqlite
def test_an_unknown_database_is_named_with_those_that_there_are(locks, database):
    said = r"not 'efects'\. DATABASES has 'default', 'effects'"
    with (
        distributed_lock("lottery") as lease,
        pytest.raises(ValueError, match=said),
        lease.atomic("efects"),
    ):
        pytest.fail("the block must not begin")


@pytest.mark.django_db
def test_in_a_testcase_its_own_transaction_does_not_count_and_one_within_it_does(holders):
    assert connection.in_atomic_block
    early, late = holders(2)
    enter(late, "default")
    refusal(early.atomic(), StaleFence)
    assert fence_of("default").fence == late.fence  # That transaction is usable still.
    with transaction.atomic():
        refusal(late.atomic(), match="is open already")


# --- asynchronous code ---------------------------------------------------------------------------


async def test_in_an_event_loop_it_is_refused_with_the_right_line(locks):
    async with distributed_lock("lottery") as lease:
        refusal(lease.atomic(), match=r"await sync_to_async\(function\)\(lease\)")


def test_asynchronous_code_calls_a_function_that_writes(locks, database, in_threads):
    def draw(lease):
        with lease.atomic(database):
            write(database, lease)

    async def main():
        async with distributed_lock("lottery") as lease:
            await sync_to_async(in_threads(draw))(lease)
        return lease

    lease = asyncio.run(main())
    assert written(database) == [lease.fence]


# --- several databases ---------------------------------------------------------------------------


@on_sqlite
def test_each_database_knows_its_own_fences_wherever_a_router_sends_writes_and_reads(
    holders, make_database, settings
):
    one, other, _ = (make_database(alias) for alias in ("one", "other", "replica"))
    settings.DATABASE_ROUTERS = [router(other, "replica")]
    early, late = holders(2)
    enter(late, one)
    assert fence_of(one).fence == late.fence
    assert not Fence.objects.using(other).exists()
    with early.atomic(other):
        write(other, early)
    refusal(early.atomic(one), StaleFence)
    assert written(other) == [early.fence]


def test_a_lease_of_another_alias_is_refused_before_anything_is_written(locks, database, settings):
    """The two do not keep each other out, so one of them is a mistake."""
    default = settings.REDISLOCK["default"]
    second = {**default, "KEY_PREFIX": f"{locks.prefix}-second"}
    settings.REDISLOCK = {"default": default, "second": second}
    with distributed_lock("lottery", using="second") as second:
        with distributed_lock("lottery") as first:
            enter(first, database)
        refusal(second.atomic(database), match="using='default', or give it another name")
        assert (fence_of(database).alias, fence_of(database).fence) == ("default", first.fence)
        fence_of(database).delete()
        enter(second, database)
    assert (fence_of(database).alias, fence_of(database).fence) == ("second", second.fence)
