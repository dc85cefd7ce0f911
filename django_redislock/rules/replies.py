"""The arguments of scripts, their replies and their rings, by name, in the order of lua/*.lua.

A reply of one value needs no name here: the fence that an acquire grants, the word that answers a
renewal or a release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock.rules.stored import (
    Holding,
    RateSeen,
    Wait,
    fence_in,
    noted_lease_id,
    read_holding,
    read_lock_value,
    read_noted_lease,
    read_rate,
    read_wait,
    started_lease_id,
    token_in,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# The replies to a renewal or a release. Any other says why the lease is gone.
RENEWED = b"renewed"
RELEASED = b"released"
GIVEN = b"given"  # To a hand-over by a baton.
FORCED = b"forced"

FREE, ENDLESS = -2, -1  # In place of the ms left: the lock is free, or its key has no expiry.


def in_seconds(ms: bytes | str | int) -> float:
    """Seconds, from a script's milliseconds. A time counts from the epoch."""
    return int(ms) / 1000


# --- arguments ------------------------------------------------------------------------------


class AcquireArgs(NamedTuple):
    """See lua/acquire.lua. lua/acquire_permit.lua takes one more: the number of permits."""

    token: str
    id: str
    ttl: int  # ms
    mode: str  # "try", "queue", "last" or "pause".
    ticket: bytes  # b"0" for a new one.
    markers: str  # See DoneMarkers.packed.
    renews: str
    owner: bytes


class TakeStartArgs(NamedTuple):
    """See lua/take_start.lua. The mode stands where that of AcquireArgs does."""

    token: str
    id: str
    claimed: str
    mode: str  # "try", "queue", "reserve" or "last".
    patience: int  # ms
    every: int  # us
    burst: int
    owner: bytes


class AnnounceArgs(NamedTuple):
    """See lua/announce.lua."""

    id: str  # Of the task.
    ttl: int  # ms
    delay: int | str = ""  # ms
    lives: int | str = ""  # ms
    arguments: bytes = b""
    task: str = ""
    way: str = ""


# --- replies to an acquire that grants nothing ----------------------------------------------


class QueuedReply(NamedTuple):
    """The waiter stands in the queue."""

    word: bytes
    ticket: bytes  # Its place there.
    left_ms: int  # Until the current lease must have ended.
    server_us: bytes
    newly: int  # 1 if it did not stand there before.
    owner: bytes = b""  # Of the current lease.
    replaced_ms: int = 0  # How long its holder has to end, if it is replaced.

    @property
    def server_time(self) -> float:
        """Seconds since the epoch."""
        return int(self.server_us) / 1e6


class BusyReply(NamedTuple):
    """Another owner has the lock."""

    word: bytes
    left_ms: int  # Until the current lease must have ended.
    value: bytes  # The beginning of what the lock key holds.
    server_ms: int

    @property
    def token(self) -> bytes:
        """The token of the current lease."""
        return token_in(self.value)

    @property
    def owner(self) -> bytes:
        """The owner of the current lease; b"" if the value is not ours."""
        lock = read_lock_value(self.value)
        return lock.owner if lock is not None else b""


class OwnReply(BusyReply):
    """Another delivery of the asking task run has a permit, so this one does not wait."""


class SplitReply(BusyReply):
    """The vote of a quorum is split: no owner is known to have a majority of the servers."""


class EarlyReply(NamedTuple):
    """No start is due under the rate."""

    word: bytes
    left_ms: int  # Until one is.
    owner: bytes  # Of the last start.
    server_ms: int


class DoneReply(NamedTuple):
    """A `once` of this name is done."""

    word: bytes
    marker: bytes  # See stored.read_done().
    server_ms: int


class FinishedReply(NamedTuple):
    """The task run that wants the lock has succeeded already."""

    word: bytes
    ago_ms: int


class EndlessReply(NamedTuple):
    """The lock key has no expiry."""

    word: bytes


