"""The locks that are held right now, for programs: list, look, release by force.

The admin page and ``manage.py locks`` are made of these.
"""

from __future__ import annotations

import builtins
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from django_redislock import flows, scripts, signals
from django_redislock.backends.base import read_holding
from django_redislock.conf import DEFAULT_ALIAS, backends
from django_redislock.flows import Call
from django_redislock.names import check_name

if TYPE_CHECKING:
    from django_redislock.backends.base import Backend, Seen
    from django_redislock.lease import Owner

audit = logging.getLogger("django_redislock.audit")

State = Literal["held", "cooling", "no-expiry"]


@dataclass(frozen=True, kw_only=True)
class HeldLock:
    """One held lock. Durations are seconds; None means unknown."""

    name: str
    alias: str
    state: State
    id: str  # Lease id: what force_release() wants to see again.
    owner: Owner
    fence: int | None
    held_for: float | None
    expires_in: float | None
    waiters: int
    renewals: int


class HeldLocks(builtins.list[HeldLock]):
    """A list of held locks; ``partial`` says that there are more than it has."""

    partial = False


def list(*, using: str = DEFAULT_ALIAS, limit: int = 1000) -> HeldLocks:  # noqa: A001
    """Up to *limit* held locks of one alias, those first that end first.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    names, total = backend.held_names(limit)
    found = HeldLocks(
        held for seen in backend.look_many(names) if (held := _held(backend, seen)) is not None
    )
    found.partial = total > limit
    return found


def get(name: str, *, using: str = DEFAULT_ALIAS) -> HeldLock | None:
    """The lock *name*, or None if nobody holds it.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    return _held(backend, backend.look_many([check_name(name)])[0])


def force_release(name: str, id: str, *, using: str = DEFAULT_ALIAS, by: str = "") -> bool:  # noqa: A002
    """End exactly the lease *id* of the lock *name*; the next waiter gets the lock.

    The holder is not stopped: its lease is lost, with the reason "forced", at its next renewal.

    Args:
        name: The lock.
        id: The lease that was seen; a newer one is left alone.
        using: Alias in REDISLOCK.
        by: Who does it, for the audit log.

    Returns:
        Whether it was ended; False if it was gone or somebody newer holds the lock.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    name = check_name(name)
    call = Call(scripts.FORCE_RELEASE, name, (id,), backend.within)
    word, value = backend.run(flows.ask(call))
    if word != b"released":
        audit.info("Lock %r (%s): lease %s was not there to release, by %s", name, using, id, by)
        return False
    holder = str(read_holding(value).owner)
    audit.warning("Lock %r (%s): lease %s of %s released by %s", name, using, id, holder, by)
    signals.lock_force_released.send_robust(
        sender=HeldLock, name=name, using=using, id=id, holder=holder, by=by
    )
    return True


def _held(backend: Backend, seen: Seen) -> HeldLock | None:
    holding = seen.holding
    if holding is None:
        return None
    state: State = "cooling" if holding.state == "cooling" else "held"
    if seen.expires_in is None:
        state = "no-expiry"
    return HeldLock(
        name=seen.name,
        alias=backend.alias,
        state=state,
        id=holding.id,
        owner=holding.owner,
        fence=holding.fence,
        held_for=None if holding.since is None else max(0.0, seen.server_time - holding.since),
        expires_in=seen.expires_in,
        waiters=seen.waiters,
        renewals=holding.renewals,
    )


__all__ = ["HeldLock", "HeldLocks", "force_release", "get", "list"]
