"""The REDISLOCK setting: what is wrong is named, with the key; changes take effect at once."""

import math
import re
import threading
import time
from datetime import timedelta

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis import CredentialProvider

from django_redislock import LockUnavailable, conf, distributed_lock, held
from django_redislock.backends import ClusterBackend, InMemoryBackend, RedisBackend, registry
from django_redislock.backends.quorum.backend import QuorumBackend
from django_redislock.backends.registry import backends, make
from django_redislock.backends.sentinel import SentinelBackend
from django_redislock.checks import check_settings
from django_redislock.testing import IN_MEMORY
from tests.support.matrix import everywhere
from tests.support.others import held_by_other
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

# --- defaults ------------------------------------------------------------------------------------


def test_everything_but_the_server_has_a_default(settings):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://a"}}
    assert conf.conf("default") == conf.Conf(
        alias="default",
        backend="django_redislock.backends.RedisBackend",
        location="redis://a",
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


def test_a_project_without_the_setting_uses_this_machine_while_it_is_debugged(settings):
    del settings.REDISLOCK
    settings.DEBUG = True
    assert conf.aliases() == ["default"]
    assert conf.conf("default").location == "redis://127.0.0.1:6379/0"
    with pytest.raises(ImproperlyConfigured, match="has no alias 'jobs'"):
        conf.conf("jobs")


def test_every_key_is_read(settings):
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
            "LONGEST_RETRY_AFTER": timedelta(minutes=5),
            "TIMELINE": 100,
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
        timeline=100,
        longest_retry_after=300.0,
    )
    assert conf.aliases() == ["jobs"]


def test_the_backend_is_the_one_that_is_named(settings):
    settings.REDISLOCK = {"jobs": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}
    assert isinstance(backends["jobs"], InMemoryBackend)


# --- what is wrong -------------------------------------------------------------------------------

WRONG = [
    ("TTL", 0, "at least 0.05 seconds"),
    ("TTL", -1, "at least 0.05 seconds"),
    ("TTL", 0.049, "at least 0.05 seconds"),
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
    ("MAX_HOLD", 0.049, "at least 0.05 seconds"),
    ("MAX_HOLD", "1h", "number of seconds"),
    ("UNAVAILABLE_AFTER", -1, "0 or more seconds"),
    ("UNAVAILABLE_AFTER", "5", "number of seconds"),
    ("LONGEST_RETRY_AFTER", 0.9, "at least 1 seconds"),
    ("LONGEST_RETRY_AFTER", None, "number of seconds"),
    *(("TIMELINE", wrong, "10 to 1000, not") for wrong in (0, 9, 1001, 40.0, True, None)),
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
def test_a_wrong_value_is_named_with_its_key_and_the_rule(settings, key, value, rule):
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
        ({"LOCATION": "redis://a?socket_timeout=2s"}, "['LOCATION']", "'socket_timeout'"),
        ({"LOCATION": "redis://a?sokket=2"}, "['LOCATION']", "'sokket'"),
        ({"OPTIONS": {"sokket": 1}}, "['OPTIONS']", "sokket"),
        (
            {"OPTIONS": {"credential_provider": CredentialProvider(), "password": "a"}},
            "['LOCATION'] with OPTIONS",
            "cannot be passed along with",
        ),
        (
            {"LOCATION": "rediss://a", "OPTIONS": {"ssl_cert_reqs": "a"}},
            "['LOCATION'] with OPTIONS",
            "Flag: a",
        ),
        *(
            ({"LOCATION": "rediss://a", "OPTIONS": options}, f"['OPTIONS'][{option!r}]", rule)
            for options, option, rule in [
                (
                    {"ssl_min_version": "TLSv1_3"},
                    "ssl_min_version",
                    "ssl.TLSVersion, not 'TLSv1_3'",
                ),
                ({"ssl_min_version": 13}, "ssl_min_version", "ssl.TLSVersion, not 13"),
                ({"ssl_ciphers": "none-such"}, "ssl_ciphers", "OpenSSL takes it, not 'none-such'"),
                ({"ssl_keyfile": "/a.key"}, "ssl_keyfile", r"needs \['ssl_certfile'\]"),
                ({"ssl_ca_certs": 1}, "ssl_ca_certs", "a path, not 1"),
                ({"ssl_certfile": "/a", "ssl_password": 1}, "ssl_password", "a string, not int"),
                ({"ssl_include_verify_flags": 4}, "ssl_include_verify_flags", "a list .* not 4"),
            ]
        ),
        ({"OPTIONS": {"protocol": 4}}, "['OPTIONS']['protocol']", "3, or 2 for a proxy .*, not 4"),
        ({"OPTIONS": {"protocol": "2"}}, "['OPTIONS']['protocol']", "must be 3, or 2 .* not '2'"),
        ({"OPTIONS": {"protocol": True}}, "['OPTIONS']['protocol']", "must be 3, or 2 .* not True"),
        ({"LOCATION": "redis://a?protocol=1"}, "['LOCATION']['protocol']", "must be 3, or 2 "),
        ({"LOCATION": "redis://a?protocol=x"}, "['LOCATION']", "'protocol'"),
        ({"LOCATION": "localhost:6379"}, "['LOCATION']", "redis://host:6379/0"),
        ({"LOCATION": ["redis://a", "redis://b"]}, "['LOCATION']", "one server"),
        ({"BACKEND": "not.there.Backend"}, "['BACKEND']", "cannot be imported"),
        ({"BACKEND": "django_redislock.conf.Conf"}, "['BACKEND']", "Conf"),
        ({"BACKEND": "django_redislock.backends.base.Backend"}, "['BACKEND']", "no backend"),
        ({**IN_MEMORY, "REPLICAS_ACK": 1}, "['REPLICAS_ACK']", "InMemoryBackend"),
    ],
)
def test_what_the_backend_cannot_use_is_named_with_its_key(settings, default, where, rule):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://a", **default}}
    with pytest.raises(ImproperlyConfigured, match=rule) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith(f"REDISLOCK['default']{where}")


