"""All models, where Django looks for them: LockPage, which has no table, and the others."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, NamedTuple

from django.db import models

from django_redislock.completed_runs import CompletedRun
from django_redislock.fences import Fence, FencedModel
from django_redislock.humanize import visible
from django_redislock.rules.names import Permit
from django_redislock.rules.stored import is_number

if TYPE_CHECKING:
    from django_redislock import held_lock

__all__ = ["CompletedRun", "Fence", "FencedModel", "HeldLock", "LockPage"]


class _Key(NamedTuple):
    """The lock that the key of a page stands for."""

    alias: str
    permit: Permit


class _NoRows(models.Manager["HeldLock"]):
    """Finds no rows: ``dumpdata``, say, asks each model."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        return super().get_queryset().none()


class HeldLock(models.Model):
    """The page of a lock in the admin, and what permissions refer to. It has no rows.

    Python code calls it :data:`LockPage`, since HeldLock is the class of held.py. Django makes
    addresses and permissions from the name of this class.

    In addresses, the key stands for alias, name and number of the permit. Browsers and proxies
    rewrite a name such as ``..`` or one with a slash, so the key is base64.
    """

    lock: held_lock.HeldLock  # Only pages made by of() have it.

    key = models.CharField(primary_key=True, max_length=1000, editable=False)

    objects = _NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        verbose_name = "held lock"
        verbose_name_plural = "held locks"
        default_permissions = ("view",)
        permissions = [
            ("force_release_heldlock", "Can force release held locks"),
            ("pause_heldlock", "Can pause locks, so that nobody gets them"),
        ]

    def __str__(self) -> str:
        return visible(self.name)  # Django's log shows it too.

    @classmethod
    def named(cls, name: str, alias: str, permit: int = 1) -> HeldLock:
        """The page of a lock, or of a permit of it, whether it is held or not."""
        which = f"\0{permit}" * (permit > 1)
        packed = base64.urlsafe_b64encode(f"{alias}\0{name}{which}".encode())
        return cls(key=packed.decode().rstrip("="))

    @classmethod
    def of(cls, lock: held_lock.HeldLock) -> HeldLock:
        """The page of a lock that is held."""
        page = cls.named(lock.key.name, lock.alias, lock.key.number)
        page.lock = lock
        return page

    @classmethod
    def with_key(cls, key: str) -> HeldLock | None:
        """The page with this key; None if no page has it."""
        found = cls(key=key)
        name, number = found.permit
        return found if name and cls.named(name, found.alias, number).key == key else None

    @property
    def name(self) -> str:
        """The lock's name; beyond the first permit with its number."""
        return self.permit.label

    @property
    def permit(self) -> Permit:
        """The lock, or the permit of it."""
        return self._unpacked.permit

    @property
    def alias(self) -> str:
        """Its alias in REDISLOCK."""
        return self._unpacked.alias

    @property
    def _unpacked(self) -> _Key:
        try:
            packed = base64.urlsafe_b64decode(self.key + "=" * (-len(self.key) % 4)).decode()
        except ValueError:  # Of base64 and of UTF-8.
            return _Key("", Permit(""))
        alias, _, name = packed.partition("\0")
        name, _, number = name.partition("\0")
        return _Key(alias, Permit(name, int(number) if is_number(number, 4) else 1))


LockPage = HeldLock
