"""Servers that know nothing of each other, each behind a network of its own.

def test_a_minority_that_is_dead(make_quorum):
    quorum = make_quorum()
    quorum.servers[1].kill()
    quorum.proxies[2].blackhole()
"""

import pytest

from django_redislock.backends.quorum import servers as quorum_servers
from django_redislock.rules.keys import fence_key, lock_keys
from tests.support.stored import NAME
from tests.support.waiting import HUNG

TTL = 20.0


class Quorum:
    """Independent servers, each behind a network of its own, and the setting that names them."""

    def __init__(self, settings, servers, proxies, prefix):
        self.servers = servers
        self.proxies = proxies
        self._settings = settings
        self._prefix = prefix
        self._clients = [server.client() for server in servers]
        self.configure()

    def configure(self, socket_timeout=HUNG, **options):
        """Set REDISLOCK, with connections that are new.

        A server that is only slow counts as silent after most of *socket_timeout*, and is then not
        dialed for a second. One that is killed or refuses is known to be away at once.
        """
        self._settings.REDISLOCK = {"default": {**self.setting(socket_timeout), **options}}

    def setting(self, socket_timeout=HUNG):
        """What REDISLOCK says of the default alias."""
        return {
            "BACKEND": "django_redislock.backends.QuorumBackend",
            "LOCATION": [proxy.url for proxy in self.proxies],
            "KEY_PREFIX": self._prefix,
            "TTL": TTL,
            "WAIT": HUNG,
            "OPTIONS": {"socket_timeout": socket_timeout},
        }

    def value(self, server, name=NAME):
        value = self._clients[server].get(self._key(name))
        return value or b""

    def is_free(self, name=NAME):
        """Whether no server keeps anything of a lock."""
        return not any(self.value(server, name) for server in range(len(self.servers)))

    def keep(self, server, value, name=NAME, ttl=HUNG, permit=1):
        self._clients[server].set(self._key(name, permit), value, ex=int(ttl))

    def _key(self, name, permit=1):
        return lock_keys(self._prefix, name, permit).lock

    def known_by(self, lease):
        """The servers that keep that lease, of those that run."""
        running = [number for number, server in enumerate(self.servers) if server.running]
        return [number for number in running if lease.id.encode() in self.value(number, lease.name)]

    def clients(self, server, name):
        """The connections of that client_name, as a server tells them apart."""
        every = self._clients[server].client_list()
        return {one["id"] for one in every if one["name"] == name}

    def mark(self, server):
        """The greatest fence that a server knows of."""
        score = self._clients[server].zscore(fence_key(self._prefix), "last")
        return int(score or 0)

    def set_mark(self, server, fence):
        """Let a server have given out that fence."""
        self._clients[server].zadd(fence_key(self._prefix), {"last": fence})

    def lapse(self, *servers, name=NAME, ms=0):
        """Let these servers lose a lock before its time, in so many milliseconds."""
        for server in servers:
            self._clients[server].pexpire(self._key(name), ms)


@pytest.fixture
def dial_in_time(monkeypatch):
    """Let a dial to a server of a quorum come to an end, however busy the machine is.

    Else the others would go on without that server.
    """
    monkeypatch.setattr(quorum_servers, "DIAL_WITHIN", HUNG)


@pytest.fixture
def make_quorum(settings, make_server, make_proxy, key_prefix, dial_in_time):
    """Start servers that know nothing of each other."""

    def make(size=3, kind=None, **config):
        servers = [make_server(kind, **config) for _ in range(size)]
        proxies = [make_proxy(server) for server in servers]
        return Quorum(settings, servers, proxies, key_prefix)

    return make