# Each would be a lock that all machines see, and be one on each machine instead.
NOWHERE = [
    ("not set, DEBUG off", None, "REDISLOCK is not set, and DEBUG is off. Name the server"),
    ("empty", {}, "has no alias 'default'. Known are: none. Name the server"),
    (
        "another alias",
        {"locks": {"LOCATION": "redis://a"}},
        "no alias 'default'. Known are: 'locks'",
    ),
    ("empty alias", {"default": {}}, "REDISLOCK['default'] has no LOCATION"),
    ("only another key", {"default": {"TTL": 20}}, "REDISLOCK['default'] has no LOCATION"),
    (
        "LOCATION is empty",
        {"default": {"LOCATION": ""}},
        "must be a URL, not ''",
    ),
    ("LOCATION is None", {"default": {"LOCATION": None}}, "must be a URL, not None"),
    (
        "one level too high",
        {"LOCATION": "redis://a"},
        "put it one level deeper: REDISLOCK = {'default': {'LOCATION': ...}}.",
    ),
    (
        "one key too high",
        {"default": {"LOCATION": "redis://a"}, "OPTIONS": {"db": 1}},
        "REDISLOCK['OPTIONS'] stands where the name of an alias should",
    ),
    ("an alias that is no name", {1: {"LOCATION": "redis://a"}}, "is a string, not 1"),
]


@both_ways
@pytest.mark.parametrize(
    ("setting", "says"), [one[1:] for one in NOWHERE], ids=[one[0] for one in NOWHERE]
)
async def test_a_setting_that_names_no_server_never_leads_to_this_machine(
    way, settings, setting, says
):
    settings.DEBUG = False
    if setting is None:
        del settings.REDISLOCK
    else:
        settings.REDISLOCK = setting
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)):
        await way.acquire(distributed_lock("lottery", wait=0))


@pytest.mark.parametrize("name", ["_sock", "protocol"])
def test_a_redis_py_whose_connections_lack_what_is_needed_is_refused_by_its_version(
    name, settings, monkeypatch
):
    class Changed(redis.Connection):
        def __init__(self, **options):
            super().__init__(**options)
            delattr(self, name)

    RedisBackend(conf.conf("default"))  # Not with the one that is installed.
    monkeypatch.setattr(redis, "Connection", Changed)
    says = rf"redis-py {re.escape(redis.__version__)} .* no {name}, .* 6\.4 to 8\.1 are known"
    with pytest.raises(ImproperlyConfigured, match=says):
        RedisBackend(conf.conf("default"))


@pytest.mark.no_permit("the bystander is where the default alias is")
def test_an_alias_works_without_a_default_one(place, settings):
    settings.REDISLOCK = {"jobs": place.setting()}
    with distributed_lock("lottery", using="jobs") as lease:
        assert lease.held
        assert held.get("lottery", using="jobs")


