"""Pictures drawn from text: ```` ```{diagram} What it shows ```` around lines of characters.

The text is a picture by itself, for readers of the source. On the site, what is drawn with box
characters becomes lines, a triangle an arrow, and a run of blocks a bar, with the words in it:

    ███ holds ███   ░░░ waits ░░░   ▒▒▒ stopped ▒▒▒

Lines and words have the colours of the theme.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

WIDE, HIGH = 8.4, 20  # Of a character, in pixels.
FONT = 14
BARS = {"█": "held", "░": "waits", "▒": "stopped"}
# Where a character's lines lead, from its middle: left, up, right, down.
LINES = {
    "─": "lr",
    "│": "ud",
    "┌": "rd",
    "┐": "ld",
    "└": "ru",
    "┘": "lu",
    "├": "udr",
    "┤": "udl",
    "┬": "lrd",
    "┴": "lru",
    "┼": "lrud",
}
ENDS = {"l": (-WIDE / 2, 0), "r": (WIDE / 2, 0), "u": (0, -HIGH / 2), "d": (0, HIGH / 2)}
ARROWS = {"▶": (1, 0), "◀": (-1, 0), "▲": (0, -1), "▼": (0, 1)}


def svg(title: str, lines: list[str]) -> str:
    """The picture, with classes that site.css colours."""
    shapes = [shape for y, line in enumerate(lines) for shape in _shapes(line, (y + 0.5) * HIGH)]
    width, height = max(map(len, lines)) * WIDE, len(lines) * HIGH
    return (
        f'<svg class="diagram" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img"'
        f' aria-label="{escape(title)}">{"".join(shapes)}</svg>'
    )


def _shapes(line: str, y: float) -> Iterator[str]:
    bars = "|".join(rf"{one}(?:[^{''.join(BARS)}]*{one})*" for one in BARS)
    for bar in re.finditer(bars, line):
        x, width = bar.start() * WIDE, len(bar[0]) * WIDE
        kind, words = BARS[bar[0][0]], bar[0].strip("".join(BARS) + " ")
        place = f'x="{x:.1f}" y="{y - 8}" width="{width:.1f}" height="16" rx="3"'
        yield f'<rect class="{kind}" {place}/>'
        if words:
            yield _text(words, x + width / 2, y, f'class="{kind}" text-anchor="middle"')
    line = re.sub(bars, lambda bar: " " * len(bar[0]), line)
    for at, mark in enumerate(line):
        x = (at + 0.5) * WIDE
        for end in LINES.get(mark, ""):
            yield '<path d="M {:.1f} {} l {:.1f} {}"/>'.format(x, y, *ENDS[end])
        if mark in ARROWS:
            yield _arrow(x, y, *ARROWS[mark])
    drawn = "".join([*LINES, *ARROWS])
    for words in re.finditer(rf"[^\s{drawn}]+(?: [^\s{drawn}]+)*", line):
        yield _text(words[0], words.start() * WIDE, y, "")


def _text(words: str, x: float, y: float, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y + FONT / 3:.1f}" {how}>{escape(words)}</text>'


def _arrow(x: float, y: float, right: int, down: int) -> str:
    """A line through the character, and a head at its end."""
    along, aside = (WIDE / 2, 4) if right else (HIGH / 2, 4)
    tip = (x + right * along, y + down * along)
    foot = (tip[0] - right * 7, tip[1] - down * 7)
    sides = [(foot[0] + side * down, foot[1] + side * right) for side in (aside, -aside)]
    points = " ".join(f"{one[0]:.1f},{one[1]:.1f}" for one in (tip, *sides))
    start = f"{x - right * along:.1f} {y - down * along:.1f}"
    return f'<path d="M {start} L {foot[0]:.1f} {foot[1]:.1f}"/><polygon points="{points}"/>'


class Diagram(Directive):
    """The directive; its argument says what the picture shows, to whoever cannot see it."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", svg(self.arguments[0], list(self.content)), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("diagram", Diagram)
    return {"parallel_read_safe": True}
