"""Several servers that share the locks out among them: a Redis or Valkey cluster.

def test_a_failover(make_cluster, settings, key_prefix):
    cluster = make_cluster(replicas=1)
    locks = cluster.locks(settings, key_prefix)
    with cluster.in_a_hurry():
        cluster.servers[0].kill()
        cluster.await_failover()
"""

import functools
from itertools import count, pairwise

import pytest
import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from django_redislock.rules.keys import IN_BUCKETS, bucket_of, hash_tag
from tests.conftest import Locks, chosen_kind, closed_later
from tests.support.servers import (
    KIND,
    Group,
    Server,
    ServerStartError,
    free_port,
    made_once,
    trust_each_other,
)
from tests.support.waiting import wait_until

ALL_ASSIGNED = f"cluster_slots_assigned:{REDIS_CLUSTER_HASH_SLOTS}\r".encode()


class Cluster(Group):
    """Masters that have the same number of slots each, and replicas of them.

    Args:
        kind: See Server.
        masters: How many.
        replicas: How many the first of them has.
        node_timeout: Seconds after which the others take a silent node for dead.
        tls: All of them speak TLS only. Redis only.
        config: See Server.
    """

    def __init__(self, kind, *, masters=3, replicas=0, node_timeout=60.0, tls=False, **config):
        self.kind = kind
        self._config = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": round(node_timeout * 1000),
            "repl_diskless_sync_delay": 0,
            **({"tls": True, "tls_cluster": "yes", "tls_replication": "yes"} if tls else {}),
            **config,
        }
        self.servers = [self._make() for _ in range(masters)]
        self.replicas = [self._make() for _ in range(replicas)]
        if tls:
            trust_each_other([*self.servers, *self.replicas])
        self._former = []

    def start(self):
        """Start all, and return once each of them knows who keeps what."""
        every = [*self.servers, *self.replicas]
        for server in every:
            server.start(ready=False)
        for server in every:
            self._await(server)
        share = REDIS_CLUSTER_HASH_SLOTS / len(self.servers)
        bounds = pairwise(round(share * number) for number in range(len(self.servers) + 1))
        for epoch, (server, (first, end)) in enumerate(zip(self.servers, bounds, strict=True), 1):
            self.tell(server, "SET-CONFIG-EPOCH", epoch)
            self.tell(server, "ADDSLOTSRANGE", first, end - 1)
        for server in every[1:]:
            self.meet(server)
        wait_until(lambda: all(self._knows(server, len(every)) for server in every))
        for replica in self.replicas:
            self.tell(replica, "REPLICATE", self.id_of(self.servers[0]))
        # A master denies its vote to a node that it takes for a master.
        count = len(self.replicas)
        wait_until(lambda: all(self.tell(one, "NODES").count(b"slave") == count for one in every))
        wait_until(lambda: all(map(self.is_ready, every)), message="the cluster is ready")
        return self

    def meet(self, server):
        """Have a server become one of the cluster."""
        config = server._config
        port = config.get("cluster-announce-bus-port", config["cluster-port"])
        self.tell(self.servers[0], "MEET", server.host, server.port, port)

    def add(self):
        """One more master, without slots."""
        server = self._make()
        self.servers.append(server)
        server.start()
        self.tell(server, "SET-CONFIG-EPOCH", 100)
        self.meet(server)
        known = len(self.servers) + len(self.replicas)
        wait_until(lambda: all(self._knows(one, known) for one in self.servers))
        wait_until(lambda: self.is_ready(server))
        return server

    def locks(self, settings, prefix, **options):
        """REDISLOCK for a test; *options* are its other settings."""
        locks = Locks(settings, self.servers[0], prefix)
        locks.configure(**self.setting(), **options)
        locks.prefix += IN_BUCKETS  # As a pattern, it matches all of the test's keys.
        locks.redis = self._client
        return locks

    def setting(self, **options):
        """What REDISLOCK says of the default alias; *options* are its OPTIONS."""
        if self.servers[0].scheme == "rediss":
            options = {"ssl_ca_certs": self.servers[0].ca, **options}
        return {
            "BACKEND": "django_redislock.backends.ClusterBackend",
            "LOCATION": [one.url.removesuffix("/0") for one in self.servers],
            "OPTIONS": options,
        }

    @functools.cached_property
    def _client(self):
        """The client of the tests that share this cluster: to make one takes 20 ms."""
        return self.client()

    def client(self):
        """A client of the cluster that is not ours."""
        alive = next(one for one in self.servers if one.running)
        tls = {"ssl": True, "ssl_ca_certs": alive.ca} if alive.scheme == "rediss" else {}
        return redis.RedisCluster(alive.host, alive.port, socket_timeout=5, **tls)

    def tell(self, server, *command):
        with server.client() as client:
            return client.execute_command("CLUSTER", *command)

    def id_of(self, server):
        """The name of a node among the others."""
        return str(self.tell(server, "MYID").decode())

    def owner_node(self, name):
        """The master that keeps a lock, as the masters say that are there."""
        slot = slot_of(name)
        for server in self.servers:
            if server.running and any(
                low <= slot <= high and port == server.port
                for low, high, (_, port, *_), *_ in self._slots(server)
            ):
                return server
        raise AssertionError(f"nobody keeps {name!r}")

    def name_on(self, server):
        return next(self.names_on(server))

    def names_on(self, server):
        kept = [
            (low, high)
            for low, high, (_, port, *_), *_ in self._slots(server)
            if port == server.port
        ]
        names = (f"lottery {number}" for number in count())
        return (name for name in names if any(low <= slot_of(name) <= high for low, high in kept))

    def begin_move(self, name, to):
        """Let the slot of a lock be on its way from one master to another."""
        slot, source = slot_of(name), self.owner_node(name)
        self.tell(to, "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.tell(source, "SETSLOT", slot, "MIGRATING", self.id_of(to))

    def move_keys(self, name, to):
        slot, source = slot_of(name), self.owner_node(name)
        with source.client() as client:
            while keys := client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                client.migrate(to.host, to.port, keys, 0, 5000)

    def end_move(self, name, to):
        slot, node = slot_of(name), self.id_of(to)
        for server in (to, *(one for one in self.servers if one is not to)):
            if server.running:
                self.tell(server, "SETSLOT", slot, "NODE", node)

    def move(self, name, to):
        """The slot of a lock goes from one master to another."""
        self.begin_move(name, to)
        self.move_keys(name, to)
        self.end_move(name, to)

    def move_whole(self, name, to):
        """The slot of a lock goes to another master in one step, as from Valkey 9 on."""
        slot, source = slot_of(name), self.owner_node(name)
        self.tell(source, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.id_of(to))
        wait_until(lambda: self.owner_node(name) is to, message=f"slot {slot} has moved")

    @property
    def master(self):
        return self.servers[0]

    def fail_over(self):
        """Have a replica take over, though nothing is wrong."""
        self.tell(self.replicas[0], "FAILOVER")

    def await_failover(self):
        """Return the replica that has taken the place of the first master, once all know it."""
        former, *others = self.servers

        def known():
            for replica in self.replicas:
                if all(
                    self.is_ready(server) and replica.port in self._masters(server)
                    for server in (*others, replica)
                ):
                    return replica
            return None

        successor = wait_until(known, message="a replica has taken over")
        assert successor is not None
        self.servers = [successor, *others]
        self.replicas = [one for one in self.replicas if one is not successor]
        self._former.append(former)
        return successor

    def wait_for_the_silent(self, seconds):
        for server in (*self.servers, *self.replicas):
            if server.running:
                with server.client() as client:
                    client.config_set("cluster-node-timeout", round(seconds * 1000))

    def take_back(self, former):
        """Return once a former master, which runs again, is a replica of its successor for all."""

        def follows():
            with former.client() as client:
                in_step = client.info("replication").get("master_link_status") == "up"
            return in_step and all(
                former.port in {port for _, _, _, *kept in self._slots(one) for _, port, *_ in kept}
                for one in self.servers
            )

        wait_until(follows, message="the former master follows its successor", every=0.1)
        self._former.remove(former)
        self.replicas.append(former)

    def take_out(self, former):
        """Have a former master, which runs on, be no node of the cluster any more."""
        id_of_it = self.id_of(former)
        for server in (*self.servers, *self.replicas):
            self.tell(server, "FORGET", id_of_it)
        self.tell(former, "RESET", "HARD")

    def is_ready(self, server):
        """Whether a node serves clients, knows all slots and, if a replica, has the data."""
        info = self.tell(server, "INFO")
        # Without "full coverage", a node serves clients before it has heard of all slots.
        if b"cluster_state:ok" not in info or ALL_ASSIGNED not in info:
            return False
        with server.client() as client:
            info = client.info("replication")
        return info["role"] == "master" or info["master_link_status"] == "up"

    def close(self):
        if "_client" in vars(self):  # It was made.
            self._client.close()
        for server in (*self._former, *self.servers, *self.replicas):
            server.close()

    def report(self):
        return "\n".join(f"{one!r}\n{one.log}" for one in self.servers)

    def _make(self):
        return Server(self.kind, cluster_port=free_port(), **self._config)

    def _await(self, server):
        """Return once a node that was started is ready; on other ports if one of its was taken."""
        try:
            server.wait_ready()
        except ServerStartError:
            if "Address already in use" not in server.log:
                raise
            server.port, server._config["cluster-port"] = free_port(), free_port()
            server.start()

    def _slots(self, server):
        with server.client(protocol=3) as client:
            connection = client.connection_pool.get_connection()
            connection.send_command("CLUSTER", "SLOTS")
            return connection.read_response()

    def _masters(self, server):
        """The ports of those that keep slots, as a node says."""
        return {port for _, _, (_, port, *_), *_ in self._slots(server)}

    def _knows(self, server, nodes):
        info = self.tell(server, "INFO")
        return f"cluster_known_nodes:{nodes}\r".encode() in info


def slot_of(name):
    return key_slot(hash_tag(bucket_of(name)).encode())


@pytest.fixture
def make_cluster(request):
    """Start clusters of the test's own, to be broken."""
    with closed_later(request, "what the nodes wrote", Cluster.report) as note:

        def make(kind=KIND, **options):
            return note(Cluster(chosen_kind(request, kind), **options)).__enter__()

        yield make


@pytest.fixture(scope="session")
def shared_cluster():
    """A cluster for the whole run (of an xdist worker), to use and not to break."""
    yield from made_once(lambda: Cluster(KIND).__enter__())


@pytest.fixture
def cluster(shared_cluster):
    return shared_cluster()
