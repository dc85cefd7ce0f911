"""Locks in views: class-based ones, and answers to those who find a lock busy or no server."""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import timedelta

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import decorator_from_middleware, method_decorator
from django.views import View
from rest_framework.response import Response
from rest_framework.views import APIView

from django_redislock import (
    InvalidLockName,
    LockLost,
    LockTimeout,
    Rate,
    clock,
    distributed_lock,
    held,
)
from django_redislock.middleware import LockErrorsMiddleware
from django_redislock.testing import LockTestKit
from tests.support.matrix import needs_scripts
from tests.support.others import held_by, held_by_other

pytestmark = needs_scripts

LATER = "Somebody else is at this. Try again in 12 s; it may take longer."

lock = distributed_lock("v:{pk}", wait=0)


def held_names():
    """The locks that are held while a view runs."""
    return HttpResponse(",".join(one.name for one in held.list()))


class Plain(View):
    """A view without a lock of its own."""

    def get(self, request, pk):
        return held_names()


class APlain(View):
    """The same, asynchronous."""

    async def get(self, request, pk):
        await asyncio.sleep(0)
        return held_names()


def over(method, view):
    """The view with the lock over one of its methods."""
    return method_decorator(lock, name=method)(type("Locked", (view,), {})).as_view()


@lock
def of_function(request: HttpRequest, pk: int) -> HttpResponse:
    """A view that is a function."""
    return held_names()


@lock
async def aof_function(request: HttpRequest, pk: int) -> HttpResponse:
    """The same, asynchronous."""
    await asyncio.sleep(0)
    return held_names()


VIEWS = {
    "of-method": over("get", Plain),
    "a-of-method": over("get", APlain),
    "of-class": over("dispatch", Plain),
    "a-of-class": over("dispatch", APlain),
    "plain": lock(Plain.as_view()),
    "a-plain": lock(APlain.as_view()),
    "of-function": of_function,
    "a-of-function": aof_function,
}


class OfMethod(View):
    """The lock is over the method where it is defined."""

    @method_decorator(lock)
    def get(self, request, pk):
        return held_names()


@method_decorator([distributed_lock("v:{request.method}:{pk}", wait=0)], name="get")
class Parent(View):
    """The name takes something of the request; the method takes whatever comes."""

    def get(self, request, *args, **kwargs):
        return held_names()


class Child(Parent):
    """Inherits it."""


@method_decorator(lock, name="post")
class Rest(APIView):
    """Of Django REST framework."""

    authentication_classes = ()

    def post(self, request, pk):
        return Response(held_names().content.decode())


@method_decorator(distributed_lock("v:{self.kwargs[pk]}"), name="get")
class OfSelf(Plain):
    """method_decorator gives a decorator no self, so no name can be made of it."""


def losing(request, pk):
    """A view that loses its lease."""
    raise LockLost("v")


class Locked(LockErrorsMiddleware):
    """As a project has it that wants another status."""

    busy_status = 423


async def in_a_group(request, pk):
    """A view that locks in a task of its own, whose exception comes in a group."""
    async with asyncio.TaskGroup() as group:
        group.create_task(aof_function(request, pk))
    return HttpResponse()


urlpatterns = [
    *(path(f"{name}/<int:pk>", view) for name, view in VIEWS.items()),
    path("defined/<int:pk>", OfMethod.as_view()),
    path("in-a-group/<int:pk>", in_a_group),
    path("twice/<int:pk>", distributed_lock("w:{pk}")(VIEWS["of-class"])),
    path("child/<int:pk>", Child.as_view()),
    path("rest/<int:pk>", Rest.as_view()),
    path("of-self/<int:pk>", OfSelf.as_view()),
    path("one/<int:pk>", decorator_from_middleware(Locked)(of_function)),
    path("losing/<int:pk>", losing),
]

MIDDLEWARE = "django_redislock.middleware.LockErrorsMiddleware"
each_view = pytest.mark.parametrize("view", VIEWS)


@pytest.fixture(autouse=True)
def site(settings):
    """These views, with the middleware."""
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = [MIDDLEWARE]


# --- class-based views ----------------------------------------------------------------------------


def test_a_view_runs_under_the_lock_of_its_arguments(place):
    for _ in range(2):
        response = Client().get("/of-method/7")
        assert (response.status_code, response.content) == (200, b"v:7")
    assert held.list() == []


