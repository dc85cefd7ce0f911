"""What every backend does the same way: perform flows, keep leases alive, know who holds what."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ReferenceType, WeakSet, ref

from django_redislock import clock, signals
from django_redislock import lease as lease_module
from django_redislock.backends.watchdog import Watchdog
from django_redislock.conf import SHORTEST_TTL, seconds
from django_redislock.exceptions import LockLost, LockUnavailable
from django_redislock.humanize import counted
from django_redislock.lease import Holding, Owner, is_number
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from django_redislock.conf import Conf
    from django_redislock.lease import Lease
    from django_redislock.rules.flows import Answer, Flow, Refused, Unanswered

logger = logging.getLogger("django_redislock")

Result = TypeVar("Result")

# None without a loop, where get_running_loop() would raise, ten times as slow.
running_loop = asyncio._get_running_loop

LONGEST_PATIENCE = 5.0  # Seconds until a server counts as not answering.

_STATES = {"h": "held", "c": "claimed", "k": "cooling"}


class Seen(NamedTuple):
    """A lock as the server shows it."""

    name: str
    holding: Holding | None  # None: it is free.
    expires_in: float | None  # Seconds; None if it is free or has no expiry.
    waiters: int
    server_time: float  # Seconds since the epoch.


class Backend(ABC):
    """One alias of REDISLOCK: a place where locks are kept, shared by all threads and loops."""

    clock: Callable[[], float] = staticmethod(clock.now)

    def __init__(self, conf: Conf) -> None:
        self.conf = conf
        self.alias = conf.alias
        self.prefix = conf.key_prefix
        self.terms: dict[Any, Any] = {}  # Kept for lock.py: options -> what they come to here.
        self._start()
        _backends.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.alias!r}>"

    def _start(self) -> None:
        """Make all that belongs to this process alone; once more in a forked child."""
        self.process = secrets.token_hex(8)
        self.watchdog = Watchdog(self)
        self._leases_lock = threading.Lock()
        # Leases that this process relies on, by name: one, or more after a loss. Weak: a lease
        # that nobody refers to any more must not be renewed.
        self.leases: dict[str, tuple[ReferenceType[Lease], ...]] = {}

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's connections, threads and leases is ours."""
        self._start()

    def retire(self) -> None:
        """No new locks will come. Those that are held go on being renewed and released here."""
        self.watchdog.retire()

    def patience(self, ttl: float) -> float:
        """The operation timeout in seconds: how long a server may take for one operation."""
        return min(LONGEST_PATIENCE, ttl / 3)

    # --- performing -------------------------------------------------------------------------

    @abstractmethod
    def run(self, flow: Flow[Result]) -> Result:
        """Perform a flow, blocking this thread."""

    @abstractmethod
    async def arun(self, flow: Flow[Result]) -> Result:
        """Perform a flow without blocking the event loop."""

    @abstractmethod
    def renew_many(self, calls: Sequence[Call]) -> list[Answer | Unanswered | Refused]:
        """Run many scripts at once for the watchdog, on a connection of its own."""

    @abstractmethod
    def close_watchdog(self) -> None:
        """Close that connection; no lease is left to renew."""

    @abstractmethod
    def ask_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run many scripts at once, and return what they returned.

        Raises:
            LockUnavailable: The server refused, or did not answer.
        """

    @abstractmethod
    def held_names(
        self, limit: int, offset: int = 0, *, latest_first: bool = False
    ) -> tuple[list[str], int]:
        """Names of held locks by expiry, the next to end first, and how many there are in all.

        It is a look at an index: a name may have become free. Nobody scans the keyspace for it.
        """

    @abstractmethod
    def ran_names(self, limit: int) -> tuple[list[str], int]:
        """Names of the locks of tasks, the last to run first, and how many there are."""

    # --- knowing leases ---------------------------------------------------------------------

    def leases_of(self, name: str) -> list[Lease]:
        """The leases of *name* that this process relies on, the newest last.

        All but the last were lost, or will turn out to be, and are not released yet.
        """
        references = self.leases.get(name)
        if references is None:
            return []
        return [lease for reference in references if (lease := reference()) is not None]

    def watch(self, lease: Lease) -> None:
        """Look after a new lease."""
        with self._leases_lock:
            earlier = self.leases.get(lease.name)
            self.leases[lease.name] = (*earlier, ref(lease)) if earlier else (ref(lease),)
        self.watchdog.watch(lease)

    def forget(self, lease: Lease) -> None:
        """The lease is over."""
        with self._leases_lock:
            references = self.leases.pop(lease.name, ())
            if len(references) > 1 or (references and references[0]() is not lease):
                self._keep_living(lease.name, references, but=lease)
        self.watchdog.forget(lease)

    def dropped(self, lease: Lease) -> None:
        """A lease was collected that nobody has released."""
        # Called by a destructor, which may run anywhere, also while this thread has the lock.
        # What stays is a dead reference, which goes with the next lease of that name.
        if self._leases_lock.acquire(blocking=False):
            try:
                # Its own reference may still find it.
                self._keep_living(lease.name, self.leases.pop(lease.name, ()), but=lease)
            finally:
                self._leases_lock.release()

    def _keep_living(
        self, name: str, references: Sequence[ReferenceType[Lease]], but: Lease | None = None
    ) -> None:
        living = tuple(one for one in references if (found := one()) is not None and found != but)
        if living:
            self.leases[name] = living

    # --- keeping leases (lease.Keeper) --------------------------------------------------------

    def renew(self, lease: Lease, ttl: float | timedelta | None = None) -> None:
        """See Lease.renew()."""
        renewal, length = self._renewal(lease, ttl)
        try:
            deadline = self.run(flows.renew(renewal, self.patience(lease.ttl)))
        except LockLost as lost:
            lease._lose(lost.reason)
            raise
        self._renewed(lease, length, deadline)

    async def arenew(self, lease: Lease, ttl: float | timedelta | None = None) -> None:
        """See Lease.renew()."""
        renewal, length = self._renewal(lease, ttl)
        try:
            deadline = await self.arun(flows.renew(renewal, self.patience(lease.ttl)))
        except LockLost as lost:
            lease._lose(lost.reason)
            raise
        self._renewed(lease, length, deadline)

    def settle(self, lease: Lease) -> None:
        """Ask the server whether it holds a lease in doubt; see Lease.ensure_held()."""
        if running_loop() is not None:
            raise LockUnavailable(
                lease.name,
                "whether the lease that was handed over is confirmed is not known yet, and asking"
                " would block the event loop; use `await lease.aensure_held()`",
            )
        self.renew(lease)

    def _renewal(self, lease: Lease, ttl: float | timedelta | None) -> tuple[flows.Renewal, float]:
        """What to send, and the ttl that the lease has if that is answered."""
        count = lease._next_count
        length = _length(lease, ttl)
        self._check_not_over(lease)
        left = lease._renewable(length)
        if left <= 0:
            raise lease._loss()
        renews = flows.will_renew(lease.auto_renew, left, lease._hold_until - self.clock())
        return flows.Renewal(lease.name, lease._token, left, count, renews), length

    def _renewed(self, lease: Lease, length: float, deadline: float) -> None:
        """The server has renewed a lease."""
        # Lost stays lost, though the answer may be that it was renewed.
        self._check_not_over(lease)
        lease.ttl = max(lease.ttl, length)  # Another one may have made it longer meanwhile.
        lease._extend(deadline)

    def _check_not_over(self, lease: Lease) -> None:
        if not lease._active:
            raise lease._loss()  # Lost, ended, or the parent process's.
        if self.clock() >= lease._ends:
            lease._expire()
            raise lease._loss()

    def tell_lost(self, lease: Lease) -> None:
        """Tell everybody who wants to know that *lease* is lost, outside the calling thread."""
        self.watchdog.forget(lease)
        over = lease._loss().over
        logger.error(
            "Lost the lease %s of lock %r (%s); the code under it may still run",
            lease.id,
            lease.name,
            f"{lease.lost_reason}: {over}" if over else lease.lost_reason,
        )
        if lease._callbacks or signals.lock_lost.receivers:
            # Losses are rare. A callback that hangs must stop neither other losses nor the exit.
            thread = threading.Thread(
                target=_tell, args=(lease,), name="redislock-lost", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # No more threads, or the interpreter is shutting down.
                _tell(lease)

    # --- looking ------------------------------------------------------------------------------

    @property
    def within(self) -> float:
        """Seconds that one try of an operation without a ttl of its own may take."""
        return 0.75 * self.patience(self.conf.ttl)

    def look(self, name: str) -> Call:
        """The step that looks at a lock; see seen()."""
        return Call(scripts.LOOK, name, (), self.within)

    def look_many(self, names: Sequence[str]) -> list[Seen]:
        """The state of many locks, in few round trips."""
        values = self.ask_many([self.look(name) for name in names]) if names else []
        return [self.seen(name, value) for name, value in zip(names, values, strict=True)]

    def seen(self, name: str, value: list[Any]) -> Seen:
        """Read the answer of the look script."""
        data, left_ms, waiters, server_ms, id, strange = value  # noqa: A001
        left = int(left_ms)
        return Seen(
            name=name,
            holding=None if left == -2 else read_holding(data, id.decode(), strange.decode()),
            expires_in=left / 1000 if left >= 0 else None,
            waiters=int(waiters),
            server_time=int(server_ms) / 1000,
        )


def _length(lease: Lease, ttl: float | timedelta | None) -> float:
    """The ttl that a lease is to have, in seconds.

    It never becomes shorter: a renewal that is still on its way for the old ttl would be believed
    although the server has taken it for over.

    Raises:
        ValueError: It is no duration, or is shorter.
    """
    if ttl is None:
        return lease.ttl
    length = seconds(ttl, "ttl", least=SHORTEST_TTL)
    if length < lease.ttl:
        raise ValueError(
            f"ttl must be at least that of the lease, {lease.ttl:g} s, not {length:g}: a lease can"
            " be made longer, not shorter. Release it to end it."
        )
    return length


def read_holding(data: bytes, id: str = "", strange: str = "") -> Holding:  # noqa: A002
    """Read what the lock key holds, see lua/_lease.lua. Never raises: it may be anything.

    Args:
        data: The value, or as much of it as the server answers.
        id: What stands for it, if the server said so: see lua/_sight.lua.
        strange: What it is, if the server says that it is not ours.
    """
    value = data.decode(errors="replace")
    head, *rest = value.split("|", 6)
    if not strange and len(head) == 55 and len(rest) == 6 and head[32] in _STATES:
        fence, since, ttl, _, _, owner = rest
        renews, renewals = head[33], head[34:39]
        numbers = is_number(fence, 19) and all(map(is_number, (since, ttl, renewals)))
        if numbers and renews in "r-":
            return Holding(
                id=id or head[39:],
                owner=Owner.unpack(owner),
                state=_STATES[head[32]],
                fence=int(fence),
                since=int(since) / 1000,
                ttl=int(ttl) / 1000,
                renewals=int(renewals),
                renews=renews == "r",
            )
    return Holding(id=id, owner=Owner(), state="foreign", strange=_described(strange))


def _described(strange: str) -> str:
    """What the server says of something strange, in words: "list 3" is a list of 3 elements."""
    kind, _, size = strange.rpartition(" ")
    if not kind:
        return "a string"
    unit = "byte" if kind == "string" else "element"
    return f"a {kind}" if size == "-1" else f"a {kind} of {counted(int(size), unit)}"


def _tell(lease: Lease) -> None:
    lease._run_callbacks()
    signals.lock_lost.send_robust(sender=type(lease), lease=lease, reason=lease.lost_reason)


_backends: WeakSet[Backend] = WeakSet()


def _after_fork_in_child() -> None:
    lease_module._renew_process()
    for backend in list(_backends):
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
