"""How long locks stand still when their master goes: python -m tests.support.recovery sentinel.

For each way to go it prints the seconds from then to the first grant of the successor, to somebody
who asks all the time. The sentinels take a master for dead after a second of silence, and so do the
nodes of a cluster: python -m tests.support.recovery cluster. In a quorum, one server of three goes.
"""

import os
import statistics
import sys
import threading
import time

from tests.support.servers import KINDS, Server

RUNS = 7
DOWN_AFTER = 1.0

HOW = {
    "killed (SIGKILL)": lambda topology: topology.master.kill(),
    "silent (SIGSTOP)": lambda topology: topology.master.pause(),
    "planned": lambda topology: topology.fail_over(),
}


def of_sentinels(kind):
    from tests.support.topologies import Watched

    return Watched(kind, down_after=DOWN_AFTER)


def of_cluster(kind):
    from tests.support.clusters import Cluster

    return Cluster(kind, replicas=1, node_timeout=DOWN_AFTER)


class Independent:
    """Three servers that know nothing of each other, so that none takes over from another."""

    def __init__(self, kind):
        self._servers = [Server(kind) for _ in range(3)]
        self.master = self._servers[0]

    def __enter__(self):
        for server in self._servers:
            server.start()
        return self

    def __exit__(self, *exc_info):
        for server in self._servers:
            server.close()

    def setting(self):
        return {
            "BACKEND": "django_redislock.backends.QuorumBackend",
            "LOCATION": [server.url for server in self._servers],
        }

    def await_failover(self):
        pass


TOPOLOGIES = {
    "sentinel": of_sentinels,
    "cluster": of_cluster,
    "quorum": Independent,
}


def longest_pause(topology, go):
    """The longest that an acquire took while the master went."""
    from django.conf import settings

    from django_redislock import distributed_lock
    from django_redislock.backends.registry import backends

    with topology:
        settings.REDISLOCK = {"default": {**topology.setting(), "UNAVAILABLE_AFTER": 30}}
        backends.reset()
        over = threading.Event()
        pauses = [0.0]

        def ask_on_and_on():
            number = 0
            while not over.is_set():
                number += 1  # What was lost with the master has to run out: never the same name.
                lock, begun = distributed_lock(f"draw {number}", wait=30), time.perf_counter()
                lock.acquire()
                pauses.append(time.perf_counter() - begun)
                lock.release(success=False)

        asking = threading.Thread(target=ask_on_and_on)
        asking.start()
        while len(pauses) < 20:  # Connections are there.
            time.sleep(0.01)
        pauses.clear()
        go(topology)
        topology.await_failover()
        time.sleep(3)  # So that the first grant comes before the end.
        over.set()
        asking.join()
        return max(pauses)


def main(which):
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    for kind in KINDS:
        for how, go in HOW.items():
            if which == "quorum" and how == "planned":
                continue
            took = sorted(longest_pause(TOPOLOGIES[which](kind), go) for _ in range(RUNS))
            print(
                f"{kind:7} {how:18} median {statistics.median(took):.2f} s,"
                f" {took[0]:.2f} to {took[-1]:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1])
