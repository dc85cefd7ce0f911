"""fenced_update(): rows that remember the fence that they were written under."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_redislock import LockLost, distributed_lock, fenced_update
from tests import ROOT
from tests.effects.models import Annual, Counter, Letter, Note, Report, Stock, Till, Unfenced
from tests.package.test_docs import code_of
from tests.support.databases import (
    MARIADB,
    POSTGRES,
    await_blocked,
    on_servers,
    on_sqlite,
    router,
)
from tests.support.waiting import HUNG


def reports(database):
    return Report.objects.using(database).order_by("pk")


def bodies(database):
    return list(reports(database).values_list("body", "fence"))


def test_rows_are_written_with_the_fence_and_may_be_again(locks, database):
    with distributed_lock("lottery") as lease:
        assert fenced_update(reports(database), lease, body="drawn") == (0, 0)  # There is no row.
        for _ in range(2):
            reports(database).create(body="as it was")
        assert fenced_update(reports(database), lease) == (2, 0)  # It only claims them.
        assert bodies(database) == [("as it was", lease.fence)] * 2
        done = fenced_update(reports(database), lease, body="drawn")
    assert (done.updated, done.refused) == done == (2, 0)
    assert bodies(database) == [("drawn", lease.fence)] * 2


def test_rows_that_a_later_lease_has_written_are_refused_and_counted(holders, database):
    early, late = holders(2)
    rows = [reports(database).create() for _ in range(3)]
    assert fenced_update(reports(database).filter(pk=rows[1].pk), late, body="late") == (1, 0)
    # The new value takes the updated rows out of the selection.
    selected = reports(database).filter(is_new=True)
    assert fenced_update(selected, early, body="early", is_new=False) == (2, 1)
    by_early, by_late = ("early", early.fence), ("late", late.fence)
    assert bodies(database) == [by_early, by_late, by_early]


def test_it_may_be_part_of_a_larger_transaction(locks, database):
    reports(database).create()

    def fail():
        with distributed_lock("lottery") as lease, lease.atomic(database):
            fenced_update(reports(database), lease, body="drawn")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bodies(database) == [("", 0)]


def test_an_error_of_the_database_is_told_and_leaves_no_transaction(locks, database):
    reports(database).create()
    with distributed_lock("lottery") as lease, pytest.raises(IntegrityError):
        fenced_update(reports(database), lease, body=None)
    assert not connections[database].in_atomic_block


def write_between(database, late, early, in_threads):
    """Let the later lease write while a transaction is open that has read, and then the earlier."""

    def write_late():
        assert fenced_update(reports(database), late, body="late") == (1, 0)

    reports(database).create()
    with transaction.atomic(using=database):
        assert bodies(database) == [("", 0)]
        with ThreadPoolExecutor(1) as thread:
            thread.submit(in_threads(write_late)).result(HUNG)
        return fenced_update(reports(database), early, body="early")


@pytest.mark.parametrize(
    ("database_kind", "level", "is_final"),
    [
        (POSTGRES, "read committed", False),
        (POSTGRES, "repeatable read", True),
        (POSTGRES, "serializable", True),
        (MARIADB, "read committed", False),
        (MARIADB, "repeatable read", False),  # Its updates see what its snapshot does not.
    ],
)
def test_refused_rows_are_counted_though_the_transaction_has_read_before_or_its_snapshot_is_final(
    holders, make_database, in_threads, level, is_final
):
    database = make_database("effects", isolation=level)
    early, late = holders(2)
    reports(database).create()

    def write_late():
        assert fenced_update(reports(database), late, body="late") == (1, 0)

    def write_between():
        with transaction.atomic(using=database):
            assert bodies(database) == [("", 0)]
            with ThreadPoolExecutor(1) as thread:
                thread.submit(in_threads(write_late)).result(HUNG)
            return fenced_update(reports(database), early, body="early")

    if is_final:
        with pytest.raises(OperationalError, match="could not serialize"):
            write_between()
    else:
        assert write_between() == (0, 1)
    assert bodies(database) == [("late", late.fence)]


# PostgreSQL asks a subquery no second time, and Django puts all of a join into one. The rows of a
# model with a parent it selects first, and updates both tables after that.
SELECTED = {
    "plain": (Note, {"pk__gt": 0}, {"text": "late"}, {}),
    "joined": (Note, {"report__is_new": True}, {"text": "late"}, {}),
    "of a parent": (Till, {"pk__gt": 0}, {"value": 2}, {"value": 1, "is_open": False}),
}


@on_servers
@pytest.mark.parametrize("how", SELECTED)
def test_a_waiter_for_a_later_lease_is_refused_however_the_rows_are_selected(
    holders, database, in_threads, how
):
    early, late = holders(2)
    Note.objects.using(database).create(report=reports(database).create())
    Till.objects.using(database).create(name="till")
    model, condition, of_late, of_early = SELECTED[how]
    selected = model.objects.using(database).filter(**condition)

    def update_early():
        return fenced_update(selected, early, **of_early)

    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic(using=database):
            assert fenced_update(selected, late, **of_late) == (1, 0)
            waiting = thread.submit(in_threads(update_early))
            await_blocked(database)
        assert waiting.result(HUNG) == (0, 1)
    (row,) = model.objects.using(database).values("fence", *of_late)
    assert row == {"fence": late.fence, **of_late}


@on_sqlite
def test_a_fence_in_the_table_of_a_parent_is_refused(locks, database):
    with distributed_lock("lottery") as lease, pytest.raises(TypeError) as refused:
        fenced_update(Annual.objects.using(database), lease, body="x")
    assert "Give Annual a field of its own, or update rows of Report" in str(refused.value)


@on_sqlite
def test_with_a_router_rows_are_written_and_counted_in_one_place(holders, make_database, settings):
    main, replica = make_database("main"), make_database("replica")
    early, late = holders(2)
    for alias in (main, replica):
        Report.objects.using(alias).create()
    fenced_update(Report.objects.using(main), late, body="late")
    settings.DATABASE_ROUTERS = [router(main, replica)]
    assert fenced_update(Report.objects.all(), early, body="early") == (0, 1)
    assert fenced_update(Report.objects.all(), late, body="later") == (1, 0)
    assert bodies(replica) == [("", 0)]


@pytest.mark.parametrize("joined", [False, True])
def test_rows_are_written_as_the_queryset_does_it_also_those_that_a_manager_hides(
    locks, database, joined
):
    report = reports(database).create()
    Note.objects.using(database).create(report=report, text="thrown away")
    letters = Letter.everything.using(database)
    selected = letters.filter(**{"report__is_new": True} if joined else {"report": report.pk})
    with distributed_lock("lottery") as lease:
        assert fenced_update(selected, lease) == (1, 0)
    assert list(letters.values_list("text", "fence")) == [("written", lease.fence)]


def test_a_plain_save_admits_no_late_holder(holders, database):
    early, late = holders(2)
    read_before = reports(database).create()
    fenced_update(reports(database), late, body="late")
    read_before.is_new = False
    read_before.save()
    assert fenced_update(reports(database), early, body="early") == (0, 1)
    assert bodies(database) == [("", late.fence)]
    reports(database).update_or_create(pk=read_before.pk, defaults={"body": "saved"})
    assert bodies(database) == [("saved", late.fence)]


@on_sqlite
def test_a_save_may_raise_the_fence_and_a_new_row_has_its_own(locks, database):
    row = reports(database).create(fence=7)
    assert reports(database).get().fence == 7
    row.fence = 9
    row.save()
    assert (row.fence, reports(database).get().fence) == (9, 9)
    row.fence = F("fence") + 1
    row.save()
    assert reports(database).get().fence == 10
    till = Till.objects.using(database).create(name="till", fence=7)
    till.value = 1
    till.save()
    row = Till.objects.using(database).get()
    assert (row.value, row.fence) == (1, 7)


def test_migrations_have_a_field_of_django():
    _, path, args, options = Report._meta.get_field("fence").deconstruct()
    assert path == "django.db.models.BigIntegerField"
    assert (args, options) == ([], {"default": 0, "editable": False})


# --- what is refused -----------------------------------------------------------------------------


@on_sqlite
def test_a_lease_that_is_over_writes_nothing(locks, database):
    reports(database).create()
    with distributed_lock("lottery") as lease:
        pass
    with (
        CaptureQueriesContext(connections[database]) as sent,
        pytest.raises(LockLost, match="it was released"),
    ):
        fenced_update(reports(database), lease, body="drawn")
    assert len(sent) == 0


@on_sqlite
@pytest.mark.parametrize("model", [Counter, Unfenced])
def test_a_model_without_a_field_for_the_fence_is_refused(locks, database, model):
    line = "`fence = models.BigIntegerField(default=0)`"
    with distributed_lock("lottery") as lease, pytest.raises(TypeError, match=re.escape(line)):
        fenced_update(model.objects.using(database), lease, value=1)


@on_sqlite
def test_neither_a_fence_by_hand_nor_what_is_no_lease_is_accepted(locks, database):
    with distributed_lock("lottery") as lease:
        with pytest.raises(TypeError, match="leave fence= out"):
            fenced_update(reports(database), lease, fence=7)
        with pytest.raises(TypeError, match="not a lease: 7"):
            fenced_update(reports(database), 7, body="drawn")


# --- the optimistic lock of docs/databases.md ----------------------------------------------------

BUYERS, EACH = 4, 5


def test_the_version_check_of_the_docs_loses_no_update_without_a_lock(
    database, settings, in_threads
):
    settings.DATABASE_ROUTERS = [router(database, database)]  # The example names no database.
    blocks = code_of((ROOT / "docs/databases.md").read_text(), "python")
    (example,) = [block for block in blocks if "def sell_one" in block]
    names = {"Stock": Stock}
    exec(example[example.index("def sell_one") :], names)
    stock = Stock.objects.create(left=100)
    start = threading.Barrier(BUYERS)

    def buy(buyer):
        start.wait(HUNG)
        for _ in range(EACH):
            names["sell_one"](stock.pk)

    with ThreadPoolExecutor(BUYERS) as buyers:
        list(buyers.map(in_threads(buy), range(BUYERS)))
    stock.refresh_from_db()
    assert (stock.left, stock.version) == (100 - BUYERS * EACH, BUYERS * EACH)
