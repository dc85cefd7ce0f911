"""The check for django-health-check, by the view of that package."""

import time
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.test import RequestFactory
from health_check.views import HealthCheckView  # Of django-health-check, from PyPI.

from django_redislock.contrib.health_check import PROBE, Locks
from tests.support.others import held_by

CHECK = "django_redislock.contrib.health_check.Locks"


async def visited(**options):
    """The status of the page, and what it says of the check."""
    view = HealthCheckView.as_view(checks=[(CHECK, options)])
    answer = await view(RequestFactory().get("/health/?format=text"))
    return answer.status_code, answer.content.decode()


async def test_a_server_that_answers_is_healthy(locks):
    assert await visited() == (200, "Locks(alias=None): OK\n")
    assert await visited(alias="default") == (200, "Locks(alias='default'): OK\n")
    kept = locks.keys()
    assert not any(PROBE.encode() in key for key in kept)


def test_checks_of_a_blocking_site_leave_no_connection_behind(locks):
    for _ in range(3):  # Each in an event loop of its own.
        assert async_to_sync(visited)()[0] == 200
    named = [one for one in locks.redis.client_list() if one["name"]]
    assert len(named) <= 3


async def test_a_check_by_another_process_is_an_answer_too(locks):
    with held_by(PROBE):
        assert (await visited())[0] == 200


async def test_each_alias_says_what_is_wrong_with_it_in_words(locks, settings):
    default = settings.REDISLOCK["default"]
    gone = {"LOCATION": "redis://user:secret@127.0.0.1:1/0"}
    settings.REDISLOCK = {"default": default, "gone": gone, "odd": {"LOCATION": "x", "TLL": 1}}
    status, says = await visited()
    assert status == 500
    assert "The server 127.0.0.1:1 (gone) cannot answer: " in says
    assert "REDISLOCK['odd'] has unknown keys: TLL." in says
    assert "default" not in says.replace("REDISLOCK", "")
    assert "secret" not in says
    assert (await visited(alias="default"))[0] == 200
    assert "has no alias 'nope'" in (await visited(alias="nope"))[1]


async def test_a_server_that_hangs_is_told_within_the_time_limit(locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy, OPTIONS={"socket_timeout": 30})
    proxy.blackhole()
    started = time.monotonic()
    status, says = await visited(timeout=timedelta(seconds=0.5))
    assert time.monotonic() - started < 10
    assert status == 500
    assert "did not answer within 0.5 s" in says


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"timeout": "5"}, "timeout must be a number of seconds or a timedelta, not '5'"),
        ({"timeout": 0}, r"timeout must be at least 0\.05 seconds"),
        ({"alias": 5}, "alias must be a non-empty string, not 5"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        Locks(**arguments)


def test_a_timeout_may_be_a_number_of_seconds():
    assert Locks(timeout=2).timeout == timedelta(seconds=2)