class ReplacedReply(NamedTuple):
    """A newer call has replaced this one."""

    word: bytes
    newer: bytes  # Its owner.


class LostReply(NamedTuple):
    """The handed-over lease is over, or another acquire has taken it up."""

    word: bytes
    why: bytes  # As a renewal says it.


_TRIES: dict[bytes, Any] = {
    b"queued": QueuedReply,
    b"busy": BusyReply,
    b"own": OwnReply,
    b"split": SplitReply,
    b"early": EarlyReply,
    b"done": DoneReply,
    b"finished": FinishedReply,
    b"endless": EndlessReply,
    b"replaced": ReplacedReply,
    b"lost": LostReply,
}


def read_try(reply: Any) -> Any:
    """The reply to an acquire, as one of the above. A fence, or a strange reply, stays as it is."""
    try:
        return _TRIES[reply[0]](*reply)
    except (KeyError, IndexError, TypeError):
        return reply


def is_busy(reply: Any) -> bool:
    """Whether a try has found that the lock is not free, or that no start is due."""
    return isinstance(read_try(reply), BusyReply | EarlyReply)


# --- replies of the other scripts -----------------------------------------------------------


class LookReply(NamedTuple):
    """The state of a lock."""

    value: bytes  # The beginning of what the lock key holds.
    left_ms: int  # Until it ends; FREE or ENDLESS.
    waiters: int
    server_ms: bytes
    id: bytes
    strange: bytes  # If the value is not ours: its type and size, see lua/_sight.lua.
    note: bytes = b""  # What its holder waits for.
    rate: bytes = b""  # Of a free lock, see stored.read_rate().
    where: str = ""  # On which servers, if there are several: "host:6379", or "2 of 3".

    @property
    def is_free(self) -> bool:
        """Whether nobody has the lock."""
        return int(self.left_ms) == FREE

    @property
    def rated(self) -> RateSeen | None:
        """The rate of that name; None if there is none, or somebody has the lock."""
        return read_rate(self.rate) if self.rate else None

    @property
    def holding(self) -> Holding | None:
        """The current lease, or what stands in its place under a rate; None if the lock is free."""
        if self.is_free:
            return self.rated and self.rated.holding
        return read_holding(self.value, self.id.decode(), self.strange.decode())

    @property
    def wait(self) -> Wait | None:
        """What its holder waits for; None if the holder waits for nothing."""
        noted = read_wait(self.note)
        return noted and noted[1]

    @property
    def fence(self) -> int:
        """The fence of its lease; 0 if that is not ours."""
        return fence_in(self.value)

    @property
    def server_time(self) -> float:
        """Seconds since the epoch."""
        return in_seconds(self.server_ms)

    @property
    def expires_in(self) -> float | None:
        """Seconds until it ends; None if it is free or has no expiry."""
        return in_seconds(self.left_ms) if int(self.left_ms) >= 0 else None


class QueueEntry(NamedTuple):
    """One waiter."""

    ticket: bytes
    id: bytes
    owner: bytes

    @property
    def since(self) -> float:
        """When it came, in seconds since the epoch: its ticket is the server time then.

        The ticket of a pause is negative, so the pause is served first.
        """
        return abs(int(self.ticket)) / 1e6


class InspectReply(NamedTuple):
    """The waiters of a lock, and its past."""

    server_ms: bytes
    waiters: list[list[bytes]]
    past: list[bytes]  # See stored.read_noted_lease().

    @property
    def queue(self) -> list[QueueEntry]:
        """The waiters, the next to be served first."""
        return [QueueEntry(*waiter) for waiter in self.waiters]

    @property
    def last_since(self) -> float:
        """When the last lease of the past was granted; 0 if there is none."""
        last = read_noted_lease(self.past[-1]) if self.past else None
        return last.since if last else 0.0


class ForceReleaseReply(NamedTuple):
    """The outcome of a release by force."""

    word: bytes  # b"released", b"gone" or b"taken".
    value: bytes  # The beginning of the value that was released, or that is there now.


