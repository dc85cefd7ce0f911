"""Jobs, each with one run at a time: a function, a command, a Celery task."""

from __future__ import annotations

from django_redislock.jobs.decorator import single_instance
from django_redislock.jobs.options import Conflict, JobOptions, Skipped
from django_redislock.jobs.run import current_lease, run_job

__all__ = ["Conflict", "JobOptions", "Skipped", "current_lease", "run_job", "single_instance"]