# What redis-py would pass over, and so use its default for: this machine, 6379, database 0.
UNCLEAR = [
    ("redis://a/abc", "is no database"),
    ("redis://a/-1", "is no database"),
    ("redis://a/0/1", "is no database"),
    ("redis://a/1.5", "is no database"),
    ("redis://a/\u0661", "is no database"),  # A digit to int().
    ("redis://a?db=-1", "a db after the \\? that must be the number of a database"),
    ("redis://a?db=x", "a db after the \\? that must be the number of a database"),
    ("redis://a/1?db=2", "a database twice"),
    ("redis://a?ssl_ca_certs=/ca", "after the \\? that is for TLS: .*begin with rediss://"),
    ("redis://a?db=1&db=2", "twice"),
    ("redis://a?db=", "without a value"),
    ("redis://a?db", "name=value"),
    ("redis://a/0#1", "%23"),
    ("redis://:pa#ss@a/0", "%23"),
    ("redis://:pa/ss@a/0", "names no host; in a password, write / as %2F"),
    ("redis://a:0/0", "port of 1 to 65535"),
    ("redis://a:65536/0", "port of 1 to 65535"),
    ("redis://a:-1/0", "port of 1 to 65535"),
    ("redis://a:/0", "port of 1 to 65535"),
    ("redis://a:port/0", "port of 1 to 65535"),
    ("redis://a..internal:6379/0", "names a host that is malformed"),
    (f"redis://{'a' * 64}.internal:6379/0", "names a host that is malformed"),
    ("redis:///0", "names no host"),
    ("redis://:6379/0", "names no host"),
    ("rediss://:secret@/0", "names no host"),
    ("redis://[::1/0", "a host that is malformed"),
    ("unix://run/redis.sock", "unix:///path"),
    ("unix:///", "unix:///path"),
    ("unix:///run/redis.sock?db=x", "must be the number of a database"),
    ("redis://", "not a URL"),
    ("redis:a", "not a URL"),
    ("REDIS://a", "not a URL"),
    ("a:6379", "not a URL"),
    ("valkey://a", "must begin with redis://"),
    # Of other backends.
    ("redis+sentinel://a:26379/primary/0", "leads to Sentinel: use SentinelBackend"),
    ("sentinel://a:26379", "leads to Sentinel: use SentinelBackend"),
    ("redis+cluster://a:7000", "for a cluster use ClusterBackend"),
    ("redis://a:7000,b:7000/0", "names several hosts; name one, the primary; for a cluster"),
]


@pytest.mark.parametrize(("location", "says"), UNCLEAR, ids=[one for one, _ in UNCLEAR])
def test_no_part_of_an_address_is_passed_over(settings, location, says):
    settings.REDISLOCK = {"default": {"LOCATION": location}}
    with pytest.raises(ImproperlyConfigured, match=says) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith("REDISLOCK['default']['LOCATION'] ")
    assert raised.value.__cause__ is None  # It could quote a password.
    assert raised.value.__suppress_context__


@pytest.mark.parametrize(
    ("location", "host", "port", "db"),
    [
        ("redis://a", "a", 6379, 0),
        ("redis://a/", "a", 6379, 0),
        ("redis://a:1/15", "a", 1, 15),
        ("redis://a?db=3", "a", 6379, 3),
        ("rediss://u:p,%23%40@a.example:65535/1?socket_timeout=1", "a.example", 65535, 1),
        ("redis://[::1]:6380/2", "::1", 6380, 2),
        ("redis://:@a/1", "a", 6379, 1),
    ],
)
def test_an_address_leads_where_it_says(settings, location, host, port, db):
    settings.REDISLOCK = {"default": {"LOCATION": location}}
    backend = backends["default"]
    assert isinstance(backend, RedisBackend)
    connection = backend._dialer._sync_class(**backend._dialer._sync)
    assert (connection.host, connection.port, connection.db) == (host, port, db)


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("redis://a", {"host": "b"}, "['host'] contradicts LOCATION"),
        ("redis://a:1", {"port": 2}, "['port'] contradicts LOCATION"),
        ("redis://a/1", {"db": 2}, "['db'] contradicts LOCATION"),
        ("unix:///a", {"path": "/b"}, "['path'] contradicts LOCATION"),
        ("redis://a", {"db": -1}, "['db'] must be an integer"),
        ("redis://a", {"db": 2**31 + 1}, "['db'] must be an integer"),
        ("redis://a", {"db": True}, "['db'] must be an integer"),
        ("redis://a", {"db": "x"}, "['db'] must be an integer"),
        ("redis://a", {"ssl_ca_certs": "/ca"}, "['ssl_ca_certs'] is for TLS: leave it out, or let"),
        (
            "redis://a",
            {"ssl": True},
            "['ssl'] is for TLS: leave it out, or let LOCATION begin",
        ),
        ("unix:///a", {"ssl_keyfile": "/k"}, "['ssl_keyfile'] is for TLS"),
        ("redis://a", {"port": 0}, "['port'] must be an integer"),
        ("redis://a", {"port": 65536}, "['port'] must be an integer"),
    ],
)
def test_options_do_not_lead_elsewhere(settings, location, options, says):
    settings.REDISLOCK = {"default": {"LOCATION": location, "OPTIONS": options}}
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith("REDISLOCK['default']['OPTIONS']")


