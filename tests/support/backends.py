"""The places that keep locks: a server of each kind; one that forbids scripts; one by its socket;
one by TLS, for a user with the fewest rights; one that speaks RESP2 only; the memory; a master
that sentinels watch; a cluster; a quorum of three.

tests/support/matrix.py says which of them a test runs in.
"""

from abc import ABC, abstractmethod

import pytest

from django_redislock import held
from django_redislock.backends.memory.backend import InMemoryBackend
from django_redislock.backends.registry import backends
from django_redislock.doctor import minimal_acl
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.testing import IN_MEMORY
from tests.conftest import Locks, skip_or_fail
from tests.support.matrix import (
    CLUSTER,
    MEMORY,
    QUORUM,
    RESP2,
    SECURED,
    SENTINEL,
    SOCKET,
    UNSCRIPTED,
)
from tests.support.servers import (
    KIND,
    KINDS,
    Server,
    made_once,
    missing,
)
from tests.support.waiting import HUNG


class Place(ABC):
    """Where the locks of a test are kept: REDISLOCK is set to it."""

    @abstractmethod
    def configure(self, **options):
        """Change settings of the default alias, and keep the others."""

    @abstractmethod
    def lose_data(self):
        """Let the server lose all that it keeps."""

    @abstractmethod
    def lapse(self, name):
        """Let the lease of a lock end on the server before its time."""

    @abstractmethod
    def write(self, name, value, seconds=60.0):
        """Let the key of a lock hold what another program has written."""

    @abstractmethod
    def read(self, name):
        """What the key of a lock holds; "" if there is none."""

    def force_release(self, lease):
        """Let an operator free the lock."""
        assert held.force_release(lease.name, lease.id)

    @abstractmethod
    def setting(self):
        """Return the setting of the default alias."""

    def keys(self):
        """Return the keys on the server; none where there are no keys."""
        return []


class ServerPlace(Place):
    """A backend on a real server."""

    def __init__(self, name, locks, options):
        self.name = name
        self.locks = locks
        self._options = {**PATIENT, **options}
        self.configure(OPTIONS={}, **DEFAULTS)

    def on(self, target, **options):
        """Reach the server by another address, such as a proxy's."""
        self.locks.on(target, OPTIONS=self._options, **{**DEFAULTS, **options})

    def configure(self, **options):
        if "OPTIONS" in options:
            options["OPTIONS"] = {**self._options, **options["OPTIONS"]}
        self.locks.configure(**options)

    def lose_data(self):
        if keys := self.locks.keys():
            self.locks.redis.delete(*keys)

    def lapse(self, name):
        self.locks.redis.delete(lock_keys(self.locks.prefix, name).lock)

    def write(self, name, value, seconds=60.0):
        _write(self.locks, name, value, seconds)

    def read(self, name):
        return _read(self.locks, name)

    def force_release(self, lease):
        if self.name != UNSCRIPTED:
            return super().force_release(lease)
        # Of those who may run scripts.
        keys = scripts.FORCE_RELEASE.given(lock_keys(self.locks.prefix, lease.name))
        args = lease.id, lease.id, ""  # The id of the request has as many digits.
        self.locks.redis.eval(scripts.FORCE_RELEASE.source, len(keys), *keys, *args)
        return None

    def setting(self):
        return dict(self.locks._settings.REDISLOCK["default"])

    def keys(self):
        return self.locks.keys()


class MemoryPlace(Place):
    """The in-memory backend."""

    name = MEMORY

    def __init__(self, settings):
        self._settings = settings
        settings.REDISLOCK = {"default": {**IN_MEMORY, **DEFAULTS}}

    def configure(self, **options):
        self._settings.REDISLOCK = {"default": {**self.setting(), **options}}

    def lose_data(self):
        self._interpreter().clear()

    def lapse(self, name):
        self._perform(name, "DEL")

    def write(self, name, value, seconds=60.0):
        self._perform(name, "SET", value, "PX", round(seconds * 1000))

    def read(self, name):
        return (self._perform(name, "GET") or b"").decode()

    def _perform(self, name, command, *args):
        backend = backends["default"]
        assert isinstance(backend, InMemoryBackend)
        key = lock_keys(backend.prefix, name).lock
        return backend.interpreter.perform(command, key, *args, us=backend._us)

    def _interpreter(self):
        backend = backends["default"]
        assert isinstance(backend, InMemoryBackend)
        return backend.interpreter

    def setting(self):
        return dict(self._settings.REDISLOCK["default"])


