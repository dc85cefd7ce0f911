"""The kit for tests of projects that use locks; the pytest plugin has it as ``redislock``."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, get_args

from django_redislock.backends.memory.backend import InMemoryBackend
from django_redislock.backends.registry import backends
from django_redislock.conf import aliases, given, is_set, parse
from django_redislock.exceptions import LostReason
from django_redislock.rules import flows, scripts
from django_redislock.rules.arguments import SHORTEST_TTL, number
from django_redislock.rules.arguments import seconds as seconds_of
from django_redislock.rules.forms import Attempt
from django_redislock.rules.lease_state import Granted, token_of
from django_redislock.rules.names import Permit, check_name
from django_redislock.rules.options import DEFAULT_ALIAS, MOST_PERMITS, Options
from django_redislock.rules.steps import Call
from django_redislock.rules.stored import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta
    from typing import Self

    from django_redislock.backends.base import Backend
    from django_redislock.lease import Lease

OTHER = Owner(host="another-host", pid=1, thread="MainThread", command="simulated")

IN_MEMORY = {"BACKEND": f"{InMemoryBackend.__module__}.{InMemoryBackend.__qualname__}"}

# Settings of an alias that are about servers. The others count in memory too.
_OF_SERVERS = frozenset({"BACKEND", "LOCATION", "OPTIONS", "REPLICAS_ACK"})


class LockTestKit:
    """Lets a test act on locks: pretend that others hold them, take them away, look.

    As a context manager it also keeps the locks of every alias in memory, also if REDISLOCK is
    changed meanwhile. The block begins without locks; after it, all is as before.
    """

    def __init__(self) -> None:
        self._blocks: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        # Outages outlast a change of settings, which makes the backends anew.
        block = backends.made_by(partial(_in_memory, Counter()))
        block.__enter__()
        self._blocks.append(block)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.pop().__exit__(None, None, None)

    @contextmanager
    def simulate_held_by_other(
        self,
        name: str,
        *,
        using: str = DEFAULT_ALIAS,
        ttl: float | timedelta = 3600.0,
        owner: Owner = OTHER,
        limit: int | None = None,
    ) -> Iterator[None]:
        """Let another machine hold the lock *name*, or a permit of it, during the block.

        Its lease ends after *ttl* (seconds or a timedelta), since nobody renews it.

        Raises:
            AssertionError: The lock is held already.
        """
        backend = backends[using]
        ttl = seconds_of(ttl, "ttl", least=SHORTEST_TTL)
        limit = None if limit is None else number(limit, "limit", MOST_PERMITS)
        options = Options(ttl=ttl, wait=0.0, renew=False, max_hold=math.inf, limit=limit)
        owner = replace(owner, limit=limit) if limit else owner
        attempt = Attempt(check_name(name), owner, backend.terms(options))
        outcome = backend.run(flows.acquire(attempt, backend.clock()))
        if not isinstance(outcome, Granted):
            raise AssertionError(f"Lock {name!r} is held already, so nobody else can hold it.")
        try:
            yield
        finally:
            timeout, permit = attempt.terms.operation_timeout, outcome.permit
            leave = Call(scripts.LEAVE, attempt.name, (attempt.token,), timeout, permit=permit)
            backend.run(flows.result_of(leave))

    def simulate_lost(
        self, name: str, reason: LostReason = "expired", *, using: str = DEFAULT_ALIAS
    ) -> Lease:
        """Let the holder of the lock *name* in this process lose it, and return its lease.

        on_lost callbacks and the lock_lost signal fire as they would.

        Raises:
            AssertionError: Nobody in this process holds it.
            ValueError: There is no such reason.
        """
        if reason not in get_args(LostReason):
            known = ", ".join(map(repr, get_args(LostReason)))
            raise ValueError(f"reason must be one of {known}, not {reason!r}.")
        backend = backends[using]
        lease = next((one for one in backend.leases.of(check_name(name)) if one.held), None)
        if lease is None:
            raise AssertionError(f"Nobody in this process holds the lock {name!r}.")
        timeout, permit = backend.operation_timeout(lease.ttl), lease.permit_number
        leave = Call(scripts.LEAVE, lease.name, (token_of(lease),), timeout, permit=permit)
        backend.run(flows.result_of(leave))
        backend.lost(lease, reason)
        return lease

    @contextmanager
    def simulate_unavailable(self, *, using: str | None = None) -> Iterator[None]:
        """Let the server of one alias, or of all, not answer during the block.

        Locks raise LockUnavailable at once. Held leases are not renewed meanwhile.
        """
        chosen = [_memory(alias) for alias in (aliases() if using is None else [using])]
        for backend in chosen:
            backend.outages[backend.conf.alias] += 1
            backend.wake_waiters()
        try:
            yield
        finally:
            for backend in chosen:
                backend.outages[backend.conf.alias] -= 1

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass for all locks, at once: ttl, min_hold, once, max_hold and wait.

        The leases of this process are renewed as usual, so they stay held unless renew=False,
        max_hold or simulate_unavailable() ends them. The clocks of Python and Django stay as they
        are.
        """
        left = seconds_of(seconds, "seconds")
        for alias in aliases():
            _memory(alias).advance(left)

    def assert_locked(self, name: str, *, using: str = DEFAULT_ALIAS) -> None:
        """Fail unless somebody holds the lock *name*, or a permit of it, or it cools down."""
        if not self._is_locked(name, using):
            raise AssertionError(f"Lock {name!r} is not held.")

    def assert_not_locked(self, name: str, *, using: str = DEFAULT_ALIAS) -> None:
        """Fail if somebody holds the lock *name*, or a permit of it, or it cools down."""
        if self._is_locked(name, using):
            raise AssertionError(f"Lock {name!r} is held.")

    def _is_locked(self, name: str, using: str) -> bool:
        checked = check_name(name)
        permits = [Permit(checked, number) for number in range(1, MOST_PERMITS + 1)]
        return not all(look.is_free for look in backends[using].look_many(permits))


def _in_memory(outages: Counter[str], alias: str) -> Backend:
    """An in-memory backend for an alias, also if the alias names a server."""
    raw = given(alias) if is_set() or alias != DEFAULT_ALIAS else {}
    if isinstance(raw, dict):
        raw = {key: value for key, value in raw.items() if key not in _OF_SERVERS} | IN_MEMORY
    backend = InMemoryBackend(parse(alias, raw))
    backend.outages = outages
    return backend


def _memory(alias: str) -> InMemoryBackend:
    backend = backends[alias]
    if not isinstance(backend, InMemoryBackend):
        raise RuntimeError(
            "This works only while locks are kept in memory: within `with LockTestKit() as kit:`,"
            " or with the redislock fixture."
        )
    return backend