@pytest.mark.parametrize("options", [{"db": 0, "port": 1}, {"db": 2**31, "port": 65535}])
def test_options_may_lead_where_the_address_does_not_say(settings, options):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://a", "OPTIONS": options}}
    assert isinstance(backends["default"], RedisBackend)


def test_what_the_library_decides_cannot_be_changed_by_the_address(locks):
    locks.configure(LOCATION=f"{locks.server.url}?retry_on_timeout=yes&health_check_interval=1")
    with held_by_other("lottery"):
        assert distributed_lock("lottery", wait=0.1).acquire() is False
    backend = backends["default"]
    assert isinstance(backend, RedisBackend)
    for options in (backend._dialer._sync, backend._dialer._async):
        assert options["retry_on_timeout"] is False
        assert options["health_check_interval"] == 0


@pytest.mark.parametrize(
    ("location", "options", "seconds"),
    [
        ("redis://a", {}, 3),  # A third of the ttl.
        ("redis://a", {"socket_timeout": 2}, 2),
        ("redis://a?socket_timeout=0.5", {}, 0.5),
        ("redis://a?socket_timeout=0.5", {"socket_timeout": 2}, 0.5),
    ],
)
def test_the_operation_timeout_is_that_of_the_url_or_of_the_options(
    settings, location, options, seconds
):
    settings.REDISLOCK = {"default": {"LOCATION": location, "OPTIONS": options}}
    assert backends["default"].operation_timeout(9) == seconds


@pytest.mark.proves("R5")
def test_the_operation_timeout_in_the_url_bounds_a_call(locks, proxy):
    locks.on(proxy).configure(LOCATION=f"{proxy.url}?socket_timeout=0.2", TTL=60, WAIT=0)
    proxy.blackhole()
    begin = time.monotonic()
    with pytest.raises(LockUnavailable):
        distributed_lock("lottery").acquire()
    assert time.monotonic() - begin < 6  # Two tries and an undo; by default it would be 10 s.


def test_an_unknown_key_is_named_with_those_that_are_known(settings):
    settings.REDISLOCK = {"default": {"TIMEOUT": 30, "ttl": 30}}
    with pytest.raises(
        ImproperlyConfigured, match=r"REDISLOCK\['default'\] has unknown keys: TIMEOUT, ttl.*TTL"
    ):
        distributed_lock("lottery").acquire()


@pytest.mark.parametrize("setting", [None, [], "redis://127.0.0.1"], ids=repr)
def test_a_setting_that_is_no_dictionary_is_refused(settings, setting):
    settings.REDISLOCK = setting
    with pytest.raises(ImproperlyConfigured, match="REDISLOCK must be a dictionary of aliases"):
        distributed_lock("lottery").acquire()
    settings.REDISLOCK = {"default": setting}
    with pytest.raises(ImproperlyConfigured, match=r"REDISLOCK\['default'\] must be a dictionary"):
        distributed_lock("lottery").acquire()


# --- changes -------------------------------------------------------------------------------------


@both_ways
async def test_a_changed_setting_takes_effect_at_once(way, place):
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


