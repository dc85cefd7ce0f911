"""A site for uvicorn and gunicorn: views that hold a lock, and wait for it."""

import json
import os
from pathlib import Path

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

settings.configure(
    INSTALLED_APPS=["django_redislock"],
    REDISLOCK=json.loads(os.environ["TESTS_REDISLOCK"]),
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["127.0.0.1"],
)
django.setup()

import asyncio  # noqa: E402

from django_redislock import distributed_lock  # noqa: E402

PRELOADED = os.getpid()  # Of gunicorn's arbiter, with --preload.
WAIT = 60
if "TESTS_HELD_BEFORE" in os.environ:
    # As a project does that takes a lock while it is imported: connections and a watchdog exist.
    at_import = distributed_lock("at import")
    assert at_import.acquire()
    with distributed_lock("before"):
        pass


async def hold(request):
    async with distributed_lock("lottery", ttl=60):
        await asyncio.sleep(WAIT)
    return HttpResponse("held")


async def take(request):
    async with distributed_lock("lottery", wait=WAIT):
        return HttpResponse("taken")


def add(request):
    """Read a number and write it one higher, in a process of those that were forked."""
    counter = Path(os.environ["TESTS_COUNTER"])
    with distributed_lock("lottery", wait=WAIT):
        counter.write_text(str(int(counter.read_text()) + 1))
    inherited = at_import.lease is not None and at_import.lease.held
    return HttpResponse(json.dumps([PRELOADED, os.getpid(), inherited]))


urlpatterns = [path("hold", hold), path("take", take), path("add", add)]
asgi = get_asgi_application()
wsgi = get_wsgi_application()
