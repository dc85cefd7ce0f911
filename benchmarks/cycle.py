"""Uncontended acquire and release, by one client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.contenders import (
    ASYNC,
    CONTENDERS,
    READY_BYTES,
    REDIS_PY,
    AsyncContender,
    Contender,
)
from benchmarks.figures import Chart, Row, Table, at_least, at_most, ours_to, percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bench import Bench

NAME = "bench:cycle"
WARM_UP = 0.05  # Seconds before anything counts: connections, scripts, caches.

# Cycles with the named contender for so many seconds; returns the seconds of each cycle.
Spin = Callable[[str, float], list[float]]


@dataclass(slots=True)
class Tally:
    """What one contender did in one placement, over all rounds."""

    rates: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    client_cpu: float = 0.0
    server_cpu: float = 0.0


def measure(bench: Bench) -> list[Table]:
    """Cycles per second, latency, CPU and commands: sync, then asyncio."""
    with asyncio.Runner() as runner:
        return [
            _table(bench, "sync", 2.2, list(CONTENDERS), lambda *turn: _spin(bench, *turn)),
            _table(bench, "asyncio", 2.5, ASYNC, lambda *turn: runner.run(_aspin(bench, *turn))),
        ]


def _table(bench: Bench, kind: str, bound: float, names: Sequence[str], spin: Spin) -> Table:
    tallies: dict[tuple[str, str], Tally] = {}
    for turn in bench.turns(names, bench.effort.cycle_rounds):
        tally = tallies.setdefault((turn.placement, turn.name), Tally())
        spin(turn.name, WARM_UP)
        client_cpu, server_cpu = time.process_time(), bench.server.cpu_seconds()
        samples = spin(turn.name, bench.effort.cycle_seconds)
        tally.client_cpu += time.process_time() - client_cpu
        tally.server_cpu += bench.server.cpu_seconds() - server_cpu
        tally.rates.append(len(samples) / sum(samples))
        tally.samples += samples
    rows = [_row(bench, name, cores, tally, spin) for (cores, name), tally in tallies.items()]
    rows.sort(key=lambda row: row["cores"], reverse=True)  # One core first, as in the targets.
    claim = f"uncontended cycle, {kind}"
    targets = [
        *at_least(
            f"{claim}: cycles per second, of {REDIS_PY}'s",
            bound,
            ours_to(rows, "cycles/s", REDIS_PY),
            moonshot=3,
        ),
        *at_most(f"{claim}: time, of {READY_BYTES}", 1.3, ours_to(rows, "µs", READY_BYTES)),
    ]
    chart = Chart(f"cycle-{kind}", "cycles/s", "longer")
    return Table(f"Uncontended acquire and release, {kind}", rows, targets, chart)


def _row(bench: Bench, name: str, cores: str, tally: Tally, spin: Spin) -> Row:
    with bench.server.counting() as traffic:
        counted = len(spin(name, WARM_UP))
    cycles = len(tally.samples)
    rate = median(tally.rates)
    return {
        "lock": name,
        "cores": cores,
        "cycles/s": rate,
        "µs": 1e6 / rate,
        "p50 µs": percentile(tally.samples, 0.50) * 1e6,
        "p99 µs": percentile(tally.samples, 0.99) * 1e6,
        "client CPU µs": tally.client_cpu / cycles * 1e6,
        "server CPU µs": tally.server_cpu / cycles * 1e6,
        "requests": traffic.requests / counted,
        "in scripts": traffic.scripted / counted,
    }


def _spin(bench: Bench, name: str, seconds: float) -> list[float]:
    contender: Contender = bench.contender(name)
    samples = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        with contender.lock(NAME):
            pass
        before, now = now, time.perf_counter()
        samples.append(now - before)
    return samples


async def _aspin(bench: Bench, name: str, seconds: float) -> list[float]:
    contender: AsyncContender = bench.contender(name)
    samples = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        async with contender.alock(NAME):
            pass
        before, now = now, time.perf_counter()
        samples.append(now - before)
    return samples