def test_a_backend_that_is_made_while_the_setting_changes_is_not_kept(settings, monkeypatch):
    """Else a thread that is about to take its first lock would leave the former server for all."""
    made, changed = threading.Event(), threading.Event()

    def slowly(conf):
        backend = make(conf)
        made.set()
        assert changed.wait(HUNG)
        return backend

    settings.REDISLOCK = {"default": {**IN_MEMORY, "TTL": 5}}
    monkeypatch.setattr(registry, "make", slowly)
    thread = in_thread(lambda: backends["default"].conf.ttl)
    assert made.wait(HUNG)
    settings.REDISLOCK = {"default": {**IN_MEMORY, "TTL": 7}}
    changed.set()
    assert thread.result(HUNG) == 7
    assert backends["default"].conf.ttl == 7


def test_another_setting_changes_nothing(place):
    before = backends["default"]
    with override_settings(USE_TZ=False):
        assert backends["default"] is before


@pytest.mark.waits
@both_ways
async def test_a_held_lease_stays_with_the_backend_that_granted_it(way, place):
    before = place.setting()
    lock = distributed_lock("lottery", ttl=6)
    assert await way.acquire(lock)
    lease = lock.lease
    with override_settings(REDISLOCK={"default": {**IN_MEMORY, "KEY_PREFIX": "elsewhere"}}):
        # There the lock is free, and here it goes on being renewed.
        assert held.get("lottery") is None
        await way.until(lambda: lease.renewals)
        await way.renew(lease)
        await way.release(lock)
        assert not lease.held
    if place.keys():
        with override_settings(REDISLOCK={"default": before}):
            assert held.get("lottery") is None


@pytest.mark.waits
@everywhere
@both_ways
async def test_the_connections_of_a_forgotten_setting_are_closed(way, locks):
    def connections():
        return sum(one["name"] == locks.prefix for one in locks.redis.client_list())

    locks.configure(OPTIONS={"client_name": locks.prefix})
    kept = distributed_lock("lottery", ttl=6)
    assert await way.acquire(kept)
    lease = kept.lease
    await way.until(lambda: lease.renewals)  # By the watchdog's own connection.
    locks.configure(OPTIONS={})
    assert lease.held
    await way.release(kept)
    if way.name == "sync":
        await way.until(lambda: connections() == 0)
    else:
        await way.until(lambda: connections() == 1)  # That of the loop, which closes with it.


@pytest.mark.no_permit("the bystander is where the default alias is")
def test_aliases_keep_their_locks_apart(place, settings):
    settings.REDISLOCK = {
        "default": place.setting(),
        "other": {**place.setting(), "KEY_PREFIX": place.setting().get("KEY_PREFIX", "x") + "-2"},
    }
    with distributed_lock("lottery"), distributed_lock("lottery", wait=0, using="other"):
        seen = held.get("lottery", using="other")
        assert seen.alias == "other"


def test_two_aliases_of_one_prefix_share_their_locks(locks, settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "TTL": 5}}
    with distributed_lock("lottery"):
        assert distributed_lock("lottery", wait=0, using="other").acquire() is False


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("redis://web:6380/0", "web:6380"),
        ("redis://web", "web:6379"),
        ("rediss://scott:tiger@web:6380/1?socket_timeout=3", "web:6380"),
        ("redis://:tiger@[::1]:6380", "[::1]:6380"),
        ("unix:///run/redis.sock?password=tiger", "/run/redis.sock"),
        ("unix://:tiger@/run/redis.sock", "/run/redis.sock"),
        (["redis://:tiger@a", "redis://:tiger@b:2"], "a:6379, b:2"),
        # A password that should have been escaped must not pass for a host.
        ("redis://scott:12/tiger@web", ""),
        ("redis://:12#tiger@web", ""),
        ("redis://scott:ti/ger@web", ""),
        ("redis://tiger?@web", ""),
        ("", ""),
    ],
    ids=str,
)
def test_the_address_of_an_alias_has_no_secret(location, address):
    assert conf.Conf(alias="default", location=location).address == address


# --- sentinels -----------------------------------------------------------------------------------

SENTINELS = {
    "BACKEND": "django_redislock.backends.SentinelBackend",
    "LOCATION": ["redis://a:26379", "redis://b:26379", "redis://[::1]:26379"],
    "OPTIONS": {"service_name": "mymaster"},
}


