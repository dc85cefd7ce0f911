"""Instructions of a client for a cycle: exact where time is noisy; counted by Valgrind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.contenders import OURS, REDIS_PY, Contender, contender
from benchmarks.figures import Row, Table, at_most, ours_to

if TYPE_CHECKING:
    from benchmarks.bench import Bench

NAME = "bench:instructions"
WARM_UP = 50  # Cycles: imports, connections, scripts and caches are in each run.
COUNTED = 500  # Cycles by which the second run of a contender is longer than the first.
COUNTING = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


def measure(bench: Bench) -> list[Table]:
    """The difference of a longer and a shorter run; nothing without Valgrind."""
    rows: list[Row] = []
    if shutil.which(COUNTING[0]):
        for name in bench.among((REDIS_PY, OURS)):
            longer, shorter = (
                _instructions(name, bench.server.port, WARM_UP + cycles) for cycles in (COUNTED, 0)
            )
            rows.append({"lock": name, "instructions": (longer - shorter) / COUNTED})
    claim = f"uncontended cycle, sync: instructions of the client, of {REDIS_PY}'s"
    target = at_most(claim, 0.5, ours_to(rows, "instructions", REDIS_PY))
    return [Table("Instructions of a client for one cycle", rows, target)]


def _instructions(name: str, port: int, cycles: int) -> int:
    run = subprocess.run(
        [*COUNTING, sys.executable, "-m", __name__, name, str(port), str(cycles)],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # Or tables of names would differ each time.
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = TOTAL.search(run.stderr)
    if not found:
        raise RuntimeError(f"Valgrind tells no instructions: {run.stderr}")
    return int(found[1].replace(",", ""))


def main(name: str, port: str, cycles: str) -> None:
    """Lock and release so often."""
    runner: Contender = contender(name, int(port))
    for _ in range(int(cycles)):
        with runner.lock(NAME):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
