"""What ``manage.py locks watch`` shows: the held locks, and what changed since the last look."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from django_redislock import held
from django_redislock.management import terminal
from django_redislock.wording import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.held import HeldLock, Selection

EVENTS_SHOWN = 6
QUEUES_SHOWN = 3
WAITERS_SHOWN = 3


class Screen:
    """Looks at the locks of some aliases, again and again."""

    def __init__(self, aliases: list[str]) -> None:
        self._aliases = aliases
        self._before: dict[tuple[str, str], HeldLock] | None = None
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def look(self, lines: int = 1000) -> list[str]:
        """Look again; at most *lines* lines.

        Raises:
            LockUnavailable: A server did not or could not answer.
        """
        found, partial = listed(self._aliases, 1000)
        self._note({(lock.alias, lock.name): lock for lock in found})
        # Those that are waited for, and have been held longest, matter most.
        found.sort(key=lambda lock: (-lock.waiters, -(lock.held_for or 0.0)))
        queues = [line for lock in found[:QUEUES_SHOWN] if lock.waiters for line in _queue(lock)]
        room = lines - len(queues) - EVENTS_SHOWN - 5
        several = len(self._aliases) > 1
        waiting = sum(lock.waiters for lock in found)
        more = " or more" if partial else ""
        return [
            f"{time.strftime('%H:%M:%S')}  held: {len(found)}{more}  waiting: {waiting}",
            "",
            *(terminal.locks(found[: max(1, room)], aliases=several) if found else ()),
            *(["", *queues] if queues else []),
            *(["", *self._events] if self._events else []),
        ]

    def _note(self, now: dict[tuple[str, str], HeldLock]) -> None:
        before, self._before = self._before, now
        if before is None:
            return
        clock = time.strftime("%H:%M:%S")
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            if (old and old.id) == (new and new.id):
                continue
            change = "handed over" if old and new else "taken" if new else "free"
            holders = " -> ".join(terminal.place(one.owner) for one in (old, new) if one)
            self._events.append(visible(f"{clock}  {key[1]}  {change}  {holders}"))


def listed(
    aliases: list[str], limit: int, only: Selection | None = None
) -> tuple[list[HeldLock], bool]:
    """Up to *limit* held locks of each alias, and whether there may be more."""
    lists = [held.list(using=alias, limit=limit, only=only) for alias in aliases]
    return [lock for one in lists for lock in one], any(one.partial for one in lists)


def _queue(lock: HeldLock) -> Iterator[str]:
    waiters = held.detail(lock.name, using=lock.alias).waiters
    for number, waiter in enumerate(waiters[:WAITERS_SHOWN], start=1):
        who = f"{terminal.place(waiter.owner)} {terminal.doing(waiter.owner)}"
        yield visible(f"{lock.name}  waiting {number}.  {who}")
    if len(waiters) > WAITERS_SHOWN:
        yield visible(f"{lock.name}  and {lock.waiters - WAITERS_SHOWN} more")
