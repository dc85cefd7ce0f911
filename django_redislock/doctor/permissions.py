"""Whether ``migrate`` has made the permissions of the admin's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError

from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator


def examine_admin() -> Iterator[Finding]:
    """Ask the database, unless the admin is not installed."""
    if not apps.is_installed("django.contrib.admin"):
        yield Finding("permissions", "ok", "not needed: the admin is not installed")
        return
    known = apps.get_model("auth", "Permission").objects.filter(
        content_type__app_label="django_redislock", codename="force_release_heldlock"
    )
    try:
        found = known.exists()
    except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
        yield Finding(
            "permissions",
            "warn",
            f"the database does not tell whether the admin's page has its permissions: {error}",
            "Run manage.py migrate, or check DATABASES.",
        )
        return
    if found:
        yield Finding("permissions", "ok", "the admin's page has its permissions")
    else:
        yield Finding(
            "permissions",
            "warn",
            "the admin's page lacks its permissions, so only superusers see it",
            "Run manage.py migrate.",
        )
