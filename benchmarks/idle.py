"""What waiters send while they only wait: many wait, one holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.contenders import WAITING, Contender, contender
from benchmarks.crew import Threads
from benchmarks.figures import Row, Table, at_most, ours

if TYPE_CHECKING:
    from benchmarks.bench import Bench

NAME = "bench:idle"
WAITERS = 64
SETTLE = 0.5  # Seconds for all to be in line.


def measure(bench: Bench) -> list[Table]:
    """Client requests per second of one idle waiter."""
    rows = [_row(bench, name) for name in bench.among(WAITING)]
    claim = "an idle waiter: client requests per second"
    target = at_most(claim, 1, ours(rows, "requests/s, each waiter"))
    return [Table(f"Idle, {WAITERS} waiters", rows, target)]


def _row(bench: Bench, name: str) -> Row:
    seconds = bench.effort.idle_seconds
    holder: Contender = bench.contender(name)
    with Threads(WAITERS) as crew:
        with holder.lock(NAME):
            crew.begin(_wait_once, name, bench.server.port)
            time.sleep(SETTLE)
            with bench.server.counting() as traffic:
                time.sleep(seconds)
        crew.results()
    return {
        "lock": name,
        "requests/s, each waiter": traffic.requests / seconds / WAITERS,
        "in scripts/s, each waiter": traffic.scripted / seconds / WAITERS,
    }


def _wait_once(_shared: None, name: str, port: int) -> None:
    waiter: Contender = contender(name, port)
    with waiter.lock(NAME):
        pass
