"""Django settings of the test suite; the `locks` fixture fills REDISLOCK, per test."""

import functools
import json
import os

import redis.utils

# For each connection redis-py reads the metadata of its package, which takes longer than the rest.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

SECRET_KEY = "not a secret"
USE_TZ = True
TIME_ZONE = "UTC"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_redislock",
    "tests.effects",
]
MIDDLEWARE = [
    "tests.support.site.strict_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
# A real one takes a second for each user of each test.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
ROOT_URLCONF = "tests.support.site"
STATIC_URL = "/static/"
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

# A child process of a test gets the setting of that test (support/processes.py). Everybody else
# gets an address where nothing listens, so that a test without the fixture fails at once.
REDISLOCK = json.loads(
    os.environ.get("TESTS_REDISLOCK", '{"default": {"LOCATION": "redis://127.0.0.1:1/0"}}')
)
