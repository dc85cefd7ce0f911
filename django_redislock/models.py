"""A model without a table: it gives held locks a page in the admin, and permissions a home."""

from __future__ import annotations

import base64
import binascii

from django.db import models


class HeldLock(models.Model):
    """A lock on its page in the admin. Nothing of it is in the database.

    The key stands for alias and name in addresses. A name could be ``..`` or hold a slash, which
    browsers and proxies rewrite, so it is base64 there.
    """

    key = models.CharField(primary_key=True, max_length=1000, editable=False)

    class Meta:
        managed = False
        verbose_name = "held lock"
        verbose_name_plural = "held locks"
        default_permissions = ("view",)
        permissions = [("force_release_heldlock", "Can force release held locks")]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str, alias: str) -> HeldLock:
        """The page of a lock, whether it is held or not."""
        packed = base64.urlsafe_b64encode(f"{alias}/{name}".encode())
        return cls(key=packed.decode().rstrip("="))

    @classmethod
    def with_key(cls, key: str) -> HeldLock | None:
        """The page with this key; None if the key is none of ours."""
        found = cls(key=key)
        return found if found._unpacked and cls.named(found.name, found.alias) == found else None

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._unpacked[2]

    @property
    def alias(self) -> str:
        """Its alias in REDISLOCK."""
        return self._unpacked[0]

    @property
    def _unpacked(self) -> tuple[str, str, str] | tuple[()]:
        try:
            packed = base64.urlsafe_b64decode(self.key + "=" * (-len(self.key) % 4))
            return packed.decode().partition("/")
        except (binascii.Error, ValueError):
            return ()