def test_sentinels_and_their_servers_have_options_of_their_own(settings):
    options = {
        "service_name": "mymaster",
        "password": "of-data",
        "db": 3,
        "ssl": True,
        "ssl_ca_certs": "/data.crt",
        "max_connections": 10,
        "socket_timeout": 2,
        "sentinel_kwargs": {"password": "of-sentinels", "ssl_ca_certs": "/sentinels.crt"},
    }
    location = [f"rediss://{host}:26379" for host in "abc"]
    settings.REDISLOCK = {"default": {**SENTINELS, "LOCATION": location, "OPTIONS": options}}
    backend = backends["default"]
    assert isinstance(backend, SentinelBackend)
    assert backend.operation_timeout(60) == 2
    server = backend._dialer._dialer_to("10.0.0.1:6379")
    connection = server._sync_class(**server._sync)
    assert (connection.host, connection.port, connection.db) == ("10.0.0.1", 6379, 3)
    assert (connection.password, connection.ca_certs) == ("of-data", "/data.crt")
    for sentinel in backend.sentinels._dialers.values():
        asking = sentinel._sync_class(**sentinel._sync)
        assert (asking.port, asking.db) == (26379, 0)
        assert (asking.password, asking.ca_certs) == ("of-sentinels", "/sentinels.crt")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"LOCATION": ""}, "['LOCATION'] must be"),
        ({"LOCATION": "redis://a:26379"}, "['LOCATION'] must be a list of the addresses"),
        ({"LOCATION": ["redis://a"]}, "['LOCATION'][0] names no port. That of a sentinel is"),
        ({"LOCATION": ["unix:///a"]}, "['LOCATION'][0] names no port"),
        ({"LOCATION": ["redis://a:1", "a:2"]}, "['LOCATION'][1] is not a URL"),
        ({"LOCATION": ["redis://a:1", "redis://a:1"]}, "['LOCATION'][1] names a:1 twice"),
        ({"LOCATION": ["redis://a:1/2"]}, "['LOCATION'][0] names a database"),
        ({"LOCATION": ["redis://a:1?soket=2"]}, "['LOCATION'][0] has an option that redis-py"),
        ({"OPTIONS": {}}, "['OPTIONS']['service_name'] must be what the sentinels call"),
        ({"OPTIONS": {"service_name": 7}}, "['OPTIONS']['service_name'] must be"),
    ],
)
def test_what_cannot_be_a_setting_of_sentinels_is_refused(settings, wrong, says):
    settings.REDISLOCK = {"default": {**SENTINELS, **wrong}}
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith("REDISLOCK['default']")


def test_sentinels_without_a_location_are_told_what_it_looks_like(settings):
    settings.REDISLOCK = {"default": {**SENTINELS, "LOCATION": ()}}
    with pytest.raises(ImproperlyConfigured, match="LOCATION"):
        distributed_lock("lottery").acquire()
    setting = {key: value for key, value in SENTINELS.items() if key != "LOCATION"}
    settings.REDISLOCK = {"default": setting}
    with pytest.raises(ImproperlyConfigured, match=r"Add 'LOCATION': .'redis://host-1:26379'"):
        distributed_lock("lottery").acquire()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "a"}, "['host']: the sentinels say where the servers are"),
        ({"ssl": "yes"}, "['ssl'] must be True or False, not 'yes'"),
        ({"ssl_ca_certs": "/ca"}, "['ssl_ca_certs'] is for TLS"),
        ({"sentinels": []}, " has an option that redis-py does not accept"),
        ({"db": -1}, "['db'] must be an integer"),
        ({"socket_timeout": 0}, "['socket_timeout'] must be a positive number"),
        ({"sentinel_kwargs": "x"}, "['sentinel_kwargs'] must be a dictionary"),
        ({"sentinel_kwargs": {"db": 1}}, "['sentinel_kwargs']['db']: a sentinel has no databases"),
        ({"sentinel_kwargs": {"ssl": True}}, "['sentinel_kwargs']['ssl']: write rediss://"),
        ({"sentinel_kwargs": {"host": "a"}}, "['sentinel_kwargs']['host']: LOCATION says"),
        ({"sentinel_kwargs": {"soket": 1}}, "['sentinel_kwargs'] has an option that redis-py"),
    ],
)
def test_options_of_sentinels_that_cannot_be_are_refused(settings, options, says):
    settings.REDISLOCK = {"default": {**SENTINELS, "OPTIONS": {**SENTINELS["OPTIONS"], **options}}}
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith("REDISLOCK['default']['OPTIONS']")


