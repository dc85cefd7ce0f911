"""@single_instance_task: a Celery task of which only one run happens at a time, anywhere.

The lock is taken around the task's body, by the process that runs it. So a worker, eager mode, a
direct call, beat, ``send_task`` and every canvas behave alike. A lock taken when a task is
published, or in a Celery signal, would not guard them all.
"""

from __future__ import annotations

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "celery":
        raise
    raise ImportError(
        "single_instance_task needs Celery: pip install 'django_redislock[celery]'."
    ) from error

from contextlib import suppress

from django_redislock.celery import checks as _checks  # noqa: F401 - registers them
from django_redislock.celery import message as _activity  # noqa: F401 - names owners
from django_redislock.celery.decorator import SingleInstanceTask, single_instance_task
from django_redislock.celery.options import Conflict, SingleInstance
from django_redislock.exceptions import RunAbandoned
from django_redislock.jobs.options import Skipped
from django_redislock.jobs.run import current_lease

with suppress(ImportError):  # Optional, as it is for kombu: to YAML, a skip is any dictionary.
    import yaml

    yaml.SafeDumper.add_representer(Skipped, yaml.SafeDumper.represent_dict)

__all__ = [
    "Conflict",
    "RunAbandoned",
    "SingleInstance",
    "SingleInstanceTask",
    "current_lease",
    "single_instance_task",
]
