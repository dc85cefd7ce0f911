"""The measured tables as Markdown, on the screen and in the documentation."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import number
from benchmarks.pictures import svg
from benchmarks.placement import ALL_CORES, ONE_CORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.bench import Bench
    from benchmarks.figures import Row, Table, Target

RESULTS = Path(__file__).with_name("RESULTS.md")
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"  # What a user gains, and how.
PICTURES = PAGE.with_suffix("")
BEGIN = "<!-- measured: written by python -m benchmarks --write, do not edit -->"
END = "<!-- /measured -->"
GAINS_BEGIN = "<!-- gains: written by python -m benchmarks --write, do not edit -->"
GAINS_END = "<!-- /gains -->"
PACKAGES = (
    "Django",
    "redis",
    "hiredis",
    "python-redis-lock",
    "celery",
    "celery-singleton",
    "celery-heimdall",
    "celery-once",
    "psycopg",
    "PyMySQL",
)


def markdown(tables: Sequence[Table], bench: Bench, command: str) -> str:
    """Everything measured: what a user gains, the targets, then each table."""
    targets = [target for table in tables for target in table.targets]
    parts = [*filter(None, [_gains(tables)]), f"Measured by `{command}` on {_machine(bench)}."]
    if targets:
        met = sum(target.met for target in targets)
        parts += [f"## Targets: {met} of {len(targets)} met", _grid(map(_target_row, targets))]
        if missed := [target for target in targets if not target.met]:
            parts += ["What bounds the others:", "\n".join(_limits(missed))]
    for table in tables:
        parts.append(f"## {table.title}")
        if table.chart:
            parts.append(f"![{table.title}](../docs/{PICTURES.name}/{table.chart.file}.svg)")
        parts.append(_grid(table.rows))
    return "\n\n".join(parts) + "\n"


def write(measured: str, tables: Sequence[Table]) -> None:
    """Put the measured part into its place in the documentation; the rest stays as it is."""
    PICTURES.mkdir(exist_ok=True)
    for table in tables:
        if table.chart:
            picture = PICTURES / f"{table.chart.file}.svg"
            picture.write_text(svg(table, table.chart), encoding="utf-8")
    gains = _gains(tables)
    _put(PAGE, GAINS_BEGIN, gains, GAINS_END)
    _put(RESULTS, BEGIN, measured.removeprefix(gains).strip(), END)


def _put(page: Path, begin: str, text: str, end: str) -> None:
    """Write *text* between two lines of a page; the rest stays as it is."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    text = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def _gains(tables: Sequence[Table]) -> str:
    return "\n".join(f"- {table.gain}" for table in tables if table.gain)


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
        "target": f"{target.direction} {target.bound:g}",
        "moonshot": "" if target.moonshot is None else f"{target.moonshot:g}",
        ONE_CORE: target.measured.get(ONE_CORE, ""),
        ALL_CORES: target.measured.get(ALL_CORES, ""),
        "met": "moonshot" if target.moonshot_met else "yes" if target.met else "**no**",
    }


def _limits(missed: Iterable[Target]) -> Iterator[str]:
    """A line for each reason why targets are missed, with the targets."""
    claims: dict[str, list[str]] = {}
    for target in missed:
        reason = target.limited_by or "nothing that we know of"
        claims.setdefault(reason, []).append(f"*{target.claim}*")
    return (f"- {'; '.join(named)}: {reason}." for reason, named in claims.items())


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
    return value if isinstance(value, str) else number(value)
