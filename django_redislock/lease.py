"""The lease: what a program holds while it has a lock."""

from __future__ import annotations

import math
from os import urandom
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import ref

from django.core.signing import BadSignature, Signer

from django_redislock import logs, misuse, process, signals, transactions
from django_redislock.exceptions import LockLost, LockUnavailable
from django_redislock.holder import must_not_block, running_loop
from django_redislock.misuse import check_callback
from django_redislock.rules import flows
from django_redislock.rules.arguments import DEFAULT_DATABASE, SHORTEST_TTL, part, seconds
from django_redislock.rules.lease_state import Alarm, LeaseState
from django_redislock.rules.steps import Notify

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from typing import Any, NoReturn
    from weakref import ReferenceType

    from django_redislock.backends.base import Backend
    from django_redislock.exceptions import LostReason
    from django_redislock.rules.steps import Flow


# --- the baton: a text by which one process takes up the lease that another has handed over -------

_SALT = "django_redislock.baton"  # Stays: batons of other versions are signed with it.


class Baton(NamedTuple):
    """The content of a baton. None of it is secret: the signature protects it."""

    alias: str
    name: str  # Of the lock.
    id: str  # Of the lease to take up.
    permit: int = 1  # Which one it is,
    limit: int | None = None  # of how many.

    @property
    def signed(self) -> str:
        """The text that is passed on."""
        return Signer(salt=_SALT).sign_object(list(self))

    @classmethod
    def read(cls, baton: object) -> Self:
        """Read what :attr:`signed` wrote.

        Raises:
            ValueError: It was not signed with this SECRET_KEY, or is no text, or is newer.
        """
        if not isinstance(baton, str):
            raise ValueError(f"baton must be what hand_over() returned, not {baton!r}.")
        try:
            said = Signer(salt=_SALT).unsign_object(baton)
        except BadSignature:
            raise ValueError(
                "baton must be what hand_over() returned: it was changed, or signed with another"
                " SECRET_KEY. All programs that pass batons need the same one; an old one can stay"
                " in SECRET_KEY_FALLBACKS."
            ) from None
        if not isinstance(said, list) or len(said) > len(cls._fields):
            raise ValueError(
                "baton says more than this version of django_redislock can read: a newer one has"
                " made it. Update this program too."
            )
        return cls(*said)


logger = logs.logger("django_redislock")


class Leases(dict[str, "tuple[ReferenceType[Lease], ...]"]):
    """The leases that a process relies on, by name: one, or more after a loss or with a limit.

    References are weak: a lease that the program has dropped must not be renewed. Signal handlers
    and destructors may change the dict at any point, so each change is one step of the dict,
    without a mutex.
    """

    def of(self, name: str) -> list[Lease]:
        """The leases of *name*, the newest last. Without a limit, only the newest can be valid.

        The earlier ones were lost, known or not, and are not released yet.
        """
        references = self.get(name)
        if references is None:
            return []
        return [lease for reference in references if (lease := reference()) is not None]

    def add(self, lease: Lease) -> None:
        """Rely on a new lease."""
        reference = (ref(lease),)
        if self.setdefault(lease.name, reference) is not reference:
            self._put(lease, reference)

    def discard(self, lease: Lease) -> None:
        """Rely on a lease no more."""
        references = self.get(lease.name, ())
        only = len(references) == 1 and references[0]() is lease
        if not only and self._others(references, lease):
            return  # Others may be looked for. The last takes this one out.
        references = self.pop(lease.name, ())
        if len(references) == 1 and references[0]() is lease:
            return
        if others := self._others(references, lease):
            self._put(lease, others)

    def _put(self, lease: Lease, references: tuple[ReferenceType[Lease], ...]) -> None:
        # Nobody else puts back leases that are taken out here. If another thread has put some
        # meanwhile, they are joined.
        while self.setdefault(lease.name, references) is not references:
            references = (*self._others(self.pop(lease.name, ()), lease), *references)

    @staticmethod
    def _others(
        references: tuple[ReferenceType[Lease], ...], lease: Lease
    ) -> tuple[ReferenceType[Lease], ...]:
        """The references to other leases that have not ended."""
        # A lease that is being collected may still be found by its own reference.
        found = [(one, one()) for one in references]
        return tuple(
            [
                one
                for one, other in found
                if other is not None and other is not lease and not other.is_ended
            ]
        )