def test_a_list_for_one_server_says_which_backend_takes_it(settings):
    settings.REDISLOCK = {"default": {"LOCATION": ["redis://a:26379"]}}
    with pytest.raises(ImproperlyConfigured, match=r"django_redislock\.backends\.SentinelBackend"):
        distributed_lock("lottery").acquire()


def test_an_address_of_sentinels_is_the_service_and_where_they_are(settings):
    secret = {**SENTINELS, "LOCATION": ["redis://:secret@a:26379", "redis://b:26379"]}
    settings.REDISLOCK = {"default": secret}
    assert conf.conf("default").address == "mymaster, of the sentinels a:26379, b:26379"


# --- a quorum ------------------------------------------------------------------------------------

QUORUM = {
    "BACKEND": "django_redislock.backends.QuorumBackend",
    "LOCATION": ["redis://a:6379/0", "redis://b", "unix:///c"],
}


def test_the_servers_of_a_quorum_have_the_same_options(settings):
    options = {"password": "secret", "socket_timeout": 2, "max_connections": 10}
    settings.REDISLOCK = {"default": {**QUORUM, "OPTIONS": options}}
    backend = backends["default"]
    assert isinstance(backend, QuorumBackend)
    assert backend.operation_timeout(60) == 2
    assert [server.name for server in backend.quorum] == ["a:6379", "b:6379", "/c"]
    for server in backend.quorum:
        dialer = server.dialer
        assert dialer._sync_class(**dialer._sync).password == "secret"


def test_a_server_of_a_quorum_has_a_time_that_is_small_against_the_ttl(settings):
    settings.REDISLOCK = {"default": QUORUM}
    assert [backends["default"].operation_timeout(ttl) for ttl in (2, 30)] == [0.2, 0.5]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"LOCATION": "redis://a"}, "['LOCATION'] must be a list of an odd number of servers"),
        ({"LOCATION": ["redis://a"]}, "at least 3, such as ['redis://host-1:6379/0',"),
        ({"LOCATION": ["redis://a", "redis://b"]}, "not of 2. With an even number"),
        ({"LOCATION": [f"redis://{letter}" for letter in "abcd"]}, "not of 4. With an even number"),
        (
            {"LOCATION": ["redis://a", "redis://b", "redis://A:6379/2"]},
            "['LOCATION'][2] names a:6379 twice, also with another database",
        ),
        ({"LOCATION": ["redis://a", "b", "redis://c"]}, "['LOCATION'][1] is not a URL"),
        ({"REPLICAS_ACK": 1}, "['REPLICAS_ACK'] must be 0"),
        ({"OPTIONS": {"max_connections": 1}}, "['OPTIONS']['max_connections'] must be an integer"),
        ({"OPTIONS": {"socket_timeout": 0}}, "['OPTIONS']['socket_timeout'] must be a positive"),
        ({"OPTIONS": {"soket": 1}}, "['OPTIONS'] has an option that redis-py does not accept"),
    ],
)
def test_what_cannot_be_a_setting_of_a_quorum_is_refused(settings, wrong, says):
    settings.REDISLOCK = {"default": {**QUORUM, **wrong}}
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)) as raised:
        distributed_lock("lottery").acquire()
    assert str(raised.value).startswith("REDISLOCK['default']")


def test_a_list_for_one_server_says_which_backends_take_it(settings):
    settings.REDISLOCK = {"default": {"LOCATION": ["redis://a:6379"]}}
    with pytest.raises(ImproperlyConfigured, match="QuorumBackend"):
        distributed_lock("lottery").acquire()


# --- clusters ------------------------------------------------------------------------------------

CLUSTER = {
    "BACKEND": "django_redislock.backends.ClusterBackend",
    "LOCATION": ["redis://a:7000", "redis://b:7000", "redis://[::1]:7000"],
}


@pytest.mark.parametrize("location", [CLUSTER["LOCATION"], "redis://a:7000", "redis://a:7000/0"])
def test_a_cluster_is_named_by_one_of_its_nodes_or_more(settings, location):
    settings.REDISLOCK = {"default": {**CLUSTER, "LOCATION": location}}
    assert isinstance(backends["default"], ClusterBackend)


