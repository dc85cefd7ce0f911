"""The REDISLOCK setting: what is wrong is named, with the key; changes take effect at once."""

import math
import re
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis import CredentialProvider

from django_redislock import LockUnavailable, conf, distributed_lock, held
from django_redislock.backends import RedisBackend, registry
from django_redislock.backends.registry import backends, make
from django_redislock.testing import IN_MEMORY
from tests.support.matrix import everywhere
from tests.support.others import held_by_other
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

NODES = ["redis://a:7000", "redis://b:7000", "redis://[::1]:7000"]


def at(backend, default, location=None, **options):
    """The setting of an alias."""
    return {
        "BACKEND": f"django_redislock.backends.{backend}",
        "LOCATION": default if location is None else location,
        "OPTIONS": options,
    }


one = partial(at, "RedisBackend", "redis://a")
tls = partial(at, "RedisBackend", "rediss://a")
watching = [f"redis://{host}:26379" for host in "ab"]
sentinels = partial(at, "SentinelBackend", watching, service_name="mymaster")
quorum = partial(at, "QuorumBackend", ["redis://a:6379/0", "redis://b", "unix:///c"])
cluster = partial(at, "ClusterBackend", NODES)
KINDS = (one, sentinels, quorum, cluster)


def made(settings, setting):
    """The backend of that setting."""
    settings.REDISLOCK = {"default": setting}
    return backends["default"]


def dialed(dialer):
    """The connection that it would open."""
    return dialer._sync_class(**dialer._sync)


# --- defaults ------------------------------------------------------------------------------------


def test_everything_but_the_server_has_a_default(settings):
    assert isinstance(made(settings, {"LOCATION": "redis://a"}), RedisBackend)
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


GIVEN_AND_READ = {
    "BACKEND": ("django_redislock.backends.InMemoryBackend",) * 2,
    "LOCATION": (["redis://a", "redis://b"], ("redis://a", "redis://b")),
    "OPTIONS": ({"socket_timeout": 1}, {"socket_timeout": 1}),
    "KEY_PREFIX": ("jobs", "jobs"),
    "TTL": (timedelta(minutes=1), 60.0),
    "WAIT": (math.inf, math.inf),
    "RENEW": (False, False),
    "MAX_HOLD": (3600, 3600.0),
    "REPLICAS_ACK": (2, 2),
    "UNAVAILABLE_AFTER": (math.inf, math.inf),
    "LONGEST_RETRY_AFTER": (timedelta(minutes=5), 300.0),
    "TIMELINE": (100, 100),
}


def test_every_key_is_read(settings):
    settings.REDISLOCK = {"jobs": {key: given for key, (given, _) in GIVEN_AND_READ.items()}}
    read = {key.lower(): read for key, (_, read) in GIVEN_AND_READ.items()}
    assert conf.conf("jobs") == conf.Conf(alias="jobs", **read)
    assert conf.aliases() == ["jobs"]


# --- what is wrong -------------------------------------------------------------------------------


def refused(settings, setting):
    """Why no lock of the alias "jobs" can be taken."""
    settings.REDISLOCK = {"jobs": setting}
    with pytest.raises(ImproperlyConfigured) as raised:
        distributed_lock("lottery", using="jobs").acquire()
    return raised.value


