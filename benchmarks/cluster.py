"""How many locks a cluster does, by the number of its nodes."""

from __future__ import annotations

import secrets
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import OURS
from benchmarks.figures import Row, Table

if TYPE_CHECKING:
    from benchmarks.bench import Bench

NODES = (1, 2, 3)
AT_ONCE = 1000  # Locks that are taken together, and released together.


def measure(bench: Bench) -> list[Table]:
    """Locks taken and released by one process as fast as it can, all names at once.

    The nodes and the client share the cores of this machine, so what the nodes could do with a
    core each is in the processor time of the busiest one: each lock costs it that much.
    """
    if not bench.among([OURS]):
        return []
    bench.contender(OURS)  # It configures Django.
    return [Table("Cluster, by nodes", [_row(bench, nodes) for nodes in NODES])]


def _row(bench: Bench, nodes: int) -> Row:
    from django_redislock.backends.cluster.backend import ClusterBackend
    from django_redislock.conf import parse
    from tests.support.clusters import Cluster

    with Cluster("valkey", masters=nodes) as cluster:
        backend = ClusterBackend(parse("default", cluster.setting()))
        _cycle(backend)
        clients = [server.client() for server in cluster.servers]
        rates, client_cpu, cycles = [], 0.0, 0
        before = [_cpu_seconds(client) for client in clients]
        for _ in range(bench.effort.rounds * 4):
            begun, used = time.perf_counter(), time.process_time()
            _cycle(backend)
            rates.append(AT_ONCE / (time.perf_counter() - begun))
            client_cpu += time.process_time() - used
            cycles += AT_ONCE
        spent = [_cpu_seconds(client) - was for client, was in zip(clients, before, strict=True)]
        backend.retire()
    busiest = max(spent) / cycles
    return {
        "nodes": nodes,
        "cycles/s, all on these cores": median(rates),
        "client CPU µs": client_cpu / cycles * 1e6,
        "CPU µs of all nodes": sum(spent) / cycles * 1e6,
        "CPU µs of the busiest": busiest * 1e6,
        "cycles/s, with a core for each node": 1 / busiest,
    }


def _cycle(backend: Any) -> None:
    """Take and release so many locks of other names than before."""
    from django_redislock.rules import scripts
    from django_redislock.rules.steps import Call

    run = secrets.token_hex(4)
    tokens = {f"bench:{run}:{nth}": secrets.token_hex(16) for nth in range(AT_ONCE)}
    taken = [
        Call(scripts.ACQUIRE, name, (token, token[:16], 30_000, "try", b"0", "", "r", "{}"), 5.0)
        for name, token in tokens.items()
    ]
    backend.results_of(taken)
    released = [Call(scripts.RELEASE, name, (token,), 5.0) for name, token in tokens.items()]
    assert set(backend.results_of(released)) == {b"released"}


def _cpu_seconds(client: Any) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])
