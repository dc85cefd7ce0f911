"""Settings of the example project; everything is ordinary but `REDIS_URL` and what follows from it.

Environment:
    REDIS_URL: the Redis or Valkey to use, such as redis://127.0.0.1:6379/0. Without it the
        embedded server is used, and started if it does not run yet (see embedded_server.py).
    DATABASE_PATH: the SQLite file, db.sqlite3 beside manage.py by default.
    METRICS_PORT: where processes show their metrics, such as 9464 (see telemetry.py).
    DEMO_LOCKS: set by demos that keep the locks elsewhere: more of REDISLOCK["default"], as JSON.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

from example_project import embedded_server

BASE_DIR = Path(__file__).resolve().parent.parent

REDIS_URL = os.environ.get("REDIS_URL") or embedded_server.url()

REDISLOCK = {
    "default": {
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "lottery",
        **json.loads(os.environ.get("DEMO_LOCKS", "{}")),
    },
}

if REDISLOCK["default"].get("BACKEND", "").endswith("QuorumBackend"):
    # The demo starts none of the tasks that need records of runs, which a quorum does not keep.
    SILENCED_SYSTEM_CHECKS = ["django_redislock.E051", "django_redislock.W061"]

# redis-py and Celery spell the address of a Unix socket differently.
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://", 1)
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_RESULT_EXPIRES = 3600
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE_PATH", BASE_DIR / "db.sqlite3"),
        "OPTIONS": {
            # A draw reads before it writes: take SQLite's write lock at BEGIN, and wait for it.
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            # Who reads waits for nobody.
            "init_command": "PRAGMA journal_mode=WAL",
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_redislock",
    "django_redislock.contrib.otel",
    *([] if find_spec("django.tasks") else ["django_tasks"]),  # Before Django 6.
    "django_tasks_db",
    "lottery",
    "shop",
]

TASKS = {
    "default": {
        "BACKEND": "django_tasks_db.DatabaseBackend",
        "QUEUES": [],  # Any.
    },
}

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
TIME_ZONE = "UTC"

# An example is run on one's own machine: DEBUG also restricts the hosts to localhost.
DEBUG = True
SECRET_KEY = os.environ.get("SECRET_KEY", "not a secret, as this is an example")
