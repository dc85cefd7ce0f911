"""The Django app."""

from __future__ import annotations

from functools import cache

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured


class OtelConfig(AppConfig):
    """Put "django_redislock.contrib.otel" into INSTALLED_APPS."""

    name = "django_redislock.contrib.otel"
    label = "redislock_otel"
    verbose_name = "OpenTelemetry of locks"

    def ready(self) -> None:
        _switch_on()


@cache  # Tests that change INSTALLED_APPS make the app ready again.
def _switch_on() -> None:
    try:
        from django_redislock.contrib.otel.telemetry import Telemetry
    except ImportError as error:
        raise ImproperlyConfigured(
            "django_redislock.contrib.otel in INSTALLED_APPS needs OpenTelemetry's API:"
            f" pip install 'django_redislock[otel]'. ({error})"
        ) from error
    Telemetry().connect()
