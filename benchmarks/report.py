"""The measured tables as Markdown, on the screen and in the documentation."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.placement import ALL_CORES, ONE_CORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.figures import Row, Table, Target

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- measured: written by python -m benchmarks --write, do not edit -->"
END = "<!-- /measured -->"
PACKAGES = ("Django", "redis", "hiredis", "python-redis-lock")


def markdown(tables: Sequence[Table], bench: Bench, command: str) -> str:
    """Everything measured: the targets first, then each table, then where it was measured."""
    targets = [target for table in tables for target in table.targets]
    parts = [f"Measured by `{command}` on {_machine(bench)}."]
    if targets:
        met = sum(target.met for target in targets)
        parts += [f"## Targets: {met} of {len(targets)} met", _grid(map(_target_row, targets))]
    for table in tables:
        parts += [f"## {table.title}", _grid(table.rows)]
    return "\n\n".join(parts) + "\n"


def write(measured: str) -> None:
    """Put the measured part into its place in the documentation; the rest stays as it is."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{measured}\n{END}{after}", encoding="utf-8")


def _machine(bench: Bench) -> str:
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"{len(bench.placements[ALL_CORES]) or os.cpu_count()} cores, {platform.system()}, "
        f"Valkey {bench.server.version} over TCP on loopback, "
        f"{platform.python_implementation()} {platform.python_version()}, {packages}"
    )


def _target_row(target: Target) -> Row:
    return {
        "what": target.claim,
        "target": target.goal,
        ONE_CORE: target.measured.get(ONE_CORE, ""),
        ALL_CORES: target.measured.get(ALL_CORES, ""),
        "met": "yes" if target.met else "**no**",
    }


def _grid(rows: Iterable[Row]) -> str:
    rows = list(rows)
    if not rows:
        return "Not measured."
    columns = list(rows[0])
    # Numbers stand right, words left.
    rules = ["---" if isinstance(rows[0][column], str) else "--:" for column in columns]
    lines = [columns, rules, *([_cell(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
