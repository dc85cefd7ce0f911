"""Several servers that keep the same locks: a master, its replicas, and the sentinels.

def test_a_failover(make_watched, settings, key_prefix):
    watched = make_watched()
    locks = watched.locks(settings, key_prefix)
    with watched.in_a_hurry():
        watched.master.kill()
        watched.await_failover()
"""

import pytest
import redis

from tests.conftest import Locks, chosen_kind, closed_later
from tests.support.servers import (
    KIND,
    KINDS,
    Group,
    Sentinel,
    Server,
    made_once,
    missing,
    trust_each_other,
)
from tests.support.stored import NAME, channels
from tests.support.waiting import wait_until

SERVICE = "mymaster"


class Watched(Group):
    """A master with replicas, watched by sentinels: two replicas and three sentinels.

    Args:
        kind: See Server.
        down_after: Seconds after which the sentinels take a silent master for dead.
        password: What clients of the servers must know.
        sentinel_password: What clients of the sentinels must know.
        tls: All of them speak TLS only. Redis only.
    """

    def __init__(
        self,
        kind,
        *,
        down_after=60.0,
        failover_timeout=3.0,
        password="",
        sentinel_password="",
        tls=False,
    ):
        self._password = {"password": password} if password else {}
        self._sentinel_password = {"password": sentinel_password} if sentinel_password else {}
        config = {"repl_diskless_sync_delay": 0}
        if password:
            config |= {"requirepass": password, "masterauth": password}
        encrypted = {"tls": True, "tls_replication": "yes"} if tls else {}
        self.master = Server(kind, **config, **encrypted)
        self.replicas = [Server(kind, **config, **encrypted) for _ in range(2)]
        self.sentinels = [Sentinel(kind, **encrypted) for _ in range(3)]
        if tls:
            trust_each_other([*self.servers, *self.sentinels])
        self._lines = [
            f"sentinel down-after-milliseconds {SERVICE} {down_after * 1000:.0f}",
            f"sentinel failover-timeout {SERVICE} {failover_timeout * 1000:.0f}",
            f"sentinel parallel-syncs {SERVICE} 2",
        ]
        if password:
            self._lines.append(f"sentinel auth-pass {SERVICE} {password}")
        if sentinel_password:  # They ask each other too.
            self._lines.append(f"requirepass {sentinel_password}")
            self._lines.append(f"sentinel sentinel-pass {sentinel_password}")

    def start(self):
        """Start all, and return once they know each other and have the same data."""
        for server in self.servers:
            server.start()
        for replica in self.replicas:
            self.client(replica).replicaof(self.master.host, self.master.port)
        for sentinel in self.sentinels:
            # Told who the others are: to find out by themselves takes them two seconds.
            sentinel.tell(f"sentinel monitor {SERVICE} {_place(self.master)} 2", *self._lines)
            known = f"sentinel known-replica {SERVICE}"
            sentinel.tell(*[f"{known} {_place(replica)}" for replica in self.replicas])
            known = f"sentinel known-sentinel {SERVICE}"
            others = [one for one in self.sentinels if one is not sentinel]
            sentinel.tell(*[f"{known} {_place(other)} {other.id}" for other in others])
        for sentinel in self.sentinels:
            sentinel.start()
        wait_until(lambda: all(self.is_in_step(replica) for replica in self.replicas))
        wait_until(lambda: all(self._is_ready(sentinel) for sentinel in self.sentinels))
        return self

    @property
    def servers(self):
        return [self.master, *self.replicas]

    def locks(self, settings, prefix, **options):
        """REDISLOCK for a test; *options* are its other settings."""
        locks = Locks(settings, self.master, prefix)
        locks.redis = self.client(self.master)
        return locks.configure(**self.setting(), **options)

    def setting(self, **options):
        """What REDISLOCK says of the default alias; *options* are more of its OPTIONS."""
        mine = {"service_name": SERVICE, **self._password}
        asking = dict(self._sentinel_password)
        if self.master.scheme == "rediss":
            mine |= {"ssl": True, "ssl_ca_certs": self.master.ca}
            asking["ssl_ca_certs"] = self.master.ca
        if asking:
            mine["sentinel_kwargs"] = asking
        return {
            "BACKEND": "django_redislock.backends.SentinelBackend",
            "LOCATION": [one.url.removesuffix("/0") for one in self.sentinels],
            "OPTIONS": {**mine, **options},
        }

    def client(self, server, **options):
        return server.client(**{**self._password, **options})

    def ask(self, sentinel, *command):
        with sentinel.client(**self._sentinel_password) as client:
            return client.execute_command("SENTINEL", *command)

    def named_by(self, sentinel):
        """The server that a sentinel calls the master."""
        _, port = self.ask(sentinel, "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def fail_over(self):
        """Have a replica take over, though nothing is wrong."""
        self.ask(self.sentinels[0], "FAILOVER", SERVICE)

    def wait_for_the_silent(self, seconds):
        for sentinel in self.sentinels:
            name, ms = "down-after-milliseconds", str(round(seconds * 1000))
            self.ask(sentinel, "SET", SERVICE, name, ms)

    def await_failover(self):
        """Return the new master once all the running sentinels know it."""
        return self.find_master(other_than=self.master)

    def find_master(self, other_than=None):
        """Return the master once all the running sentinels name the same."""

        def known():
            named = {self.named_by(sentinel) for sentinel in self.sentinels if sentinel.running}
            return None if other_than in named or len(named) > 1 else named.pop()

        master = wait_until(known, message="the sentinels agree on a master")
        assert master is not None
        self.replicas = [server for server in self.servers if server is not master]
        self.master = master
        return master

    def is_in_step(self, replica):
        """Whether a server is a replica that has what its master has."""
        return self.client(replica).info("replication").get("master_link_status") == "up"

    def is_settled(self):
        """Whether no sentinel is amid a failover: await_failover() returns before its end."""
        said = [_fields(self.ask(sentinel, "MASTER", SERVICE)) for sentinel in self.sentinels]
        return all(_text(one["flags"]) == "master" for one in said)

    def close(self):
        for server in (*self.sentinels, *self.servers):
            server.close()

    def report(self):
        return "\n".join(f"{one!r}\n{one.log}" for one in self.sentinels)

    def _is_ready(self, sentinel):
        """Whether it has heard from all the others."""
        try:
            usable = self.ask(sentinel, "CKQUORUM", SERVICE)
        except redis.ResponseError:
            return False
        links = [_text(_fields(one)["master-link-status"]) for one in self._replicas_of(sentinel)]
        return b"3 usable" in usable and links == ["ok", "ok"]

    def _replicas_of(self, sentinel):
        return self.ask(sentinel, "REPLICAS", SERVICE)


def await_copies(master, replicas):
    """Return once replicas have all that their master has now.

    WAIT would tell of what the same connection has written, and no more.
    """

    def offset(server):
        with server.client() as client:
            return int(client.info("replication")["master_repl_offset"])

    written = offset(master)
    wait_until(lambda: all(offset(replica) >= written for replica in replicas))


def can_be_rung(locks, master, name=NAME):
    """How many wait for a lock on a channel that somebody listens to, on the server that keeps it.

    Those who have lost their connection, or have not come back to a new master yet, are passed over
    when the lock is released.
    """
    with master.client() as client:
        heard = {
            *client.execute_command("PUBSUB", "CHANNELS"),
            *client.execute_command("PUBSUB", "SHARDCHANNELS"),
        }
    return sum(channel in heard for channel in channels(locks, name))


def _place(server):
    return f"{server.host} {server.port}"


def _fields(reply):
    """What is told as names and values, by whatever protocol."""
    if not isinstance(reply, dict):
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    return {_text(name): value for name, value in reply.items()}


def _text(value):
    return value if isinstance(value, str) else value.decode()


@pytest.fixture
def make_watched(request):
    """Start topologies of the test's own, to be broken. Without a kind, see make_server."""
    with closed_later(request, "what the sentinels wrote", Watched.report) as note:

        def make(kind=None, **options):
            return note(Watched(chosen_kind(request, kind), **options)).__enter__()

        yield make


@pytest.fixture(scope="session")
def shared_watched():
    """A topology for the whole run (of an xdist worker), to use and not to break."""
    yield from made_once(lambda: Watched(KIND).__enter__())


@pytest.fixture(scope="session")
def shared_quorum(shared_servers):
    """Three servers that know nothing of each other, to use and not to break; of both kinds."""
    own = []

    def get():
        shared = [shared_servers(kind) for kind in KINDS if not missing(kind)]
        while len(shared) + len(own) < 3:
            own.append(Server(KIND).start())
        return [*shared, *own]

    yield get
    for server in own:
        server.close()


@pytest.fixture
def watched(shared_watched):
    return shared_watched()
