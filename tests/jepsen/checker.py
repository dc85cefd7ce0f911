"""What the histories say: which updates were lost, whether the fences grew, how long nobody got in.

It reads what clients and database have written down, and knows no server and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Operation:
    """One line of a client's history: it took the lock, and incremented the counters under it.

    All times are seconds by the same clock. What follows the death of a client that was killed is
    missing.
    """

    client: int
    asked: float  # When it began to ask for the lock.
    granted: float | None = None  # When it was told that it has the lock.
    fence: int = 0  # Of its lease; 0 if that has none.
    plain: bool = False  # The unguarded counter was incremented.
    fenced: bool = False  # So was the one that is written under the fence.
    error: str = ""  # The first one.


@dataclass(frozen=True)
class Ledger:
    """One counter at the end, and every write of it in the order in which the database had them."""

    value: int
    fences: Sequence[int]  # Of the lease that each write was made under.


@dataclass(frozen=True)
class Verdict:
    """What became of the increments."""

    granted: int  # Operations that had the lock.
    lost: int  # Increments of the unguarded counter that are missing at its end.
    lost_with_fence: int  # The same of the counter that is written under the fence.
    refused: int  # Operations that were too late, and that the fence has stopped.
    writes_out_of_order: int  # Writes under the fence after one that had a newer fence.
    grants_out_of_order: int  # Leases whose fence is not above that of one granted before.
    longest_gap: float  # Seconds from one grant to the next.

    @property
    def wrong(self):
        """What must not be, whatever goes wrong with servers and clients; for people."""
        counts = {
            "increments under the fence are lost": self.lost_with_fence,
            "writes under the fence are out of order": self.writes_out_of_order,
            "leases have a fence that is not above one before": self.grants_out_of_order,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


def judge(operations, plain, fenced):
    """Compare what clients were told with what the database has."""
    granted = [one for one in operations if one.granted is not None]
    times = sorted(one.granted for one in granted if one.granted is not None)
    return Verdict(
        granted=len(granted),
        lost=_lost(plain, sum(one.plain for one in granted)),
        lost_with_fence=_lost(fenced, sum(one.fenced for one in granted)),
        refused=sum(_is_refused(one) for one in granted),
        writes_out_of_order=sum(later <= earlier for earlier, later in pairwise(fenced.fences)),
        grants_out_of_order=_grants_out_of_order(granted),
        longest_gap=max((later - earlier for earlier, later in pairwise(times)), default=0.0),
    )


def _is_refused(one):
    """Without an error, the client was killed between the counters."""
    return one.plain and not one.fenced and one.fence > 0 and bool(one.error)


def _lost(ledger, acknowledged):
    """How many increments are missing.

    The ledger also has those of clients that were killed before they could write them down.
    """
    return max(len(ledger.fences), acknowledged) - ledger.value


def _grants_out_of_order(granted):
    """Count leases whose fence is not above that of every lease that was granted before it.

    A client that was stopped writes down late when it was granted. So "before" is said only of
    what was granted before the other one asked.
    """
    by_grant = sorted((one.granted, one.fence) for one in granted if one.fence and one.granted)
    known = greatest = wrong = 0
    for one in sorted(granted, key=lambda one: one.asked):
        while known < len(by_grant) and by_grant[known][0] < one.asked:
            greatest = max(greatest, by_grant[known][1])
            known += 1
        wrong += bool(one.fence) and one.fence <= greatest
    return wrong
