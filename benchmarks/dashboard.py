"""Draw docs/monitoring/dashboard.svg: the panels of the dashboard, from a run of `make demo-jobs`.

Run it as `python -m benchmarks.dashboard`. A real Prometheus scrapes `manage.py locks metrics` and
what the beats show by OpenTelemetry, and answers what the panels of
docs/monitoring/grafana-dashboard.json ask.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
MONITORING = ROOT / "docs" / "monitoring"

COLUMN, ROW, GAP = 50, 30, 6  # Pixels of the grid in which Grafana lays out panels.
COLOURS = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#8c959f")
MOST_LINES = len(COLOURS)
STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.row { font-size: 15px; font-weight: 600; }
.big { font-size: 40px; font-weight: 600; }
.quiet { fill: #59636e; }
.page { fill: #f6f8fa; }
.panel { fill: #ffffff; stroke: #d1d9e0; }
.grid { stroke: #d1d9e0; }
.line { fill: none; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .page { fill: #010409; }
  .panel { fill: #0d1117; stroke: #3d444d; }
  .grid { stroke: #3d444d; }
}
"""


class Line(NamedTuple):
    """One line of a panel: its legend, and (time, value) where it has any."""

    legend: str
    points: list[tuple[float, float]]


def main() -> None:
    """Run the demo, and draw what Prometheus has seen of it."""
    sys.path.insert(0, str(ROOT / "example_project"))
    os.chdir(ROOT / "example_project")
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.demo_settings"
    from tests.support.servers import free_port

    first = free_port()
    os.environ["METRICS_PORT"] = str(first)  # And the ports after it.
    import django

    django.setup()
    from django.conf import settings
    from django.core.management import call_command
    from django.test import override_settings

    from example_project.telemetry import MOST_PROCESSES
    from lottery.management.commands import demo_jobs
    from tests.support.prometheus import Prometheus, locks_metrics

    beats = [f"127.0.0.1:{port}" for port in range(first, first + MOST_PROCESSES)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        class Watched(demo_jobs.Command):
            """The demo, watched from when its server is up until its last step."""

            def _run_jobs(self, stage: Any) -> Any:
                default = settings.REDISLOCK["default"] | {"LOCATION": stage.redis.url}
                stack.enter_context(override_settings(REDISLOCK={"default": default}))
                prometheus = Prometheus(Path(folder), locks_metrics, also=beats)
                self.prometheus = stack.enter_context(prometheus)
                self.from_ = time.time()
                return super()._run_jobs(stage)

            def _records(self, stage: Any) -> str:
                picture = draw(self.prometheus, self.from_, time.time())
                (MONITORING / "dashboard.svg").write_text(picture, encoding="utf-8")
                stack.close()
                return str(super()._records(stage))

        call_command(Watched())


def draw(prometheus: Any, begin: float, end: float) -> str:
    """The picture of all panels, from the answers of *prometheus* about this time."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    shapes: list[str] = []
    height = 0
    for panel in board["panels"]:
        where = panel["gridPos"]
        x, y = where["x"] * COLUMN + GAP, where["y"] * ROW + GAP
        wide, high = where["w"] * COLUMN - GAP, where["h"] * ROW - GAP
        height = max(height, y + high + GAP)
        if panel["type"] == "row":
            shapes.append(f'<text class="row" x="{x + 4}" y="{y + 19}">{panel["title"]}</text>')
            continue
        lines = [line for one in panel["targets"] for line in _answers(prometheus, one, begin, end)]
        shapes.append(
            f'<rect class="panel" x="{x}" y="{y}" width="{wide}" height="{high}" rx="3"/>'
        )
        title = escape(panel["title"])
        shapes.append(f'<text class="title" x="{x + 10}" y="{y + 19}">{title}</text>')
        seconds = panel["fieldConfig"]["defaults"]["unit"] == "s"
        kind = {"stat": _stat, "table": _table}.get(panel["type"], _graph)
        if not lines:
            nothing = f'<text class="quiet" x="{x + 10}" y="{y + 44}">no data in this run</text>'
            shapes.append(nothing)
        elif kind is _graph:
            shapes += _graph(lines, x, y, wide, high, (begin, end), "s" if seconds else "")
        else:
            shapes += kind(lines, x, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * COLUMN + GAP} {height}"'
        f' role="img">\n<title>{escape(board["title"])}</title>\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{24 * COLUMN + GAP}" height="{height}"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _answers(prometheus: Any, target: dict[str, Any], begin: float, end: float) -> Iterator[Line]:
    query = target["expr"].replace("$__rate_interval", "10s").replace("$alias", ".*")
    found = prometheus.ask("query_range", query=query, start=begin, end=end, step=1)["result"]
    for one in found[:MOST_LINES]:
        legend = target["legendFormat"] or ", ".join(one["metric"].values())
        for key, value in one["metric"].items():
            legend = legend.replace(f"{{{{{key}}}}}", value)
        points = [(float(at), float(value)) for at, value in one["values"] if value != "NaN"]
        if points:
            yield Line(legend, points)


def _stat(lines: list[Line], x: int, y: int) -> Iterator[str]:
    for number, line in enumerate(lines):
        top = y + 75 + 60 * number
        yield f'<text class="big" x="{x + 16}" y="{top}">{line.points[-1][1]:g}</text>'
        yield f'<text class="quiet" x="{x + 60}" y="{top}">{escape(line.legend)}</text>'


def _table(lines: list[Line], x: int, y: int) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f'<text x="{x + 10}" y="{y + 44 + 18 * number}">{escape(line.legend)}</text>'


def _graph(
    lines: list[Line], x: int, y: int, wide: int, high: int, time_: tuple[float, float], unit: str
) -> Iterator[str]:
    begin, end = time_
    most = max(value for line in lines for _, value in line.points) or 1.0
    left, right = x + 58, x + wide - 12
    top, bottom = y + 34, y + high - 14 - 15 * len(lines)
    for share in (0, 0.5, 1):
        level = bottom - share * (bottom - top)
        yield f'<path class="grid" d="M {left} {level:.1f} H {right}"/>'
        label = f"{share * most:.2g}{unit and ' '}{unit}"
        where = f'x="{left - 6}" y="{level + 4:.1f}" text-anchor="end"'
        yield f'<text class="quiet" {where}>{label}</text>'
    for number, (line, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        path, before = [], 0.0
        for at, value in line.points:
            px = left + (at - begin) / (end - begin) * (right - left)
            py = bottom - value / most * (bottom - top)
            path.append(f"{'L' if at - before < 2.5 else 'M'} {px:.1f} {py:.1f}")  # A gap is none.
            before = at
        yield f'<path class="line" stroke="{colour}" d="{" ".join(path)}"/>'
        base = bottom + 17 + 15 * number
        yield f'<rect fill="{colour}" x="{left}" y="{base - 5}" width="14" height="3"/>'
        yield f'<text class="quiet" x="{left + 20}" y="{base}">{escape(line.legend)}</text>'


if __name__ == "__main__":
    main()
