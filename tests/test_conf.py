"""The REDISLOCK setting: what is wrong is named, with the key; changes take effect at once."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_redislock import LockUnavailable, conf, distributed_lock, held
from django_redislock.backends import InMemoryBackend, RedisBackend
from django_redislock.conf import backends
from django_redislock.testing import IN_MEMORY
from tests.backends import both_ways

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.backends import Place, Way
    from tests.conftest import Locks
    from tests.proxy import Proxy

pytest_plugins = ["tests.backends"]


# --- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{}, {"default": {}}], ids=["empty", "empty alias"])
def test_everything_has_a_default(settings: Settings, setting: dict[str, Any]) -> None:
    settings.REDISLOCK = setting
    assert conf.conf("default") == conf.Conf(
        alias="default",
        backend="django_redislock.backends.RedisBackend",
        location="redis://127.0.0.1:6379/0",
        options={},
        key_prefix="redislock",
        ttl=30.0,
        wait=10.0,
        renew=True,
        max_hold=None,
        replicas_ack=0,
        unavailable_after=None,
    )
    assert isinstance(backends["default"], RedisBackend)


def test_a_project_without_the_setting_has_the_default_alias(settings: Settings) -> None:
    del settings.REDISLOCK
    assert conf.aliases() == ["default"]
    assert conf.conf("default").ttl == 30.0


def test_every_key_is_read(settings: Settings) -> None:
    settings.REDISLOCK = {
        "jobs": {
            "BACKEND": "django_redislock.backends.InMemoryBackend",
            "LOCATION": ["redis://a", "redis://b"],
            "OPTIONS": {"socket_timeout": 1},
            "KEY_PREFIX": "jobs",
            "TTL": timedelta(minutes=1),
            "WAIT": math.inf,
            "RENEW": False,
            "MAX_HOLD": 3600,
            "REPLICAS_ACK": 2,
            "UNAVAILABLE_AFTER": math.inf,
        }
    }
    assert conf.conf("jobs") == conf.Conf(
        alias="jobs",
        backend="django_redislock.backends.InMemoryBackend",
        location=("redis://a", "redis://b"),
        options={"socket_timeout": 1},
        key_prefix="jobs",
        ttl=60.0,
        wait=math.inf,
        renew=False,
        max_hold=3600.0,
        replicas_ack=2,
        unavailable_after=math.inf,
    )
    assert conf.aliases() == ["default", "jobs"]


def test_the_backend_is_the_one_that_is_named(settings: Settings) -> None:
    settings.REDISLOCK = {"jobs": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}
    assert isinstance(backends["jobs"], InMemoryBackend)


# --- what is wrong -------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("TTL", 0, "at least 0.01 seconds"),
    ("TTL", -1, "at least 0.01 seconds"),
    ("TTL", "30", "number of seconds"),
    ("TTL", True, "number of seconds"),
    ("TTL", None, "number of seconds"),
    ("TTL", math.inf, "at most"),
    ("TTL", math.nan, "at least"),
    ("WAIT", -1, "0 or more seconds"),
    ("WAIT", "10", "number of seconds"),
    ("RENEW", 1, "True or False"),
    ("RENEW", None, "True or False"),
    ("MAX_HOLD", 0, "at least"),
    ("MAX_HOLD", "1h", "number of seconds"),
    ("UNAVAILABLE_AFTER", -1, "0 or more seconds"),
    ("UNAVAILABLE_AFTER", "5", "number of seconds"),
    ("REPLICAS_ACK", -1, "0 to 100"),
    ("REPLICAS_ACK", 1.5, "0 to 100"),
    ("REPLICAS_ACK", True, "0 to 100"),
    ("KEY_PREFIX", "", "non-empty string"),
    ("KEY_PREFIX", 7, "non-empty string"),
    ("KEY_PREFIX", "a{b}", "no braces"),
    ("KEY_PREFIX", "a*", "glob"),
    ("KEY_PREFIX", "a b", "white space"),
    ("KEY_PREFIX", "a|b", "must have no"),
    ("LOCATION", 6379, "URL"),
    ("LOCATION", [], "URL"),
    ("LOCATION", [6379], "URL"),
    ("OPTIONS", [], "dictionary"),
    ("OPTIONS", {1: 2}, "dictionary"),
    ("BACKEND", "", "non-empty string"),
    ("BACKEND", 7, "non-empty string"),
]


@pytest.mark.parametrize(("key", "value", "rule"), WRONG, ids=[f"{k}={v!r}" for k, v, _ in WRONG])
def test_a_wrong_value_is_named_with_its_key_and_the_rule(
    settings: Settings, key: str, value: Any, rule: str
) -> None:
    settings.REDISLOCK = {"jobs": {key: value}}
    with pytest.raises(ImproperlyConfigured, match=rule) as raised:
        distributed_lock("lottery", using="jobs").acquire()
    assert str(raised.value).startswith(f"REDISLOCK['jobs']['{key}'] must")


@pytest.mark.parametrize(
    ("default", "where", "rule"),
    [
        ({"OPTIONS": {"max_connections": 3}}, "['OPTIONS']['max_connections']", "at least 4"),
        ({"OPTIONS": {"max_connections": "9"}}, "['OPTIONS']['max_connections']", "an integer"),
        ({"OPTIONS": {"socket_timeout": 0}}, "['OPTIONS']['socket_timeout']", "positive"),
        ({"OPTIONS": {"socket_timeout": True}}, "['OPTIONS']['socket_timeout']", "positive"),
        ({"LOCATION": "redis://a?socket_timeout=-1"}, "['LOCATION']: socket_timeout", "positive"),
        ({"LOCATION": "redis://a?socket_timeout=nan"}, "['LOCATION']: socket_timeout", "positive"),
        ({"LOCATION": "redis://a?socket_timeout=2s"}, "['LOCATION']", "not a URL"),
        ({"OPTIONS": {"sokket": 1}}, "['OPTIONS']", "sokket"),
        ({"LOCATION": "localhost:6379"}, "['LOCATION']", "redis://host:6379/0"),
        ({"LOCATION": ["redis://a", "redis://b"]}, "['LOCATION']", "one server"),
        ({"BACKEND": "not.there.Backend"}, "['BACKEND']", "cannot be imported"),
        ({"BACKEND": "django_redislock.conf.Conf"}, "['BACKEND']", "Conf"),
        ({**IN_MEMORY, "REPLICAS_ACK": 1}, "['REPLICAS_ACK']", "InMemoryBackend"),
    ],
)
def test_what_the_backend_cannot_use_is_named_with_its_key(
    settings: Settings, default: dict[str, Any], where: str, rule: str
) -> None:
    settings.REDISLOCK = {"default": default}
    with pytest.raises(ImproperlyConfigured, match=rule) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith(f"REDISLOCK['default']{where}")


@pytest.mark.parametrize(
    ("location", "options", "patience"),
    [
        ("redis://a", {}, 3),  # A third of the ttl.
        ("redis://a", {"socket_timeout": 2}, 2),
        ("redis://a?socket_timeout=0.5", {}, 0.5),
        ("redis://a?socket_timeout=0.5", {"socket_timeout": 2}, 0.5),
    ],
)
def test_the_operation_timeout_is_that_of_the_url_or_of_the_options(
    settings: Settings, location: str, options: dict[str, Any], patience: float
) -> None:
    settings.REDISLOCK = {"default": {"LOCATION": location, "OPTIONS": options}}
    assert backends["default"].patience(9) == patience


def test_the_operation_timeout_in_the_url_bounds_a_call(locks: Locks, proxy: Proxy) -> None:
    locks.on(proxy).configure(LOCATION=f"{proxy.url}?socket_timeout=0.2", TTL=60, WAIT=0)
    proxy.blackhole()
    begin = time.monotonic()
    with pytest.raises(LockUnavailable):
        distributed_lock("lottery").acquire()
    assert time.monotonic() - begin < 2  # Two tries and an undo; by default it would be 10 s.


def test_an_unknown_key_is_named_with_those_that_are_known(settings: Settings) -> None:
    settings.REDISLOCK = {"default": {"TIMEOUT": 30, "ttl": 30}}
    with pytest.raises(
        ImproperlyConfigured, match=r"REDISLOCK\['default'\] has unknown keys: TIMEOUT, ttl.*TTL"
    ):
        distributed_lock("lottery").acquire()


@pytest.mark.parametrize("setting", [None, [], "redis://127.0.0.1"], ids=repr)
def test_a_setting_that_is_no_dictionary_is_refused(settings: Settings, setting: Any) -> None:
    settings.REDISLOCK = setting
    with pytest.raises(ImproperlyConfigured, match="REDISLOCK must be a dictionary of aliases"):
        distributed_lock("lottery").acquire()
    settings.REDISLOCK = {"default": setting}
    with pytest.raises(ImproperlyConfigured, match=r"REDISLOCK\['default'\] must be a dictionary"):
        distributed_lock("lottery").acquire()


# --- changes -------------------------------------------------------------------------------------


@both_ways
async def test_a_changed_setting_takes_effect_at_once(way: Way, place: Place) -> None:
    lock = distributed_lock("lottery")
    async with way.entered(lock) as lease:
        assert lease.ttl == 10
    place.configure(TTL=7)
    async with way.entered(lock) as lease:
        assert lease.ttl == 7
    with override_settings(REDISLOCK={"default": {**place.setting(), "TTL": 8}}):
        async with way.entered(lock) as lease:
            assert lease.ttl == 8
    async with way.entered(lock) as lease:
        assert lease.ttl == 7


def test_another_setting_changes_nothing(place: Place) -> None:
    before = backends["default"]
    with override_settings(USE_TZ=False):
        assert backends["default"] is before


@both_ways
async def test_a_held_lease_stays_with_the_backend_that_granted_it(way: Way, place: Place) -> None:
    before = place.setting()
    lock = distributed_lock("lottery", ttl=0.6)
    assert await way.acquire(lock)
    lease = lock.lease
    assert lease is not None
    with override_settings(REDISLOCK={"default": {**IN_MEMORY, "KEY_PREFIX": "elsewhere"}}):
        # There the lock is free, and here it goes on being renewed.
        assert held.get("lottery") is None
        await way.until(lambda: lease.renewals > 1)
        await way.renew(lease)
        await way.release(lock)
        assert not lease.held
    if place.keys():
        with override_settings(REDISLOCK={"default": before}):
            assert held.get("lottery") is None


@both_ways
async def test_the_connections_of_a_forgotten_setting_are_closed(way: Way, locks: Locks) -> None:
    def connections() -> int:
        return sum(one["name"] == locks.prefix for one in locks.redis.client_list())

    locks.configure(OPTIONS={"client_name": locks.prefix})
    kept = distributed_lock("lottery", ttl=0.5)
    assert await way.acquire(kept)
    lease = kept.lease
    assert lease is not None
    await way.until(lambda: lease.renewals)  # By the watchdog's own connection.
    locks.configure(OPTIONS={})
    assert lease.held
    await way.release(kept)
    if way.name == "sync":
        await way.until(lambda: connections() == 0)
    else:
        await way.until(lambda: connections() == 1)  # That of the loop, which closes with it.


def test_aliases_keep_their_locks_apart(place: Place, settings: Settings) -> None:
    settings.REDISLOCK = {
        "default": place.setting(),
        "other": {**place.setting(), "KEY_PREFIX": place.setting().get("KEY_PREFIX", "x") + "-2"},
    }
    with distributed_lock("lottery"), distributed_lock("lottery", wait=0, using="other"):
        assert [one.alias for one in held.list(using="other")] == ["other"]


def test_two_aliases_of_one_prefix_share_their_locks(locks: Locks, settings: Settings) -> None:
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "TTL": 5}}
    with distributed_lock("lottery"):
        assert distributed_lock("lottery", wait=0, using="other").acquire() is False
