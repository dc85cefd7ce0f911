"""The Django app: settings checks, admin, and what a lock's owner works on."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig, apps
from django.core.signals import request_finished, request_started

from django_redislock import checks
from django_redislock.holder import Activity, begin, current_activity, end
from django_redislock.transactions import watch_connections

_UID = "django_redislock.holder"


class RedislockConfig(AppConfig):
    """Put "django_redislock" into INSTALLED_APPS."""

    name = "django_redislock"
    verbose_name = "Distributed locks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register_checks()
        request_started.connect(_note_request, dispatch_uid=_UID)
        request_finished.connect(_forget_request, dispatch_uid=_UID)
        watch_connections()  # An app before this one may have opened some.
        if "celery" in sys.modules:  # The project uses it; its tasks may not be imported yet.
            from django_redislock import celery  # noqa: F401 - registers checks, names owners
        for tasks in ("django.tasks", "django_tasks"):  # Of Django 6, and the app for older ones.
            if tasks == "django.tasks" or apps.is_installed(tasks):
                with suppress(ModuleNotFoundError):
                    of_tasks = import_module(f"{tasks}.signals")
                    of_tasks.task_started.connect(_begin_django_task, dispatch_uid=_UID)
                    of_tasks.task_finished.connect(_end_django_task, dispatch_uid=_UID)


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


def _begin_django_task(task_result: Any, **kwargs: object) -> None:
    begin(Activity(task=task_result.task.module_path, task_id=task_result.id))


def _end_django_task(task_result: Any, **kwargs: object) -> None:
    end(task_result.id)
