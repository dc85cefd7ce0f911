"""The Django app: settings checks, admin, and the request path in a lock's owner."""

from __future__ import annotations

import sys
from typing import Any

from django.apps import AppConfig
from django.core.signals import request_finished, request_started

from django_redislock import checks
from django_redislock.activity import Activity, current_activity
from django_redislock.transactions import watch_connections


class RedislockConfig(AppConfig):
    """Put "django_redislock" into INSTALLED_APPS."""

    name = "django_redislock"
    verbose_name = "Distributed locks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register_checks()
        request_started.connect(_note_request, dispatch_uid="django_redislock.note_request")
        request_finished.connect(_forget_request, dispatch_uid="django_redislock.forget_request")
        watch_connections()  # An app before this one may have opened some.
        if "celery" in sys.modules:  # The project uses it; its tasks may not be imported yet.
            from django_redislock.celery import checks as task_checks  # noqa: F401 - registers them


def _note_request(
    environ: dict[str, Any] | None = None, scope: dict[str, Any] | None = None, **kwargs: object
) -> None:
    path = (scope or {}).get("path") or ""
    if environ is not None:
        # As PEP 3333 has it: each byte of the UTF-8 is one character of PATH_INFO.
        info = environ.get("PATH_INFO") or ""
        path = info.encode("latin-1", errors="replace").decode(errors="replace")
    current_activity.set(Activity(path=str(path)))


def _forget_request(**kwargs: object) -> None:
    current_activity.set(Activity())
