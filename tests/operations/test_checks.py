"""System checks: what is wrong with the settings is said before anything goes wrong."""

import re
import socket

import pytest
from django.core import checks
from django.core.management import call_command

from django_redislock.checks import check_passwords, check_servers, check_settings
from django_redislock.doctor import rights as reach
from django_redislock.testing import IN_MEMORY
from tests import ROOT
from tests.support.waiting import HUNG

MEMORY_CACHE = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}


def redis_cache(location, **options):
    backend = "django.core.cache.backends.redis.RedisCache"
    return {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}


def ids(found):
    return [str(one.id).removeprefix("django_redislock.") for one in found]


@pytest.fixture(autouse=True)
def nothing_is_dialed(request, monkeypatch):
    """Only checks of --deploy may ask a server."""
    if "locks" in request.fixturenames:
        return

    def refuse(*args):
        raise AssertionError("a check has dialed")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_missing_setting_is_an_error_and_while_debugging_a_warning(settings):
    del settings.REDISLOCK
    settings.DEBUG = True
    assert ids(check_settings()) == ["W001"]
    settings.DEBUG = False
    (error,) = check_settings()
    assert ids([error]) == ["E004"]
    assert "REDISLOCK = {'default': {'LOCATION': 'redis://host:6379/0'}}" in error.msg


NO_LOCATION = "REDISLOCK['default'] has no LOCATION"
OPEN = "redis://redis.example.com"
# Settings of the alias "default"; the ids of what is wrong with them, and what the first one names.
OF_DEFAULT = [
    ({"LOCATION": "redis://127.0.0.1:6379/1"}, "", ""),
    ({"LOCATION": "rediss://u:p@redis.example.com:6379/1"}, "", ""),
    ({"LOCATION": "unix:///run/redis.sock", "TTL": 60}, "", ""),
    ({"LOCATION": "redis://:p@localhost", "OPTIONS": {"socket_timeout": 1}}, "", ""),
    # No server.
    ({}, "E002", NO_LOCATION),
    ({"TTL": 20}, "E002", NO_LOCATION),
    ({"LOCATION": "redis://a/abc"}, "E002", "REDISLOCK['default']['LOCATION']"),
    # Malformed.
    ("redis://127.0.0.1", "E001", "REDISLOCK['default'] must be a dictionary"),
    ({"LOKATION": "redis://a"}, "E001", "LOKATION"),
    ({"TIMEOUT": 10}, "E001", "TIMEOUT"),
    ({"TTL": "30"}, "E001", "REDISLOCK['default']['TTL']"),
    ({"TTL": 0}, "E001", "REDISLOCK['default']['TTL']"),
    ({"WAIT": -1}, "E001", "REDISLOCK['default']['WAIT']"),
    ({"RENEW": 1}, "E001", "REDISLOCK['default']['RENEW']"),
    ({"LOCATION": 6379}, "E001", "REDISLOCK['default']['LOCATION']"),
    ({"KEY_PREFIX": "a{b}"}, "E001", "REDISLOCK['default']['KEY_PREFIX']"),
    ({"REPLICAS_ACK": "1"}, "E001", "REDISLOCK['default']['REPLICAS_ACK']"),
    # Not for the backend.
    ({"LOCATION": "redis://a", "BACKEND": "nowhere.Backend"}, "E002", ""),
    ({"LOCATION": "redis://a", "BACKEND": "django_redislock.backends.NoBackend"}, "E002", ""),
    ({"LOCATION": "http://127.0.0.1"}, "E002", ""),
    ({"LOCATION": ["redis://a", "redis://b"]}, "E002", ""),
    ({"LOCATION": "redis://a", "OPTIONS": {"no_such_option": 1}}, "E002", ""),
    ({"LOCATION": "redis://a", "OPTIONS": {"socket_timeout": "1"}}, "E002", ""),
    ({"LOCATION": "redis://a", "OPTIONS": {"max_connections": 1}}, "E002", ""),
    # A password that travels in the open.
    ({"LOCATION": "redis://:secret@redis.example.com"}, "W006", ""),
    ({"LOCATION": OPEN, "OPTIONS": {"password": "secret"}}, "W006", ""),
    ({"LOCATION": OPEN}, "", ""),
    ({"LOCATION": "rediss://:secret@redis.example.com"}, "", ""),
    ({"LOCATION": "redis://:secret@127.0.0.1"}, "", ""),
    ({"LOCATION": "redis://:secret@[::1]"}, "", ""),
]
A = {"LOCATION": "redis://a"}
SETTINGS = [
    *(({"default": setting}, found, named) for setting, found, named in OF_DEFAULT),
    ({"default": A, "other": {"LOCATION": "redis://b"}}, "", ""),
    ({"default": A, "other": {"MAX_HOLD": "1h"}}, "E001", "REDISLOCK['other']['MAX_HOLD']"),
    ({"default": IN_MEMORY, "b": {"TTL": 1}}, "E002", "REDISLOCK['b'] has no LOCATION"),
    ({"default": {"TTL": 0}, "a": {"LOCATION": "http://x"}, "b": {"TLL": 1}}, "E001 E002 E001", ""),
    ({}, "E004", "'default'"),
    ({"locks": A}, "E004", "'default'"),
    (A, "E001", "{'default': {'LOCATION': ...}}"),
    ("redis://127.0.0.1", "E001", "REDISLOCK must be a dictionary"),
]


