"""The runs that a database knows to be completed, for once="database".

Importing models needs Django's applications. Programs import them from models.py.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, connections, models
from django.db.models import Q
from django.utils import timezone

from django_redislock import logs
from django_redislock.exceptions import LockMisuse
from django_redislock.fences import Fence, missing_table, where_written
from django_redislock.humanize import visible

if TYPE_CHECKING:
    from datetime import datetime

    from django_redislock.fences import FencedLease

audit = logs.logger("django_redislock.audit")


class CompletedRuns(models.QuerySet["CompletedRun"]):
    """Rows of CompletedRun."""

    def of(self, name: str) -> CompletedRuns:
        """The run of the lock of this name, if there is one."""
        return self.filter(key=Fence.key_of(name))

    def matching(self, text: str) -> CompletedRuns:
        """The runs with this text in the name of the lock, the task or its id, in any case."""
        fields = ("name", "task", "task_id")
        return self.filter(reduce(or_, (Q((f"{field}__icontains", text)) for field in fields)))

    def forget(self, *, by: str = "", reason: str = "") -> int:
        """Delete exactly these rows, so that the next run of each lock does the work again.

        The audit log has a line for each.

        Args:
            by: The operator, for that log.
            reason: Why, for that log.

        Returns:
            How many there were to delete.
        """
        forgotten = 0
        rows = where_written(self)
        for row in rows:
            # By its id: a run that has completed meanwhile has a row of its own.
            if self.model.objects.using(rows.db).filter(pk=row.pk).delete()[0]:
                forgotten += 1
                # Anybody may write names, operators and reasons: with %r none forges a line.
                text = "Lock %r (%s): run %r in database %r forgotten by %r, reason %r"
                extra = logs.of(
                    lock=row.name,
                    alias=row.alias,
                    lease=row.lease_id,
                    fence=row.fence,
                    reason=reason or None,
                    task_id=row.task_id or None,
                    job=row.task or None,
                )
                audit.warning(text, row.name, row.alias, row.by, rows.db, by, reason, extra=extra)
        return forgotten

    def prune(self, before: datetime, *, by: str = "", reason: str = "") -> int:
        """Delete the rows of old runs, of which no redelivery can come any more.

        It is one statement, and one line of the audit log.

        Args:
            before: Delete runs that were completed before this.
            by: The operator, for that log.
            reason: Why, for that log.

        Returns:
            How many there were to delete.
        """
        rows = where_written(self)
        forgotten: int = rows.filter(completed_at__lt=before).delete()[0]
        text = "All runs completed before %s (%d) in database %r forgotten by %r, reason %r"
        extra = logs.of(reason=reason or None)
        audit.warning(text, before.isoformat(), forgotten, rows.db, by, reason, extra=extra)
        return forgotten


class CompletedRun(models.Model):
    """A run with once="database". Its row was committed together with the work."""

    id = models.BigAutoField(primary_key=True)
    key = models.CharField(max_length=64, unique=True)  # As the key of a Fence.
    name = models.CharField(max_length=200)
    alias = models.CharField(max_length=200)
    # Of any length: a name too long for its column would fail a run when its work is done.
    task = models.TextField()
    task_id = models.TextField()  # "" if the task was called directly.
    place = models.TextField()  # Where it ran, as "host:pid".
    fence = models.BigIntegerField()
    lease_id = models.CharField(max_length=16)
    completed_at = models.DateTimeField(db_index=True)

    objects = CompletedRuns.as_manager()

    class Meta:
        default_permissions = ("view", "delete")

    def __str__(self) -> str:
        return visible(self.name)

    @property
    def by(self) -> str:
        """The process that did it, as ``host:pid task-id``."""
        return f"{self.place} {self.task_id or self.task}".strip()

    def as_dict(self) -> dict[str, Any]:
        """The keys of ``manage.py locks --json``."""
        return {
            "name": self.name,
            "alias": self.alias,
            "task": self.task or None,
            "task_id": self.task_id or None,
            "place": self.place or None,
            "fence": self.fence,
            "lease": self.lease_id,
            "at": round(self.completed_at.timestamp(), 3),
            "ago": round(self.ago, 3),
        }

    @property
    def ago(self) -> float:
        """Seconds since it was completed, by this machine's clock."""
        return max(0.0, (timezone.now() - self.completed_at).total_seconds())


def find(name: str, using: str) -> CompletedRun | None:
    """The completed run of a name; None if there is none.

    Raises:
        LockMisuse: The table is missing.
    """
    connection = connections[using]
    was_open = connection.connection is not None
    try:
        return CompletedRun.objects.using(using).of(name).first()
    except DatabaseError as error:
        if problem := missing_table(CompletedRun, using):
            raise LockMisuse(name, problem) from error
        raise
    finally:
        if not was_open:
            connection.close()  # It must not be idle while the caller waits for the lock.


def note(lease: FencedLease, using: str) -> None:
    """Note in the open transaction of a lease that its run is completed."""
    row = CompletedRun(
        key=Fence.key_of(lease.name),
        name=lease.name,
        alias=lease.alias,
        task=lease.owner.task,
        task_id=lease.owner.task_id,
        place=lease.owner.place,
        fence=lease.fence,
        lease_id=lease.id,
        completed_at=timezone.now(),
    )
    row.save(using=using, force_insert=True)
