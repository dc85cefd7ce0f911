"""Tables as bar charts: SVG that follows the light or dark theme of the reader's system."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from benchmarks.contenders import BARE, OURS, READY_BYTES
from benchmarks.figures import number
from benchmarks.placement import ALL_CORES, ONE_CORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Chart, Row, Table

WIDTH = 760
LEFT, RIGHT = 224, 600  # Of the bars: names stand left of them, figures right of their ends.
HEAD, LINE, BAR = 70, 26, 16
# A bar is cut where it is more than so many times as long as our longest, since next to it one
# could not see ours.
CUT = 4
LIMITS = (READY_BYTES, BARE)  # What no lock can exceed; drawn as an outline.
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; }
.strong { font-weight: 600; }
.quiet { fill: #59636e; }
.page { fill: #ffffff; }
.zero { stroke: #818b98; }
.bar { fill: #8c959f; stroke: #8c959f; }
.limit { fill: none; stroke-dasharray: 4 3; }
.ours { fill: #0969da; stroke: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .page { fill: #0d1117; }
  .zero { stroke: #656c76; }
  .bar { fill: #6e7681; stroke: #6e7681; }
  .limit { fill: none; }
  .ours { fill: #4493f8; stroke: #4493f8; }
}
"""
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>{title}: {unit}</title>
<style>{style}</style>
<rect class="page" width="{width}" height="{height}" rx="6"/>
<text class="title" x="16" y="30">{title}</text>
<text class="quiet" x="16" y="52">{unit}</text>
{shapes}
<path class="zero" d="{zero}"/>
</svg>
"""


def svg(table: Table, chart: Chart) -> str:
    """The picture of a table."""
    rows = [row for row in table.rows if row["cores"] == _placement(table)]
    cut_at = CUT * max(_figure(row, chart) for row in rows if row["lock"] == OURS)
    # So that a cut bar is longer than all that are not.
    whole = 1.15 * max(figure for row in rows if (figure := _figure(row, chart)) <= cut_at)
    scale = (RIGHT - LEFT) / min(whole, max(_figure(row, chart) for row in rows))
    shapes, y = [], HEAD
    for group, members in groupby(rows, lambda row: row.get(chart.group, "")):
        if group:
            y += LINE
            shapes.append(f'<text class="strong" x="16" y="{y - 9}">{escape(str(group))}</text>')
        for row in members:
            shapes += _bar(row, chart, y, scale)
            y += LINE
    unit = f"{chart.column}, {_placement(table)}; {chart.better} is better"
    return PICTURE.format(
        width=WIDTH,
        height=y + 14,
        title=escape(table.title),
        unit=escape(unit),
        style=STYLE,
        shapes="\n".join(shapes),
        zero=f"M {LEFT} {HEAD - 4} V {y}",
    )


def _placement(table: Table) -> str:
    """The placement that is drawn: the one that decides on targets."""
    return ONE_CORE if any(row["cores"] == ONE_CORE for row in table.rows) else ALL_CORES


def _figure(row: Row, chart: Chart) -> float:
    return float(row[chart.column])


def _bar(row: Row, chart: Chart, y: float, scale: float) -> Iterator[str]:
    name = str(row["lock"])
    words = number(_figure(row, chart))
    if chart.note:
        words += f" ({chart.note} {number(float(row[chart.note]))})"
    length = _figure(row, chart) * scale
    end = LEFT + min(length, RIGHT - LEFT)
    top, base = y + (LINE - BAR) / 2, y + LINE / 2 + 5
    kind = "bar ours" if name == OURS else "bar limit" if name in LIMITS else "bar"
    strong = ' class="strong"' if name == OURS else ""
    yield f'<text{strong} x="{LEFT - 10}" y="{base}" text-anchor="end">{escape(name)}</text>'
    yield f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BAR}"/>'
    if length > RIGHT - LEFT + 1:  # A gap says that the bar goes on.
        gap = f"M {end - 22} {top + BAR + 1} l 8 {-BAR - 2} h 6 l -8 {BAR + 2} z"
        yield f'<path class="page" d="{gap}"/>'
    yield f'<text{strong} x="{end + 8:.1f}" y="{base}">{escape(words)}</text>'
