"""Locks, waiters and runs as text: no name or owner may move the cursor or hide."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils.timezone import localtime

from django_redislock.humanize import duration, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from django_redislock.completed_runs import CompletedRun
    from django_redislock.held import Detail, HeldLock, Record, Run, Waiter
    from django_redislock.held_lock import Fact, Kind
    from django_redislock.rules.stored import Owner


# --- tables that fit a terminal, whatever letters are in them -------------------------------------

CUT = "..."  # Marks a cut.


def table(found: Iterable[Mapping[str, object]], columns: int | None = None) -> Iterator[str]:
    """The lines of an aligned table.

    If it is wider than *columns*, its last cells stand below their row, each with its header, so
    that nothing is cut.

    Args:
        found: The cells of each row by their headers. A column without any cell but None is left
            out.
        columns: The width of the terminal; None if there is none.
    """
    rows = [*found]
    headers = [header for header in rows[0] if any(row[header] is not None for row in rows)]
    texts = [["" if row[one] is None else str(row[one]) for one in headers] for row in rows]
    cells = [[*map(visible, row)] for row in (headers, *texts)]
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


# A shell takes these as they are; letters may be of any language.
_UNQUOTED = re.compile(r"[\w@%+:,./-][\w@%+=:,./#-]*")


def pasteable(name: str) -> str:
    r"""Quote a lock's name for a shell, so that it can be pasted.

    Unprintable characters become bytes in ``$'...'``, which POSIX, bash, zsh, ksh and busybox
    know: $'a\342\200\256b' has the character U+202E, which turns text around.
    """
    if _UNQUOTED.fullmatch(name) and name.isprintable():
        return name
    if name.isprintable():
        return "'" + name.replace("'", "'\"'\"'") + "'"
    return "$'" + "".join(map(_escaped, name)) + "'"


def local_time(at: float) -> datetime:
    """A time in seconds since the epoch, in the zone of the settings, or else of the system.

    Raises:
        OverflowError, ValueError, OSError: No calendar has it.
    """
    there = datetime.fromtimestamp(at, UTC)
    # Without TIME_ZONE, Django knows no zone: its localtime() raises.
    return localtime(there) if settings.TIME_ZONE else there.astimezone()


def moment(at: float) -> str:
    """The same as text. Only a foreign value names a time after the year 9999."""
    try:
        return local_time(at).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return "after the year 9999"


def _escaped(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="replace"))


def locks(
    found: Iterable[HeldLock], columns: int | None = None, *, with_alias: bool = False
) -> Iterator[str]:
    """The lines of a table of held locks; with their servers, if there are several."""
    rows = (
        {
            "NAME": pasteable(lock.name),
            "ALIAS": lock.alias if with_alias else None,
            "WHERE": lock.where or None,
            "STATE": _state(lock),
            "HELD FOR": duration(lock.held_for),
            "EXPIRES IN": _expiry(lock),
            "WAITERS": lock.waiters,
            "HOLDER": place(lock.owner) + " (gone)" * lock.gone,
            "DOING": doing(lock.owner) + f", waits for {lock.waits_for}" * bool(lock.waits_for),
            "LEASE": lock.id,
        }
        for lock in found
    )
    return table(rows, columns)


def _state(lock: HeldLock) -> str:
    if not lock.permit:
        return lock.shown_state
    also = "" if lock.shown_state == "held" else f"{lock.shown_state}, "
    return f"{also}permit {lock.permit}"


def detail(
    found: Detail, record: Record | None = None, columns: int | None = None
) -> Iterator[str]:
    """All about one lock, and what became of the runs of its job."""
    lock = found.lock
    within = columns and columns - 2
    if lock is None:
        it = f"permit {found.number} of {found.limit}" if found.limit > 1 else "it"
        yield f"{pasteable(found.name)}: nobody holds {it}"
    else:
        yield from _facts(lock.facts(*found.moments), 12)
    if found.others:
        yield from _section("Other permits:", locks(found.others, within))
    if found.waiters:
        number = lock.waiters if lock else len(found.waiters)
        waiting = (
            {
                "WAITER": waiter(one),
                "WAITING FOR": duration(one.waiting_for),
                "DOING": doing(one.owner),
                "QUEUED AT": moment(found.server_time - one.waiting_for),
            }
            for one in found.waiters
        )
        title = f"Waiting, {number} in all, the next first:"
        yield from _section(title, table(waiting, within))
    if record:
        yield from _section("Runs of the task:", _facts(record.facts, 14))
    if found.past:
        past = (
            {
                "PERMIT": lease.permit or None,
                "TAKEN": f"{duration(found.server_time - lease.since)} ago",
                "WAITED": duration(lease.owner.waited) if lease.owner.waited else "-",
                "HELD FOR": duration(lease.lasted),
                "ENDED": lease.ended,
                "HOLDER": place(lease.owner),
                "DOING": doing(lease.owner),
                "LEASE": lease.id,
                "TAKEN AT": moment(lease.since),
            }
            for lease in reversed(found.past)
        )
        yield from _section("Held before, the latest first:", table(past, within))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from ("", title)
    yield from (f"  {line}" for line in lines)


def meant(similar: Sequence[str]) -> str:
    """A question; "" if no name is similar."""
    return f"Did you mean {' or '.join(map(pasteable, similar))}?" if similar else ""


def runs(
    found: Sequence[Record],
    columns: int | None,
    notes: Mapping[str, str],
    similar: Mapping[str, Sequence[str]],
    *,
    with_alias: bool = False,
) -> Iterator[str]:
    """The lines of a table of records, and below it the notes on names without a run.

    Args:
        found: The records of the runs of jobs.
        columns: The width of the terminal; None if there is none.
        notes: By name, a note on it.
        similar: By name, similar names that may have been meant.
        with_alias: Whether to show the aliases.
    """
    abandoned = any(record.last_abandoned for record in found)
    rows = (
        {
            "NAME": pasteable(record.name),
            "ALIAS": record.alias if with_alias else None,
            "SUCCESS": _ago(record.last_success, _no_success(record, notes)),
            "FAILURE": _ago(record.last_failure),
            "SKIP": _ago(record.last_skip),
            "SKIPS": record.skips or "-",
            "UNDER WAY": _under_way(record.under_way),
            "NEVER ENDED": _ago(record.last_unended),
            # Of few tasks: no column without any.
            "ABANDONED": _ago(record.last_abandoned) if abandoned else None,
        }
        for record in found
    )
    yield from table(rows, columns)
    says = {**notes, **{name: meant(names) for name, names in similar.items()}}
    for name, text in says.items():
        if text:
            yield f"{pasteable(name)}: {text}"


def _no_success(record: Record, notes: Mapping[str, str]) -> str:
    if record.known:
        return "none"
    return "no task run" if notes.get(record.name) else "never seen"


def completed(
    found: Iterable[CompletedRun], columns: int | None = None, *, with_alias: bool = False
) -> Iterator[str]:
    """The lines of a table of completed runs."""
    rows = (
        {
            "NAME": pasteable(run.name),
            "ALIAS": run.alias if with_alias else None,
            "COMPLETED": f"{duration(run.ago)} ago",
            "BY": run.by,
            "TASK": run.task or "-",
            "FENCE": run.fence,
        }
        for run in found
    )
    return table(rows, columns)


def place(owner: Owner) -> str:
    """The owner's host:pid, or the operator."""
    return owner.place or "unknown"


