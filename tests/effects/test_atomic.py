"""lease.atomic(): the transaction that a late holder cannot write in, on real databases."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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

from django_redislock import LockLost, LockMisuse, StaleFence, distributed_lock, held
from django_redislock.models import Fence
from tests.effects.models import Counter, Entry, written
from tests.support.databases import (
    LEVELS,
    MARIADB,
    POSTGRES,
    SQLITE,
    await_blocked,
    on_mariadb,
    on_postgres,
    on_servers,
    on_sqlite,
)
from tests.support.waiting import HUNG

# What the lock's own server does is proven elsewhere.


def write(database, lease, value=0):
    """One write under the lease."""
    Entry.objects.using(database).create(fence=lease.fence, value=value)


def fence_of(database, name="lottery"):
    """The row of a lock."""
    return Fence.objects.using(database).get(name=name)


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
        with pytest.raises(StaleFence) as stale, late.atomic(database):
            pytest.fail("the block must not begin")
    assert (stale.value.name, stale.value.newer) == (names[1], newer)
    assert written(database) == [lease.fence]
    assert fence_of(database, names[0]).fence == lease.fences[names[0]]  # It is rolled back.


def test_the_block_is_committed_and_its_fence_is_claimed(locks, database):
    with distributed_lock("lottery") as lease, lease.atomic(database):
        write(database, lease)
    assert written(database) == [lease.fence]
    row = fence_of(database)
    assert (row.name, row.alias, row.fence, row.lease_id) == (
        "lottery",
        "default",
        lease.fence,
        lease.id,
    )
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


def test_one_lease_may_have_several_transactions(locks, database):
    with distributed_lock("lottery") as lease:
        for _ in range(3):
            with lease.atomic(database):
                write(database, lease)
    assert written(database) == [lease.fence] * 3


def test_an_exception_of_the_block_rolls_it_back_and_goes_through(locks, database):
    def fail():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            write(database, lease)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert written(database) == []


def _catch_an_error(database):
    there = Entry.objects.using(database).get()
    with suppress(IntegrityError):
        Entry.objects.using(database).create(position=there.position, fence=1)


@pytest.mark.parametrize(
    "end",
    [
        _catch_an_error,
        lambda database: connections[database].close(),
        lambda database: transaction.set_rollback(True, using=database),
    ],
    ids=["an error is caught", "the connection is closed", "it is to be rolled back"],
)
def test_a_transaction_that_django_would_roll_back_in_silence_is_an_error(locks, database, end):
    """Else a task would count as a success, and its work as done."""

    def draw():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            write(database, lease)
            end(database)

    with pytest.raises(TransactionManagementError, match="rolled back, though its block has ended"):
        draw()
    assert written(database) == []


def _break_by_a_read(database):
    with suppress(DatabaseError), connections[database].cursor() as cursor:
        cursor.execute("SELECT 1 FROM nowhere")


def _break_by_a_conflict(database):
    there = Entry.objects.using(database).get()
    with suppress(DatabaseError), connections[database].cursor() as cursor:
        write = "INSERT OR ROLLBACK INTO effects_entry (position, fence, value) VALUES (%s, 0, 0)"
        cursor.execute(write, [there.position])


@pytest.mark.parametrize(
    ("database_kind", "end"), [(POSTGRES, _break_by_a_read), (SQLITE, _break_by_a_conflict)]
)
def test_a_transaction_that_the_database_has_broken_unnoticed_by_django_is_an_error(
    locks, database, end
):
    """PostgreSQL would answer the commit with a rollback, and no driver calls that an error."""

    def draw():
        with distributed_lock("lottery", atomic=database) as lease:
            write(database, lease)
            end(database)

    with pytest.raises(TransactionManagementError, match="rolled back, though its block has ended"):
        draw()
    assert written(database) == []


def test_an_error_that_broke_no_more_than_a_savepoint_lets_the_block_commit(locks, database):
    with distributed_lock("lottery", atomic=database) as lease:
        write(database, lease)
        with transaction.atomic(using=database):
            savepoint = transaction.savepoint(using=database)
            _break_by_a_read(database)
            transaction.savepoint_rollback(savepoint, using=database)
    assert written(database) == [lease.fence]


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


@on_mariadb
def test_what_a_testcase_has_read_before_does_not_hide_a_newer_fence(
    locks, make_database, in_threads
):
    database = make_database("effects", isolation="repeatable read")

    def overtake():
        assert Fence.objects.using(database).update(fence=2**62) == 1

    with distributed_lock("lottery") as lease, lease.atomic(database):
        pass
    of_the_testcase = transaction.atomic(using=database)
    of_the_testcase._from_testcase = True
    with of_the_testcase, distributed_lock("lottery") as lease:
        assert fence_of(database).fence < lease.fence
        with ThreadPoolExecutor(1) as thread:
            thread.submit(in_threads(overtake)).result(HUNG)
        with pytest.raises(StaleFence), lease.atomic(database):
            pytest.fail("the block must not begin")


def test_locks_whose_names_differ_little_have_rows_of_their_own(locks, database):
    for name in ("report", "Report", "report ", "é", "e"):
        with distributed_lock(name) as lease, lease.atomic(database):
            pass
    assert Fence.objects.using(database).count() == 5


# --- who comes too late --------------------------------------------------------------------------


def test_of_two_holders_after_flushall_the_later_one_writes_and_the_earlier_one_is_refused(
    holders, database
):
    early, late = holders(2)
    with late.atomic(database):
        write(database, late)
    with pytest.raises(StaleFence) as stale, early.atomic(database):
        pytest.fail("the block must not begin")
    assert (stale.value.fence, stale.value.newer) == (early.fence, late.fence)
    assert stale.value.name == "lottery"
    assert written(database) == [late.fence]
    assert fence_of(database).lease_id == late.id


def test_who_writes_before_the_later_one_is_in_order(holders, database):
    early, late = holders(2)
    for lease in (early, late):
        with lease.atomic(database):
            write(database, lease)
    assert written(database) == [early.fence, late.fence]


def test_two_leases_with_the_same_fence_do_not_pass_for_one(locks, database):
    # As after a failover with the clock set back; here another lease has written with our fence.
    with distributed_lock("lottery") as lease:
        with lease.atomic(database):
            pass
        Fence.objects.using(database).update(lease_id="of another")
        with pytest.raises(StaleFence), lease.atomic(database):
            pytest.fail("the block must not begin")


def test_a_lease_that_is_lost_in_the_block_rolls_it_back(locks, database):
    def lose_it():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            write(database, lease)
            assert held.force_release("lottery", lease.id)
            with suppress(LockLost):
                lease.ensure_held(verify=True)

    with pytest.raises(LockLost) as lost:
        lose_it()
    assert lost.value.reason == "forced"
    assert written(database) == []
    # It never claimed: the claim was rolled back too.
    assert fence_of(database).fence == 0


def test_a_lease_that_is_over_begins_nothing(locks, database):
    with distributed_lock("lottery") as lease:
        pass
    with (
        CaptureQueriesContext(connections[database]) as sent,
        pytest.raises(LockLost, match="it was released"),
        lease.atomic(database),
    ):
        pytest.fail("the block must not begin")
    assert len(sent) == 0


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


def race(database, leases, closing):
    """Let all of them increment at once."""
    Counter.objects.using(database).create()
    start = threading.Barrier(len(leases))
    with ThreadPoolExecutor(len(leases)) as pool:
        return list(pool.map(closing(lambda lease: increment(database, lease, start)), leases))


def check_race(database, leases, outcomes):
    """No update is lost, and nobody writes after a later lease."""
    done = outcomes.count("done")
    assert Counter.objects.using(database).get().value == done
    fences = written(database)
    assert len(fences) == done
    by_value = Entry.objects.using(database).order_by("value").values_list("fence", flat=True)
    assert list(by_value) == sorted(fences), "a late holder has written after a later one"
    # The newest is refused by nobody; it can only lose to the database.
    assert outcomes[-1] != "stale"


def test_first_claims_at_once_are_all_decided(holders, database, in_threads):
    leases = holders(6)
    outcomes = race(database, leases, in_threads)
    assert set(outcomes) <= {"done", "stale"}
    assert outcomes[-1] == "done"
    check_race(database, leases, outcomes)


@on_servers
@pytest.mark.parametrize("level", LEVELS)
def test_at_each_isolation_level_no_update_is_lost(holders, make_database, in_threads, level):
    database = make_database("effects", isolation=level)
    leases = holders(6)
    outcomes = race(database, leases, in_threads)
    locks_rows = level == "repeatable read" and connections[database].vendor == "mysql"
    if locks_rows or level == "read committed":
        assert set(outcomes) <= {"done", "stale"}
    assert "done" in outcomes
    check_race(database, leases, outcomes)


@on_postgres
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_where_a_snapshot_is_final_an_overlap_is_the_databases_error_and_the_next_try_is_judged(
    holders, make_database, in_threads, level
):
    database = make_database("effects", isolation=level)
    earliest, early, late = holders(3)
    with earliest.atomic(database):
        pass  # So that there is a row.
    with ThreadPoolExecutor(1) as thread:
        with late.atomic(database):
            first_try = thread.submit(in_threads(lambda: _enter(early, database)))
            await_blocked(database)
        with pytest.raises(OperationalError, match="could not serialize"):
            first_try.result(HUNG)
        with pytest.raises(StaleFence):
            thread.submit(in_threads(lambda: _enter(early, database))).result(HUNG)


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


def _enter(lease, database):
    with lease.atomic(database):
        pass


@on_sqlite
def test_on_sqlite_readers_before_us_do_not_lock_us_out(holders, database, in_threads):
    # A transaction that reads first fails with "database is locked" if another one has written
    # since. Ours begins with its write, so it waits in line.
    leases = holders(8)
    outcomes = race(database, leases, in_threads)
    check_race(database, leases, outcomes)


@on_sqlite
def test_on_sqlite_a_database_that_stays_locked_is_its_own_error(
    holders, make_database, in_threads
):
    database = make_database("effects", timeout=0.1)
    early, late = holders(2)
    with early.atomic(database), ThreadPoolExecutor(1) as thread:
        refused = thread.submit(in_threads(lambda: _enter(late, database)))
        with pytest.raises(OperationalError, match="database is locked"):
            refused.result(HUNG)


@pytest.mark.parametrize("database_kind", [SQLITE, POSTGRES])  # MariaDB defers no constraint.
def test_an_error_at_the_commit_is_told_and_nothing_is_written(locks, database):
    deferred = (
        "CREATE TABLE child (parent bigint REFERENCES effects_entry (position)"
        " DEFERRABLE INITIALLY DEFERRED)"
    )
    with connections[database].cursor() as cursor:
        cursor.execute(deferred)

    def orphan():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            write(database, lease)
            with connections[database].cursor() as cursor:
                cursor.execute("INSERT INTO child VALUES (4711)")

    with pytest.raises(IntegrityError):
        orphan()
    assert written(database) == []


# --- what is refused -----------------------------------------------------------------------------


def test_inside_a_transaction_it_shows_the_right_order(locks, database):
    with (
        transaction.atomic(using=database),
        distributed_lock("lottery") as lease,
        pytest.raises(LockMisuse) as misuse,
        lease.atomic(database),
    ):
        pytest.fail("the block must not begin")
    assert f"with distributed_lock('lottery', atomic={database!r}):" in str(misuse.value)
    assert "ATOMIC_REQUESTS" in str(misuse.value)


def test_it_does_not_nest(locks, database):
    with (
        distributed_lock("lottery") as lease,
        lease.atomic(database),
        pytest.raises(LockMisuse, match="is open already"),
        lease.atomic(database),
    ):
        pytest.fail("the block must not begin")


def test_savepoints_within_it_are_django_s_business(locks, database):
    with distributed_lock("lottery") as lease, lease.atomic(database):
        write(database, lease, 1)
        with suppress(ZeroDivisionError), transaction.atomic(using=database):
            write(database, lease, 2)
            raise ZeroDivisionError
    assert written(database) == [lease.fence]


def test_where_autocommit_is_off_nothing_would_be_committed(locks, database):
    transaction.set_autocommit(False, using=database)
    try:
        with (
            distributed_lock("lottery") as lease,
            pytest.raises(LockMisuse, match="autocommit of database 'effects' is off"),
            lease.atomic(database),
        ):
            pytest.fail("the block must not begin")
    finally:
        transaction.rollback(using=database)
        transaction.set_autocommit(True, using=database)


def test_a_missing_table_is_said_with_the_command_that_makes_it(locks, make_database):
    database = make_database("effects", migrate=False)
    with (
        distributed_lock("lottery") as lease,
        pytest.raises(LockMisuse, match="migrate django_redislock --database=effects") as misuse,
        lease.atomic(database),
    ):
        pytest.fail("the block must not begin")
    assert isinstance(misuse.value.__cause__, DatabaseError)


@on_mariadb
def test_a_database_without_transactions_is_refused(locks, make_database):
    database = make_database("effects", init_command="SET default_storage_engine = MyISAM")
    with (
        distributed_lock("lottery") as lease,
        pytest.raises(LockMisuse, match="has no transactions"),
        lease.atomic(database),
    ):
        pytest.fail("the block must not begin")


def test_an_error_of_the_block_s_own_statements_is_left_alone(locks, database):
    with (
        pytest.raises(DatabaseError, match="nowhere"),
        distributed_lock("lottery") as lease,
        lease.atomic(database),
    ):
        connections[database].cursor().execute("SELECT 1 FROM nowhere")


def test_an_unknown_database_is_named_with_those_that_there_are(locks, database):
    with (
        distributed_lock("lottery") as lease,
        pytest.raises(ValueError, match=r"not 'efects'\. DATABASES has 'default', 'effects'"),
        lease.atomic("efects"),
    ):
        pytest.fail("the block must not begin")


@pytest.mark.django_db
class TestInATestCase:
    """pytest's mark wraps a test in the transaction of Django's TestCase."""

    def test_its_own_transaction_does_not_count(self, locks):
        assert connection.in_atomic_block
        with distributed_lock("lottery") as lease, lease.atomic():
            pass
        assert fence_of("default").fence == lease.fence

    def test_one_of_the_test_does(self, locks):
        with (
            transaction.atomic(),
            distributed_lock("lottery") as lease,
            pytest.raises(LockMisuse, match="is open already"),
            lease.atomic(),
        ):
            pytest.fail("the block must not begin")

    def test_a_stale_fence_leaves_the_test_s_transaction_usable(self, holders):
        early, late = holders(2)
        with late.atomic():
            pass
        with pytest.raises(StaleFence), early.atomic():
            pytest.fail("the block must not begin")
        assert fence_of("default").fence == late.fence


# --- asynchronous code ---------------------------------------------------------------------------


async def test_in_an_event_loop_it_is_refused_with_the_right_line(locks):
    async with distributed_lock("lottery") as lease:
        with (
            pytest.raises(LockMisuse, match=r"await sync_to_async\(function\)\(lease\)"),
            lease.atomic(),
        ):
            pytest.fail("the block must not begin")


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


class ToOther:
    """A router that writes everything to "other", and reads from a replica that knows nothing."""

    def db_for_write(self, model, **hints):
        return "other"

    def db_for_read(self, model, **hints):
        return "replica"


def test_the_fence_is_claimed_in_the_database_that_is_written(locks, make_database):
    for alias in ("one", "other"):
        make_database(alias)
    with distributed_lock("lottery") as lease, lease.atomic("other"):
        write("other", lease)
    assert fence_of("other").fence == lease.fence
    assert not Fence.objects.using("one").exists()


def test_each_database_knows_its_own_fences(holders, make_database):
    one, other = make_database("one"), make_database("other")
    early, late = holders(2)
    with late.atomic(one):
        pass
    with early.atomic(other):
        write(other, early)
    with pytest.raises(StaleFence), early.atomic(one):
        pytest.fail("the block must not begin")
    assert written(other) == [early.fence]


def test_a_router_has_no_say_in_where_the_fence_is(locks, make_database, settings):
    one, other, _ = (make_database(alias) for alias in ("one", "other", "replica"))
    settings.DATABASE_ROUTERS = [ToOther()]
    with distributed_lock("lottery") as lease, lease.atomic(one):
        pass
    assert fence_of(one).fence == lease.fence
    assert not Fence.objects.using(other).exists()


def test_a_lease_of_another_alias_is_refused_before_anything_is_written(locks, database, settings):
    """The two do not keep each other out, so one of them is a mistake."""
    default = settings.REDISLOCK["default"]
    settings.REDISLOCK = {
        "default": default,
        "second": {**default, "KEY_PREFIX": f"{locks.prefix}-second"},
    }
    with distributed_lock("lottery", using="second") as second:
        with distributed_lock("lottery") as first, first.atomic(database):
            pass
        with (
            pytest.raises(LockMisuse, match="using='default', or give it another name"),
            second.atomic(database),
        ):
            pytest.fail("the block must not begin")
        assert (fence_of(database).alias, fence_of(database).fence) == ("default", first.fence)
        fence_of(database).delete()
        with second.atomic(database):
            pass
    assert (fence_of(database).alias, fence_of(database).fence) == ("second", second.fence)
