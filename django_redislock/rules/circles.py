"""Waits that can never end: each holder waits for a lock that another holder of the circle has.

Each waiter notes its wait at all leases that it holds, see stored.Wait. So a search goes from a
wanted lock to its lease, from the lease to the lock that its holder waits for, and so on. The
search knows no server: it yields what it wants to read, and its caller, deadlocks.py, reads that.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

    from django_redislock.rules.replies import WaitReply
    from django_redislock.rules.stored import Wait

MOST_READ = 100  # Leases: a circle of more is not found.
MOST_TOLD = 8  # Leases of a circle that are named in words.


class Read(NamedTuple):
    """What a search wants to know: whether a wait goes on, and who has the wanted lock."""

    wait: Wait
    permit: int  # 1, unless the lock has several.


class Link(NamedTuple):
    """One lease of a wanted lock, with a holder that waits, too."""

    wanted_by: Wait
    permit: int
    lease_id: str
    holder: str  # As ``host:pid task-id``.
    waits: Wait  # What its holder waits for.


class Circle(NamedTuple):
    """Waits of which none can end before another one does."""

    links: tuple[Link, ...]  # First those of the wait from which it was found.

    @property
    def youngest(self) -> Wait:
        """The wait that began last, which has to give up. All finders of the circle agree on it."""
        return max((link.wanted_by for link in self.links), key=lambda wait: (wait.ticket, wait.id))

    def told(self, me: str) -> str:
        """The circle in words; *me* is what to call the holder that has found it."""
        mine = self.links[0].wanted_by.id
        # Several waiters may want the same lease.
        leases = {link.lease_id: link for link in self.links}.values()
        clauses = [
            f"{self._lease_of(link)} is held by {me if link.waits.id == mine else link.holder},"
            f" which waits for {self._lock_of(link.waits)}"
            for link in islice(leases, MOST_TOLD)
        ]
        if more := len(leases) - len(clauses):
            clauses.append(f"and so on, with {more} more")
        return "; ".join(clauses)

    @property
    def wanted(self) -> dict[str, int]:
        """The locks that its finder could take together, with their limits, the narrowest first.

        Empty if two of them are permits of one lock, or their aliases differ.
        """
        mine = self.links[0].wanted_by
        held = {link.lease_id: link.wanted_by for link in self.links if link.waits.id == mine.id}
        waits = sorted((mine, *held.values()), key=lambda wait: (wait.limit, wait.name))
        limits = {wait.name: wait.limit for wait in waits}
        are_alike = all(wait.alias == mine.alias for wait in waits)
        return limits if are_alike and len(limits) == len(waits) else {}

    def _lease_of(self, link: Link) -> str:
        lock = self._lock_of(link.wanted_by)
        return f"permit {link.permit} of {lock}" if link.wanted_by.limit > 1 else lock

    def _lock_of(self, wait: Wait) -> str:
        several = len({link.wanted_by.alias for link in self.links}) > 1
        return f"{wait.name!r} of {wait.alias!r}" if several else repr(wait.name)


def search(start: Wait) -> Generator[Read, WaitReply, Circle | None]:
    """Look, depth first, whether a wait is in a circle.

    It is in one under two conditions. Each lease of the wanted lock has a holder that waits, too,
    and so on with the locks that these holders want. And each of these waits leads back to the
    first one: a wait that only leads to a circle of others ends when they have ended theirs.

    The search does not read everything at one time. But if two searches find the same circle, all
    its waits and leases were there from the first to the second: none comes back once it is over.
    """
    links: dict[str, list[Link]] = {}  # By the id of the wait.
    found: list[Link] = []
    pending = [start]
    while pending:
        wait = pending.pop()
        if wait.id in links:
            continue
        links[wait.id] = []
        for permit in range(1, wait.limit + 1):
            if len(found) == MOST_READ:
                return None
            link = _link(wait, permit, (yield Read(wait, permit)))
            if link is None:
                return None
            links[wait.id].append(link)
            found.append(link)
        pending += [link.waits for link in reversed(links[wait.id])]
    is_circle = all(_leads_to(start.id, one, links) for one in links)
    return Circle(tuple(found)) if is_circle else None


def _link(wait: Wait, permit: int, reply: WaitReply) -> Link | None:
    """What holds up a wait; None if it is over, or will be: no holder keeps the lease and waits."""
    holding, noted = reply.holding, reply.noted
    if not reply.goes_on or noted is None or holding.state != "held":
        return None
    lease_id, waits = noted
    if lease_id != holding.id:
        return None
    return Link(wait, permit, lease_id, str(holding.owner), waits)


def _leads_to(goal: str, start: str, links: dict[str, list[Link]]) -> bool:
    seen = {start}
    pending = [start]
    while pending:
        id = pending.pop()  # noqa: A001
        if id == goal:
            return True
        further = {link.waits.id for link in links[id]} - seen
        seen |= further
        pending += further
    return False
