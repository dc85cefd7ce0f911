"""What ``manage.py locks watch`` shows: the held locks, and what changed since the last look."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from django_redislock import held
from django_redislock.exceptions import LockUnavailable
from django_redislock.management import terminal
from django_redislock.wording import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.held import HeldLock, Selection

MOST_LOCKS = 1000  # Of each alias.
EVENTS_SHOWN = 6
QUEUES_SHOWN = 3
WAITERS_SHOWN = 3
NAME_SHOWN = 40  # Columns.


class Listed(NamedTuple):
    """The held locks of some aliases."""

    locks: list[HeldLock]
    partial: bool  # Whether there may be more.
    problems: dict[str, LockUnavailable]  # Of the aliases whose server did not answer.

    def complaints(self, *, aliases: bool) -> list[str]:
        """What they say; with their aliases if there are several."""
        return [
            terminal.problem(error, alias if aliases else "")
            for alias, error in self.problems.items()
        ]


def listed(aliases: list[str], limit: int, only: Selection | None = None) -> Listed:
    """Up to *limit* held locks of each alias."""
    found = Listed([], False, {})
    for alias in aliases:
        try:
            some = held.list(using=alias, limit=limit, only=only)
        except LockUnavailable as error:  # It must not hide the others.
            found.problems[alias] = error
        else:
            found.locks.extend(some)
            found = found._replace(partial=found.partial or some.partial)
    return found


class Screen:
    """Looks at the locks of some aliases, again and again."""

    def __init__(self, aliases: list[str]) -> None:
        self._aliases = aliases
        self._before: dict[tuple[str, str], HeldLock] | None = None
        self._before_partial = False
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def look(self, lines: int = 1000) -> tuple[list[str], list[str]]:
        """Look again: what there is, in about *lines* lines, and what is wrong with servers."""
        found = listed(self._aliases, MOST_LOCKS)
        self._note(found)
        # Those that are waited for, and have been held longest, matter most.
        locks = sorted(found.locks, key=lambda lock: (-lock.waiters, -(lock.held_for or 0.0)))
        queues = [line for lock in locks[:QUEUES_SHOWN] if lock.waiters for line in _queue(lock)]
        several = len(self._aliases) > 1
        complaints = found.complaints(aliases=several)
        room = lines - len(queues) - len(complaints) - EVENTS_SHOWN - 5
        waiting = sum(lock.waiters for lock in locks)
        more = " or more" if found.partial else ""
        table = terminal.locks(locks[: max(1, room)], aliases=several, names=NAME_SHOWN)
        screen = [
            f"{time.strftime('%H:%M:%S')}  held: {len(locks)}{more}  waiting: {waiting}",
            "",
            *(table if locks else []),
            *(["", *queues] if queues else []),
            *(["", *self._events] if self._events else []),
        ]
        return screen, complaints

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
            self._events.append(visible(f"{clock}  {key[1]}  {change}  {holders}"))


def _queue(lock: HeldLock) -> Iterator[str]:
    try:
        waiters = held.detail(lock.name, using=lock.alias).waiters
    except LockUnavailable:  # The next look will tell.
        return
    for number, waiter in enumerate(waiters[:WAITERS_SHOWN], start=1):
        who = f"{terminal.place(waiter.owner)} {terminal.doing(waiter.owner)}"
        yield visible(f"{lock.name}  waiting {number}.  {who}")
    if len(waiters) > WAITERS_SHOWN:
        yield visible(f"{lock.name}  and {lock.waiters - WAITERS_SHOWN} more")
