"""Where the locks of the demo are kept, if not on its one Redis: servers of which one may die."""

from __future__ import annotations

import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from django.conf import settings
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

from django_redislock.rules.keys import IN_BUCKETS, lock_keys, prefix_of
from example_project import embedded_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lottery.demo.processes import Children

HOST = "127.0.0.1"
SERVICE = "lottery"  # What the sentinels call their master.
# Seconds for which nobody may answer: longer than it takes until a replica has taken over.
UNAVAILABLE_AFTER = 30


class Topology(ABC):
    """Servers that keep the locks of one run of a demo."""

    backend: str

    def __init__(self, home: Path, children: Children) -> None:
        self._home = home
        self._children = children
        self._password = secrets.token_urlsafe(24)  # The same for all of them.
        self._nodes: list[_Node] = []

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether locks can be kept there, also when a server dies."""

    @abstractmethod
    def strike(self) -> str:
        """Kill the server that would be missed most; says which one."""

    @abstractmethod
    def _setting(self) -> dict[str, Any]:
        """What REDISLOCK says of it."""

    @property
    def environment(self) -> dict[str, str]:
        """By what the processes of the demo find it; see example_project/settings.py."""
        backend = f"django_redislock.backends.{self.backend}"
        common = {"BACKEND": backend, "UNAVAILABLE_AFTER": UNAVAILABLE_AFTER}
        return {"DEMO_LOCKS": json.dumps({**common, **self._setting()})}

    def check(self) -> None:
        """Raise ChildDied if one has died that was not killed."""
        for node in self._nodes:
            node.check()

    def __str__(self) -> str:
        return ", ".join(f"{node.name} on port {node.port}" for node in self._nodes)

    def _start(self, name: str, *lines: str, sentinel: bool = False) -> _Node:
        node = _Node(name, self._home, self._children, self._password, lines, sentinel=sentinel)
        self._nodes.append(node)
        return node


class Sentinels(Topology):
    """A master with two replicas, and three sentinels that watch them."""

    backend = "SentinelBackend"

    def __init__(self, home: Path, children: Children) -> None:
        super().__init__(home, children)
        self._master = self._start("master")
        of_master = f"replicaof {HOST} {self._master.port}", f"masterauth {self._password}"
        self._replicas = [self._start(f"replica-{number}", *of_master) for number in (1, 2)]
        watch = (
            f"sentinel monitor {SERVICE} {HOST} {self._master.port} 2",
            f"sentinel auth-pass {SERVICE} {self._password}",
            f"sentinel sentinel-pass {self._password}",
            f"sentinel down-after-milliseconds {SERVICE} 1000",
            f"sentinel failover-timeout {SERVICE} 5000",
        )
        names = [f"sentinel-{number}" for number in (1, 2, 3)]
        self._sentinels = [self._start(name, *watch, sentinel=True) for name in names]

    def is_ready(self) -> bool:
        return all(map(self._knows_all, self._sentinels))

    def strike(self) -> str:
        return self._master.kill()

    def _knows_all(self, sentinel: _Node) -> bool:
        master = (sentinel.ask("INFO", "sentinel") or {}).get("master0", {})
        found = master.get("status"), master.get("slaves"), master.get("sentinels")
        return found == ("ok", 2, 3) and bool(sentinel.ask("SENTINEL", "CKQUORUM", SERVICE))

    def _setting(self) -> dict[str, Any]:
        secret = {"password": self._password}
        return {
            "LOCATION": [sentinel.url for sentinel in self._sentinels],
            "OPTIONS": {"service_name": SERVICE, **secret, "sentinel_kwargs": secret},
            "REPLICAS_ACK": 1,
        }


class Quorum(Topology):
    """Three servers that know nothing of each other."""

    backend = "QuorumBackend"

    def __init__(self, home: Path, children: Children) -> None:
        super().__init__(home, children)
        self._servers = [self._start(f"server-{letter}") for letter in "abc"]

    def is_ready(self) -> bool:
        return all(server.ask("PING") for server in self._servers)

    def strike(self) -> str:
        return self._servers[0].kill()

    def _setting(self) -> dict[str, Any]:
        return {
            "LOCATION": [server.url for server in self._servers],
            "OPTIONS": {"password": self._password},
        }


class Cluster(Topology):
    """Three masters, each for a third of the locks, with a replica each."""

    backend = "ClusterBackend"

    def __init__(self, home: Path, children: Children) -> None:
        super().__init__(home, children)
        self._masters = [self._member(f"master-{number}") for number in (1, 2, 3)]
        self._replicas = [self._member(f"replica-{number}") for number in (1, 2, 3)]
        self._founding = self._found()

    def is_ready(self) -> bool:
        return next(self._founding)

    def strike(self) -> str:
        prefix = prefix_of(settings.REDISLOCK["default"]["KEY_PREFIX"] + IN_BUCKETS, "lottery")
        slot = key_slot(lock_keys(prefix, "lottery").lock.encode())
        return next(master for master, slots in self._shares() if slot in slots).kill()

    def _member(self, name: str) -> _Node:
        return self._start(
            name,
            f"masterauth {self._password}",
            "cluster-enabled yes",
            f"cluster-port {embedded_server.free_port()}",
            "cluster-node-timeout 1000",
        )

    def _shares(self) -> Iterator[tuple[_Node, range]]:
        """The masters, with the slots of each."""
        bounds = [round(REDIS_CLUSTER_HASH_SLOTS * part / 3) for part in range(4)]
        return zip(self._masters, map(range, bounds, bounds[1:]), strict=False)

    def _found(self) -> Iterator[bool]:
        """Make a cluster of them, step by step; says each time whether that was the last one."""
        first, *others = every = [*self._masters, *self._replicas]
        while not all(node.ask("PING") for node in every):
            yield False
        for epoch, (master, slots) in enumerate(self._shares(), 1):
            master.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            master.ask("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
        for node in others:
            first.ask("CLUSTER", "MEET", HOST, node.port, node.told("cluster-port"))
        while not all(node.says("cluster_known_nodes:6") for node in every):
            yield False
        for master, replica in zip(self._masters, self._replicas, strict=True):
            replica.ask("CLUSTER", "REPLICATE", master.ask("CLUSTER", "MYID"))
        while not all(node.says("cluster_state:ok") for node in every):
            yield False
        while not all(master.ask("WAIT", 1, 100) for master in self._masters):
            yield False
        yield True

    def _setting(self) -> dict[str, Any]:
        return {
            "LOCATION": [master.url for master in self._masters],
            # No REPLICAS_ACK: a replica that takes over has none of its own.
            "OPTIONS": {"password": self._password},
        }


TOPOLOGIES: dict[str, type[Topology]] = {
    "sentinel": Sentinels,
    "cluster": Cluster,
    "quorum": Quorum,
}


class _Node:
    """One process of Valkey, a server or a sentinel."""

    def __init__(
        self,
        name: str,
        home: Path,
        children: Children,
        password: str,
        lines: Sequence[str],
        *,
        sentinel: bool,
    ) -> None:
        self.name = name
        self.port = embedded_server.free_port()
        self._password = password
        self._lines = lines
        folder = home / name
        folder.mkdir(mode=0o700)
        # A file, since every user can read a command line; a sentinel also writes to it.
        config = folder / "valkey.conf"
        config.touch(mode=0o600)
        common = [f"bind {HOST}", f"port {self.port}", f'dir "{folder}"', f"requirepass {password}"]
        keeps_nothing = [] if sentinel else ['save ""', "repl-diskless-sync-delay 0"]
        config.write_text("\n".join([*common, *keeps_nothing, *lines, ""]), encoding="utf-8")
        command = [embedded_server.binary(), str(config), *["--sentinel"] * sentinel]
        self._child = children.start(name, command, env={})
        self._is_killed = False

    @property
    def url(self) -> str:
        """Its address, without the password."""
        return f"redis://{HOST}:{self.port}"

    def told(self, name: str) -> str:
        """What its configuration says."""
        return next(line.partition(" ")[2] for line in self._lines if line.startswith(f"{name} "))

    def says(self, line: str) -> bool:
        """Whether that is one of the lines in which it describes the cluster."""
        return line.encode() in (self.ask("CLUSTER", "INFO") or b"").split(b"\r\n")

    def ask(self, *command: str | bytes | int) -> Any:
        """Run a command there; None if it does not answer, or refuses."""
        with contextlib.suppress(RedisError), self._client() as client:
            return client.execute_command(*command)
        return None

    def kill(self) -> str:
        """End it at once; says so."""
        self._is_killed = True
        self._child.kill()
        return f"{self.name} is killed, pid {self._child.pid}"

    def check(self) -> None:
        """Raise ChildDied if it has died by itself."""
        if not self._is_killed:
            self._child.check(may_end=False)

    def _client(self) -> Redis:
        # Tried once: whether it answers at all is the question.
        never = Retry(NoBackoff(), 0)
        return Redis(
            host=HOST, port=self.port, password=self._password, socket_timeout=5, retry=never
        )
