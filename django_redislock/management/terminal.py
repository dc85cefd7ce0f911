"""Text for terminals: nothing that somebody wrote may move the cursor or hide."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from django_redislock import activity
from django_redislock.humanize import duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django_redislock.held import Detail, HeldLock, Record, Run
    from django_redislock.rules.stored import Owner

HEADERS = ("NAME", "STATE", "HELD FOR", "EXPIRES IN", "WAITERS", "HOLDER", "DOING", "LEASE")
CUT = "..."  # In the place of what is left out.
LEAST_CUT = 12  # Columns that a cut cell has at least; less of it would say nothing.

# What a shell takes as it is: letters of any language, and these.
_UNQUOTED = re.compile(r"[\w@%+:,./-][\w@%+=:,./-]*")


def pasteable(name: str) -> str:
    r"""A lock's name in the form in which a shell gives it back, should it be pasted.

    What is not seen is written as bytes in ``$'...'``, which POSIX, bash, zsh, ksh and busybox
    know: $'a\342\200\256b' has the character U+202E, which turns text around.
    """
    if _UNQUOTED.fullmatch(name) and name.isprintable():
        return name
    if name.isprintable():
        return "'" + name.replace("'", "'\"'\"'") + "'"
    return "$'" + "".join(map(_escaped, name)) + "'"


def _escaped(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="replace"))


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], columns: int | None = None
) -> Iterator[str]:
    """The lines of an aligned table.

    Where it is wider than *columns*, its last cells stand below their row, each with its header,
    so that nothing is cut.
    """
    cells = [[visible(str(cell)) for cell in row] for row in (headers, *rows)]
    names = [width(row[0]) for row in cells]
    # One long name must not push all else away: it stands above its row.
    most = max(columns // 3, names[0]) if columns else max(names)
    fit, widths, room = _fitting(cells, columns, max(wide for wide in names if wide <= most))
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


def cut_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], columns: int
) -> tuple[list[str], Sequence[str]]:
    """The lines of an aligned table, one for each row, and the headers for which there is no room.

    What is cut ends in dots.
    """
    cells = [[visible(str(cell)) for cell in row] for row in (headers, *rows)]
    fit, widths, room = _fitting(cells, columns, max(columns // 4, width(headers[0])))
    if fit < len(headers) and room >= LEAST_CUT + 2:
        widths[fit] = room - 2
        fit += 1
    else:
        widths[0] = min(widths[0] + room, max(width(row[0]) for row in cells))
    lines = [
        _aligned(
            [clipped(cell, wide) for cell, wide in zip(row[:fit], widths, strict=False)], widths
        )
        for row in cells
    ]
    return lines, headers[fit:]


def headers_of(*, aliases: bool) -> tuple[str, ...]:
    """The headers of a table of locks; with their aliases if there are several."""
    return (HEADERS[0], "ALIAS", *HEADERS[1:]) if aliases else HEADERS


def row_of(lock: HeldLock, *, aliases: bool) -> tuple[object, ...]:
    """The row of a lock in such a table."""
    return (
        pasteable(lock.name),
        *((lock.alias,) if aliases else ()),
        f"{lock.state} {lock.owner.permit}".rstrip(),
        duration(lock.held_for),
        "never" if lock.expires_in is None else duration(lock.expires_in),
        lock.waiters,
        f"{place(lock.owner)} (gone)" if lock.gone else place(lock.owner),
        doing(lock.owner),
        lock.id,
    )


def locks(
    found: Sequence[HeldLock], columns: int | None = None, *, aliases: bool = False
) -> Iterator[str]:
    """The lines of a table of held locks."""
    rows = (row_of(lock, aliases=aliases) for lock in found)
    return table(headers_of(aliases=aliases), rows, columns)


def detail(
    found: Detail, became: Record | None = None, columns: int | None = None
) -> Iterator[str]:
    """All about one lock, and what became of the runs of its task."""
    lock = found.lock
    within = columns and columns - 2
    if lock is None:
        yield f"{pasteable(found.name)}: nobody holds it"
    else:
        yield from _facts(lock)
    if found.waiters:
        yield ""
        yield f"Waiting, {lock.waiters if lock else len(found.waiters)} in all, the next first:"
        rows = (
            (place(one.owner), duration(one.waiting_for), doing(one.owner)) for one in found.waiters
        )
        yield from indented(table(("WAITER", "WAITING FOR", "DOING"), rows, within))
    if became:
        yield ""
        yield "Runs of the task:"
        yield from indented(record(became))
    if found.past:
        yield ""
        yield "Held before, the latest first:"
        past = (
            (
                f"{duration(found.server_time - lease.since)} ago",
                duration(None if lease.until is None else lease.until - lease.since),
                lease.ended,
                place(lease.owner),
                doing(lease.owner),
                lease.id,
            )
            for lease in reversed(found.past)
        )
        headers = ("TAKEN", "HELD FOR", "ENDED", "HOLDER", "DOING", "LEASE")
        yield from indented(table(headers, past, within))


def runs(
    found: Sequence[Record], columns: int | None = None, *, aliases: bool = False
) -> Iterator[str]:
    """The lines of a table of what became of the runs of tasks."""
    headers = ("SUCCESS", "FAILURE", "SKIP", "SKIPS", "UNDER WAY", "NEVER ENDED")
    rows = (
        (
            pasteable(record.name),
            *((record.alias,) if aliases else ()),
            _ago(record.last_success, "none" if record.known else "never seen"),
            _ago(record.last_failure),
            _ago(record.last_skip),
            record.skips or "-",
            _under_way(record.under_way),
            _ago(record.last_unended),
        )
        for record in found
    )
    return table(("NAME", *(("ALIAS",) if aliases else ()), *headers), rows, columns)


def record(found: Record) -> Iterator[str]:
    """What became of the runs under one lock."""
    runs = {
        "last success": found.last_success,
        "last failure": found.last_failure,
        "last skip": found.last_skip,
        "never ended": found.last_unended,
    }
    for label, run in runs.items():
        if run:
            how = f"took {duration(run.lasted)}" if run.lasted is not None else ""
            how = f"because it was {run.why}" if run.why else how
            when = "began " if run is found.last_unended else ""
            parts = (f"{when}{duration(run.ago)} ago", how, str(run.owner))
            yield visible(f"{label:14}{', '.join(filter(None, parts))}")
    if found.skips:
        yield f"{'skips':14}{found.skips} since the last success"
    for run in found.under_way:
        yield visible(f"{'under way':14}for {duration(run.ago)}, {run.owner}")


def clipped(text: str, columns: int) -> str:
    """*text*, or as much of it as fits, with dots in the place of the rest."""
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


def place(owner: Owner) -> str:
    """Where the owner is: host:pid."""
    return owner.place or "unknown"


def doing(owner: Owner) -> str:
    """What the owner is busy with."""
    return " ".join(filter(None, (owner.task, owner.task_id))) or owner.path or owner.command or "-"


def _facts(lock: HeldLock) -> Iterator[str]:
    who = lock.owner
    facts = {
        "name": pasteable(lock.name),
        "alias": lock.alias,
        "state": lock.state,
        "note": lock.note,
        "permit": who.permit,
        "lease": lock.id,
        "fence": lock.fence,
        "held for": duration(lock.held_for),
        "expires in": "never" if lock.expires_in is None else duration(lock.expires_in),
        "ttl": duration(lock.ttl),
        "renewals": lock.renewals,
        "waiters": lock.waiters,
        "host": who.host,
        "pid": f"{who.pid} (gone: no such process on this host)" if lock.gone else who.pid,
        "thread": who.thread,
        "task": who.task,
        "task id": who.task_id,
        "command": who.command,
        "path": who.path,
    }
    for key, value in facts.items():
        if value not in {"", None}:
            yield f"{key:12}{visible(str(value))}"


def _ago(run: Run | None, otherwise: str = "-") -> str:
    return f"{duration(run.ago)} ago" if run else otherwise


def _under_way(runs: Sequence[Run]) -> str:
    if not runs:
        return "-"
    gone = " (gone)" if activity.is_gone(runs[0].owner) else ""
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"for {duration(runs[0].ago)}, {place(runs[0].owner)}{gone}{more}"


def _columns_of(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"} or "\u1160" <= char <= "\u11ff":
        return 0  # It is drawn upon or into the letter before it.
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fitting(cells: list[list[str]], columns: int | None, most: int) -> tuple[int, list[int], int]:
    """How many columns of a table fit, how wide all are, and how much room is left.

    The first has *most* at most if there is too little room for all.
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
