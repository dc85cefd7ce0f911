"""Values: who holds a lock, and for how long."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from django_redislock.exceptions import LockLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from django_redislock.exceptions import LostReason

logger = logging.getLogger("django_redislock")

# Clocks of two machines run at about the same rate, not at the same: a lease is given up this
# much before the server does (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
DRIFT_RATE = 0.01
DRIFT_FIXED = 0.002
# Seconds: a renewal that would lengthen a lease by less than this is not sent.
WORTH_RENEWING = 1 / 64

LONGEST_OWNER = 4096  # Bytes: with the rest of a lease fewer than may be seen, see lua/_queue.lua.


def drift(seconds: float) -> float:
    """How much two clocks may differ after *seconds*, in seconds."""
    return seconds * DRIFT_RATE + DRIFT_FIXED


def is_number(text: str, digits: int = 14) -> bool:
    """Whether what the server keeps may be a number of ours; anybody may have written it.

    Args:
        text: What stands there.
        digits: How many it may have; a time in ms that a calendar has has 14 at most.
    """
    return len(text) <= digits and text.isascii() and text.isdecimal()


@dataclass(frozen=True)
class Owner:
    """Who holds or wants a lock, for humans; never a proof. Carries no task arguments."""

    host: str = ""
    pid: int | None = None
    thread: str = ""
    command: str = ""  # What the process was started as, e.g. "manage.py import_users".
    path: str = ""  # Path of the HTTP request being served.
    task: str = ""
    task_id: str = ""
    permit: str = ""  # "2/5": the lock is the second of five permits of a task with limit=5.

    @cached_property
    def packed(self) -> bytes:
        """As the server keeps it: JSON without the empty fields, LONGEST_OWNER bytes at most."""
        known = {field: value for field, value in asdict(self).items() if value}
        for most in (200, 40):  # Characters, of which each may need twelve bytes.
            shown = {k: v[:most] if isinstance(v, str) else v for k, v in known.items()}
            packed = json.dumps(shown, separators=(",", ":")).encode()
            if len(packed) <= LONGEST_OWNER:
                break
        return packed

    @classmethod
    def unpack(cls, data: str) -> Owner:
        """Read what :attr:`packed` wrote. Whatever else it may be, it never raises."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(found, dict):
            return cls()
        known = {
            # What cannot be encoded could not be shown either.
            field.name: str(found[field.name])[:200].encode(errors="replace").decode()
            for field in fields(cls)
            if field.name != "pid" and field.name in found
        }
        pid = found.get("pid")
        return cls(pid=pid if type(pid) is int else None, **known)

    @property
    def place(self) -> str:
        """Where it is, as "host:pid"; "" if nobody knows."""
        return f"{self.host or 'unknown'}:{self.pid}" if self.pid is not None else self.host

    def __str__(self) -> str:
        doing = " ".join(
            part for part in (self.task_id or self.task or self.path or self.command,) if part
        )
        return f"{self.place} {doing}".strip() or "unknown"


@dataclass(frozen=True, slots=True)
class Holding:
    """The current lease of a lock as the server knows it: what anyone may see of it."""

    id: str  # The lease id. Of what is not ours, what stands for it: see lua/_sight.lua.
    owner: Owner
    state: str  # "held", "claimed" (handed over, not yet confirmed), "cooling" or "foreign".
    fence: int | None = None
    since: float | None = None  # Server time of the grant, seconds since the epoch.
    ttl: float | None = None  # Seconds it lasts unless renewed.
    renewals: int = 0
    renews: bool = False  # Whether its owner is going to renew it, a third of the ttl from then.
    strange: str = ""  # What it is, if it is not ours: "a list of 3 elements".


class Keeper(Protocol):
    """What keeps a lease alive and answers for it; see backends."""

    clock: Callable[[], float]

    def renew(self, lease: Lease, ttl: float | timedelta | None = None) -> None: ...
    async def arenew(self, lease: Lease, ttl: float | timedelta | None = None) -> None: ...
    def tell_lost(self, lease: Lease) -> None: ...
    def settle(self, lease: Lease) -> None: ...
    def dropped(self, lease: Lease) -> None: ...


class Process:
    """This process, as opposed to the one it was forked from."""


process = Process()