class NamesReply(NamedTuple):
    """A page of an index of locks."""

    total: int
    found: list[bytes]  # Each lock key, and after it its score in the index.

    @property
    def keys(self) -> list[bytes]:
        """The lock keys, in the order that was asked for."""
        return self.found[::2]

    @property
    def scores(self) -> list[tuple[bytes, bytes]]:
        """Each lock key with its score."""
        return [*zip(self.found[::2], self.found[1::2], strict=True)]


class WaitReply(NamedTuple):
    """Whether a waiter stands in a queue, and which lease the lock has."""

    goes_on: int  # 1 if it stands there.
    value: bytes  # The beginning of what the lock key holds.
    note: bytes  # What the holder of a lease waits for.

    @property
    def holding(self) -> Holding:
        """The current lease."""
        return read_holding(self.value)

    @property
    def noted(self) -> tuple[str, Wait] | None:
        """The id of the lease at which a wait is noted, and that wait."""
        return read_wait(self.note)


class RunsReply(NamedTuple):
    """The last runs under a lock: notes, or b"", see stored.read_noted_run()."""

    server_ms: bytes
    success: bytes
    failure: bytes
    skip: bytes
    unended: bytes
    started: list[bytes]  # See stored.read_started_run().
    skips: int  # Since the last success.
    abandoned: bytes
    skipped: bytes  # See stored.read_skips().
    by_job: Sequence[bytes] = ()  # The skips of each job, see stored.read_skips_of_job().

    @property
    def unended_lease_id(self) -> str:
        """The id of the lease of the run that never ended; "" if there is none."""
        return noted_lease_id(self.unended)

    @property
    def started_by_lease_id(self) -> dict[str, bytes]:
        """The notes of the runs that have begun, by lease id."""
        return {started_lease_id(note): note for note in self.started}


class TurnReply(NamedTuple):
    """The position of a deferred run."""

    ticket: bytes
    before: int  # How many are before it.
    left_ms: bytes  # Until its turn.


class DeferredCall(NamedTuple):
    """A call in the line of deferred runs."""

    ticket: bytes
    id: bytes  # Of the task.
    back_by_ms: bytes
    before: int  # How many stand before it.

    @property
    def since(self) -> float:
        """When it came, in seconds since the epoch: its ticket is the server time then."""
        return int(self.ticket) / 1e6


class CallsReply(NamedTuple):
    """The calls under a lock that have no lease. Each text begins with a time in ms, or is b""."""

    server_ms: bytes
    queued: bytes
    runs_from: bytes
    done: bytes
    finished: bytes
    deferred: list[list[bytes]]
    task: bytes = b""

    @property
    def line(self) -> list[DeferredCall]:
        """The deferred runs, the first to come first."""
        return [DeferredCall(*entry) for entry in self.deferred]  # type: ignore[arg-type]


# --- rings ----------------------------------------------------------------------------------


class GrantedRing(NamedTuple):
    """The lock was handed over to this waiter."""

    word: str
    id: str  # Of the lease.
    fence: str
    server_us: str
    permit: str = "1"

    @property
    def server_time(self) -> float:
        """When it was granted, in seconds since the epoch."""
        return int(self.server_us) / 1e6


class LookRing(NamedTuple):
    """The lock becomes free at another time than this waiter was told."""

    word: str
    id: str  # Of the lease that the waiter wants.
    left_ms: str


class AliveRing(NamedTuple):
    """A search for circles asks whether this waiter is still there: see lua/follow_wait.lua."""

    word: str
    id: str  # Of the lease that the waiter wants.


_RINGS: dict[str, Any] = {"granted": GrantedRing, "look": LookRing, "alive": AliveRing}


def read_ring(words: Sequence[str]) -> Any:
    """A ring, as one of the above; None if it is none of them."""
    try:
        return _RINGS[words[0]](*words)
    except (KeyError, IndexError, TypeError):
        return None
