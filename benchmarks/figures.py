"""From samples to tables, and from tables to the targets they are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.contenders import OURS
from benchmarks.placement import ALL_CORES, ONE_CORE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Row = dict[str, str | float]  # Column heading -> what stands there.


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of all samples does not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def jain(counts: Sequence[int]) -> float:
    """Jain's fairness index: 1 if all got the same, 1/n if one got everything."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """What we set out to reach, and what was measured."""

    claim: str
    goal: str  # Such as "at least 2".
    measured: Mapping[str, float]  # Placement -> figure.
    met: bool


@dataclass(frozen=True, slots=True)
class Table:
    """One measurement, ready to be shown."""

    title: str
    rows: Sequence[Row]
    targets: Sequence[Target] = field(default=())


def at_least(claim: str, bound: float, measured: Mapping[str, float]) -> list[Target]:
    """A target to reach or exceed; none if it was not measured."""
    return [
        Target(claim, f"at least {bound:g}", measured, figure >= bound)
        for figure in _deciding(measured)
    ]


def at_most(claim: str, bound: float, measured: Mapping[str, float]) -> list[Target]:
    """A target not to exceed; none if it was not measured."""
    return [
        Target(claim, f"at most {bound:g}", measured, figure <= bound)
        for figure in _deciding(measured)
    ]


def ours(rows: Sequence[Row], column: str, **where: str | float) -> dict[str, float]:
    """Our figure in a column, by placement."""
    return _figures(rows, column, OURS, where)


def ours_to(rows: Sequence[Row], column: str, peer: str, **where: str | float) -> dict[str, float]:
    """Our figure as a multiple of a peer's of the same run, by placement."""
    theirs = _figures(rows, column, peer, where)
    mine = _figures(rows, column, OURS, where)
    return {cores: mine[cores] / theirs[cores] for cores in mine if theirs.get(cores)}


def _figures(
    rows: Sequence[Row], column: str, lock: str, where: Mapping[str, str | float]
) -> dict[str, float]:
    return {
        str(row.get("cores", ALL_CORES)): float(row[column])
        for row in rows
        if row["lock"] == lock and all(row[key] == wanted for key, wanted in where.items())
    }


def _deciding(measured: Mapping[str, float]) -> list[float]:
    """The figure that decides: the pinned one, where there is one."""
    return [measured[cores] for cores in (ONE_CORE, ALL_CORES) if cores in measured][:1]