class Lease:
    """One grant of a lock to one owner, until a deadline.

    Attributes:
        name: The lock.
        fence: Fencing token: greater than that of every earlier lease of this lock. Pass it to
            what the lock protects, so that it can refuse a writer whose lease has ended.
        owner: Who holds it, for humans.
        id: Short hash of the secret token; stands for the lease in logs and listings.
        ttl: Seconds it lasts unless renewed.
    """

    __slots__ = (
        "__weakref__",
        "_block",
        "_callbacks",
        "_deadline",
        "_ended",
        "_ends",
        "_hold_until",
        "_holder",
        "_holds",
        "_keeper",
        "_left_behind",
        "_lost_reason",
        "_mutex",
        "_process",
        "_slot",
        "_token",
        "_unanswered",
        "auto_renew",
        "fence",
        "granted_at",
        "id",
        "name",
        "owner",
        "renewals",
        "ttl",
    )

    def __init__(
        self,
        *,
        name: str,
        token: str,
        id: str,  # noqa: A002 - the word of the contract
        fence: int,
        owner: Owner,
        ttl: float,
        deadline: float,
        ends: float,
        granted_at: float,
        hold_until: float,
        auto_renew: bool,
        keeper: Keeper,
        holder: Callable[[], object],
        block: bool,
    ) -> None:
        self.name = name
        self.id = id
        self.fence = fence
        self.owner = owner
        self.ttl = ttl
        self.auto_renew = auto_renew
        self.granted_at = granted_at
        self.renewals = 0
        self._token = token
        self._holder = holder  # Weak reference to the thread or asyncio task it was granted to.
        self._holds = 0  # How often that holds it, counting reentrant acquires; see Lock._keep().
        self._deadline = deadline  # Until when it is certainly ours.
        # Later than the deadline while nobody knows whether the confirmation of a hand-over has
        # arrived: then the lease is in doubt from the deadline until here.
        self._ends = ends
        self._hold_until = hold_until
        self._keeper = keeper
        self._process = process
        self._lost_reason: LostReason | None = None
        self._unanswered = False  # Whether the last renewal was.
        self._block = block  # Whether the end of a block releases it.
        self._left_behind = False  # Whether its holder is known to have ended without a release.
        self._slot = 0  # Where the watchdog keeps it.
        self._callbacks: list[Callable[[Lease], object]] | None = None
        self._mutex = threading.Lock()
        self._ended = False  # Set last, see __del__.

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or "ended"
        return f"<Lease {self.id} of {self.name!r}: {state}, fence {self.fence}>"

    def __del__(self) -> None:
        try:
            if self._ended or not self._holds:
                return  # Nobody relied on it.
        except AttributeError:
            return  # __init__ did not run to its end.
        # A destructor must not ask a server.
        if self._may_be_held:
            logger.warning(
                "The held lease %s of lock %r was dropped without a release; the lock stays"
                " taken for %.1f s more. Keep the handle, or use `with`.",
                self.id,
                self.name,
                self._ends - self._keeper.clock(),
            )
        self._keeper.dropped(self)

    @property
    def held(self) -> bool:
        """Whether the lock is certainly ours right now, by our own clock.

        It is False also while nobody knows: the lease was handed over a second ago or more, and
        the server has answered nothing since. ``ensure_held()`` asks it.
        """
        return self._active and self._keeper.clock() < self._deadline

    @property
    def expires_in(self) -> float:
        """Seconds until the lease ends unless renewed; 0.0 when it is not held."""
        return max(0.0, self._ends - self._keeper.clock()) if self.held else 0.0

    @property
    def lost_reason(self) -> LostReason | None:
        """Why it was lost: "expired", "forced", "taken" or "unreachable"; None if it was not."""
        if self._active and not self._may_be_held:
            return self._expiry_reason()
        return self._lost_reason

    def ensure_held(self, verify: bool = False) -> None:
        """Return if the lock is ours, raise if it is not; the check before touching the resource.

        Args:
            verify: Ask the server too, which restarts the ttl.

        Raises:
            LockLost: The lease has ended.
            LockUnavailable: With *verify*, or after a hand-over that nobody knows to be confirmed:
                the server did not answer.
        """
        if verify:
            self.renew()
        elif self._in_doubt:
            self._keeper.settle(self)
        elif not self.held:
            raise self._loss()

    async def aensure_held(self, verify: bool = False) -> None:
        """See ensure_held()."""
        if verify or self._in_doubt:
            await self.arenew()
        elif not self.held:
            raise self._loss()

    def renew(self, ttl: float | timedelta | None = None) -> None:
        """Restart the ttl now.

        Args:
            ttl: Seconds, or a timedelta, that the lease lasts from now on unless renewed. It can
                be made longer, not shorter; max_hold bounds it all the same.

        Raises:
            LockLost: The lease has ended, or max_hold is over.
            LockUnavailable: The server did not answer; the lease may still be held.
            ValueError: The ttl is no duration, or is shorter than that of the lease.
        """
        self._keeper.renew(self, ttl)

    async def arenew(self, ttl: float | timedelta | None = None) -> None:
        """See renew()."""
        await self._keeper.arenew(self, ttl)

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call *callback* with this lease once if it is lost; at once if it already is.

        It runs in a thread of its own, so it cannot delay the renewal of other leases; what it
        raises is logged.
        """
        with self._mutex:
            if self._lost_reason is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        self._call(callback)

    # What follows is for the package itself.

    @property
    def _unconfirmed(self) -> bool:
        """Whether it was handed over, and no answer of the server has confirmed it yet."""
        return self._ends > self._deadline

    @property
    def _in_doubt(self) -> bool:
        """Whether the server alone knows if it is held; see Lease._ends."""
        return self._active and self._deadline <= self._keeper.clock() < self._ends

    @property
    def _may_be_held(self) -> bool:
        """Whether it is held, or in doubt."""
        return self._active and self._keeper.clock() < self._ends

    @property
    def _active(self) -> bool:
        """Whether it is neither ended nor known to be lost; its deadline may have passed."""
        return not self._ended and self._lost_reason is None and self._process is process

    def _renewable(self, ttl: float) -> float:
        """Seconds that a renewal may ask for now: the ttl, shortened to end at max_hold."""
        return min(ttl, self._hold_until - self._keeper.clock())

    @property
    def _next_count(self) -> int:
        """The count of the next renewal; see lua/renew.lua.

        It is read before all else that the renewal says: a server shortens a lease for the newest
        one, so that must not be ignorant of another that has made the lease longer meanwhile.
        """
        return self.renewals + 1

    def _loss(self) -> LockLost:
        reason = self.lost_reason or "expired"
        over = ""
        if self._process is not process:
            over = "it belongs to the process that this one was forked from"
        elif self._ended and self._lost_reason is None:
            over = "it was released"
        elif reason == "expired":
            over = self._what_was_over()
        return LockLost(self.name, reason, over)

    def _what_was_over(self) -> str:
        """The setting by which it was not renewed any more, as a clause; "" if there is none."""
        if self._keeper.clock() < self._ends:
            return ""  # The server ended it.
        if not self.auto_renew:
            return f"renew is False, and its ttl of {self.ttl:g} s was over"
        # The last renewal is shortened to end at max_hold, less the drift of the clocks.
        if self._hold_until <= self._ends + drift(self.ttl) + WORTH_RENEWING:
            return f"its max_hold of {self._hold_until - self.granted_at:g} s was over"
        return ""

    def _extend(self, deadline: float) -> None:
        self._unanswered = False
        # A renewal's reply may be overtaken by that of a later one.
        self._deadline = self._ends = max(self._deadline, deadline)
        # Last: whoever counts on from here must know what this one asked for, see _next_count.
        self.renewals += 1

    def _end(self) -> LostReason | None:
        """Rely on it no more. Returns why it was lost, if it was."""
        with self._mutex:
            self._ended = True
            return self._lost_reason

    def _lose(self, reason: LostReason, *, at_release: bool = False) -> bool:
        """Note the loss; True for the one caller who was first."""
        with self._mutex:
            # The answer to a renewal that was overtaken by the release says nothing.
            if self._lost_reason is not None or (self._ended and not at_release):
                return False
            self._lost_reason = reason
        self._keeper.tell_lost(self)
        return True

    def _expire(self) -> None:
        """Note that the deadline has passed."""
        self._lose(self._expiry_reason())

    def _expiry_reason(self) -> LostReason:
        return "unreachable" if self._unanswered else "expired"

    def _run_callbacks(self) -> None:
        with self._mutex:
            callbacks, self._callbacks = self._callbacks or [], []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Lease], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("An on_lost callback of lock %r failed", self.name)


def _renew_process() -> None:
    global process  # noqa: PLW0603 - a forked child is another process
    process = Process()
