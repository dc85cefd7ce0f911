"""Settings of a worker that keeps its results in Django's database (django-celery-results)."""

import os

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_results"]  # noqa: F405
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["TESTS_DATABASE"],
        "OPTIONS": {"timeout": 20},
    }
}
