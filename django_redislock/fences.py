"""Models that keep fences: the newest of each lock that has written, and those of single rows.

lua/_grant.lua makes fences grow; fencing.py compares them in a database. Importing models needs
Django's applications. Programs import them from models.py.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from django.db import Error, connections, models
from django.db.models.functions import Greatest

from django_redislock.humanize import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.rules.stored import Owner

    _BigIntegerField = models.BigIntegerField[int | models.expressions.Combinable, int]
else:
    _BigIntegerField = models.BigIntegerField  # It has types for type checkers alone.

AnyModel = TypeVar("AnyModel", bound=models.Model)


def where_written(rows: models.QuerySet[AnyModel]) -> models.QuerySet[AnyModel]:
    """The same rows in the database that takes writes: for reads, a router may name a replica."""
    return rows.using(rows.select_for_update().db)


class FencedLease(Protocol):
    """A lease, as far as the database must know it: django_redislock.Lease is one."""

    name: str
    fence: int
    id: str
    owner: Owner

    @property
    def alias(self) -> str: ...
    @property
    def parts(self) -> Sequence[FencedLease]: ...
    @property
    def permit(self) -> int | None: ...
    def ensure_held(self) -> None: ...


def has_table(model: type[models.Model], using: str) -> bool:
    """Whether a database has the table of *model*. Raises django.db.Error if it cannot answer."""
    return model._meta.db_table in connections[using].introspection.table_names()


def missing_table(model: type[models.Model], using: str) -> str:
    """What to do if the table of *model* is missing, as a sentence; "" if it is there."""
    try:
        if has_table(model, using):
            return ""
    except Error:
        return ""  # The database does not answer: the first error says that better.
    return (
        f"database {using!r} has no table of {model._meta.verbose_name_plural}. Run `manage.py"
        f" migrate django_redislock --database={using}`; a router that answers allow_migrate() must"
        " let it."
    )


class Fence(models.Model):
    """The newest fence of a lock, or of one permit, that has written here; see fencing.py."""

    # Not the name itself: most collations of MySQL take "Report" and "report" for the same.
    key = models.CharField(primary_key=True, max_length=64)
    name = models.CharField(max_length=200)
    alias = models.CharField(max_length=200)
    fence = models.BigIntegerField()
    lease_id = models.CharField(max_length=16)
    claimed_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{visible(self.name)}: {self.fence}"

    @staticmethod
    def key_of(name: str, permit: int | None = None) -> str:
        """The name of a lock as a key that differs from all other names' keys in any collation.

        Several permits write at the same time, so each has a key.
        """
        which = f"\0{permit}" if permit and permit > 1 else ""  # No name has such a character.
        return hashlib.sha256(f"{name}{which}".encode()).hexdigest()


class _NewestFence(_BigIntegerField):
    """The fence of a row, which no save() lowers.

    An instance may have been read before a later lease has written its row. With the fence that it
    has read, its save() would admit a late holder again.
    """

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """See Field.pre_save(): the value, or what the database makes of it."""
        fence = super().pre_save(model_instance, add)
        if add:
            return fence
        if not hasattr(fence, "resolve_expression"):
            fence = models.Value(fence, self)
        return Greatest(models.F(self.attname), fence, output_field=models.BigIntegerField())

    def deconstruct(self) -> Any:
        """As Django's own: the migrations of projects need not know of this class."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.BigIntegerField", args, kwargs


class FencedModel(models.Model):
    """A model whose rows keep the fence that they were last written under; see fenced_update()."""

    fence = _NewestFence(default=0, editable=False)

    class Meta:
        abstract = True
