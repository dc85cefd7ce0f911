"""Server memory of a held lock, and what a released one leaves behind."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.contenders import OURS, PYTHON_REDIS_LOCK, REDIS_PY, Contender
from benchmarks.figures import Row, Table, at_most, ours

if TYPE_CHECKING:
    from benchmarks.bench import Bench

HELD = 10_000


def measure(bench: Bench) -> list[Table]:
    """Bytes per lock by INFO used_memory, with names of 16 bytes."""
    rows = [_row(bench, name) for name in bench.among((REDIS_PY, PYTHON_REDIS_LOCK, OURS))]
    targets = [
        *at_most("server memory: bytes per held lock", 350, ours(rows, "bytes per held lock")),
        *at_most(
            "server memory: bytes left per name after release",
            0,
            ours(rows, "bytes left after release"),
        ),
    ]
    return [Table(f"Server memory, {HELD:,} locks held", rows, targets)]


def _row(bench: Bench, name: str) -> Row:
    holder: Contender = bench.contender(name)
    with holder.lock("bench:memory"):  # Connections and scripts take memory too.
        pass
    bench.server.clear()
    before = bench.server.memory()
    with ExitStack() as held:
        for nth in range(HELD):
            held.enter_context(holder.lock(f"bench:name{nth:06}"))
        during = bench.server.memory()
    after = bench.server.memory()
    bench.server.clear()
    return {
        "lock": name,
        "bytes per held lock": round((during - before) / HELD),
        "bytes left after release": round((after - before) / HELD),
    }
