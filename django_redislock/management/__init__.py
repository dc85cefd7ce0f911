"""For management commands: ``manage.py locks``, and help for your own."""

from __future__ import annotations

from django_redislock.management.sigterm import release_on_sigterm
from django_redislock.management.single_instance import SingleInstanceMixin

__all__ = ["SingleInstanceMixin", "release_on_sigterm"]
