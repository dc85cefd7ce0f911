"""fenced_update(): rows that remember the fence that they were written under."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_redislock import LockLost, distributed_lock, fenced_update
from tests.effects.models import Annual, Counter, Letter, Note, Report, Till, Unfenced
from tests.support.databases import MARIADB, POSTGRES, await_blocked, on_postgres, on_servers
from tests.support.waiting import HUNG


def reports(database):
    """All rows, by key."""
    return Report.objects.using(database).order_by("pk")


def bodies(database):
    """What the rows have."""
    return list(reports(database).values_list("body", "fence"))


def test_rows_are_written_with_the_fence(locks, database):
    for _ in range(2):
        reports(database).create()
    with distributed_lock("lottery") as lease:
        done = fenced_update(reports(database), lease, body="drawn")
    assert done == (2, 0)
    assert (done.updated, done.refused) == (2, 0)
    assert bodies(database) == [("drawn", lease.fence)] * 2


def test_a_lease_may_write_the_same_row_again(locks, database):
    reports(database).create()
    with distributed_lock("lottery") as lease:
        for body in ("first", "second"):
            assert fenced_update(reports(database), lease, body=body) == (1, 0)
    assert bodies(database) == [("second", lease.fence)]


def test_rows_that_a_later_lease_has_written_are_refused_and_counted(holders, database):
    early, late = holders(2)
    rows = [reports(database).create() for _ in range(3)]
    assert fenced_update(reports(database).filter(pk=rows[1].pk), late, body="late") == (1, 0)
    assert fenced_update(reports(database), early, body="early") == (2, 1)
    assert bodies(database) == [
        ("early", early.fence),
        ("late", late.fence),
        ("early", early.fence),
    ]


def test_refused_are_those_that_were_selected_and_not_written(holders, database):
    # The new value takes the updated rows out of the selection.
    early, late = holders(2)
    for _ in range(3):
        reports(database).create()
    fenced_update(reports(database).filter(pk=reports(database).first().pk), late, body="late")
    selected = reports(database).filter(is_new=True)
    assert fenced_update(selected, early, is_new=False) == (2, 1)


def test_no_row_at_all_is_neither(locks, database):
    with distributed_lock("lottery") as lease:
        assert fenced_update(reports(database), lease, body="drawn") == (0, 0)


def test_without_values_it_only_claims_the_rows(locks, database):
    reports(database).create(body="as it was")
    with distributed_lock("lottery") as lease:
        assert fenced_update(reports(database), lease) == (1, 0)
    assert bodies(database) == [("as it was", lease.fence)]


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
    ("database_kind", "level"),
    [
        (POSTGRES, "read committed"),
        (MARIADB, "read committed"),
        (MARIADB, "repeatable read"),  # Its updates see what its snapshot does not.
    ],
)
def test_refused_rows_are_counted_also_if_the_transaction_has_read_before(
    holders, make_database, in_threads, level
):
    database = make_database("effects", isolation=level)
    early, late = holders(2)
    assert write_between(database, late, early, in_threads) == (0, 1)
    assert bodies(database) == [("late", late.fence)]


@on_postgres
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_where_a_snapshot_is_final_it_is_the_database_s_error(
    holders, make_database, in_threads, level
):
    database = make_database("effects", isolation=level)
    early, late = holders(2)
    with pytest.raises(OperationalError, match="could not serialize"):
        write_between(database, late, early, in_threads)
    assert bodies(database) == [("late", late.fence)]


class Replicated:
    """A router that writes to "main" and reads from a replica that lags behind."""

    def db_for_write(self, model, **hints):
        return "main"

    def db_for_read(self, model, **hints):
        return "replica"


@on_servers
@pytest.mark.parametrize("joined", [False, True])
def test_who_has_waited_for_a_later_lease_is_refused_however_the_rows_are_selected(
    holders, database, in_threads, joined
):
    """PostgreSQL asks a subquery no second time, and Django puts all of a join into one."""
    early, late = holders(2)
    note = Note.objects.using(database).create(report=reports(database).create())
    selected = Note.objects.using(database).filter(
        **{"report__is_new": True} if joined else {"pk": note.pk}
    )
    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic(using=database):
            assert fenced_update(selected, late, text="of the later") == (1, 0)
            waiting = thread.submit(in_threads(fenced_update), selected, early)
            await_blocked(database)
        assert waiting.result(HUNG) == (0, 1)
    note.refresh_from_db()
    assert (note.text, note.fence) == ("of the later", late.fence)


@on_servers
def test_who_has_waited_for_a_later_lease_is_refused_also_with_values_of_a_parent(
    holders, database, in_threads
):
    """Django selects the rows of such a model first, and updates both tables after that."""
    early, late = holders(2)
    tills = Till.objects.using(database)
    till = tills.create(name="till")

    def update_early():
        return fenced_update(tills.filter(pk=till.pk), early, value=1, is_open=False)

    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic(using=database):
            assert fenced_update(tills.filter(pk=till.pk), late, value=2) == (1, 0)
            waiting = thread.submit(in_threads(update_early))
            await_blocked(database)
        assert waiting.result(HUNG) == (0, 1)
    till.refresh_from_db()
    assert (till.value, till.is_open, till.fence) == (2, True, late.fence)


def test_a_fence_in_the_table_of_a_parent_is_refused(locks, database):
    """Django selects the rows of such a model first, and updates both tables after that."""
    with distributed_lock("lottery") as lease, pytest.raises(TypeError) as refused:
        fenced_update(Annual.objects.using(database), lease, body="x")
    assert "Give Annual a field of its own, or update rows of Report" in str(refused.value)


def test_with_a_router_rows_are_written_and_counted_in_one_place(holders, make_database, settings):
    main, replica = make_database("main"), make_database("replica")
    early, late = holders(2)
    for alias in (main, replica):
        Report.objects.using(alias).create()
    fenced_update(Report.objects.using(main), late, body="late")
    settings.DATABASE_ROUTERS = [Replicated()]
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


@pytest.mark.parametrize("model", [Counter, Unfenced])
def test_a_model_without_a_field_for_the_fence_is_refused(locks, database, model):
    line = "`fence = models.BigIntegerField(default=0)`"
    with distributed_lock("lottery") as lease, pytest.raises(TypeError, match=re.escape(line)):
        fenced_update(model.objects.using(database), lease, value=1)


def test_the_fence_is_not_given_by_hand(locks, database):
    with distributed_lock("lottery") as lease, pytest.raises(TypeError, match="leave fence= out"):
        fenced_update(reports(database), lease, fence=7)


def test_what_is_no_lease_is_refused(locks, database):
    with distributed_lock("lottery"), pytest.raises(TypeError, match="not a lease: 7"):
        fenced_update(reports(database), 7, body="drawn")
