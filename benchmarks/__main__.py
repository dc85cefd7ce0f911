"""The command: `python -m benchmarks [names] [--quick] [--write]`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import (
    cluster,
    contended,
    cycle,
    effects,
    handoff,
    idle,
    instructions,
    memory,
    quorum,
    records,
    report,
    tasks,
    telemetry,
    watchdog,
)
from benchmarks.bench import FULL, QUICK, Bench
from benchmarks.contenders import CONTENDERS, TASKS
from benchmarks.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASUREMENTS = {
    "cycle": cycle.measure,
    "instructions": instructions.measure,
    "handoff": handoff.measure,
    "contended": contended.measure,
    "idle": idle.measure,
    "memory": memory.measure,
    "records": records.measure,
    "watchdog": watchdog.measure,
    "tasks": tasks.measure,
    "effects": effects.measure,
    "quorum": quorum.measure,
    "cluster": cluster.measure,
    "telemetry": telemetry.measure,
}
NAMES = list(dict.fromkeys([*CONTENDERS, *TASKS]))  # Ours is among both.


def main(argv: Sequence[str]) -> None:
    """Measure what was asked for, show it, and write it down on request."""
    options = _options(argv)
    # However we are ended, the blocks below end the server and the child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tables = []
    with Server() as server:
        bench = Bench(server, QUICK if options.quick else FULL, options.contender)
        for name in options.names:
            began = time.monotonic()
            tables += MEASUREMENTS[name](bench)
            sys.stderr.write(f"{name}: measured in {time.monotonic() - began:.0f} s\n")
        measured = report.markdown(tables, bench, " ".join(["python -m benchmarks", *argv]))
    sys.stdout.write(measured)
    if options.write:
        report.write(measured, tables)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare Redis locks in one run, on a private Valkey.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(MEASUREMENTS)}; default all"
    )
    parser.add_argument("--quick", action="store_true", help="less exact, some minutes")
    parser.add_argument(
        "--write", action="store_true", help="write RESULTS.md, the gains and the pictures"
    )
    parser.add_argument(
        "--contender",
        action="append",
        choices=NAMES,
        metavar="LOCK",
        help=f"measure only this lock; may be repeated; of {'; '.join(NAMES)}",
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in MEASUREMENTS]:
        parser.error(f"unknown measurement: {', '.join(unknown)}")
    if options.write and (options.names or options.contender):
        parser.error("--write writes the whole page: name no measurement and no contender")
    options.names = options.names or list(MEASUREMENTS)
    options.contender = options.contender or NAMES
    return options


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
