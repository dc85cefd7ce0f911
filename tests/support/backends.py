"""The places that keep locks: a server of each kind; one that forbids scripts; one by its socket;
one by TLS, for a user with the fewest rights; one that speaks RESP2 only; the memory; a master
that sentinels watch; a cluster; a quorum of three.

tests/support/matrix.py says which of them a test runs in.
"""

import pytest

from django_redislock import held
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


class Place:
    """Where the locks of a test are kept: REDISLOCK is set to it.

    lose_data() lets the server lose all that it keeps, and lapse() one lease before its time.
    write() lets the key of a lock hold what another program has written; read() says what it holds.
    """

    def setting(self):
        return dict(self._settings.REDISLOCK["default"])

    def configure(self, **options):
        """Change settings of the default alias, and keep the others."""
        self._settings.REDISLOCK = {"default": {**self.setting(), **options}}

    def force_release(self, lease):
        """Let an operator free the lock."""
        assert held.force_release(lease.name, lease.id)

    def keys(self):
        """Return the keys on the server; none where there are no keys."""
        return []


class OnServers(Place):
    """On real servers, each of which keeps the same: one, a group that is one, or a quorum."""

    def __init__(self, *every):
        self._settings = every[0]._settings
        self._every = every

    def lose_data(self):
        for locks in self._every:
            if keys := locks.keys():
                locks.redis.delete(*keys)

    def lapse(self, name):
        for locks in self._every:
            locks.redis.delete(lock_keys(locks.prefix, name).lock)

    def write(self, name, value, seconds=60.0):
        for locks in self._every:
            locks.redis.set(lock_keys(locks.prefix, name).lock, value, px=round(seconds * 1000))

    def read(self, name):
        locks = self._every[0]
        return (locks.redis.get(lock_keys(locks.prefix, name).lock) or b"").decode()

    def keys(self):
        return sorted(set().union(*(locks.keys() for locks in self._every)))


class ServerPlace(OnServers):
    """A backend on a real server."""

    def __init__(self, name, locks, options):
        super().__init__(locks)
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

    def force_release(self, lease):
        if self.name != UNSCRIPTED:
            super().force_release(lease)
            return
        # Of those who may run scripts.
        keys = scripts.FORCE_RELEASE.given(lock_keys(self.locks.prefix, lease.name))
        args = lease.id, lease.id, ""  # The id of the request has as many digits.
        self.locks.redis.eval(scripts.FORCE_RELEASE.source, len(keys), *keys, *args)


class QuorumPlace(OnServers):
    """Three servers that know nothing of each other."""

    name = QUORUM

    def __init__(self, settings, servers, prefix):
        self.locks = [Locks(settings, server, prefix) for server in servers]
        super().__init__(*self.locks)
        settings.REDISLOCK = {
            "default": {
                "BACKEND": "django_redislock.backends.QuorumBackend",
                "LOCATION": [server.url for server in servers],
                "KEY_PREFIX": prefix,
                "OPTIONS": PATIENT,
                **DEFAULTS,
            }
        }


class MemoryPlace(Place):
    """The in-memory backend."""

    name = MEMORY

    def __init__(self, settings):
        self._settings = settings
        settings.REDISLOCK = {"default": {**IN_MEMORY, **DEFAULTS}}

    def lose_data(self):
        backends["default"].interpreter.clear()

    def lapse(self, name):
        self._perform(name, "DEL")

    def write(self, name, value, seconds=60.0):
        self._perform(name, "SET", value, "PX", round(seconds * 1000))

    def read(self, name):
        return (self._perform(name, "GET") or b"").decode()

    def _perform(self, name, command, *args):
        backend = backends["default"]
        key = lock_keys(backend.prefix, name).lock
        return backend.interpreter.perform(command, key, *args, us=backend._us)


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
    if name == CLUSTER:  # Its client is shared.
        yield ServerPlace(name, shared_cluster().locks(settings, key_prefix), {})
        return
    if name == QUORUM:
        made = QuorumPlace(settings, shared_quorum(), key_prefix)
    elif name == SENTINEL:
        watched = shared_watched()
        made = ServerPlace(name, watched.locks(settings, key_prefix), watched.setting()["OPTIONS"])
    else:
        if name in {SOCKET, SECURED, RESP2}:
            server = shared_reached(name)
        else:
            kind = name if name in KINDS else KIND
            if reason := missing(kind):
                skip_or_fail(reason)
            server = shared_servers(kind)
        locks = Locks(settings, server, key_prefix)
        options = {}
        if name == RESP2:
            options = {"protocol": 2}
        elif name == SECURED:
            options = least_rights(locks, server)
        elif name == UNSCRIPTED:
            options = forbid_scripting(locks)
        made = ServerPlace(name, locks, options)
        if name == SOCKET:
            made.configure(LOCATION=server.unix_url)
    yield made
    made.lose_data()
    for locks in made._every:
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
