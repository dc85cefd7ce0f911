"""The admin pages of held locks; Django's autodiscovery imports this package."""

from __future__ import annotations

from django_redislock.admin.page import HeldLockAdmin

__all__ = ["HeldLockAdmin"]
