"""Names each plain task of Celery as the owner of the locks that its body takes."""

from __future__ import annotations

from typing import Any

from celery.signals import task_postrun, task_prerun

from django_redislock.activity import Activity, begin, end


def _begin_task(task_id: str, task: Any, **kwargs: object) -> None:
    if not hasattr(task, "single_instance_options"):  # Its run does so itself.
        begin(Activity(task=task.name, task_id=task_id))


def _end_task(task_id: str, task: Any, **kwargs: object) -> None:
    if not hasattr(task, "single_instance_options"):
        end(task_id)


task_prerun.connect(_begin_task, dispatch_uid="django_redislock.activity")
task_postrun.connect(_end_task, dispatch_uid="django_redislock.activity")
