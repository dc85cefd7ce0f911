"""The project: settings, URLs and the Celery application."""

from __future__ import annotations

from .celery import app as celery_app

__all__ = ["celery_app"]
