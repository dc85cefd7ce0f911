"""Tables that fit a terminal, whatever letters are in them."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from django_redislock.humanize import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CUT = "..."  # Marks a cut.


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], columns: int | None = None
) -> Iterator[str]:
    """The lines of an aligned table.

    If it is wider than *columns*, its last cells stand below their row, each with its header, so
    that nothing is cut.
    """
    cells = [[visible(str(cell)) for cell in row] for row in (headers, *rows)]
    # One long name must not push the rest away. If it is wider than the first column, it stands
    # above its row, on a line of its own.
    names = [width(row[0]) for row in cells]
    most = max(columns // 3, names[0]) if columns else max(names)
    fit, widths, room = _fitting(cells, columns, max(wide for wide in names if wide <= most))
    # The room that is left is for longer names.
    widths[0] = max(wide for wide in names if wide <= widths[0] + room)
    for number, row in enumerate(cells):
        first, *others = row[:fit]
        if width(first) > widths[0]:
            yield first
            first = ""
        yield _aligned((first, *others), widths)
        if number:
            labelled = (
                f"{header.lower()} {cell}"
                for header, cell in zip(headers[fit:], row[fit:], strict=True)
                if cell != "-"
            )
            yield from _filled(labelled, columns or 0)


def clipped(text: str, columns: int) -> str:
    """*text*, or as much of it as fits, with dots for the rest."""
    if width(text) <= columns:
        return text
    dots = CUT[:columns]
    while (beyond := width(text) + len(dots) - columns) > 0 and text:
        text = text[: -max(1, beyond // 2)]  # A letter takes two columns at most.
    return text + dots


def width(text: str) -> int:
    """Columns that *text* takes."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def indented(lines: Iterable[str]) -> Iterator[str]:
    """*lines*, two columns to the right."""
    return (f"  {line}" for line in lines)


def _columns_of(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"} or "\u1160" <= char <= "\u11ff":
        return 0  # Drawn on the letter before it.
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fitting(cells: list[list[str]], columns: int | None, most: int) -> tuple[int, list[int], int]:
    """How many columns of a table fit, how wide all are, and how much room is left.

    If there is too little room for all, the first has *most* at most.
    """
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    if columns is None or sum(widths) + 2 * (len(widths) - 1) <= columns:
        return len(widths), widths, 0
    widths[0] = min(widths[0], most)
    fit, room = 1, columns - widths[0]
    while fit < len(widths) and widths[fit] + 2 <= room:
        room -= widths[fit] + 2
        fit += 1
    return fit, widths, max(0, room)


def _aligned(cells: Sequence[str], widths: list[int]) -> str:
    padded = (cell + " " * (wide - width(cell)) for cell, wide in zip(cells, widths, strict=False))
    return "  ".join(padded).rstrip()


def _filled(cells: Iterable[str], columns: int) -> Iterator[str]:
    """Indented lines of as many *cells* as fit."""
    line = ""
    for cell in cells:
        if line and 4 + width(f"{line}  {cell}") > columns:
            yield f"    {line}"
            line = cell
        else:
            line = f"{line}  {cell}" if line else cell
    if line:
        yield f"    {line}"