def waiter(one: Waiter) -> str:
    """The same of a waiter, and whether it is a pause that has not begun."""
    return f"{place(one.owner)} ({one.note})" if one.note else place(one.owner)


def doing(owner: Owner) -> str:
    """What the owner does, and the id of its task."""
    return " ".join(filter(None, (owner.doing, owner.task_id))) or "-"


def _facts(facts: Iterable[Fact], wide: int) -> Iterator[str]:
    """A line of each fact, with its label in so many columns."""
    for label, value, kind in facts:
        render = _RENDER.get(kind, str)
        for one in value if kind == "runs" else [value]:
            yield f"{label.lower():{wide}}{visible(render(one))}"


_RENDER: dict[Kind, Callable[[Any], str]] = {
    "name": pasteable,
    "lock": pasteable,
    "state": lambda lock: lock.shown_state,
    "holder": lambda lock: place(lock.owner) + " (gone: no such process on this host)" * lock.gone,
    "duration": duration,
    "age": duration,
    "left": lambda lock: f"{_expiry(lock)} {lock.ends}".rstrip(),
    "moment": moment,
    "run": lambda run: f"{run}, at {moment(run.at)}",
    "runs": lambda run: f"for {duration(run.ago)}, {run.owner}, since {moment(run.at)}",
}


def _expiry(lock: HeldLock) -> str:
    return "never" if lock.expires_in is None else duration(lock.expires_in)


def _ago(run: Run | None, otherwise: str = "-") -> str:
    return f"{duration(run.ago)} ago" if run else otherwise


def _under_way(runs: Sequence[Run]) -> str:
    if not runs:
        return "-"
    gone = " (gone)" if runs[0].gone else ""
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"for {duration(runs[0].ago)}, {place(runs[0].owner)}{gone}{more}"
