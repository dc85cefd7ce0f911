"""From samples to tables, and from tables to the targets they are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    direction: Literal["at least", "at most"]
    bound: float
    measured: Mapping[str, float]  # Placement -> figure. The pinned one decides, if there is one.
    moonshot: float | None = None  # A bound beyond the bound, for the glory.
    limited_by: str = ""  # What keeps us from more; told if the bound is not reached.

    @property
    def met(self) -> bool:
        """Whether the bound is reached."""
        return self._reaches(self.bound)

    @property
    def moonshot_met(self) -> bool:
        """Whether the moonshot is reached, if there is one."""
        return self.moonshot is not None and self._reaches(self.moonshot)

    def _reaches(self, bound: float) -> bool:
        figure = self.measured[ONE_CORE if ONE_CORE in self.measured else ALL_CORES]
        return figure >= bound if self.direction == "at least" else figure <= bound


@dataclass(frozen=True, slots=True)
class Chart:
    """How a table is drawn: a bar for each row of the placement that decides."""

    file: str  # The picture's name in docs/benchmarks/, without its suffix.
    column: str  # What the bars are as long as; its name says the unit.
    better: Literal["longer", "shorter"]
    group: str = ""  # A column whose values part the bars into groups.
    note: str = ""  # A column told behind the figure.


@dataclass(frozen=True, slots=True)
class Table:
    """One measurement, ready to be shown."""

    title: str
    rows: Sequence[Row]
    targets: Sequence[Target] = ()
    chart: Chart | None = None
    gain: str = ""  # What it means to a user, in one sentence; the page begins with these.


def at_least(
    claim: str,
    bound: float,
    measured: Mapping[str, float],
    moonshot: float | None = None,
    limited_by: str = "",
) -> list[Target]:
    """A target to reach or exceed; none if it was not measured."""
    return [Target(claim, "at least", bound, measured, moonshot, limited_by)] if measured else []


def at_most(
    claim: str,
    bound: float,
    measured: Mapping[str, float],
    moonshot: float | None = None,
    limited_by: str = "",
) -> list[Target]:
    """A target not to exceed; none if it was not measured."""
    return [Target(claim, "at most", bound, measured, moonshot, limited_by)] if measured else []


def number(value: float) -> str:
    """A figure with as many digits as it deserves."""
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratios: Mapping[str, float]) -> str:
    """Ratios in a sentence: "1.33 times (one core) and 1.08 times (all cores)"."""
    return " and ".join(f"{number(ratio)} times ({cores})" for cores, ratio in ratios.items())


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
