"""What people write when they need a lock around a task: correct as far as it goes.

Kept to prove that the tests of the table are worth something: they must fail with it. See
tests/celery/test_naive.py.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import redis
from celery import shared_task
from django.conf import settings

from django_redislock.celery.options import OPTIONS

# Seconds. Nothing renews it, so people take more than any run of theirs may need. A short one would
# be over when, on a slow machine, the broker delivers the task of a killed worker again.
EXPIRY = 60


def single_instance_task(**options):
    """``SET NX EX`` around the body, skip if it is there, delete it in the end."""
    ours = {name: options.pop(name) for name in list(options) if name in OPTIONS}

    def decorate(function):
        signature = inspect.signature(function)

        @shared_task(**options)
        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            name = ours["key"].format_map(signature.bind(*args, **kwargs).arguments)
            server = redis.Redis.from_url(settings.REDISLOCK["default"]["LOCATION"])
            if not server.set(f"naive:{name}", "locked", nx=True, ex=EXPIRY):
                return {"skipped": "busy"}
            try:
                return function(*args, **kwargs)
            finally:
                server.delete(f"naive:{name}")

        return locked

    return decorate
