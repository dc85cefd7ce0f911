"""For the tests of projects that use locks; the pytest plugin hands it out as ``redislock``."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from django_redislock import flows, scripts
from django_redislock.backends.memory import InMemoryBackend
from django_redislock.conf import DEFAULT_ALIAS, backends
from django_redislock.exceptions import LostReason
from django_redislock.flows import Call, Granted
from django_redislock.lease import Owner
from django_redislock.names import check_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.lease import Lease

OTHER = Owner(host="another-host", pid=1, thread="MainThread", command="simulated")

IN_MEMORY = {"BACKEND": f"{InMemoryBackend.__module__}.{InMemoryBackend.__qualname__}"}


class LockTestKit:
    """What a test may do to locks: pretend that others hold them, take them away, look."""

    @contextmanager
    def simulate_held_by_other(
        self, name: str, *, using: str = DEFAULT_ALIAS, ttl: float = 3600.0, owner: Owner = OTHER
    ) -> Iterator[None]:
        """Let another machine hold the lock *name* during the block."""
        backend = backends[using]
        token = secrets.token_hex(16)
        request = flows.Request(
            name=check_name(name),
            token=token,
            id=hashlib.sha256(token.encode()).hexdigest()[:16],
            owner=owner,
            ttl=ttl,
            wait=0.0,
            patience=backend.patience(ttl),
        )
        outcome = backend.run(flows.acquire(request, backend.clock()))
        if not isinstance(outcome, Granted):
            raise AssertionError(f"Lock {name!r} is held already, so nobody else can hold it.")
        try:
            yield
        finally:
            backend.run(flows.ask(Call(scripts.LEAVE, request.name, (token,), request.patience)))

    def simulate_lost(
        self, name: str, reason: LostReason = "expired", *, using: str = DEFAULT_ALIAS
    ) -> Lease:
        """Let the code that holds the lock *name* in this process lose it, and return its lease.

        on_lost callbacks and the lock_lost signal fire as they would.
        """
        if reason not in get_args(LostReason):
            known = ", ".join(map(repr, get_args(LostReason)))
            raise ValueError(f"reason must be one of {known}, not {reason!r}.")
        backend = backends[using]
        lease = next((one for one in backend.leases_of(check_name(name)) if one.held), None)
        if lease is None:
            raise AssertionError(f"Nobody in this process holds the lock {name!r}.")
        token = (lease._token,)
        backend.run(flows.ask(Call(scripts.LEAVE, lease.name, token, backend.patience(lease.ttl))))
        lease._lose(reason)
        return lease

    def assert_locked(self, name: str, *, using: str = DEFAULT_ALIAS) -> None:
        """Fail unless somebody holds the lock *name* right now."""
        if not self._is_locked(name, using):
            raise AssertionError(f"Lock {name!r} is not held.")

    def assert_not_locked(self, name: str, *, using: str = DEFAULT_ALIAS) -> None:
        """Fail if somebody holds the lock *name* right now."""
        if self._is_locked(name, using):
            raise AssertionError(f"Lock {name!r} is held.")

    def _is_locked(self, name: str, using: str) -> bool:
        backend = backends[using]
        return backend.look_many([check_name(name)])[0].holding is not None
