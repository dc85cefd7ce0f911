"""Where locks are kept in a trial, and what can go wrong with these servers.

A backend that is to be tried too is one more Place, and one more line of CONTENDERS.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import redis

from tests.jepsen.network import HOST, Network
from tests.jepsen.workload import NAME, TTL
from tests.support.clusters import Cluster
from tests.support.proxy import Proxy
from tests.support.servers import KIND, Server
from tests.support.topologies import SERVICE, Watched
from tests.support.waiting import eventually, wait_until

LONG = 1.5 * TTL  # Seconds: the longest that a server or a network stands still.
DOWN_AFTER = 1.0  # Seconds after which sentinels and nodes take a silent master for dead.


class Place(ABC):
    """Servers that keep locks. To be entered before use; the end of the block ends them.

    Args:
        dice: What decides which server is hit, and for how long.
    """

    def __init__(self, dice):
        self.dice = dice
        self.kind = KIND
        self.network = Network()  # Which clients must go through.
        self.stack = ExitStack()

    @property
    @abstractmethod
    def servers(self):
        """Those that can be asked for all keys."""

    @property
    @abstractmethod
    def faults(self):
        """What can go wrong, by what is said of it; each returns when all is well again."""

    @abstractmethod
    def start(self):
        """Start the servers."""

    def a_while(self):
        """Return after some time, which may be shorter than a lease or longer."""
        time.sleep(self.dice.uniform(TTL / 4, LONG))

    def __enter__(self):
        with ExitStack() as stack:  # It ends what has been started, should the rest not start.
            self.stack = stack
            stack.enter_context(self.network)
            self.start()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self.stack.close()


class Independent(Place):
    """Servers that know nothing of each other.

    A server that is killed has lost all when it is back.
    """

    @property
    def servers(self):
        return self._servers

    @property
    def faults(self):
        return {
            "server killed": self._kill,
            "server stopped": self._stop,
            "server cut off": self._cut_off,
        }

    def start(self):
        self._servers = [self.stack.enter_context(Server(self.kind)) for _ in range(self.size)]

    @property
    def urls(self):
        return [server.url for server in self._servers]

    def _kill(self):
        server = self.dice.choice(self._servers)
        server.kill()
        time.sleep(self.away)
        server.restart()

    def _stop(self):
        with self.dice.choice(self._servers).paused():
            self.a_while()

    def _cut_off(self):
        with self.network.cut(_end(self.dice.choice(self._servers))):
            self.a_while()


class Single(Independent):
    """One server. It is back at once when it was killed, as with a supervisor."""

    size = 1
    away = 0.0

    def start(self):
        super().start()
        self.setting = {"LOCATION": self.urls[0]}


class Quorum(Independent):
    """Three servers, of which one is hit. When killed it stays away for longer than any lease."""

    size = 3
    away = 1.5 * TTL

    def start(self):
        super().start()
        backend = "django_redislock.backends.QuorumBackend"
        self.setting = {"BACKEND": backend, "LOCATION": self.urls}


class Replicated(Place):
    """A master that has replicas. Each fault ends with one of them as the master."""

    @property
    def faults(self):
        return {
            "master killed": self._kill,
            "master stopped": self._stop,
            "master cut off from clients": self._cut_off,
            "planned failover": self._fail_over,
        }

    @abstractmethod
    def failover(self):
        """Yield the master; then wait for the next one, and until the former follows it."""

    @abstractmethod
    def plan_failover(self):
        """Have a replica take over although the master is well; False: ask again in a second.

        May raise redis.ResponseError instead, as long as the failover before is not quite over.
        """

    @property
    @abstractmethod
    def master(self):
        """The master now."""

    def _cut_off(self):
        with self.network.cut(_end(self.master)):  # The others do not notice, so it stays master.
            self.a_while()

    def _kill(self):
        with self.failover() as master:
            master.kill()

    def _stop(self):
        with self.failover() as master:
            master.pause()

    def _fail_over(self):
        with self.failover():
            wait_until(self._is_planned, message="a failover begins", every=1.0)

    def _is_planned(self):
        try:
            return self.plan_failover()
        except redis.ResponseError:
            return False


class Sentinels(Replicated):
    """A master, two replicas and three sentinels."""

    @property
    def servers(self):
        return self._watched.servers

    @property
    def faults(self):
        return {**super().faults, "master cut off and killed": self._kill_alone}

    @property
    def master(self):
        return self._watched.find_master()  # On a busy machine sentinels may change it, too.

    def start(self):
        self._watched = self.stack.enter_context(Watched(self.kind, down_after=DOWN_AFTER))
        self.setting = self._watched.setting()

    def plan_failover(self):
        sentinel = self._watched.sentinels[0]
        if self._watched.named_by(sentinel) is not self._watched.master:
            return True
        # It says yes, and gives up if no replica is good and quick enough.
        self._watched.ask(sentinel, "FAILOVER", SERVICE)
        return False

    @contextmanager
    def failover(self):
        former = self.master
        yield former
        master = self._watched.await_failover()
        _run(former)
        # The sentinels would tell it too, after ten seconds.
        follow = partial(self._watched.client(former).replicaof, master.host, master.port)
        eventually(follow, redis.ConnectionError)
        for replica in self._watched.replicas:
            self._await_in_step(replica)
        # A master that is killed before that may stay without a successor for minutes.
        wait_until(self._watched.is_settled, every=0.1)

    def _kill_alone(self):
        """What the master grants for a while is lost with it."""
        with ExitStack() as proxies, self.failover() as master:
            for replica in self._watched.replicas:
                proxy = proxies.enter_context(Proxy(master))
                self._watched.client(replica).replicaof(proxy.host, proxy.port)
                self._await_in_step(replica)
                proxy.blackhole()
            self.a_while()
            master.kill()

    def _await_in_step(self, replica):
        def is_in_step():
            try:
                return self._watched.is_in_step(replica)
            except redis.ConnectionError:  # Who becomes a replica closes its connections.
                return False

        wait_until(is_in_step, message="all replicas have what the master has", every=0.1)


class Nodes(Replicated):
    """A cluster of three masters. The one that keeps the lock has a replica."""

    @property
    def servers(self):
        return self._cluster.servers  # A replica answers for none of its keys.

    @property
    def faults(self):
        return {**super().faults, "master cut off from nodes": self._cut_off_from_nodes}

    @property
    def master(self):
        return self._cluster.servers[0]

    def start(self):
        cluster = Cabled(self.network, self.kind, replicas=1, node_timeout=DOWN_AFTER)
        self._cluster = self.stack.enter_context(cluster)
        assert cluster.owner_node(NAME) is cluster.servers[0], "only this one has a replica"
        self.setting = cluster.setting()

    def plan_failover(self):
        (replica,) = self._cluster.replicas
        with replica.client() as client:
            if client.info("replication")["role"] == "master":
                return True
        # It says yes also if its master does not know it well enough yet, and then nothing happens.
        self._cluster.tell(replica, "FAILOVER")
        return False

    @contextmanager
    def failover(self):
        former = self.master
        with ExitStack() as self._until_failover:
            yield former
            self._cluster.await_failover()
        _run(former)
        self._cluster.take_back(former)

    def _cut_off_from_nodes(self):
        """Clients still reach the former master, and its replica still gets what it is told."""
        with self.failover() as master:
            self._until_failover.enter_context(self.network.cut(self._cluster.end(master)))


class Cabled(Cluster):
    """A cluster whose nodes talk to each other through a network.

    Each has an address that its own connections come from. Replicas follow their master directly.
    """

    def __init__(self, network, *args, **options):
        self._network = network
        self._addresses = (f"127.0.0.{number}" for number in count(11))
        super().__init__(*args, **options)

    def end(self, server):
        """What the network calls a node."""
        return f"node {server._config['bind-source-addr']}"

    def _make(self):
        server = super()._make()
        address = next(self._addresses)
        port = self._network.lead_to(address, lambda: int(server._config["cluster-port"]))
        server._config |= {
            "bind-source-addr": address,
            "protected-mode": "no",  # Else it would refuse an address that is not its own.
            "cluster-announce-ip": HOST,
            "cluster-announce-bus-port": port,
        }
        return server


def _end(server):
    """What the network calls a server."""
    return f"server {server.port}"


def _run(server):
    """Have a server go on that was stopped or killed."""
    if server.running:
        server.resume()
    else:
        server.start()


@dataclass(frozen=True)
class Contender:
    """What is tried: a lock in a place."""

    place: type[Place]
    lock: str = "ours"  # See workload.LOCKS.
    options: dict[str, Any] = field(default_factory=dict)  # Of REDISLOCK.


CONTENDERS = {
    "single": Contender(Single),
    "sentinel": Contender(Sentinels),
    "sentinel-ack": Contender(Sentinels, options={"REPLICAS_ACK": 1}),
    "cluster": Contender(Nodes),
    "quorum": Contender(Quorum),
    # The controls: a trial that finds nothing wrong with these would prove nothing.
    "redis-py": Contender(Single, lock="redis-py"),
    "pottery": Contender(Quorum, lock="pottery"),
}
