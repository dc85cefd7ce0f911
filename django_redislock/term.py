"""leadership(): the term of the one process that leads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from django_redislock.exceptions import LockMisuse
from django_redislock.lock import distributed_lock
from django_redislock.misuse import check_callback
from django_redislock.rules.arguments import SHORTEST_TTL, seconds
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

    from django_redislock.lease import Lease
    from django_redislock.lock import Lock

    Seconds = float | timedelta


def leadership(
    name: str,
    *,
    ttl: Seconds | None = None,
    wait: Seconds | None = math.inf,
    max_silence: Seconds | None = None,
    using: str = DEFAULT_ALIAS,
) -> Term:
    """The term of one leader among all processes that use the same server and name.

    ``with leadership("scheduler", ttl=15) as term:`` waits, leads, and steps down at the end of the
    block, also if its body raises; so does ``async with``. A term is a lease of
    ``distributed_lock(name)``, renewed while the block lasts.

    Args:
        name: The name of the lock.
        ttl: Seconds, or a timedelta, after which another may lead if this process dies. None means
            the setting TTL.
        wait: How long to wait for the term; 0 does not wait. None means the setting WAIT.
        max_silence: How long the term lasts after the last ``term.beat()``, so that a body that
            hangs does not lead for ever. None: as long as the process lives, or the setting
            MAX_HOLD allows.
        using: Alias in REDISLOCK.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: An argument is of the wrong type or out of range.
    """
    silence = None
    if max_silence is not None:
        silence = seconds(max_silence, "max_silence", least=SHORTEST_TTL)
    lock = distributed_lock(name, ttl=ttl, wait=wait, renew=True, max_hold=silence, using=using)
    return Term(lock, silence)


class Term:
    """The time of one leader, from the beginning to the end of a block; see leadership().

    Entering the block raises LockTimeout if *wait* runs out, and LockUnavailable if the server does
    not answer. Leaving it after a loss raises LockLost, unless the body has raised.
    """

    __slots__ = ("_lease", "_lock", "_max_silence")

    def __init__(self, lock: Lock, max_silence: float | None) -> None:
        self._lock = lock
        self._max_silence = max_silence
        self._lease: Lease | None = None  # That of the last block.

    def __repr__(self) -> str:
        return f"<Term of {self.name!r}: {self._current() or 'not begun'}>"

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._lock.name

    @property
    def held(self) -> bool:
        """Whether this process certainly leads right now, by its own clock. Without I/O."""
        lease = self._current()
        return lease is not None and lease.held

    @property
    def fence(self) -> int:
        """Greater than in every earlier term. A system can refuse a late leader by it.

        Raises:
            LockMisuse: No block has begun yet.
        """
        return self._begun().fence

    def beat(self) -> None:
        """Say that the body goes on, before *max_silence* is over. Return only if it still leads.

        Like ``Lease.ensure_held()``, it asks the server only while nobody knows whether a hand-over
        was confirmed.

        Raises:
            LockLost: The term is over.
            LockUnavailable: See ``Lease.ensure_held()``.
            LockMisuse: No block has begun yet.
        """
        lease = self._begun()
        self._hear(lease)
        lease.ensure_held()

    def on_lost(self, callback: Callable[[Term], object]) -> None:
        """Call *callback* with this term, once, when it is lost; at once if it is lost already.

        The callback runs in a thread of its own, or in this one if the term is lost already. What
        it raises is logged.

        Raises:
            LockMisuse: No block has begun yet.
            TypeError: *callback* is no function, or a coroutine or generator function.
        """
        check_callback(callback, "on_lost()")
        self._begun().on_lost(lambda _: callback(self))

    def _current(self) -> Lease | None:
        """The lease of the caller's block; of a caller without one, that of the last block.

        A thread or asyncio task that has lost its lease must not take the next one, of another
        that has entered the same term, for its own.
        """
        return self._lock.lease or self._lease

    def _begun(self) -> Lease:
        lease = self._current()
        if lease is None:
            raise LockMisuse(self.name, "its term begins with its block: write `with` before this.")
        return lease

    def _hear(self, lease: Lease) -> None:
        """Max_silence begins anew: a max_hold of the lease, see ``Lease.hold_on``."""
        if self._max_silence is not None:
            lease.hold_on(self._max_silence)

    # --- with, async with -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._lease = self._lock.__enter__()
        try:
            self._hear(self._lease)
        except BaseException as error:  # Of a signal handler.
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.__exit__(exc_type, exc, traceback)

    async def __aenter__(self) -> Self:
        self._lease = await self._lock.__aenter__()
        try:
            self._hear(self._lease)
        except BaseException as error:  # Of a signal handler.
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._lock.__aexit__(exc_type, exc, traceback)
