"""A site with the views that the tests of the debug toolbar and of the health check visit."""

from contextlib import suppress

from django.http import HttpResponse
from django.urls import include, path

from django_redislock import LockUnavailable, distributed_lock


def draw(request):
    """Take two locks, and one that may be busy."""
    with distributed_lock("lottery"):
        pass
    try:
        with distributed_lock("report"):
            raise ValueError
    except ValueError:
        pass
    other = distributed_lock("<b>busy</b>", wait=0)
    text = "got it" if other.acquire() else "busy"
    if other.lease:
        other.release()
    return HttpResponse(f"<html><body>{text}</body></html>")


async def adraw(request):
    """The same with one lock, in a coroutine."""
    async with distributed_lock("lottery"):
        pass
    return HttpResponse("<html><body>drawn</body></html>")


def tried(request):
    """Ask a server that may not answer."""
    with suppress(LockUnavailable), distributed_lock("lottery"):
        pass
    return HttpResponse("<html><body>tried</body></html>")


def cut(request):
    """Take a lock, and release it when the server may be gone."""
    lock = distributed_lock("lottery", ttl=1)
    lock.acquire()
    at_work()
    with suppress(LockUnavailable):
        lock.release()
    return HttpResponse("<html><body>cut</body></html>")


def at_work():
    """What cut() does under its lock."""


def nothing(request):
    """Take no lock."""
    return HttpResponse("<html><body>nothing</body></html>")


urlpatterns = [
    path("draw/", draw),
    path("adraw/", adraw),
    path("nothing/", nothing),
    path("tried/", tried),
    path("cut/", cut),
    path("__debug__/", include("debug_toolbar.urls")),
]