@pytest.mark.parametrize(("setting", "found", "named"), SETTINGS)
def test_each_setting_is_judged_and_a_mistake_is_named(settings, setting, found, named):
    settings.REDISLOCK = setting
    settings.DEBUG = True  # Which excuses only that there is no setting.
    messages = check_settings()
    assert ids(messages) == found.split()
    for message in messages:
        assert message.hint
        assert "secret" not in str(message)
        assert (message.level == checks.ERROR) is ("E" in ids([message])[0])
    assert not messages or named in messages[0].msg


@pytest.mark.parametrize(
    ("timeout", "found"),
    [(10, []), (10.5, ["W003"]), (29, ["W003"]), (30, ["E003"]), (60, ["E003"])],
)
def test_a_timeout_must_leave_room_for_a_renewal(settings, timeout, found):
    options = {"TTL": 30, "OPTIONS": {"socket_timeout": timeout}}
    settings.REDISLOCK = {"default": {**A, **options}}
    assert ids(check_settings()) == found
    location = f"redis://127.0.0.1:6379/0?socket_timeout={timeout}"  # The URL wins.
    options["OPTIONS"] = {"socket_timeout": 1}
    settings.REDISLOCK = {"default": {**options, "LOCATION": location}}
    assert ids(check_settings()) == found


HERE = "redis://127.0.0.1:6379"
SHARED = [
    redis_cache(f"{HERE}/0"),
    redis_cache("redis://localhost"),
    # Where both name a database, redis-py and so Django follow the URL.
    redis_cache(f"{HERE}/0", db=1),
    redis_cache(["redis://h:1", HERE]),
    redis_cache(f"redis://h:1;{HERE}/0"),
]
APART = [
    MEMORY_CACHE,
    redis_cache(f"{HERE}/1"),
    redis_cache("redis://127.0.0.1:6380/0"),
    redis_cache("redis://elsewhere:6379/0"),
    redis_cache(f"{HERE}/1", db=0),
    redis_cache(HERE, db=1),
    redis_cache(HERE, db="x"),
    redis_cache("not a url"),
    redis_cache(None),  # An environment variable that is not set.
    redis_cache([None, 3]),
]


def test_a_cache_in_the_same_database_is_a_warning(settings):
    settings.REDISLOCK = {"default": {"LOCATION": f"{HERE}/0"}}
    settings.CACHES = {}
    assert check_settings() == []
    for cache in [*SHARED, *APART]:
        settings.CACHES = {"default": MEMORY_CACHE, "pages": cache}
        found = check_settings()
        assert ids(found) == (["W004"] if cache in SHARED else []), cache
        assert all("CACHES['pages']" in one.msg for one in found)


@pytest.mark.parametrize("debug", [True, False])
def test_locks_in_memory_are_for_debugging(settings, debug):
    settings.REDISLOCK = {"default": IN_MEMORY}
    settings.DEBUG = debug
    assert ids(check_settings()) == ([] if debug else ["W005"])


