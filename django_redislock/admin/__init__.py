"""The admin pages of held locks and completed runs; Django's autodiscovery imports this package."""

from __future__ import annotations

from django_redislock.admin.completed_runs import CompletedRunAdmin
from django_redislock.admin.page import HeldLockAdmin

__all__ = ["CompletedRunAdmin", "HeldLockAdmin"]
