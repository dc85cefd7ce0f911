"""Text for terminals: nothing that somebody wrote may move the cursor or hide."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from django_redislock.wording import duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django_redislock.exceptions import LockUnavailable
    from django_redislock.held import Detail, HeldLock
    from django_redislock.lease import Owner

HEADERS = ("NAME", "STATE", "HELD FOR", "EXPIRES IN", "WAITERS", "HOLDER", "DOING", "LEASE")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of an aligned table."""
    cells = [[visible(str(cell)) for cell in row] for row in (headers, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [
            cell + " " * (wide - _width(cell)) for cell, wide in zip(row, widths, strict=True)
        ]
        yield "  ".join(padded).rstrip()


def locks(
    found: Sequence[HeldLock], *, aliases: bool = False, names: int | None = None
) -> Iterator[str]:
    """The lines of a table of held locks; with their aliases if there are several.

    Args:
        found: The locks.
        aliases: Whether there are several.
        names: Columns that a name may take, so that one long name does not push all else away.
    """
    headers = (*HEADERS, "ALIAS") if aliases else HEADERS
    rows = (_row(lock)[: len(headers)] for lock in found)
    if names:
        rows = ((clipped(visible(str(name)), names), *rest) for name, *rest in rows)
    return table(headers, rows)


def detail(found: Detail) -> Iterator[str]:
    """All about one lock."""
    lock = found.lock
    if lock is None:
        yield f"{visible(found.name)}: nobody holds it"
    else:
        yield from _facts(lock)
    if found.waiters:
        yield ""
        yield f"Waiting, {lock.waiters if lock else len(found.waiters)} in all, the next first:"
        rows = (
            (place(one.owner), doing(one.owner), duration(one.waiting_for)) for one in found.waiters
        )
        yield from indented(table(("WAITER", "DOING", "WAITING FOR"), rows))
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
        yield from indented(table(headers, past))


def problem(error: LockUnavailable, alias: str = "") -> str:
    """Why a server cannot be asked; of several, which one."""
    whose = f"the locks of {alias}" if alias else "the locks"
    return visible(f"The server of {whose} cannot answer: {error.problem}.")


def clipped(line: str, columns: int) -> str:
    """As much of *line* as fits."""
    while (beyond := _width(line) - columns) > 0:
        line = line[: -max(1, beyond // 2)]  # A letter takes two columns at most.
    return line


def indented(lines: Iterable[str]) -> Iterator[str]:
    """*lines*, two columns to the right."""
    return (f"  {line}" for line in lines)


def place(owner: Owner) -> str:
    """Where the owner is: host:pid."""
    return owner.place or "unknown"


def doing(owner: Owner) -> str:
    """What the owner is busy with."""
    return " ".join(filter(None, (owner.task, owner.task_id))) or owner.path or owner.command or "-"


def _row(lock: HeldLock) -> tuple[object, ...]:
    return (
        lock.name,
        f"{lock.state} {lock.owner.permit}".rstrip(),
        duration(lock.held_for),
        "never" if lock.expires_in is None else duration(lock.expires_in),
        lock.waiters,
        place(lock.owner),
        doing(lock.owner),
        lock.id,
        lock.alias,
    )


def _facts(lock: HeldLock) -> Iterator[str]:
    owner = lock.owner
    facts = {
        "name": lock.name,
        "alias": lock.alias,
        "state": lock.state,
        "note": lock.note,
        "permit": owner.permit,
        "lease": lock.id,
        "fence": lock.fence,
        "held for": duration(lock.held_for),
        "expires in": "never" if lock.expires_in is None else duration(lock.expires_in),
        "ttl": duration(lock.ttl),
        "renewals": lock.renewals,
        "waiters": lock.waiters,
        "host": owner.host,
        "pid": owner.pid,
        "thread": owner.thread,
        "task": owner.task,
        "task id": owner.task_id,
        "command": owner.command,
        "path": owner.path,
    }
    for key, value in facts.items():
        if value not in {"", None}:
            yield f"{key:12}{visible(str(value))}"


def _width(text: str) -> int:
    """Columns that *text* takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)