@each_view
async def test_each_kind_of_view_does_with_and_without_an_event_loop(redislock, view):
    responses = [await AsyncClient().get(f"/{view}/7")]
    responses.append(await asyncio.to_thread(Client().get, f"/{view}/7"))
    for response in responses:
        assert (response.status_code, response.content) == (200, b"v:7")
    assert held.list() == []


@pytest.mark.parametrize("view", ["of-class", "a-of-class"])
def test_what_dispatch_answers_by_itself_is_as_before(redislock, view):
    assert Client().put(f"/{view}/7").status_code == 405
    assert Client().options(f"/{view}/7").headers["Allow"]


def test_a_view_may_be_decorated_twice_and_inherited(redislock):
    assert Client().get("/twice/7").content in {b"v:7,w:7", b"w:7,v:7"}
    assert Client().get("/child/7").content == b"v:GET:7"
    assert Client().get("/defined/7").content == b"v:7"


def test_what_a_view_is_not_given_cannot_name_the_lock(redislock):
    with pytest.raises(InvalidLockName, match=r"'self', which .*get.* request, pk"):
        Client().get("/of-self/7")


def test_a_method_that_takes_something_else_is_refused_at_the_call(redislock):
    with pytest.raises(TypeError, match="pk"):
        OfMethod().get(HttpRequest())


# --- busy -----------------------------------------------------------------------------------------


@pytest.fixture
def no_time_passes(redislock, monkeypatch):
    """What is left of a lease is its ttl."""
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)


def answer(error, middleware=LockErrorsMiddleware):
    """What the middleware says to an exception of a view."""
    made = middleware(lambda request: HttpResponse())
    return made.process_exception(RequestFactory().get("/"), error)


@pytest.mark.usefixtures("no_time_passes")
@pytest.mark.parametrize("view", [*VIEWS, "in-a-group"])
async def test_a_view_that_finds_it_busy_does_not_run_and_says_when_to_try_again(redislock, view):
    with redislock.simulate_held_by_other("v:7", ttl=12):
        response = await AsyncClient().get(f"/{view}/7")
        assert (await AsyncClient().get(f"/{view}/8")).status_code == 200
    assert response.status_code == 409
    assert response["Retry-After"] == "12"
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert response.content == LATER.encode()


def test_a_group_of_several_exceptions_is_not_answered():
    """One of them may be a bug."""
    assert answer(ExceptionGroup("several", [LockTimeout("v:7"), ZeroDivisionError()])) is None


@pytest.mark.usefixtures("no_time_passes")
def test_no_one_is_sent_away_for_the_whole_of_a_long_lease(redislock, settings, monkeypatch):
    """It may be released at any time. What cools down is not."""
    with redislock.simulate_held_by_other("v:7", ttl=3600):
        assert Client().get("/of-function/7")["Retry-After"] == "30"
        monkeypatch.setattr(Locked, "longest_retry_after", 5)
        settings.MIDDLEWARE = [f"{__name__}.Locked"]
        response = Client().get("/of-function/7")
        assert response["Retry-After"] == "5"
        assert (
            response.content == b"Somebody else is at this. Try again in 5 s; it may take longer."
        )
    with distributed_lock("v:7", min_hold=600):
        pass
    response = Client().get("/of-function/7")
    assert response["Retry-After"] == "600"
    assert response.content == b"This was done already. Try again in 600 s."


@pytest.mark.usefixtures("no_time_passes")
def test_without_a_start_under_a_rate_it_is_429_with_the_exact_time(redislock):
    starts = distributed_lock(limits=[Rate("v", "1/h")], wait=0)
    with starts:
        pass
    with pytest.raises(LockTimeout) as raised, starts:
        pass
    response = answer(raised.value)
    assert (response.status_code, response["Retry-After"]) == (429, "3600")
    assert response.content == b"Too many of these were made. Try again in 3600 s."


@pytest.mark.no_permit("the bystander is one of the default alias")
def test_the_longest_time_is_a_setting_of_the_alias_of_the_lock(settings):
    settings.REDISLOCK = {
        "default": {"LONGEST_RETRY_AFTER": 5},
        "slow": {"LONGEST_RETRY_AFTER": math.inf},
    }
    with LockTestKit() as kit:
        for alias, seconds in (("default", 5), ("slow", 3600)):
            lock = distributed_lock("v:7", wait=0, using=alias)
            with (
                kit.simulate_held_by_other("v:7", using=alias, ttl=3600),
                pytest.raises(LockTimeout) as raised,
                lock,
            ):
                pass
            assert seconds - 60 < int(answer(raised.value)["Retry-After"]) <= seconds
    assert answer(LockTimeout("v:7", alias="?")).status_code == 409  # It was made by hand.


