"""Eight processes take the same lock over and over: how often in all, and how evenly."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.contenders import PYTHON_REDIS_LOCK, REDIS_PY, WAITING, Contender, contender
from benchmarks.crew import Processes
from benchmarks.figures import Chart, Row, Table, Target, at_least, jain, ours, ours_to, times
from benchmarks.placement import confine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench

NAME = "bench:contended"
PROCESSES = 8
COLD = "each cycle is a hand-over to another process, whose Python is in no cache by then"
BARGES = "it hands nothing on: the releasing process most often acquires next, and the others wait"
HEAD_START = 0.1  # Seconds until the common start, for all to hear of it.


def measure(bench: Bench) -> list[Table]:
    """Throughput and fairness."""
    counts: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    seconds = bench.effort.contended_seconds
    with Processes(PROCESSES) as crew:
        for turn in bench.turns(WAITING):
            crew.perform(_connect, turn.name, bench.server.port, turn.cores)
            start = time.perf_counter() + HEAD_START
            counts[turn.placement, turn.name].append(
                crew.perform(_compete, turn.name, bench.server.port, start, start + seconds)
            )
    rows: list[Row] = [
        {
            "lock": name,
            "cores": cores,
            "cycles/s": median(sum(got) / seconds for got in rounds),
            "Jain": min(jain(got) for got in rounds),
            "busiest process, % of all": max(max(got) / sum(got) for got in rounds) * 100,
        }
        for (cores, name), rounds in counts.items()
    ]
    rows.sort(key=lambda row: row["cores"], reverse=True)
    chart = Chart("contended", "cycles/s", "longer", note="Jain")
    ratio = ours_to(rows, "cycles/s", PYTHON_REDIS_LOCK)
    gain = (
        f"{PROCESSES} processes that contend for a lock have it equally often, together"
        f" {times(ratio)} as often as with {PYTHON_REDIS_LOCK}."
    )
    title = f"Contended, {PROCESSES} processes"
    return [Table(title, rows, list(_targets(rows)), chart, gain if ratio else "")]


def _targets(rows: list[Row]) -> Iterator[Target]:
    crowd = f"{PROCESSES} processes"
    yield from at_least(f"{crowd}: Jain's index", 0.99, ours(rows, "Jain"))
    for peer, bound, moonshot, limited_by in (
        (PYTHON_REDIS_LOCK, 1.8, 2.5, COLD),
        (REDIS_PY, 1, None, BARGES),
    ):
        claim = f"{crowd}: cycles per second, of {peer}'s"
        yield from at_least(claim, bound, ours_to(rows, "cycles/s", peer), moonshot, limited_by)


def _connect(_shared: None, name: str, port: int, cores: set[int]) -> None:
    """Get ready: nobody's imports and connections are to cut the others' time."""
    confine(os.getpid(), cores)
    competitor: Contender = contender(name, port)
    with competitor.lock(f"{NAME}:{os.getpid()}"):
        pass


def _compete(_shared: None, name: str, port: int, start: float, end: float) -> int:
    """Take the lock as often as it goes; returns how often."""
    competitor: Contender = contender(name, port)
    # perf_counter() is the same in all processes.
    time.sleep(max(0, start - time.perf_counter()))
    count = 0
    while True:
        with competitor.lock(NAME):
            now = time.perf_counter()
        if now > end:
            return count
        count += 1