WRONG = {
    "TTL": {
        "at least 0.05 seconds": [0, -1, 0.049, math.nan],
        "number of seconds": ["30", True, None],
        "at most": [math.inf],
    },
    "WAIT": {"0 or more seconds": [-1], "number of seconds": ["10"]},
    "RENEW": {"True or False": [1, None]},
    "MAX_HOLD": {"at least 0.05 seconds": [0, 0.049], "number of seconds": ["1h"]},
    "UNAVAILABLE_AFTER": {"0 or more seconds": [-1], "number of seconds": ["5"]},
    "LONGEST_RETRY_AFTER": {"at least 1 seconds": [0.9], "number of seconds": [None]},
    "TIMELINE": {"10 to 1000, not": [0, 9, 1001, 40.0, True, None]},
    "REPLICAS_ACK": {"0 to 100": [-1, 1.5, True]},
    "RELEASE_BEFORE_COMMIT": {"one of 'warn', 'ignore'": ["raise", "", None, True, ["warn"]]},
    "KEY_PREFIX": {
        "non-empty string": ["", 7],
        "no braces, glob characters, bars or white space": ["a{b}", "a*", "a b", "a|b"],
    },
    "LOCATION": {"be a URL": ["", None, 6379, [], [6379]]},
    "OPTIONS": {"dictionary": [[], {1: 2}]},
    "BACKEND": {"non-empty string": ["", 7]},
}