@pytest.mark.parametrize(
    ("bound", "left", "seconds"),
    [
        (30, 0.9, "1"),  # At least one, and rounded up.
        (30, 3.1, "4"),
        (5, 3600, "5"),
        (timedelta(seconds=5), 3600, "5"),
        (math.inf, 3600, "3600"),
        (math.inf, math.inf, "30"),  # It never ends.
        (math.inf, None, "1"),
    ],
    ids=str,
)
def test_a_subclass_bounds_the_time_after_which_to_try_again(bound, left, seconds, monkeypatch):
    monkeypatch.setattr(Locked, "longest_retry_after", bound)
    assert answer(LockTimeout("v:7", expires_in=left), Locked)["Retry-After"] == seconds


@pytest.mark.parametrize("bound", ["5", 0, True, math.nan], ids=repr)
def test_a_wrong_bound_of_a_subclass_is_refused_when_a_server_starts(bound, monkeypatch):
    monkeypatch.setattr(Locked, "longest_retry_after", bound)
    with pytest.raises(ValueError, match=r"^longest_retry_after must be "):
        Locked(lambda request: HttpResponse())


def test_another_status_is_a_subclass_of_the_middleware_and_a_single_view_may_have_one(
    redislock, settings, monkeypatch
):
    with redislock.simulate_held_by_other("v:7", ttl=12):
        settings.MIDDLEWARE = []
        assert Client().get("/one/7").status_code == 423
        settings.MIDDLEWARE = [f"{__name__}.Locked"]
        assert Client().get("/of-function/7").status_code == 423
        monkeypatch.setattr(Locked, "busy_status", 503)
        assert Client().get("/of-function/7").status_code == 503


@pytest.mark.usefixtures("no_time_passes")
def test_who_asks_for_json_gets_it(redislock):
    with redislock.simulate_held_by_other("v:7", ttl=12):
        response = Client().get("/of-function/7", headers={"Accept": "application/json"})
        assert response.json() == {"detail": LATER}
        page = Client().get("/of-function/7", headers={"Accept": "text/html,*/*;q=0.8"})
        assert page["Content-Type"].startswith("text/plain")


def test_neither_the_lock_nor_its_holder_is_told_but_both_are_in_the_log(redislock, caplog):
    with held_by("v:7", host="secret-host", task="secret.task"):
        response = Client().get("/of-function/7")
    for secret in (b"secret", b"v:7", b"4711"):
        assert secret not in response.content + bytes(str(response.headers), "ascii")
    (told,) = (one for one in caplog.records if one.name == "django_redislock.request")
    assert "'v:7'" in told.getMessage()
    assert "secret-host:4711" in told.getMessage()
    # So Python shows it by itself: Django gives our loggers no handler, unless LOGGING does.
    assert told.levelno == logging.WARNING == logging.lastResort.level


# --- unavailable, lost ----------------------------------------------------------------------------


@each_view
def test_unavailable_is_503(redislock, view, caplog):
    with redislock.simulate_unavailable():
        response = Client().get(f"/{view}/7")
    assert response.status_code == 503
    assert response.content == b"This does not work at the moment. Try again later."
    assert "'v:7' is unavailable" in caplog.text


def test_a_loss_stays_an_error_as_the_work_may_be_done():
    with pytest.raises(LockLost):
        Client().get("/losing/7")


# --- Django REST framework ------------------------------------------------------------------------


def test_an_api_view_runs_under_its_lock(redislock):
    assert Client().post("/rest/7").json() == "v:7"


@pytest.mark.usefixtures("no_time_passes")
def test_busy_and_unavailable_are_the_same_in_an_api_view(redislock):
    headers = {"Accept": "application/json"}
    with redislock.simulate_held_by_other("v:7", ttl=12):
        response = Client().post("/rest/7", headers=headers)
        assert (response.status_code, response["Retry-After"]) == (409, "12")
        assert response.json()["detail"] == LATER
    with redislock.simulate_unavailable():
        assert Client().post("/rest/7", headers=headers).status_code == 503


def test_without_the_middleware_all_goes_through(redislock, settings):
    settings.MIDDLEWARE = []
    client = Client(raise_request_exception=False)
    with held_by_other("v:7"):
        assert client.get("/of-function/7").status_code == 500
