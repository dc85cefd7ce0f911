"""The state of a joint lease, made of the states of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.exceptions import LockLost, LostReason
    from django_redislock.rules.lease_state import LeaseState


class JointState:
    """As a LeaseState, of several leases that are granted and released together.

    It is held while all parts are held, and lost with the first part. Each part is renewed, lost
    and ended by itself. A joint state changes its parts only for transactions.
    """

    times_held = 1  # By its own acquire; a reentrant one makes a joint lease of its own.
    token = ""  # Each part has its own.
    min_hold = 0.0  # Each part keeps that of its own acquires.

    def __init__(self, parts: Sequence[LeaseState]) -> None:
        self._parts = parts
        self.name = ", ".join(part.name for part in parts)
        self.granted_at = max(part.granted_at for part in parts)
        self.is_of_run = any(part.is_of_run for part in parts)
        self.permit = parts[0].permit  # The records of a run are those of the first one.
        # All have the same.
        self.holder = parts[0].holder
        self.caller = parts[0].caller

    @property
    def ttl(self) -> float:
        return min(part.ttl for part in self._parts)

    @property
    def renewals(self) -> int:
        return min(part.renewals for part in self._parts)

    @property
    def deadline(self) -> float:
        return min(part.deadline for part in self._parts)

    @property
    def ends(self) -> float:
        return min(part.ends for part in self._parts)

    @property
    def is_ours(self) -> bool:
        return self._parts[0].is_ours

    @property
    def is_active(self) -> bool:
        return all(part.is_active for part in self._parts)

    @property
    def is_ended(self) -> bool:
        return all(part.is_ended for part in self._parts)

    @property
    def is_lost(self) -> bool:
        return any(part.is_lost for part in self._parts)

    lost = is_lost

    def is_held(self, now: float) -> bool:
        return all(part.is_held(now) for part in self._parts)

    def may_be_held(self, now: float) -> bool:
        return all(part.may_be_held(now) for part in self._parts)

    def is_in_doubt(self, now: float) -> bool:
        return self.may_be_held(now) and not self.is_held(now)

    def lost_reason(self, now: float) -> LostReason | None:
        return next(filter(None, (part.lost_reason(now) for part in self._parts)), None)

    def loss(self, now: float) -> LockLost:
        lost = (part for part in self._parts if part.lost_reason(now))
        return next(lost, self._parts[0]).loss(now)

    def lose(self, *_: Any, **__: Any) -> bool:
        """Returns False: the part that is lost tells of the loss."""
        return False

    def unnest(self) -> int:
        """It is over. The release of each part ends that part."""
        return 0

    def succeeded(self, min_hold: float) -> None:
        """Nothing: the release of each part says so."""

    @property
    def transactions(self) -> int:
        return min(part.transactions for part in self._parts)

    def hold_for_transactions(self) -> bool:
        """Transactions hold all parts too, until they are over. Returns True."""
        for part in self._parts:
            part.hold_for_transactions()
        return True

    def transactions_are_over(self) -> None:
        """The transactions are over and no longer hold a part."""
        for part in self._parts:
            part.transactions_are_over()
