"""What ``manage.py locks watch`` shows: the held locks, and what changed since the last look."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from django_redislock import held
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import visible
from django_redislock.management import terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django_redislock.held import HeldLock, Selection

MOST_LOCKS = 1000  # Of each alias.
EVENTS_SHOWN = 6
QUEUES_SHOWN = 3
WAITERS_SHOWN = 3


class Listed(NamedTuple):
    """The held locks of some aliases."""

    locks: list[HeldLock]
    total: int  # How many are held, whichever were asked for.
    partial: bool  # Whether there may be more.
    problems: dict[str, LockUnavailable]  # Of the aliases whose server did not answer.

    def complaints(self) -> list[str]:
        """What they say."""
        return [held.problem(error, alias) for alias, error in self.problems.items()]


def listed(aliases: list[str], limit: int, only: Selection | None = None) -> Listed:
    """Up to *limit* held locks of each alias."""
    found = Listed([], 0, False, {})
    for alias in aliases:
        try:
            some = held.list(using=alias, limit=limit, only=only)
        except LockUnavailable as error:  # It must not hide the others.
            found.problems[alias] = error
        else:
            found.locks.extend(some)
            found = found._replace(
                total=found.total + some.total, partial=found.partial or some.partial
            )
    return found


class Screen:
    """Looks at the locks of some aliases, again and again."""

    def __init__(self, aliases: list[str]) -> None:
        self._aliases = aliases
        self._before: dict[tuple[str, str], HeldLock] | None = None
        self._before_partial = False
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def look(
        self, lines: int | None = None, columns: int | None = None
    ) -> tuple[list[str], list[str]]:
        """Look again: what there is, and what is wrong with servers.

        Args:
            lines: That there is room for; None if that does not matter.
            columns: The same.
        """
        found = listed(self._aliases, MOST_LOCKS)
        self._note(found)
        # Those that are waited for, and have been held longest, matter most.
        locks = sorted(found.locks, key=lambda lock: (-lock.waiters, -(lock.held_for or 0.0)))
        several = len(self._aliases) > 1
        complaints = [
            line
            for complaint in found.complaints()
            for line in textwrap.wrap(complaint, columns or len(complaint))
        ]
        waiting = sum(lock.waiters for lock in locks)
        more = " or more" if found.partial else ""
        status = f"{time.strftime('%H:%M:%S')}  held: {len(locks)}{more}  waiting: {waiting}"
        queues = [line for lock in locks[:QUEUES_SHOWN] if lock.waiters for line in _queue(lock)]
        rows, events = len(locks), list(self._events)
        if lines is not None:
            # The status, a space and the headers are there anyway.
            room = lines - len(complaints) - 3
            rows, queues, events = _share(room, rows, queues, events)
        table, missing = _table(locks, rows, columns, aliases=several)
        if missing:
            status += f"  no room for: {', '.join(missing)}"
        shown = [status]
        for part in (table, queues, events):
            shown += ["", *part] if part else []
        return [terminal.clipped(line, columns) if columns else line for line in shown], complaints

    def _note(self, found: Listed) -> None:
        before = self._before
        now = {(lock.alias, lock.name): lock for lock in found.locks}
        if before is not None:
            # Of those whose server is silent nothing is known: they are as they were.
            now |= {key: lock for key, lock in before.items() if key[0] in found.problems}
        self._before = now
        # Which of too many locks are listed differs from look to look.
        partial = found.partial or self._before_partial
        self._before_partial = found.partial
        if before is None:
            return
        keys = before.keys() & now.keys() if partial else before.keys() | now.keys()
        clock = time.strftime("%H:%M:%S")
        for key in sorted(keys):
            old, new = before.get(key), now.get(key)
            if (old and old.id) == (new and new.id):
                continue
            change = "handed over" if old and new else "taken" if new else "free"
            holders = " -> ".join(terminal.place(one.owner) for one in (old, new) if one)
            name = terminal.pasteable(key[1])
            self._events.append(visible(f"{clock}  {name}  {change}  {holders}"))


def _share(
    room: int, rows: int, queues: list[str], events: list[str]
) -> tuple[int, list[str], list[str]]:
    """So much of each as fits into *room* lines: the locks first, and of the events the latest."""
    below = sum(len(part) + 1 for part in (queues, events) if part)
    rows = min(rows, max(room - below, room // 2, 2))
    room -= rows + 1
    queues = queues[: max(0, room)]
    room -= len(queues) + 1 if queues else 0
    return rows, queues, events[-room:] if room > 0 else []


def _table(
    locks: list[HeldLock], rows: int, columns: int | None, *, aliases: bool
) -> tuple[list[str], Sequence[str]]:
    """A table of so many of *locks*, and the headers for which there is no room."""
    if not locks:
        return [], ()
    if rows < len(locks):
        rows = max(1, rows - 1)
    headers = terminal.headers_of(aliases=aliases)
    cells = [terminal.row_of(lock, aliases=aliases) for lock in locks[:rows]]
    missing: Sequence[str] = ()
    if columns is None:
        lines = list(terminal.table(headers, cells))
    else:
        lines, missing = terminal.cut_table(headers, cells, columns)
    if rows < len(locks):
        lines.append(f"{len(locks) - rows} more")
    return lines, missing


def _queue(lock: HeldLock) -> Iterator[str]:
    try:
        waiters = held.detail(lock.name, using=lock.alias).waiters
    except LockUnavailable:  # The next look will tell.
        return
    name = terminal.pasteable(lock.name)
    for number, waiter in enumerate(waiters[:WAITERS_SHOWN], start=1):
        who = f"{terminal.place(waiter.owner)} {terminal.doing(waiter.owner)}"
        yield visible(f"{name}  waiting {number}.  {who}")
    if len(waiters) > WAITERS_SHOWN:
        yield f"{name}  and {lock.waiters - WAITERS_SHOWN} more"