class Lease(LeaseState):
    """One grant of a lock to one owner, until a deadline.

    Attributes:
        name: The lock.
        fence: Fencing token: greater than that of every earlier lease of this lock. Pass it to the
            protected system, which can then refuse a late writer.
        owner: The process that holds it, for humans.
        id: Its public name in logs and listings; the token is secret.
        template: The name as it was written, "report:{id}" for "report:42".
        permit: The number of its permit, from 1 to the limit of the lock; None without a limit.
    """

    ttl: float
    """Seconds that the lease lasts unless renewed."""
    renewals: int
    """How often the lease was renewed."""

    _backend: Backend  # Which granted it.
    _callbacks: Any = ()  # To call when it is lost; a list once there is one.

    def __repr__(self) -> str:
        shown = "held" if self.held else self.lost_reason or "ended"
        which = "" if self.permit is None else f", permit {self.permit}"
        return f"<Lease {self.id} of {self.name!r}: {shown}, fence {self.fence}{which}>"

    def __del__(self) -> None:
        try:
            backend = self._backend
        except AttributeError:
            return  # __init__ did not run to its end.
        if self.is_ended or self.times_held <= 0 or self.name not in backend.leases:
            return  # Nobody relies on it, or an interrupt came before anybody did.
        # A destructor must not ask a server.
        now = backend.clock()
        if self.may_be_held(now):
            logger.warning(
                "The held lease %s of lock %r was dropped without a release; the lock stays"
                " taken for %.1f s more. Keep the handle, or use `with`.",
                self.id,
                self.name,
                self.ends - now,
                extra=logs.of(self),
            )
        backend.leases.discard(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"The lease of lock {self.name!r} cannot be pickled: it belongs to this process. Pass"
            " its fence instead."
        )

    @property
    def parts(self) -> tuple[Lease, ...]:
        """Of a joint lock the lease of each name; else the lease itself."""
        return (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its locks, in the order in which they were taken."""
        return tuple([part.name for part in self.parts])

    @property
    def fences(self) -> dict[str, int]:
        """The fencing token of each name; a rate has none."""
        return {part.name: part.fence for part in self.parts if part.fence is not None}

    @property
    def alias(self) -> str:
        """The alias of the lock in REDISLOCK."""
        return self._backend.alias

    @property
    def held(self) -> bool:
        """Whether the lock is certainly ours right now, by our own clock.

        It is also False while nobody knows: the lease was handed over to us a second ago or more,
        and the server has not answered since. ``ensure_held()`` asks the server.
        """
        return self.replaced_by is None and self.is_held(self._backend.clock())

    @property
    def expires_in(self) -> float:
        """Seconds until the lease ends unless renewed; 0.0 when it is not held."""
        return max(0.0, self.ends - self._backend.clock()) if self.held else 0.0

    @property
    def lost_reason(self) -> LostReason | None:
        """Why it was lost: "expired", "forced", "taken", "unreachable", "replaced"; else None."""
        return self.loss_reason(self._backend.clock())

    def ensure_held(self, verify: bool = False) -> None:
        """Return if the lock is ours, else raise: the check before you touch the resource.

        Args:
            verify: Ask the server too, which restarts the ttl.

        Raises:
            LockLost: The lease has ended.
            LockUnavailable: The server did not or could not answer. It is asked only with *verify*,
                or while nobody knows whether a hand-over was confirmed; in the latter case an event
                loop's thread gets this error without asking.
        """
        if self.replaced_by is not None:
            raise self.loss(self._backend.clock())
        is_in_doubt = self._is_in_doubt()
        if not verify and is_in_doubt and running_loop() is not None:
            raise LockUnavailable(
                self.name,
                "whether the lease that was handed over is confirmed is not known yet, and asking"
                " would block the event loop; use `await lease.aensure_held()`",
                "timeout",
            )
        if verify or is_in_doubt:
            self.renew()
        elif not self.held:
            raise self.loss(self._backend.clock())

    async def aensure_held(self, verify: bool = False) -> None:
        """See ensure_held()."""
        if self.replaced_by is not None:
            raise self.loss(self._backend.clock())
        if verify or self._is_in_doubt():
            await self.arenew()
        elif not self.held:
            raise self.loss(self._backend.clock())

    def renew(self, ttl: float | timedelta | None = None) -> None:
        """Restart the ttl now.

        Args:
            ttl: How long the lease lasts from now on unless renewed, in seconds or as a timedelta.
                It can be longer than before, not shorter; max_hold bounds it all the same.

        Raises:
            LockLost: The lease has ended, or max_hold is over.
            LockUnavailable: The server did not or could not answer; the lease may still be held,
                and its next renewal asks for the longer ttl again.
            ValueError: The ttl is no duration, or is shorter than that of the lease.
        """
        self._backend.run(self.renewing(self._checked(ttl)))

    async def arenew(self, ttl: float | timedelta | None = None) -> None:
        """See renew()."""
        await self._backend.arun(self.renewing(self._checked(ttl)))

    def hand_over(self, within: float | timedelta = 60) -> str:
        """End the lease and return a baton. Its bearer takes the lock up, without a gap.

        Write ``task.delay(..., baton=lease.hand_over())``, or ``with take_up(baton) as lease:`` in
        any process with the same settings. Nobody else gets the lock meanwhile, and the new lease
        has a greater fence. The old lease is over at once, except after LockMisuse and ValueError.
        The end of its block does nothing more, and its min_hold does not count.

        Args:
            within: How long the baton is good, in seconds or as a timedelta. After that the next
                waiter has the lock.

        Returns:
            The baton: a text signed with SECRET_KEY. It can be used once.

        Raises:
            LockLost: The lease had ended before.
            LockUnavailable: The server did not or could not answer. The lock is released, at the
                latest when the lease or the baton runs out.
            LockMisuse: A transaction is open; or a reentrant acquire or the run of a job holds the
                lease; or it is of several locks; or the backend is a quorum; or it is called in a
                thread whose event loop runs.
            ValueError: *within* is no duration, or too short.
        """
        if running_loop() is not None and must_not_block():
            raise misuse.blocks_the_loop(self.name, "`await lease.ahand_over()`")
        if transactions.is_open():
            raise misuse.is_held_further(self.name, by_transaction=True)
        baton: str = self._backend.run(self._hand_over(within))
        return baton

    async def ahand_over(self, within: float | timedelta = 60) -> str:
        """See hand_over()."""
        baton: str = await self._backend.arun(self._hand_over(within))
        return baton

    def hold_on(self, max_silence: float) -> None:
        """Let max_hold be over *max_silence* seconds from now. For the package's own Term."""
        now = self._backend.clock()
        if self.allow_silence(now, max_silence):
            self._backend.watchdog_of(self.name).watch(self, now)

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call *callback* with this lease, once, when it is lost; at once if it is lost already.

        The callback runs in a thread of its own, so it cannot delay the renewal of other leases. If
        the lease is lost already, it runs in this thread. What it raises is logged; so is
        SystemExit, which cannot end the process from a thread of its own.

        Raises:
            TypeError: *callback* is no function, or a coroutine or generator function.
        """
        check_callback(callback, "on_lost()")
        vars(self).setdefault("_callbacks", []).append(callback)
        if self.is_lost or self.replaced_by is not None:
            self.run_callbacks()

    def on_endangered(self, callback: Callable[[Lease], object], left: float = 0.5) -> None:
        """Call *callback* with this lease when it is endangered; at once if it is so already.

        A lease is endangered while a renewal is unanswered and at most *left* of the ttl is left.
        It is still held: there is time to stop, or to save the work. A renewal that succeeds ends
        the danger; the next danger calls *callback* again.

        The callback runs in a thread of its own, so it cannot delay the renewal of other leases. If
        the lease is endangered already, it runs in this thread. What it raises is logged. A process
        that stood still until the lease ended is told only of the loss, see on_lost(). With
        renew=False there is no danger: the lease ends as planned.

        Args:
            callback: The function to call.
            left: A part of the ttl, more than 0 and less than 1.

        Raises:
            ValueError: *left* is no such number.
            TypeError: *callback* is no function, or a coroutine or generator function.
        """
        check_callback(callback, "on_endangered()")
        alarm = Alarm(part(left, "left"), callback)
        self.warn(alarm)
        if self.must_raise(alarm, self._backend.clock()):
            self.raise_alarm(alarm)

    def atomic(self, using: str = DEFAULT_DATABASE) -> AbstractContextManager[None]:
        """A transaction that is committed only if no later lease of the lock has written.

        Write ``with lease.atomic():`` in the block of the lock, so that the commit comes before the
        release. The first statement claims the fence in the database. That keeps every other lease
        of this lock out until the commit.

        Args:
            using: Alias in DATABASES.

        Raises:
            StaleFence: A later lease has claimed its fence. Nothing was written in this block.
            LockLost: The lease has ended. At the end of the block, all is rolled back.
            LockUnavailable: See ensure_held(). All is rolled back.
            LockMisuse: A transaction is open already, and would be committed after the release; or
                autocommit is off; or it is called in a thread whose event loop runs; or the table
                is missing; or a lease of another alias has written.
            TransactionManagementError: The body has caught an error that rolls all back.
            ValueError: There is no such database.
        """
        from django_redislock import fencing

        return fencing.atomic(self, using)

    @property
    def has_callbacks(self) -> bool:
        """Whether there are on_lost callbacks that were not called yet."""
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Call the on_lost callbacks, each once, also if several threads do this."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return  # Another thread was faster.
            try:
                callback(self)
            except (Exception, SystemExit) as error:
                if _is_passed_on(error):
                    raise
                logger.exception(
                    "An on_lost callback of lock %r failed", self.name, extra=logs.of(self)
                )

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tell of a danger, by the callback or the signal. For the package itself."""
        if alarm.callback is None:
            left = max(0.0, self.ends - self._backend.clock())
            news = {"lease": self, "left": left, "template": self.template}
            signals.lease_endangered.send_robust(sender=type(self), **news)
            return
        try:
            alarm.callback(self)
        except (Exception, SystemExit) as error:
            if _is_passed_on(error):
                raise
            logger.exception(
                "An on_endangered callback of lock %r failed", self.name, extra=logs.of(self)
            )

    def _is_in_doubt(self) -> bool:
        return self.is_in_doubt(self._backend.clock())

    def _checked(self, ttl: float | timedelta | None) -> float | None:
        # It never becomes shorter: an answer to a renewal for the old ttl may still be on its way.
        # We would believe it, though the lease is over on the server.
        if ttl is None:
            return None
        length = seconds(ttl, "ttl", least=SHORTEST_TTL)
        if length < self.ttl:
            raise ValueError(
                f"ttl must be at least that of the lease, {self.ttl:g} s, not {length:g}: a lease"
                " can be made longer, not shorter. Release it to end it."
            )
        return length

    def _hand_over(self, within: float | timedelta) -> Flow[str]:
        lasts = seconds(within, "within", least=SHORTEST_TTL)
        backend = self._backend
        if not backend.supports_batons:
            raise misuse.hands_nothing_over(self.alias, self.name)
        if self.is_of_run:
            raise misuse.is_of_run(self.name)
        if self.times_held > 1 and self.is_active:
            raise misuse.is_held_further(self.name, by_transaction=False)
        now = backend.clock()
        if not self.may_be_held(now):
            backend.note_expiry(self)
            raise self.loss(now)
        digits = urandom(24).hex()
        limit = None if self.permit is None else self.owner.limit or 1
        baton = Baton(self.alias, self.name, digits[32:], self.permit_number, limit)
        signed = baton.signed
        timeout = backend.operation_timeout(self.ttl)
        over = flows.HandOver(
            *(self.name, self._token, digits[:32], baton.id, lasts, self.owner, timeout),
            self.permit_number,
            backend.retention,
        )
        held_for = now - self.granted_at
        news = {
            "sender": type(self),
            "lease": self,
            "held_for": held_for,
            "success": True,
            "template": self.template,
        }
        try:
            # First: another owner may have the lock before the answer comes.
            self.end_by_hand_over()
            backend.leases.discard(self)
            reason = yield from flows.hand_over(over)
            if reason is None:
                yield Notify(signals.lock_released, news)
                return signed
        except GeneratorExit:
            raise
        except BaseException:  # Nobody gets the baton.
            yield from flows.take_back(over)
            raise
        backend.lost(self, reason, at_release=True)
        raise self.loss(backend.clock())

    def renewing(self, ttl: float | None, until: float = -math.inf) -> Flow[None]:
        """The flow of renew(). It asks a silent server until *until*. For the package itself."""
        backend = self._backend
        try:
            renewal = self.renewal(backend.clock(), ttl)
        except LockLost:
            backend.note_expiry(self)
            raise
        timeout = backend.operation_timeout(self.ttl)
        answer = yield from flows.answer_to_renewal(renewal, timeout, until)
        try:
            self.answered(renewal, answer, backend.clock())
        except LockLost as lost:
            backend.lost(self, lost.reason)
            raise


def _is_passed_on(error: BaseException) -> bool:
    """In the main thread: any SystemExit, since a signal handler may have raised it.

    In any other thread it would end nothing but that thread, without a word.

    Raises:
        BaseException: In the main thread, what a signal handler raised.
    """
    if current_thread() is not main_thread():
        return False
    try:
        process.pass_on_interrupt(error)
        return isinstance(error, SystemExit)
    finally:
        del error  # See process.pass_on_interrupt().
