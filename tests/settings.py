"""Django settings of the test suite; the `locks` fixture fills REDISLOCK, per test."""

from __future__ import annotations

import json
import os

SECRET_KEY = "not a secret"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_redislock",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# A child process of a test gets the setting of that test (tests/processes.py). Everybody else gets
# an address where nothing listens, so that a test without the fixture fails at once.
REDISLOCK = json.loads(
    os.environ.get("TESTS_REDISLOCK", '{"default": {"LOCATION": "redis://127.0.0.1:1/0"}}')
)