def test_a_password_in_the_address_is_a_warning_for_deployment(settings):
    settings.REDISLOCK = {
        "default": {"LOCATION": "redis://:secret@127.0.0.1"},
        "other": {"LOCATION": "redis://127.0.0.1", "OPTIONS": {"password": "secret"}},
        "broken": {"LOCATION": 1},
    }
    (warning,) = check_passwords()
    assert ids([warning]) == ["W007"]
    assert "REDISLOCK['default']" in warning.msg
    assert "secret" not in str(warning)


# --- those that ask the server --------------------------------------------------------------------


def test_deployment_asks_the_server(locks, make_server, monkeypatch):
    monkeypatch.setattr(reach, "SLOW_ROUND_TRIP", HUNG)  # A busy machine is no slow server.
    locks.on(make_server(maxmemory="50mb", maxmemory_policy="allkeys-lru", appendonly="yes"))
    found = check_servers()
    assert ids(found) == ["E025"]
    assert "allkeys-lru" in found[0].msg
    assert found[0].hint


def test_a_server_that_does_not_answer_is_an_error_for_deployment(locks):
    locks.configure(LOCATION="redis://127.0.0.1:1/0")
    (found,) = check_servers()
    assert found.id == "django_redislock.E020"
    assert "Check LOCATION and OPTIONS of REDISLOCK['default']" in str(found.hint)


def test_broken_settings_do_not_break_the_checks_of_servers(settings):
    settings.REDISLOCK = {"default": {"TTL": 0}, "other": IN_MEMORY}
    assert check_servers() == []
    settings.REDISLOCK = 1
    assert check_servers() == check_passwords() == []


def test_manage_py_check_runs_them_and_asks_the_server_with_deploy_only(settings):
    # Nothing listens there, and nothing is dialed, or the fixture would say so.
    settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0", "TTL": "soon"}}
    with pytest.raises(Exception, match=r"django_redislock\.E001"):
        call_command("check")


def test_manage_py_check_deploy_asks(locks):
    locks.configure(LOCATION="redis://127.0.0.1:1/0")
    for tags in (None, ["django_redislock"]):
        with pytest.raises(Exception, match=r"django_redislock\.E020"):
            call_command("check", deploy=True, tags=tags)


# --- docs -----------------------------------------------------------------------------------------


def every_id():
    source = (ROOT / "django_redislock").rglob("*.py")
    return {found for file in source for found in re.findall(r'"([EW]0\d\d)"', file.read_text())}


def test_every_id_has_its_section_on_the_page_of_checks():
    page = (ROOT / "docs/checks.md").read_text()
    documented = re.findall(r"^### ([EW]0\d\d)\b", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(documented))
    assert every_id() == set(documented) - set(
        re.findall(r"^### ([EW]0\d\d) \(retired\)", page, re.MULTILINE)
    )


BEHIND_SENTINELS = {
    "BACKEND": "django_redislock.backends.SentinelBackend",
    "LOCATION": ["redis://a:26379", "redis://b:26379", "redis://c:26379"],
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"password": "x"}, ["W006"]),
        ({"password": "x", "ssl": True}, []),
        ({"sentinel_kwargs": {"password": "x"}}, ["W006"] * 3),
        ({"socket_timeout": 20}, ["W003"]),
    ],
)
def test_sentinels_and_their_servers_are_each_judged_by_their_own_options(
    settings, options, expected
):
    options = {"service_name": "mymaster", **options}
    settings.REDISLOCK = {"default": {**BEHIND_SENTINELS, "OPTIONS": options}}
    assert ids(check_settings()) == expected


def test_a_cache_behind_the_same_sentinels_is_warned_of(settings):
    options = {"service_name": "mymaster", "db": 1}
    settings.REDISLOCK = {"default": {**BEHIND_SENTINELS, "OPTIONS": options}}
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://mymaster/0"}
    settings.CACHES = {"default": MEMORY_CACHE, "same": cache}
    assert ids(check_settings()) == []
    settings.CACHES = {"default": MEMORY_CACHE, "same": {**cache, "LOCATION": "redis://mymaster/1"}}
    assert ids(check_settings()) == ["W004"]


def test_sentinels_without_the_name_of_what_they_watch_are_an_error(settings):
    settings.REDISLOCK = {"default": BEHIND_SENTINELS}
    (error,) = check_settings()
    assert ids([error]) == ["E002"]
    assert "service_name" in error.msg