@pytest.mark.parametrize(
    ("location", "options", "database"),
    [
        (["redis://a", "redis://b/0"], {}, 0),
        (["redis://a/10", "redis://b/10/"], {}, 10),
        ("redis://a?db=3", {}, 3),
        ("redis://a", {"db": 3}, 3),
    ],
)
def test_all_nodes_of_a_cluster_are_asked_for_the_database_that_is_named(
    settings, location, options, database
):
    settings.REDISLOCK = {"default": {**CLUSTER, "LOCATION": location, "OPTIONS": options}}
    backend = backends["default"]
    assert isinstance(backend, ClusterBackend)
    for node in (backend._dialer_to("10.0.0.1:6379"), backend._dialer_to(backend._location[0])):
        assert (node._sync.get("db", 0), node._async.get("db", 0)) == (database, database)


def test_options_and_what_stands_in_the_url_are_for_all_nodes(settings):
    location = [f"rediss://scott:tiger@{host}:7000?socket_timeout=2" for host in "ab"]
    options = {"ssl_ca_certs": "/nodes.crt", "max_connections": 10}
    settings.REDISLOCK = {"default": {**CLUSTER, "LOCATION": location, "OPTIONS": options}}
    backend = backends["default"]
    assert isinstance(backend, ClusterBackend)
    assert backend.operation_timeout(60) == 2
    for address, host in (("10.0.0.1:6379", "10.0.0.1"), ("[::2]:6379", "::2")):
        node = backend._dialer_to(address)
        connection = node._sync_class(**node._sync)
        assert (connection.host, connection.port, connection.db) == (host, 6379, 0)
        assert (connection.username, connection.password) == ("scott", "tiger")
        assert connection.ca_certs == "/nodes.crt"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"LOCATION": ()}, r"\['LOCATION'\] must be"),
        ({"LOCATION": ["redis://a", "redis://b/3"]}, r"\[1\] differs from the first one in more"),
        ({"LOCATION": "unix:///run/redis.sock"}, r"\['LOCATION'\] is a socket, but nodes of a"),
        ({"LOCATION": "redis+cluster://a"}, "LOCATION.*is no URL.*for a cluster use ClusterB"),
        (
            {"LOCATION": ["redis://a:6379", "redis://a"]},
            r"\[1\] names a:6379 twice; name each once",
        ),
        (
            {"LOCATION": ["redis://a", "rediss://b"]},
            r"\[1\] differs from the first one in more than",
        ),
        ({"LOCATION": ["redis://:x@a", "redis://:y@b"]}, r"\[1\] differs from the first one"),
        ({"OPTIONS": {"port": 7000}}, r"\['port'\]: LOCATION says where its nodes are; leave"),
        ({"OPTIONS": {"host": "a"}}, r"\['host'\]: LOCATION says where its nodes are; leave"),
        ({"OPTIONS": {"path": "/x"}}, r"\['path'\]: LOCATION says where its nodes are; leave"),
        (
            {"OPTIONS": {"max_connections": 1}},
            r"\['max_connections'\] must be an integer of at least",
        ),
        ({"OPTIONS": {"socket_timeout": 0}}, r"\['socket_timeout'\] must be a positive number"),
        ({"OPTIONS": {"protocol": 2}}, r"\['OPTIONS'\]\['protocol'\] must be 3, not 2: RESP2 is"),
        ({"OPTIONS": {"colour": 1}}, r"\['OPTIONS'\] has an option that redis-py does not accept"),
        ({"KEY_PREFIX": "a{b"}, r"\['KEY_PREFIX'\] must have no braces"),
    ],
    ids=str,
)
def test_what_a_cluster_cannot_be_reached_by_is_refused_at_check_time(settings, options, says):
    settings.REDISLOCK = {"default": {**CLUSTER, **options}}
    (error,) = [one for one in check_settings() if one.id != "django_redislock.W006"]
    assert re.search(says, error.msg), error.msg
    assert "tiger" not in error.msg


def test_a_cluster_without_location_is_told_what_to_write(settings):
    settings.REDISLOCK = {"default": {"BACKEND": CLUSTER["BACKEND"]}}
    with pytest.raises(ImproperlyConfigured, match=r"no node is named. Add 'LOCATION': \['redis"):
        backends["default"]


@pytest.mark.parametrize(
    ("location", "says"),
    [
        (["redis://a:7000", "redis://b:7000"], "one of nodes of a cluster for ClusterBackend"),
        ("redis+cluster://a:7000", "for a cluster use ClusterBackend"),
    ],
)
def test_redis_backend_says_what_a_cluster_needs(settings, location, says):
    settings.REDISLOCK = {"default": {"LOCATION": location}}
    with pytest.raises(ImproperlyConfigured, match=says):
        backends["default"]
