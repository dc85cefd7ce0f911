"""Uncontended acquire and release, by one client: of one lock, of new names, for new owners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.contenders import (
    ASYNC,
    CONTENDERS,
    OURS,
    READY_BYTES,
    REDIS_PY,
    AsyncContender,
    Contender,
)
from benchmarks.figures import (
    Chart,
    Row,
    Table,
    Target,
    at_least,
    at_most,
    ours_to,
    percentile,
    times,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.bench import Bench

NAME = "bench:cycle"
WARM_UP = 0.05  # Seconds before anything counts: connections, scripts, caches.
SAME = "the same lock"
NEW_NAME = "a new name each time"
NEW_OWNER = "a new owner each time"
PERMIT = "one of ten permits"  # Ours alone.
VARIED = (REDIS_PY, OURS)
CROWDED = (
    "two round trips by sockets, and the scripts, which the ready bytes have too; the rest is"
    " Python, and a trial with all of it in one function came to 2.1"
)
NOT_READY = "only the handle, the lease and the check for misuse are left, which ready bytes lack"
MADE_ANEW = (
    "it makes and packs keys, or the owner in JSON, anew each time; other locks know no owner"
)

numbers = count()

# Cycles with the named contender, of such a kind, for so many seconds; returns those of each.
Spin = Callable[[str, str, float], list[float]]


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
            _table(bench, "sync", list(CONTENDERS), lambda *turn: _spin(bench, *turn)),
            _table(bench, "asyncio", ASYNC, lambda *turn: runner.run(_aspin(bench, *turn))),
        ]


def _table(bench: Bench, kind: str, names: Sequence[str], spin: Spin) -> Table:
    tallies: dict[tuple[str, str, str], Tally] = {}
    for turn in bench.turns(names, bench.effort.cycle_rounds):
        kinds = (SAME, NEW_NAME, NEW_OWNER) if turn.name in VARIED else (SAME,)
        for what in (*kinds, PERMIT) if turn.name == OURS else kinds:
            tally = tallies.setdefault((what, turn.placement, turn.name), Tally())
            spin(turn.name, what, WARM_UP)
            client_cpu, server_cpu = time.process_time(), bench.server.cpu_seconds()
            samples = spin(turn.name, what, bench.effort.cycle_seconds)
            tally.client_cpu += time.process_time() - client_cpu
            tally.server_cpu += bench.server.cpu_seconds() - server_cpu
            tally.rates.append(len(samples) / sum(samples))
            tally.samples += samples
    rows = [_row(bench, *who, tally, spin) for who, tally in tallies.items()]
    # One core first, as in the targets.
    rows.sort(key=lambda row: (row["cores"], row["of"]), reverse=True)
    chart = Chart(f"cycle-{kind}", "cycles/s", "longer", group="of")
    ratio = ours_to(rows, "cycles/s", REDIS_PY, of=SAME)
    gain = f"Uncontended, {kind}: {times(ratio)} as many locks per second as {REDIS_PY}."
    title = f"Uncontended acquire and release, {kind}"
    return Table(title, rows, list(_targets(kind, rows)), chart, gain if ratio else "")


def _targets(kind: str, rows: list[Row]) -> Iterator[Target]:
    claim = f"uncontended cycle, {kind}"
    for what, bound, moonshot, limited_by in (
        (SAME, 2.0, 2.5, CROWDED),
        (NEW_NAME, 1.2, 2.0, MADE_ANEW),
        (NEW_OWNER, 1.2, 2.0, MADE_ANEW),
    ):
        ratio = ours_to(rows, "cycles/s", REDIS_PY, of=what)
        told = f"{claim}, {what}: cycles per second, of {REDIS_PY}'s"
        yield from at_least(told, bound, ratio, moonshot, limited_by)
    alone = [row for row in rows if row["lock"] == OURS and row["of"] in {SAME, PERMIT}]
    as_peers = [{**row, "lock": OURS if row["of"] == PERMIT else SAME} for row in alone]
    ratio = ours_to(as_peers, "µs", SAME)
    yield from at_most(f"{claim}, {PERMIT}: time, of a lock without a limit", 1.2, ratio)
    told = f"{claim}, {SAME}: time, of {READY_BYTES}"
    ratio = ours_to(rows, "µs", READY_BYTES, of=SAME)
    yield from at_most(told, 1.3, ratio, limited_by=NOT_READY)


def _row(bench: Bench, what: str, cores: str, name: str, tally: Tally, spin: Spin) -> Row:
    with bench.server.counting() as traffic:
        counted = len(spin(name, what, WARM_UP))
    cycles = len(tally.samples)
    rate = median(tally.rates)
    return {
        "of": what,
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


def _prepared(bench: Bench, what: str) -> Callable[[], str]:
    """What is done before each cycle; it returns the name of the lock."""
    if what == SAME:
        return lambda: NAME
    if what == NEW_NAME:
        return lambda: f"{NAME}:{next(numbers)}"
    if what == PERMIT:
        return lambda: f"{NAME}:permits"
    become = bench.contender(OURS).become

    def as_a_new_owner() -> str:
        become(f"/orders/{next(numbers)}/")
        return NAME

    return as_a_new_owner


def _spin(bench: Bench, name: str, what: str, seconds: float) -> list[float]:
    contender: Contender = bench.contender(name)
    lock = partial(contender.lock, limit=10) if what == PERMIT else contender.lock
    next_name = _prepared(bench, what)
    samples = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        with lock(next_name()):
            pass
        before, now = now, time.perf_counter()
        samples.append(now - before)
    return samples


async def _aspin(bench: Bench, name: str, what: str, seconds: float) -> list[float]:
    contender: AsyncContender = bench.contender(name)
    lock = partial(contender.alock, limit=10) if what == PERMIT else contender.alock
    next_name = _prepared(bench, what)
    samples = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        async with lock(next_name()):
            pass
        before, now = now, time.perf_counter()
        samples.append(now - before)
    return samples
