"""Fencing: the database refuses the writes of a late holder, by lease.atomic() and fenced_update().

A process may be stopped between its last look at its lease and its write. If the lease ends
meanwhile, it writes while another owner has the lock. No lock over a network prevents that. The
database does, if it compares the two fences in the transaction that writes.

The models are not imported before they are used: locks need no database.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError, connections, transaction
from django.db.models import BigIntegerField, Q
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from django_redislock.exceptions import LockMisuse, StaleFence
from django_redislock.holder import must_not_block
from django_redislock.rules.names import Permit
from django_redislock.transactions import CURE_OF_JOB, is_by_hand, open_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model, QuerySet

    from django_redislock.fences import Fence, FencedLease


_NO_DATABASE = "django.db.backends.dummy"  # What Django makes of an alias without an engine.
_IN_ERROR = 3  # PQTRANS_INERROR of libpq.


def check_database(alias: object, argument: str) -> None:
    """Refuse an alias without a database, without asking the database.

    Raises:
        ValueError: The message names the argument.
    """
    known = [
        name for name, one in connections.settings.items() if one.get("ENGINE") != _NO_DATABASE
    ]
    if alias not in known:
        listed = ", ".join(map(repr, known)) or "none"
        raise ValueError(
            f"{argument} must be the alias of a database, not {alias!r}. DATABASES has {listed}."
        )


def check_outermost(name: str, using: str, *, of_task: bool = False) -> None:
    """Refuse a transaction that would not be committed where its block ends.

    It opens no connection: the caller may wait for the lock first, and a database closes
    connections that are idle for too long.

    Raises:
        LockMisuse: The message shows the right order.
    """
    if must_not_block():
        raise LockMisuse(
            name,
            "a transaction was to begin in a thread whose event loop runs, and Django has no"
            " asynchronous transactions. Write `with lease.atomic():` in a function, and call that"
            " with `await sync_to_async(function)(lease)`.",
        )
    connection = connections[using]
    if open_blocks(connection):
        raise LockMisuse(
            name,
            f"a transaction of database {using!r} is open already. It would be committed after the"
            " lock is released, and the next holder would read the old data. "
            + (CURE_OF_JOB if of_task else _order(name, using)),
        )
    if is_by_hand(connection):
        raise LockMisuse(
            name,
            f"autocommit of database {using!r} is off, so the end of the block would commit"
            " nothing. Switch it on (AUTOCOMMIT, transaction.set_autocommit), and leave the commit"
            " to the block.",
        )


def _order(name: str, using: str) -> str:
    return (
        f"Take the lock first: `with distributed_lock({name!r}, atomic={using!r}):` outside of"
        " every atomic(). A view under ATOMIC_REQUESTS needs @transaction.non_atomic_requests."
    )


@contextmanager
def atomic(lease: FencedLease, using: str) -> Iterator[None]:
    """See Lease.atomic()."""
    check_database(using, "using")
    check_outermost(lease.name, using)
    connection = connections[using]
    # Asked of MySQL alone: to find out about another database, Django would make a table.
    if connection.vendor == "mysql" and not connection.features.supports_transactions:
        raise LockMisuse(
            lease.name,
            f"database {using!r} has no transactions, since its storage engine is MyISAM. Take"
            " InnoDB.",
        )
    lease.ensure_held()
    if not (fenced := [part for part in lease.parts if part.fence is not None]):
        raise LockMisuse(
            lease.name,
            "under a rate nothing is held, so there is no fence to claim. Write"
            " `with transaction.atomic():`; or add a Limit, so that a late holder cannot write.",
        )
    while True:
        is_claimed = False
        try:
            with transaction.atomic(using=using, durable=True):
                # In one order, whatever order the locks were taken in: each claim locks a row.
                parts, at = sorted(fenced, key=_name), timezone.now()
                missing = [part for part in parts if not _claim(part, using, at)]
                if is_claimed := not missing:
                    yield
                    if _is_rolled_back(connection, parts[0], at):
                        raise _rolled_back(lease.name)
                    lease.ensure_held()
                    return
        except DatabaseError as error:
            from django_redislock.fences import Fence, missing_table

            if is_claimed or not (problem := missing_table(Fence, using)):
                raise
            raise LockMisuse(lease.name, problem) from error
        for part in missing:
            _make_row(part, using)


def _name(lease: FencedLease) -> str:
    return lease.name


def _is_rolled_back(connection: BaseDatabaseWrapper, lease: FencedLease, at: datetime) -> bool:
    """Whether the transaction that claimed *lease* then is rolled back, or will be.

    Django notes the errors of writes of the ORM alone, not those of reads or of a cursor.
    """
    if connection.needs_rollback or connection.closed_in_transaction:
        return True
    driver = connection.connection  # Of a pool, it may be an object around that of the driver.
    if connection.vendor == "postgresql":  # It would answer COMMIT with ROLLBACK.
        info = getattr(driver, "info", None)
        return bool(getattr(info, "transaction_status", None) == _IN_ERROR)
    if connection.vendor == "sqlite":
        return not getattr(driver, "in_transaction", True)
    # MariaDB and MySQL roll back at a deadlock. What follows is in a transaction without the claim.
    return (
        connection.errors_occurred
        and not _row_of(lease, connection.alias)
        .filter(fence=lease.fence, lease_id=lease.id, claimed_at=at)
        .exists()
    )


def _rolled_back(name: str) -> TransactionManagementError:
    """The error for a block whose transaction Django would roll back silently."""
    return TransactionManagementError(
        f"The transaction under lock {name!r} is rolled back, though its block has ended without an"
        " error: an error of the database was caught within it, or its connection was closed. Catch"
        " such errors around an inner atomic(); to roll back on purpose, raise an exception."
    )


def _row_of(lease: FencedLease, using: str) -> QuerySet[Fence]:
    from django_redislock.fences import Fence

    return Fence.objects.using(using).filter(key=Fence.key_of(lease.name, lease.permit))


def _claim(lease: FencedLease, using: str, at: datetime) -> bool:
    """Write down that this lease writes now. Other leases wait here until its commit.

    Returns:
        Whether that was done. If not, there is no row for the lock yet.

    Raises:
        StaleFence: A later lease has written.
        LockMisuse: A lease of another alias has written.
    """
    row = _row_of(lease, using)
    # Two leases can have the same fence, if Redis lost its data while its clock was set back.
    is_not_newer = Q(fence__lt=lease.fence) | Q(fence=lease.fence, lease_id=lease.id)
    # The write comes first. It locks the row, so its comparison stays true until the commit. And
    # SQLite refuses a write after a read if another connection has written in between.
    if row.filter(is_not_newer, alias=lease.alias).update(
        fence=lease.fence, lease_id=lease.id, claimed_at=at
    ):
        return True
    # FOR UPDATE reads the current row, not the snapshot of an outer transaction, as in a TestCase.
    others = row.exclude(is_not_newer, alias=lease.alias).select_for_update()
    other = others.values_list("alias", "fence").first()
    if other is None:
        return False
    alias, fence = other
    if alias == lease.alias:
        raise StaleFence(lease.name, lease.fence, fence)
    raise LockMisuse(
        lease.name,
        f"database {using!r} knows its fences from alias {alias!r} of REDISLOCK, and this lease is"
        f" of {lease.alias!r}. Two aliases do not keep each other out, and their fences say nothing"
        f" about each other. Take the lock with using={alias!r}, or give it another name; if it has"
        " moved for good, delete its row of django_redislock.models.Fence.",
    )


def _make_row(lease: FencedLease, using: str) -> None:
    """Make the row of a lock, before the transaction that claims it.

    If two leases make it at once, both go on to claim it. If they made it within their
    transactions, one would fail, by a deadlock or because its snapshot is too old.
    """
    from django_redislock.fences import Fence

    row = Fence(
        key=Fence.key_of(lease.name, lease.permit),
        name=Permit(lease.name, lease.permit or 1).label[:200],
        alias=lease.alias,
        fence=0,
        lease_id="",
        claimed_at=timezone.now(),
    )
    Fence.objects.using(using).bulk_create([row], ignore_conflicts=True)


class FencedUpdate(NamedTuple):
    """The outcome of a fenced_update()."""

    updated: int  #: Rows that were written.
    refused: int  #: Rows that stay as they are, since a later lease has written them.


def fenced_update(queryset: QuerySet[Any], lease: FencedLease, /, **values: Any) -> FencedUpdate:
    """Update the rows that no later lease has written, and write the fence of this one into them.

    The model needs a field ``fence``, as FencedModel has it; a table of fences is not needed.
    Select rows by something that does not change, such as their key.

    Args:
        queryset: The rows.
        lease: The lease under which they are written.
        values: The new values, as for ``QuerySet.update()``.

    Returns:
        How many rows were updated, and how many were refused.

    Raises:
        LockLost, LockUnavailable: See Lease.ensure_held(). Nothing was written.
        TypeError: The model has no field for the fence, *values* has one, or *lease* is no lease.
    """
    if not hasattr(lease, "ensure_held"):
        raise TypeError(f"fenced_update was given what is not a lease: {lease!r}.")
    _check_fenced(queryset.model, values)
    lease.ensure_held()
    from django_redislock.fences import where_written

    # Count the rows where they are written.
    rows = _by_key(where_written(queryset))
    # Both in one transaction: nobody writes to an updated row before the refused ones are counted.
    with transaction.atomic(using=rows.db):
        mine = rows.filter(fence__lte=lease.fence)
        if _has_parents(queryset.model, values):
            # Django selects such rows first and updates both tables after that, without the
            # comparison. So the rows are written, and thereby locked, before.
            mine.update(fence=lease.fence)
            mine = rows.filter(fence=lease.fence)
        updated = mine.update(**values, fence=lease.fence)
        refused = _count_now(rows.filter(fence__gt=lease.fence))
    return FencedUpdate(updated, refused)


def _has_parents(model: type[Model], values: dict[str, Any]) -> bool:
    """Whether some of the values stand in the table of a parent of *model*."""
    own = model._meta.concrete_model
    fields = [model._meta.get_field(name) for name in values if name != "pk"]
    return any(field.model._meta.concrete_model is not own for field in fields)


def _by_key(rows: QuerySet[Any]) -> QuerySet[Any]:
    """The same rows, selected by their keys alone if the query has other tables too.

    With other tables, Django puts all conditions into a subquery. A database does not evaluate that
    again after it has waited for another transaction, so it would miss a newer fence.
    """
    if rows.query.count_active_tables() <= 1:  # As Django decides it.
        return rows
    keys: Any = rows.order_by().values_list("pk", flat=True)
    if not connections[rows.db].features.update_can_self_select:
        keys = list(keys)
    # No manager: it may hide some of them. And the project's class may have an update() of its own.
    return type(rows)(model=rows.model, using=rows.db).filter(pk__in=keys)


def _count_now(rows: QuerySet[Any]) -> int:
    """Count the rows as an update would find them."""
    if connections[rows.db].vendor != "mysql":
        return rows.count()
    # At REPEATABLE READ, a plain read sees the state at its transaction's first read.
    return len(rows.select_for_update().values_list("pk"))


def _check_fenced(model: type[Model], values: dict[str, Any]) -> None:
    try:
        field = model._meta.get_field("fence")
    except FieldDoesNotExist:
        field = None
    # The fence counts microseconds, and null compares with nothing.
    if not isinstance(field, BigIntegerField) or field.null:
        raise TypeError(
            f"fenced_update needs a field for the fence in {model.__name__}. Derive it from"
            " django_redislock.models.FencedModel, or write"
            " `fence = models.BigIntegerField(default=0)`."
        )
    if field.model._meta.concrete_model is not model._meta.concrete_model:
        raise TypeError(
            f"fenced_update cannot judge the fence of {model.__name__}, which stands in the table"
            f" of its parent {field.model.__name__}. Give {model.__name__} a field of its own, or"
            f" update rows of {field.model.__name__}."
        )
    if "fence" in values:
        raise TypeError("fenced_update writes the fence of the lease itself: leave fence= out.")
