"""take_up(): go on with a lease that another process or thread has handed over.

The other half is ``Lease.hand_over()`` in lease.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from django_redislock import misuse
from django_redislock.baton import Baton
from django_redislock.exceptions import LockMisuse
from django_redislock.lock import Lock
from django_redislock.rules.options import options_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django_redislock.holds import Hold
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.forms import FirstTry
    from django_redislock.rules.options import Options

    Seconds = float | timedelta


def take_up(
    baton: str,
    *,
    ttl: Seconds | None = None,
    renew: bool | None = None,
    max_hold: Seconds | None = None,
    min_hold: Seconds | None = None,
    atomic: bool | str = False,
    release_on_commit: bool = False,
) -> Lock:
    """The lock that ``lease.hand_over()`` has handed over; nobody else has had it meanwhile.

    Use it as ``with take_up(baton) as lease:``, as ``async with``, or by its ``acquire()`` and
    ``release()``. The lease has a greater fence than the one that was handed over. Making the lock
    does no I/O, and taking it up never waits. A baton can be taken up once: entering the block, or
    ``acquire()``, raises LockLost if it was taken up before, is too old, or was released by force.

    Args:
        baton: The result of ``hand_over()``.
        ttl, renew, max_hold, min_hold, atomic, release_on_commit: As of distributed_lock(), for the
            lease that is taken up. Durations count from then on.

    Raises:
        ValueError: The baton was changed, signed with another SECRET_KEY, or made by a newer
            version; or an argument is of the wrong type or out of range.
    """
    read = Baton.read(baton)
    given = ttl, 0, renew, max_hold, min_hold, False, read.alias, atomic, release_on_commit
    return TakingUp(read, options_of.__wrapped__(*given, read.limit))


class TakingUp(Lock):
    """A handle on a lock whose lease was handed over, made by take_up()."""

    __slots__ = ("_lease_id", "_permit")

    def __init__(
        self, baton: Baton, options: Options, run: RunMarker | None = None, *, template: str = ""
    ) -> None:
        super().__init__(baton.name, options, run, template=template)
        self._lease_id, self._permit = baton.id, baton.permit

    def __call__(self, function: Callable[..., Any]) -> NoReturn:
        raise LockMisuse(
            self.name,
            "a baton can be taken up once, and a function be called more often. Write `with"
            " take_up(baton):` in the function.",
        )

    def _first_try(self, hold: Hold) -> FirstTry:
        if not hold.backend.supports_batons:
            raise misuse.hands_nothing_over(hold.backend.alias, self.name)
        form = super()._first_try(hold)
        form.take_up(self._lease_id, self._permit)
        return form
