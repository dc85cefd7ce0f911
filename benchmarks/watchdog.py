"""What it costs to keep many leases renewed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.contenders import OURS, TTL, Contender
from benchmarks.figures import Row, Table

if TYPE_CHECKING:
    from benchmarks.bench import Bench

HELD = 10_000


def measure(bench: Bench) -> list[Table]:
    """CPU and commands of our watchdog; no peer renews many leases without a thread for each."""
    rows = [_row(bench, name) for name in bench.among([OURS])]
    return [Table(f"Watchdog, {HELD:,} leases of {TTL} s", rows)]


def _row(bench: Bench, name: str) -> Row:
    holder: Contender = bench.contender(name)
    seconds = bench.effort.watchdog_seconds
    with ExitStack() as held:
        for nth in range(HELD):
            held.enter_context(holder.lock(f"bench:name{nth:06}"))
        with bench.server.counting() as traffic:
            before = time.process_time()  # Of all threads.
            time.sleep(seconds)
            cpu = time.process_time() - before
    return {
        "lock": name,
        "client CPU %": cpu / seconds * 100,
        "requests/s": traffic.requests / seconds,
        "in scripts/s": traffic.scripted / seconds,
    }
