"""``manage.py locks watch``: the held locks, and what changed since the last look."""

from __future__ import annotations

import math
import textwrap
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from django_redislock import held
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import visible
from django_redislock.management import console, terminal
from django_redislock.management.terminal import clipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.held import HeldLock
    from django_redislock.rules.names import Permit

MOST_LOCKS = 1000  # Of each alias.
EVENTS_SHOWN = 6
QUEUES_SHOWN = 3
WAITERS_SHOWN = 3


class LiveView:
    """Looks at the locks of some aliases, again and again."""

    def __init__(self, using: list[str]) -> None:
        self._aliases = using
        self._before: dict[tuple[str, Permit], HeldLock] | None = None
        self._before_partial = False
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def look(
        self, lines: int | None = None, columns: int | None = None
    ) -> tuple[list[str], list[str]]:
        """Look again; return the lines to show, and the problems of servers.

        Args:
            lines: The room in lines; None if that does not matter.
            columns: The room in columns; the same.
        """
        found = console.listed(self._aliases, MOST_LOCKS)
        self._note(found)
        # Locks with the most waiters, then those held longest, matter most.
        locks = sorted(found.locks, key=lambda lock: (-lock.waiters, -(lock.held_for or 0.0)))
        several = len(self._aliases) > 1
        problems = [
            line
            for problem in found.problems.values()
            for line in textwrap.wrap(problem, columns or len(problem))
        ]
        # Waiters for any permit of a name are counted, and shown, once.
        waited_for: dict[tuple[str, str], HeldLock] = {}
        for lock in locks:
            if lock.waiters:
                waited_for.setdefault((lock.alias, lock.key.name), lock)
        waiting = sum(lock.waiters for lock in waited_for.values())
        more = " or more" if found.partial or problems else ""
        counts = f"held: {len(locks)}{more}  waiting: {waiting}"
        if problems and not locks:
            counts = "held: unknown"
        status = f"{time.strftime('%H:%M:%S')}  {counts}"
        longest = islice(waited_for.values(), QUEUES_SHOWN)
        queues = [line for lock in longest for line in _queue(lock)]
        events = list(self._events)
        locked = _table(locks, math.inf, columns, with_alias=several)
        if lines is not None:
            # The status, a blank line and the headers come anyway.
            room = lines - len(problems) - 3
            rows, queues, events = _share(room, max(0, len(locked) - 1), queues, events)
            locked = _table(locks, rows, columns, with_alias=several)
        shown = [status]
        for part in (locked, queues, events):
            shown += ["", *part] if part else []
        return [clipped(line, columns) if columns else line for line in shown], problems

    def _note(self, found: console.Listed) -> None:
        before = self._before
        now = {(lock.alias, lock.key): lock for lock in found.locks}
        if before is not None:
            # If a server is silent, its locks count as unchanged.
            now = {key: lock for key, lock in before.items() if key[0] in found.problems} | now
        self._before = now
        # If there are too many locks, each look may list others.
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
            name = terminal.pasteable(key[1].label)
            self._events.append(visible(f"{clock}  {name}  {change}  {holders}"))


def _share(
    room: int, rows: int, queues: list[str], events: list[str]
) -> tuple[int, list[str], list[str]]:
    """Fit everything into *room* lines: the locks come first, and the latest events stay."""
    below = sum(len(part) + 1 for part in (queues, events) if part)
    rows = min(rows, max(room - below, room // 2, 2))
    room -= rows + 1
    queues = queues[: max(0, room)]
    room -= len(queues) + 1 if queues else 0
    return rows, queues, events[-room:] if room > 0 else []


def _table(
    locks: list[HeldLock], rows: float, columns: int | None, *, with_alias: bool
) -> list[str]:
    """A table of as many *locks* as fit into so many lines below its headers: one at least."""
    shown = len(locks) if math.isinf(rows) else min(len(locks), int(rows))
    while shown:
        more = [f"{len(locks) - shown} more"] if shown < len(locks) else []
        lines = [*terminal.locks(locks[:shown], columns, with_alias=with_alias)]
        room = rows + 1 - len(more)
        if len(lines) <= room:
            return [*lines, *more]
        if shown == 1:
            return [*lines[: max(2, int(room))], *more]
        shown -= 1
    return []


def _queue(lock: HeldLock) -> Iterator[str]:
    try:
        name, number = lock.key
        waiters = held.detail(name, permit=number, using=lock.alias).waiters
    except LockUnavailable:  # The next look will say so.
        return
    shown = terminal.pasteable(name)
    for number, waiter in enumerate(waiters[:WAITERS_SHOWN], start=1):
        who = f"{terminal.waiter(waiter)} {terminal.doing(waiter.owner)}"
        yield visible(f"{shown}  waiting {number}.  {who}")
    if len(waiters) > WAITERS_SHOWN:
        # The list has counted them all, but more may have come since.
        yield f"{shown}  and {max(lock.waiters, len(waiters)) - WAITERS_SHOWN} more"
