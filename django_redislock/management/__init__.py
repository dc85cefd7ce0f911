"""For management commands: ``manage.py locks``, and help for your own."""

from __future__ import annotations

from django_redislock.management.single_instance import SingleInstanceMixin, release_on_sigterm

__all__ = ["SingleInstanceMixin", "release_on_sigterm"]