@pytest.mark.parametrize(
    ("key", "rule", "value"),
    [
        pytest.param(key, rule, value, id=f"{key}={value!r}")
        for key, rules in WRONG.items()
        for rule, values in rules.items()
        for value in values
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_the_rule(settings, key, rule, value):
    says = str(refused(settings, {key: value}))
    assert says.startswith(f"REDISLOCK['jobs']['{key}'] must")
    assert rule in says


TIMEOUT = "['OPTIONS']['socket_timeout'] must be a positive number"
MOST = "['OPTIONS']['max_connections'] must be an integer of at least 4"
RESP = "['protocol'] must be 3, or 2 for a proxy that does not speak RESP3, not"
NO_TLS = "is for TLS: leave it out, or let LOCATION begin with rediss://"
UNKNOWN = "['OPTIONS'] has an option that redis-py does not accept"
NUMBER = "['OPTIONS']['{}'] must be an integer"
DIFFERS = "['LOCATION'][1] differs from the first one in more"
REFUSED = [
    ({"TIMEOUT": 30, "ttl": 30}, " has unknown keys: TIMEOUT, ttl. Known are: ... TTL"),
    ({**IN_MEMORY, "REPLICAS_ACK": 1}, "['REPLICAS_ACK'] ... InMemoryBackend"),
    ({"BACKEND": "not.there.Backend"}, "['BACKEND'] ... cannot be imported"),
    ({"BACKEND": "django_redislock.conf.Conf"}, "['BACKEND'] ... Conf"),
    ({"BACKEND": "django_redislock.backends.base.Backend"}, "['BACKEND'] ... no backend"),
    # All of them.
    *((kind(socket_timeout=wrong), TIMEOUT) for kind in KINDS for wrong in (0, True)),
    *((kind(max_connections=wrong), MOST) for kind in KINDS for wrong in (3, "9")),
    *((kind(sokket=1), f"{UNKNOWN} ... sokket") for kind in KINDS),
    *((kind(()), "['LOCATION'] must be a URL") for kind in KINDS),
    # One server.
    (one("redis://a?socket_timeout=-1"), "['LOCATION']: socket_timeout ... positive"),
    (one("redis://a?socket_timeout=nan"), "['LOCATION']: socket_timeout ... positive"),
    (one("redis://a?socket_timeout=2s"), "['LOCATION'] ... 'socket_timeout'"),
    (one("redis://a?sokket=2"), "['LOCATION'] ... 'sokket'"),
    (
        one(credential_provider=CredentialProvider(), password="a"),
        "['LOCATION'] ... cannot be passed",
    ),
    (tls(ssl_cert_reqs="a"), "['LOCATION'] with OPTIONS ... Flag: a"),
    (tls(ssl_min_version="TLSv1_3"), "['OPTIONS']['ssl_min_version'] ... not 'TLSv1_3'"),
    (tls(ssl_min_version=13), "['OPTIONS']['ssl_min_version'] ... Version, not 13"),
    (tls(ssl_ciphers="none"), "['OPTIONS']['ssl_ciphers'] ... takes it, not 'none'"),
    (tls(ssl_keyfile="/a.key"), "['OPTIONS']['ssl_keyfile'] needs ['ssl_certfile']"),
    (tls(ssl_ca_certs=1), "['OPTIONS']['ssl_ca_certs'] must be a path, not 1"),
    (tls(ssl_password=1), "['OPTIONS']['ssl_password'] ... a string, not int"),
    (
        tls(ssl_include_verify_flags=4),
        "['OPTIONS']['ssl_include_verify_flags'] ... a list ... not 4",
    ),
    (one("redis://a?protocol=1"), f"['LOCATION']{RESP} 1"),
    (one("redis://a?protocol=x"), "['LOCATION'] ... 'protocol'"),
    (one(["redis://a:26379"]), "['LOCATION'] ... django_redislock.backends.SentinelBackend"),
    (one(["redis://a:6379"]), "['LOCATION'] ... one server ... QuorumBackend"),
    (one(NODES), "['LOCATION'] ... one of nodes of a cluster for ClusterBackend"),
    *((one(protocol=wrong), f"['OPTIONS']{RESP} {wrong!r}") for wrong in (4, "2", True)),
    # Options do not lead elsewhere.
    *((one(db=wrong), NUMBER.format("db")) for wrong in (-1, 2**31 + 1, True, "x")),
    *((one(port=wrong), NUMBER.format("port")) for wrong in (0, 65536)),
    (sentinels(db=-1), NUMBER.format("db")),
    *(
        (cluster(**{option: "a"}), f"['OPTIONS']['{option}']: LOCATION says where its nodes are")
        for option in ("host", "port", "path")
    ),
    (one(host="b"), "['OPTIONS']['host'] contradicts LOCATION"),
    (one("redis://a:1", port=2), "['OPTIONS']['port'] contradicts LOCATION"),
    (one("redis://a/1", db=2), "['OPTIONS']['db'] contradicts LOCATION"),
    (one("unix:///a", path="/b"), "['OPTIONS']['path'] contradicts LOCATION"),
    (one(ssl_ca_certs="/ca"), f"['OPTIONS']['ssl_ca_certs'] {NO_TLS}"),
    (one(ssl=True), f"['OPTIONS']['ssl'] {NO_TLS}"),
    (one("unix:///a", ssl_keyfile="/k"), f"['OPTIONS']['ssl_keyfile'] {NO_TLS}"),
    # Sentinels.
    ({"BACKEND": sentinels()["BACKEND"]}, " ... Add 'LOCATION': ['redis://host-1:26379'"),
    (sentinels("redis://a:26379"), "['LOCATION'] must be a list of the addresses"),
    (sentinels(["redis://a"]), "['LOCATION'][0] names no port. That of a sentinel is"),
    (sentinels(["unix:///a"]), "['LOCATION'][0] names no port"),
    (sentinels(["redis://a:1", "a:2"]), "['LOCATION'][1] is not a URL"),
    (sentinels(["redis://a:1", "redis://a:1"]), "['LOCATION'][1] names a:1 twice"),
    (sentinels(["redis://a:1/2"]), "['LOCATION'][0] names a database"),
    (sentinels(["redis://a:1?soket=2"]), "['LOCATION'][0] has an option that redis-py"),
    ({**sentinels(), "OPTIONS": {}}, "['OPTIONS']['service_name'] must be what the senti"),
    (sentinels(service_name=7), "['OPTIONS']['service_name'] must be"),
    (sentinels(host="a"), "['OPTIONS']['host']: the sentinels say where the servers are"),
    (sentinels(ssl="yes"), "['OPTIONS']['ssl'] must be True or False, not 'yes'"),
    (sentinels(ssl_ca_certs="/ca"), "['OPTIONS']['ssl_ca_certs'] is for TLS"),
    *(
        (sentinels(sentinel_kwargs=options), f"['OPTIONS']['sentinel_kwargs']{says}")
        for options, says in (
            ("x", " must be a dictionary"),
            ({"db": 1}, "['db']: a sentinel has no databases"),
            ({"ssl": True}, "['ssl']: write rediss://"),
            ({"host": "a"}, "['host']: LOCATION says"),
            ({"soket": 1}, " has an option that redis-py"),
        )
    ),
    # A quorum.
    (quorum("redis://a"), "['LOCATION'] must be a list of an odd number of servers"),
    (quorum(["redis://a"]), "['LOCATION'] ... at least 3, such as ['redis://host-1:6379/0',"),
    (quorum(["redis://a", "redis://b"]), "['LOCATION'] ... not of 2. With an even number"),
    (quorum([f"redis://{name}" for name in "abcd"]), "['LOCATION'] ... not of 4. With an even"),
    (
        quorum(["redis://a", "redis://b", "redis://A:6379/2"]),
        "['LOCATION'][2] names a:6379 twice, also",
    ),
    (quorum(["redis://a", "b", "redis://c"]), "['LOCATION'][1] is not a URL"),
    ({**quorum(), "REPLICAS_ACK": 1}, "['REPLICAS_ACK'] must be 0"),
    # A cluster.
    ({"BACKEND": cluster()["BACKEND"]}, " ... no node is named. Add 'LOCATION': ['redis"),
    (cluster(["redis://a", "redis://b/3"]), DIFFERS),
    (cluster(["redis://a", "rediss://b"]), DIFFERS),
    (cluster(["redis://:x@a", "redis://:y@b"]), DIFFERS),
    (cluster("unix:///run/redis.sock"), "['LOCATION'] is a socket, but nodes of a"),
    (cluster("redis+cluster://a"), "['LOCATION'] is no URL ... for a cluster use ClusterB"),
    (cluster(["redis://a:6379", "redis://a"]), "['LOCATION'][1] names a:6379 twice; name each"),
    (cluster(protocol=2), "['OPTIONS']['protocol'] must be 3, not 2: RESP2 is"),
    ({**cluster(), "KEY_PREFIX": "a{b"}, "['KEY_PREFIX'] must have no braces"),
]


@pytest.mark.parametrize(("setting", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_the_backend_cannot_use_is_named_with_its_key(settings, setting, says):
    begins, *rest = map(re.escape, says.split(" ... "))
    pattern = ".*".join([rf"REDISLOCK\['jobs'\]{begins}", *rest])
    assert re.match(pattern, str(refused(settings, setting)))


# What redis-py would pass over, and so use its default for: this machine, 6379, database 0.
UNCLEAR = {
    "is no database": [f"redis://a/{one}" for one in ("abc", "-1", "0/1", "1.5", "\u0661")],
    "a db after the ? that must be the number of a database": ["redis://a?db=-1", "redis://a?db=x"],
    "must be the number of a database": ["unix:///run/redis.sock?db=x"],
    "a database twice": ["redis://a/1?db=2"],
    "after the ? that is for TLS: leave it out": ["redis://a?ssl_ca_certs=/ca"],
    "twice": ["redis://a?db=1&db=2"],
    "without a value": ["redis://a?db="],
    "name=value": ["redis://a?db"],
    "%23": ["redis://a/0#1", "redis://:pa#ss@a/0"],
    "names no host; in a password, write / as %2F": ["redis://:pa/ss@a/0"],
    "port of 1 to 65535": [f"redis://a:{port}/0" for port in ("0", "65536", "-1", "", "port")],
    "a host that is malformed": [
        "redis://a..internal:6379/0",
        f"redis://{'a' * 64}.internal:6379/0",
        "redis://[::1/0",
    ],
    "names no host": ["redis:///0", "redis://:6379/0", "rediss://:secret@/0"],
    "unix:///path": ["unix://run/redis.sock", "unix:///"],
    "not a URL": ["redis://", "redis:a", "REDIS://a", "a:6379", "localhost:6379"],
    "must begin with redis://": ["valkey://a"],
    # Of other backends.
    "leads to Sentinel: use SentinelBackend": [
        "redis+sentinel://a:26379/primary/0",
        "sentinel://a:26379",
    ],
    "for a cluster use ClusterBackend": ["redis+cluster://a:7000"],
    "names several hosts; name one, the primary; for a cluster": ["redis://a:7000,b:7000/0"],
}


@pytest.mark.parametrize(
    ("location", "says"),
    [(location, says) for says, locations in UNCLEAR.items() for location in locations],
    ids=[location for locations in UNCLEAR.values() for location in locations],
)
def test_no_part_of_an_address_is_passed_over(settings, location, says):
    error = refused(settings, {"LOCATION": location})
    assert str(error).startswith("REDISLOCK['jobs']['LOCATION'] ")
    assert says in str(error)
    assert error.__cause__ is None  # It could quote a password.
    assert error.__suppress_context__


# Each would be a lock that all machines see, and be one on each machine instead.
NOWHERE = [
    ({}, "has no alias 'default'. Known are: none. Name the server"),
    ({"locks": one()}, "no alias 'default'. Known are: 'locks'"),
    ({"default": {}}, "REDISLOCK['default'] has no LOCATION"),
    ({"default": {"TTL": 20}}, "REDISLOCK['default'] has no LOCATION"),
    (
        {"LOCATION": "redis://a"},
        "put it one level deeper: REDISLOCK = {'default': {'LOCATION': ...}}.",
    ),
    (
        {"default": {"LOCATION": "redis://a"}, "OPTIONS": {"db": 1}},
        "REDISLOCK['OPTIONS'] stands where the name of an alias should",
    ),
    ({1: {"LOCATION": "redis://a"}}, "is a string, not 1"),
    *((wrong, "REDISLOCK must be a dictionary of aliases") for wrong in (None, [], "redis://a")),
    *(
        ({"default": wrong}, "REDISLOCK['default'] must be a dictionary")
        for wrong in (None, [], "redis://a")
    ),
]


@pytest.mark.parametrize(("setting", "says"), NOWHERE, ids=[f"{setting}" for setting, _ in NOWHERE])
def test_a_setting_that_names_no_server_never_leads_to_this_machine(settings, setting, says):
    settings.DEBUG = False
    settings.REDISLOCK = setting
    with pytest.raises(ImproperlyConfigured, match=re.escape(says)):
        distributed_lock("lottery", wait=0).acquire()


def test_nor_does_none_at_all_unless_the_project_is_debugged(settings):
    del settings.REDISLOCK
    settings.DEBUG = False
    with pytest.raises(ImproperlyConfigured, match="is not set, and DEBUG is off"):
        distributed_lock("lottery", wait=0).acquire()
    settings.DEBUG = True
    assert conf.aliases() == ["default"]
    assert conf.conf("default").location == "redis://127.0.0.1:6379/0"
    with pytest.raises(ImproperlyConfigured, match="has no alias 'jobs'"):
        conf.conf("jobs")


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


# --- where it leads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "options", "host", "port", "db"),
    [
        ("redis://a", {}, "a", 6379, 0),
        ("redis://a/", {}, "a", 6379, 0),
        ("redis://a:1/15", {}, "a", 1, 15),
        ("redis://a?db=3", {}, "a", 6379, 3),
        ("rediss://u:p,%23%40@a.example:65535/1?socket_timeout=1", {}, "a.example", 65535, 1),
        ("redis://[::1]:6380/2", {}, "::1", 6380, 2),
        ("redis://:@a/1", {}, "a", 6379, 1),
        # What the address does not say.
        ("redis://a", {"db": 0, "port": 1}, "a", 1, 0),
        ("redis://a", {"db": 2**31, "port": 65535}, "a", 65535, 2**31),
    ],
)
def test_an_address_leads_where_it_says(settings, location, options, host, port, db):
    connection = dialed(made(settings, one(location, **options))._dialer)
    assert (connection.host, connection.port, connection.db) == (host, port, db)


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("redis://web:6380/0", "web:6380"),
        ("redis://web", "web:6379"),
        ("rediss://scott:tiger@web:6380/1?socket_timeout=3", "web:6380"),
        ("redis://:tiger@[::1]:6380", "[::1]:6380"),
        ("unix:///run/redis.sock?password=tiger", "/run/redis.sock"),
        ("unix://:tiger@/run/redis.sock", "/run/redis.sock"),
        (["redis://:tiger@a", "redis://b:2"], "a:6379, b:2"),
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
    watched = conf.Conf(alias="default", location=location, options={"service_name": "mymaster"})
    assert watched.address == f"mymaster, of the sentinels {address}"


def test_what_the_library_decides_cannot_be_changed_by_the_address(locks):
    locks.configure(LOCATION=f"{locks.server.url}?retry_on_timeout=yes&health_check_interval=1")
    with held_by_other("lottery"):
        assert distributed_lock("lottery", wait=0.1).acquire() is False
    dialer = backends["default"]._dialer
    for options in (dialer._sync, dialer._async):
        assert options["retry_on_timeout"] is False
        assert options["health_check_interval"] == 0


@pytest.mark.parametrize(
    ("setting", "ttl", "seconds"),
    [
        (one(), 9, 3),  # A third of the ttl.
        (one(socket_timeout=2), 9, 2),
        (one("redis://a?socket_timeout=0.5"), 9, 0.5),
        (one("redis://a?socket_timeout=0.5", socket_timeout=2), 9, 0.5),
        (sentinels(socket_timeout=2), 60, 2),
        (cluster([f"{node}?socket_timeout=2" for node in NODES]), 60, 2),
        (quorum(socket_timeout=2), 60, 2),
        (quorum(), 2, 0.2),  # Of several servers, each has little time.
        (quorum(), 30, 0.5),
    ],
)
def test_the_operation_timeout_is_that_of_the_url_or_of_the_options(
    settings, setting, ttl, seconds
):
    assert made(settings, setting).operation_timeout(ttl) == seconds


@pytest.mark.proves("R5")
def test_the_operation_timeout_in_the_url_bounds_a_call(locks, proxy):
    locks.on(proxy).configure(LOCATION=f"{proxy.url}?socket_timeout=0.2", TTL=60, WAIT=0)
    proxy.blackhole()
    begin = time.monotonic()
    with pytest.raises(LockUnavailable):
        distributed_lock("lottery").acquire()
    assert time.monotonic() - begin < 6  # Two tries and an undo; by default it would be 10 s.


def test_sentinels_and_their_servers_have_options_of_their_own(settings):
    location = [f"rediss://{host}:26379" for host in "abc"]
    of_sentinels = {"password": "of-sentinels", "ssl_ca_certs": "/sentinels.crt"}
    of_servers = {"password": "of-data", "db": 3, "ssl": True, "ssl_ca_certs": "/data.crt"}
    setting = sentinels(location, **of_servers, max_connections=10, sentinel_kwargs=of_sentinels)
    backend = made(settings, setting)
    connection = dialed(backend._dialer._dialer_to("10.0.0.1:6379"))
    assert (connection.host, connection.port, connection.db) == ("10.0.0.1", 6379, 3)
    assert (connection.password, connection.ca_certs) == ("of-data", "/data.crt")
    for asking in map(dialed, backend.sentinels._dialers.values()):
        assert (asking.port, asking.db) == (26379, 0)
        assert (asking.password, asking.ca_certs) == ("of-sentinels", "/sentinels.crt")


def test_the_servers_of_a_quorum_have_the_same_options(settings):
    backend = made(settings, quorum(password="secret", max_connections=10))
    assert [server.name for server in backend.quorum] == ["a:6379", "b:6379", "/c"]
    assert {dialed(server.dialer).password for server in backend.quorum} == {"secret"}


@pytest.mark.parametrize(
    ("location", "options", "database"),
    [
        (NODES, {}, 0),
        ("redis://a:7000", {}, 0),
        (["redis://a", "redis://b/0"], {}, 0),
        (["redis://a/10", "redis://b/10/"], {}, 10),
        ("redis://a?db=3", {}, 3),
        ("redis://a", {"db": 3}, 3),
    ],
)
def test_all_nodes_of_a_cluster_are_asked_for_the_database_that_is_named(
    settings, location, options, database
):
    backend = made(settings, cluster(location, **options))
    for node in (backend._dialer_to("10.0.0.1:6379"), backend._dialer_to(backend._location[0])):
        assert (node._sync.get("db", 0), node._async.get("db", 0)) == (database, database)


def test_options_and_what_stands_in_the_url_are_for_all_nodes(settings):
    location = [f"rediss://scott:tiger@{host}:7000" for host in "ab"]
    backend = made(settings, cluster(location, ssl_ca_certs="/nodes.crt", max_connections=10))
    for address, host in (("10.0.0.1:6379", "10.0.0.1"), ("[::2]:6379", "::2")):
        connection = dialed(backend._dialer_to(address))
        assert (connection.host, connection.port, connection.db) == (host, 6379, 0)
        assert (connection.username, connection.password) == ("scott", "tiger")
        assert connection.ca_certs == "/nodes.crt"


# --- aliases -------------------------------------------------------------------------------------


@pytest.mark.no_permit("the bystander is where the default alias is")
def test_an_alias_works_without_a_default_one(place, settings):
    settings.REDISLOCK = {"jobs": place.setting()}
    with distributed_lock("lottery", using="jobs") as lease:
        assert lease.held
        assert held.get("lottery", using="jobs")


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
    first = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": first, "other": {**first, "TTL": 5}}
    with distributed_lock("lottery"):
        assert distributed_lock("lottery", wait=0, using="other").acquire() is False


# --- changes -------------------------------------------------------------------------------------


@both_ways
async def test_a_changed_setting_takes_effect_at_once(way, place):
    lock = distributed_lock("lottery")

    async def ttl():
        async with way.entered(lock) as lease:
            return lease.ttl

    assert await ttl() == 10
    place.configure(TTL=7)
    assert await ttl() == 7
    with override_settings(REDISLOCK={"default": {**place.setting(), "TTL": 8}}):
        assert await ttl() == 8
    backend = backends["default"]
    with override_settings(USE_TZ=False):  # Another setting changes nothing.
        assert backends["default"] is backend
    assert await ttl() == 7


def test_a_backend_that_is_made_while_the_setting_changes_is_not_kept(settings, monkeypatch):
    """Else a thread that is about to take its first lock would leave the former server for all."""
    begun, changed = threading.Event(), threading.Event()

    def slowly(conf):
        backend = make(conf)
        begun.set()
        assert changed.wait(HUNG)
        return backend

    settings.REDISLOCK = {"default": {**IN_MEMORY, "TTL": 5}}
    monkeypatch.setattr(registry, "make", slowly)
    thread = in_thread(lambda: backends["default"].conf.ttl)
    assert begun.wait(HUNG)
    settings.REDISLOCK = {"default": {**IN_MEMORY, "TTL": 7}}
    changed.set()
    assert thread.result(HUNG) == 7
    assert backends["default"].conf.ttl == 7


@pytest.mark.waits
@both_ways
async def test_a_held_lease_stays_with_the_backend_that_granted_it(way, place):
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
        assert held.get("lottery") is None


@pytest.mark.waits
@everywhere
@both_ways
async def test_the_connections_of_a_forgotten_setting_are_closed(way, locks):
    locks.configure(OPTIONS={"client_name": locks.prefix})
    lock = distributed_lock("lottery", ttl=6)
    assert await way.acquire(lock)
    lease = lock.lease
    await way.until(lambda: lease.renewals)  # By the watchdog's own connection.
    locks.configure(OPTIONS={})
    assert lease.held
    await way.release(lock)
    # That of the loop closes with it.
    left = 0 if way.name == "sync" else 1
    await way.until(lambda: locks.connections() == left)
