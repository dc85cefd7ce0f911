"""Server memory of a held lock, and what a released one leaves behind."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.contenders import OURS, PYTHON_REDIS_LOCK, REDIS_PY, Contender
from benchmarks.figures import Row, Table, at_most, ours

if TYPE_CHECKING:
    from benchmarks.bench import Bench

HELD = 10_000
LEFT, LEFT_LONG = "bytes left after release", "bytes left by longer ones"


def measure(bench: Bench) -> list[Table]:
    """Bytes per lock by INFO used_memory, with names of 16 bytes."""
    rows = [_row(bench, name) for name in bench.among((REDIS_PY, PYTHON_REDIS_LOCK, OURS))]
    targets = [
        *at_most(
            "server memory: bytes per held lock",
            350,
            ours(rows, "bytes per held lock"),
            limited_by="the owner in JSON, and an entry in the index that lists held locks",
        ),
        *at_most(
            "server memory: bytes left per name after release",
            0,
            ours(rows, LEFT),
        ),
    ]
    return [Table(f"Server memory, {HELD:,} locks held", rows, targets)]


def _row(bench: Bench, name: str) -> Row:
    holder: Contender = bench.contender(name)
    with holder.lock("bench:memory"):  # Connections and scripts take memory too.
        pass
    bench.server.clear()
    names = [f"bench:name{nth:06}" for nth in range(HELD)]
    before = bench.server.memory()
    for lock in names:
        with holder.lock(lock):
            pass
    shortly = bench.server.memory()
    bench.server.clear()
    with ExitStack() as held:
        for lock in names:
            held.enter_context(holder.lock(lock))
        during = bench.server.memory()
    after = bench.server.memory()  # To take so many takes seconds, so each was held for long.
    bench.server.clear()
    return {
        "lock": name,
        "bytes per held lock": round((during - before) / HELD),
        LEFT: round((shortly - before) / HELD),
        LEFT_LONG: round((after - before) / HELD),
    }
