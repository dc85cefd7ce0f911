"""A lock on the majority of three servers, beside one on a single server and pottery's Redlock."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import redis
from pottery import Redlock  # type: ignore[import-untyped]

from benchmarks.contenders import OURS, TTL, WAIT
from benchmarks.figures import Row, Table, Target, percentile
from benchmarks.placement import ALL_CORES
from benchmarks.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.bench import Bench

NAME = "bench:quorum"
SERVERS = 3
WARM_UP = 0.1  # Seconds before anything counts.
# Three servers and the client share the cores with each other. So many cycles have met nobody.
QUIET = 0.1

SINGLE = "one server"
QUORUM = "a quorum of three"
POTTERY = "pottery's Redlock on the same three"


def measure(bench: Bench) -> list[Table]:
    """The time of a cycle by each way, in turn."""
    if not bench.among([OURS]):
        return []
    bench.contender(OURS)  # It configures Django.
    from django.test import override_settings

    with ExitStack() as stack:
        others = [stack.enter_context(Server()).port for _ in range(SERVERS - 1)]
        ports = [bench.server.port, *others]
        urls = [f"redis://127.0.0.1:{port}/0" for port in ports]
        backend = "django_redislock.backends.QuorumBackend"
        common = {"TTL": TTL, "WAIT": WAIT}
        stack.enter_context(
            override_settings(
                REDISLOCK={
                    "default": {"LOCATION": urls[0], **common},
                    "quorum": {"BACKEND": backend, "LOCATION": urls, **common},
                }
            )
        )
        return [_table(_ways(ports), bench)]


def _ways(ports: list[int]) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    from django_redislock import distributed_lock

    masters = {redis.Redis(port=port) for port in ports}
    return {
        SINGLE: lambda: distributed_lock(NAME),
        QUORUM: lambda: distributed_lock(NAME, using="quorum"),
        POTTERY: lambda: Redlock(key=NAME, masters=masters, auto_release_time=TTL),
    }


def _table(ways: dict[str, Callable[[], AbstractContextManager[object]]], bench: Bench) -> Table:
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for nth in range(bench.effort.rounds):
        for at in range(len(ways)):
            # In turn, so that a noisy moment hits all alike.
            way = list(ways)[(nth + at) % len(ways)]
            _spin(ways[way], WARM_UP)
            samples[way] += _spin(ways[way], bench.effort.cycle_seconds)
    quiet = {way: percentile(taken, QUIET) for way, taken in samples.items()}
    rows: list[Row] = [
        {
            "a lock on": way,
            "p10 µs": quiet[way] * 1e6,
            "p50 µs": percentile(taken, 0.5) * 1e6,
            "of one server": quiet[way] / quiet[SINGLE],
        }
        for way, taken in samples.items()
    ]
    targets = [
        Target(
            "a cycle on a quorum of three: time, of one server's",
            "at most",
            2.0,
            {ALL_CORES: quiet[QUORUM] / quiet[SINGLE]},
        ),
        Target(
            "a cycle on a quorum of three: times as fast as pottery's Redlock",
            "at least",
            3.0,
            {ALL_CORES: quiet[POTTERY] / quiet[QUORUM]},
        ),
    ]
    return Table("A majority of three servers", rows, targets)


def _spin(lock: Callable[[], AbstractContextManager[object]], seconds: float) -> list[float]:
    samples = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        before = now
        with lock():
            pass
        now = time.perf_counter()
        samples.append(now - before)
    return samples