class QuorumPlace(Place):
    """Three servers that know nothing of each other."""

    name = QUORUM

    def __init__(self, settings, servers, prefix):
        self.locks = [Locks(settings, server, prefix) for server in servers]
        self._settings = settings
        settings.REDISLOCK = {
            "default": {
                "BACKEND": "django_redislock.backends.QuorumBackend",
                "LOCATION": [server.url for server in servers],
                "KEY_PREFIX": prefix,
                "OPTIONS": PATIENT,
                **DEFAULTS,
            }
        }

    def configure(self, **options):
        self._settings.REDISLOCK = {"default": {**self.setting(), **options}}

    def lose_data(self):
        for locks in self.locks:
            if keys := locks.keys():
                locks.redis.delete(*keys)

    def lapse(self, name):
        for locks in self.locks:
            locks.redis.delete(lock_keys(locks.prefix, name).lock)

    def write(self, name, value, seconds=60.0):
        for locks in self.locks:
            _write(locks, name, value, seconds)

    def read(self, name):
        return _read(self.locks[0], name)

    def setting(self):
        return dict(self._settings.REDISLOCK["default"])

    def keys(self):
        found = [locks.keys() for locks in self.locks]
        return sorted({key for keys in found for key in keys})


def _write(locks, name, value, seconds):
    locks.redis.set(lock_keys(locks.prefix, name).lock, value, px=round(seconds * 1000))


def _read(locks, name):
    value = locks.redis.get(lock_keys(locks.prefix, name).lock)
    return (value or b"").decode()


# A busy machine is no dead server: without a limit of its own, it would be one after a part of the
# ttl, and many tests have a short one.
PATIENT = {"socket_timeout": 5.0}
# For tests in which nothing hangs, or not until a server has answered.
UNHURRIED = {"socket_timeout": HUNG}
DEFAULTS = {"TTL": 10, "WAIT": 5}


@pytest.fixture(scope="session")
def shared_reached():
    """A server that is reached by a socket, one by TLS and one by RESP2, for the whole run."""

    def start(name):
        kind = "redis"  # The Valkey of the wheel speaks no TLS.
        if reason := missing(kind):
            skip_or_fail(reason)
        how = {SOCKET: "unix", SECURED: "tls", RESP2: "resp2"}[name]
        return Server(kind, **{how: True}).start()

    yield from made_once(start)


@pytest.fixture
def place(
    request,
    settings,
    shared_servers,
    shared_reached,
    shared_watched,
    shared_cluster,
    shared_quorum,
    key_prefix,
    dial_in_time,
):
    """Keep the locks of this test in one of the places."""
    name = request.param
    if name == MEMORY:
        yield MemoryPlace(settings)
        return
    if name == SENTINEL:
        watched = shared_watched()
        locks = watched.locks(settings, key_prefix)
        yield ServerPlace(name, locks, watched.setting()["OPTIONS"])
        locks.redis.close()
        return
    if name == CLUSTER:
        yield ServerPlace(name, shared_cluster().locks(settings, key_prefix), {})
        return
    if name == QUORUM:
        quorum = QuorumPlace(settings, shared_quorum(), key_prefix)
        yield quorum
        quorum.lose_data()
        for locks in quorum.locks:
            locks.redis.close()
        return
    if name in {SOCKET, SECURED, RESP2}:
        server = shared_reached(name)
        locks = Locks(settings, server, key_prefix)
        options = {"protocol": 2} if name == RESP2 else {}
        if name == SECURED:
            options = least_rights(locks, server)
        reached = ServerPlace(name, locks, options)
        if name == SOCKET:
            reached.configure(LOCATION=server.unix_url)
        yield reached
        reached.lose_data()
        locks.redis.close()
        return
    kind = next((kind for kind in KINDS if kind == name), KIND)
    if reason := missing(kind):
        skip_or_fail(reason)
    locks = Locks(settings, shared_servers(kind), key_prefix)
    yield ServerPlace(name, locks, forbid_scripting(locks) if name == UNSCRIPTED else {})
    if keys := locks.keys():
        locks.redis.delete(*keys)
    locks.redis.close()


def least_rights(locks, server):
    """Make a user who may do what locks need, and return the OPTIONS to be that user."""
    # Some tests have a second prefix.
    rules = *minimal_acl(locks.prefix).split(), "~test-*", "&test-*"
    locks.redis.execute_command("ACL", "SETUSER", locks.prefix, "on", ">least", *rules)
    return {"username": locks.prefix, "password": "least", "ssl_ca_certs": server.ca}


def forbid_scripting(locks):
    """Make a user who may do anything but run scripts, and return the OPTIONS to be that user."""
    rules = ("on", ">unscripted", "~*", "&*", "+@all", "-@scripting")
    locks.redis.execute_command("ACL", "SETUSER", UNSCRIPTED, *rules)
    return {"username": UNSCRIPTED, "password": UNSCRIPTED}
