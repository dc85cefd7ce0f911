"""A held lock as operators and programs see it: its holder, its waiters, its past leases.

Imported from held.py, which finds them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from django_redislock.humanize import counted, duration
from django_redislock.rules.names import Permit, normalized
from django_redislock.rules.options import MOST_PERMITS
from django_redislock.rules.stored import Owner, read_noted_lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# --- the output of ``manage.py locks --json`` about locks, waiters and runs, for programs ---------


class Jsonable:
    """A dataclass whose fields are printed under their own names, so none is renamed or removed.

    An owner's data has a key of its own; its process and its task stand beside it, too. Times are
    numbers, rounded to milliseconds. None means unknown.
    """

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what is printed."""
        return _printed(self)


def _printed(found: Any) -> dict[str, Any]:
    printed: dict[str, Any] = {}
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Owner):
            owner = {key: one or None for key, one in _printed(value).items()}
            owner["deferred"] = value.deferral and value.deferral._asdict()
            printed |= {key: owner[key] for key in ("host", "pid", "task", "task_id")}
            printed[field.name] = owner
        elif isinstance(value, Jsonable):
            printed[field.name] = value.as_dict()
        elif isinstance(value, tuple):
            printed[field.name] = [
                one.as_dict() if isinstance(one, Jsonable) else one for one in value
            ]
        elif isinstance(value, float):
            printed[field.name] = round(value, 3)
        else:
            printed[field.name] = None if value == "" else value
    return printed


# --- what is shown of a lock, an owner or a record, for humans ------------------------------------

Kind = Literal[
    "text",
    "name",  # Of the lock itself: the title of its page has it.
    "lock",  # The name of another lock.
    "state",  # Of a whole lock.
    "badge",  # What the badges of a state say too.
    "holder",  # Of a whole lock: its owner's process, or the operator.
    "duration",
    "age",  # Seconds that go on growing.
    "left",  # Of a whole lock: when it ends.
    "moment",
    "run",
    "runs",  # Those under way.
]


class Fact(NamedTuple):
    """One thing that is known. Each surface renders the value by its kind."""

    label: str  # As on a page; a terminal has it in small letters.
    value: Any
    kind: Kind = "text"


# The fields of an owner that are shown, beside its process. A search looks at the texts.
OWNER: dict[str, tuple[str, Kind]] = {
    "names": ("Belongs to", "text"),
    "reason": ("Reason", "text"),
    "task": ("Task", "text"),
    "task_id": ("Task id", "text"),
    "path": ("Request", "text"),
    "command": ("Command", "text"),
    "thread": ("Thread", "text"),
    "waited": ("Waited", "duration"),
}


def known_facts(*facts: Fact) -> list[Fact]:
    """Those of *facts* that have a value."""
    return [fact for fact in facts if fact.value not in {None, "", ()}]


State = Literal["held", "cooling", "paused", "overdue", "no-expiry", "foreign", "rate"]
STATES = (*get_args(State), "permit")  # A selection may name these.
Ended = Literal["done", "failed", "forced", "replaced", "expired"]

CLOCK_SLACK = 1.0  # Seconds by which a lease may seem to last longer than its ttl.


@dataclass(frozen=True, kw_only=True)
class HeldLock(Jsonable):
    """One held lock, or one held permit. Durations are seconds; None means unknown."""

    name: str  #: Beyond the first permit with its number: "gpu#2".
    alias: str
    state: State
    id: str  #: Lease id, for force_release().
    fence: int | None
    owner: Owner
    held_for: float | None
    expires_in: float | None
    ttl: float | None = None  #: As granted, or as lengthened by renew(ttl=...).
    renewals: int
    waiters: int
    where: str = ""  #: Which of several servers keeps it.
    gone: bool = False  #: Its owner was a process of this host, and does not exist any more.
    strange: str = ""  #: Of a foreign lock, the kind of value: "a list of 3 elements".
    newer_format: int | None = None  #: That of its lease, if only a newer version can read it.
    handed_over: bool = False  #: The bearer of a baton may take it up; its owner made the baton.
    waits_for: str = ""  #: The lock that its holder waits for, once it has waited for a second.
    circle: str = ""  #: If that wait can never end: the circle of holders and locks.
    starts_left: int | None = None  #: Of a rate: how many starts may be made at once now.
    number: int = 1  #: Of the permit, by its key.

    @property
    def key(self) -> Permit:
        """The lock or permit itself, even if another lock is named "gpu#2"."""
        return Permit.labelled(self.name, self.number)

    @property
    def permit(self) -> str:
        """Which permit of how many it is: "2/4"; "" of a lock without a limit."""
        return _permit(self.number, self.owner)

    @property
    def holder(self) -> str:
        """Its owner in one line; of a foreign lock, the kind of value."""
        return self.strange or str(self.owner)

    @property
    def shown_state(self) -> str:
        """The state in one or two words."""
        if self.circle:
            return "circle"
        if self.newer_format is not None and self.state == "held":
            return "held (newer)"
        return "handed over" if self.handed_over else self.state

    @property
    def ends(self) -> str:
        """A clause to follow ``expires_in``: what becomes of the lock then; "" if unknown."""
        if self.expires_in is None or self.state in {"foreign", "rate"}:
            return ""
        if self.handed_over:
            return "unless it is taken up"
        is_free = self.state == "cooling" or self.owner.operator
        return "and is free then" if is_free else "unless it is renewed"

    @property
    def ends_late(self) -> bool:
        """Whether it ends later than its ttl allows: the server's clock was set back meanwhile.

        Its next renewal puts that right; if its owner is dead, only an operator can.
        """
        if self.state == "cooling" or self.expires_in is None or self.ttl is None:
            return False
        return self.expires_in > self.ttl + CLOCK_SLACK

    @property
    def note(self) -> str:  # noqa: PLR0911 - one sentence per state
        """Sentences that an operator should read beside the state; "" if there are none."""
        if why := self._cannot_be_read:
            never = " It has no expiry, so the lock would never become free."
            return why + never * (self.expires_in is None)
        if self.state == "rate":
            left = counted(self.starts_left or 0, "start")
            return (
                f"A rate, which nobody holds: {left} can be made now, and then one when it is due."
            )
        if self.state == "no-expiry":
            return "Its key has lost its expiry, so the lock would never become free."
        if self.handed_over and self.expires_in is not None:
            return (
                "Handed over to whoever takes it up, until"
                f" {duration(self.expires_in)} from now; the next waiter has it then."
            )
        if self.circle:
            return (
                f"Its holder waits, and that would never end: {self.circle}. The youngest of these"
                " waits ends with LockMisuse."
            )
        if self.ends_late:
            return (
                "It ends later than its ttl allows, since the server's clock was set back; the next"
                " renewal puts that right."
            )
        return ""

    @property
    def _cannot_be_read(self) -> str:
        """Why this version cannot read the value of its key, as a sentence; "" if it can."""
        if self.state == "foreign":
            return f"Not a lock of ours but {self.strange}, which somebody else wrote to its key."
        if self.newer_format is not None:
            return (
                "Its holder runs a newer version of django_redislock, and this one cannot read its"
                f" lease, of format {self.newer_format}: update this program."
            )
        return ""

    def facts(self, taken_at: float | None = None, expires_at: float | None = None) -> list[Fact]:
        """All that is shown of it; the times, if they are known, as those of a Detail."""
        ours, rate = self.state not in {"foreign", "rate"}, self.state == "rate"
        return known_facts(
            Fact("Name", self.name, "name"),
            Fact("State", self, "state"),
            Fact("Permit", self.permit, "badge"),
            Fact("Note", self.note, "badge"),
            Fact("Started by" if rate else "Holder", self if self.owner.place else None, "holder"),
            Fact("Waits for", self.waits_for, "lock"),
            *(
                Fact(label, getattr(self.owner, field) or None, kind)
                for field, (label, kind) in OWNER.items()
            ),
            Fact("Held for", self.held_for, "age"),
            Fact("Taken at", taken_at, "moment"),
            Fact("Next start" if rate else "Expires in", self, "left"),
            Fact("Next at" if rate else "Expires at", expires_at, "moment"),
            Fact("TTL", self.ttl, "duration"),
            Fact("Renewals", self.renewals if ours else None),
            Fact("Waiters", self.waiters),
            Fact("Starts left", self.starts_left),
            Fact("Fence", self.fence),
            Fact("Lease" if ours else "Id", self.id),
            Fact("Alias", self.alias),
            Fact("Where", self.where),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields that are printed; ``note`` includes ``strange``."""
        more = {"permit": self.permit or None, "note": self.note or None}
        printed = {**super().as_dict(), **more}
        del printed["strange"], printed["number"]
        return printed


class HeldLocks(list[HeldLock]):
    """Some of the held locks.

    Attributes:
        total: How many there are in all, by the server's index.
        partial: Whether there may be more than were asked for or looked at.
        silent: Of several servers, those that did not answer. Their locks are missing.
    """

    total: int = 0
    partial: bool = False
    silent: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Waiter(Jsonable):
    """An owner in the queue of a lock."""

    id: str  #: The id of the lease that it will have.
    owner: Owner
    waiting_for: float  #: Seconds.

    @property
    def note(self) -> str:
        """What it is, if it is no waiter like others: an operator's pause that has not begun."""
        return "pending pause" if self.owner.operator else ""


@dataclass(frozen=True, kw_only=True)
class PastLease(Jsonable):
    """A lease that has ended.

    The server notes leases that lasted a second, were renewed, handed over or released by force, or
    were a job's.
    """

    id: str
    fence: int
    owner: Owner
    since: float  #: Server time, seconds since the epoch.
    until: float | None  #: None: unknown, since its owner never released it.
    ended: Ended
    number: int = 1  #: Of the permit.

    @property
    def permit(self) -> str:
        """As that of a HeldLock."""
        return _permit(self.number, self.owner)

    def as_dict(self) -> dict[str, Any]:
        """The fields that are printed."""
        printed = {**super().as_dict(), "permit": self.permit or None}
        del printed["number"]
        return printed

    @property
    def lasted(self) -> float | None:
        """Seconds for which it was held; None if unknown."""
        return None if self.until is None else self.until - self.since


@dataclass(frozen=True, kw_only=True)
class Detail:
    """All there is to know about one lock, or one permit of it, held or not."""

    name: str  #: As that of a HeldLock.
    alias: str
    lock: HeldLock | None  #: None: nobody holds it.
    waiters: list[Waiter]  #: For any permit of the name, in the order of the queue.
    past: list[PastLease]  #: The oldest first; of the first permit, with those of all others.
    server_time: float  #: Seconds since the epoch.
    number: int = 1  #: Of the permit.
    others: Sequence[HeldLock] = ()  #: The other permits of the name that are held.

    @property
    def key(self) -> Permit:
        """The lock or permit itself, even if another lock is named "gpu#2"."""
        return Permit.labelled(self.name, self.number)

    @property
    def moments(self) -> tuple[float | None, float | None]:
        """When its lease was granted, and when it ends, by the server's clock. None: unknown."""
        now, lock = self.server_time, self.lock
        if lock is None:
            return None, None
        return (
            None if lock.held_for is None else now - lock.held_for,
            None if lock.expires_in is None else now + lock.expires_in,
        )

    @property
    def limit(self) -> int:
        """How many permits the name has, by its holders, waiters and past leases; or 1."""
        holders = [*self.others, self.lock] if self.lock else self.others
        some = holders, self.waiters, self.past
        return limit_of(one.owner for those in some for one in those)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects locks. An empty field admits all.

    Attributes:
        search: A part of the name, or of the owner's data, in any case.
        state: The state; "permit" means the permits of locks with a limit, in any state.
        host: The owner's host.
        task: The full name of the owner's task.
        prefix: The beginning of the name.
        older_than: Seconds for which the lock has been held at least.
    """

    search: str = ""
    state: str = ""
    host: str = ""
    task: str = ""
    prefix: str = ""
    older_than: float | None = None

    def __post_init__(self) -> None:
        # As names are: typed or pasted text may be another form of the same letters.
        for part in ("search", "prefix"):
            object.__setattr__(self, part, normalized(getattr(self, part)))

    def check(self) -> None:
        """Refuse an unknown state: no lock would ever be in it, and that would look healthy.

        Raises:
            ValueError: There is no such state.
        """
        if self.state and self.state not in STATES:
            known = ", ".join(map(repr, STATES))
            raise ValueError(f"state must be one of {known}, or empty, not {self.state!r}.")

    def admits(self, lock: HeldLock) -> bool:
        """Whether *lock* is selected."""
        owner = lock.owner
        return (
            (not self.state or self.state in _states(lock))
            and (not self.host or owner.host == self.host)
            and (not self.task or owner.task == self.task)
            and lock.name.startswith(self.prefix)
            and (
                self.older_than is None
                or (lock.held_for is not None and lock.held_for >= self.older_than)
            )
            and (not self.search or self.search.casefold() in _searchable(lock))
        )

    def narrow(self, permits: list[Permit]) -> list[Permit]:
        """The *permits* worth a look; in a search, those that match come first."""
        if self.prefix:
            permits = [one for one in permits if one.label.startswith(self.prefix)]
        if self.search:
            wanted = self.search.casefold()
            permits = sorted(permits, key=lambda one: wanted not in one.label.casefold())
        return permits


def limit_of(owners: Iterable[Owner]) -> int:
    """How many permits a name has, as its owners say, or 1. Bounded: anybody may be an owner."""
    return min(max([1, *(one.limit for one in owners)]), MOST_PERMITS)


def read_past(entries: Iterable[bytes], lock: HeldLock | None, number: int = 1) -> list[PastLease]:
    """The leases before *lock*, the oldest first, from the entries of the timeline of a permit."""
    leases: dict[str, PastLease] = {}  # The entry of a lease's end takes the place of its first.
    for entry in entries:
        if noted := read_noted_lease(entry):
            ended = noted.ended if noted.ended in get_args(Ended) else "expired"
            leases[noted.id] = PastLease(**noted._replace(ended=ended)._asdict(), number=number)
    if lock is not None and lock.id in leases and leases[lock.id].until is None:
        del leases[lock.id]  # It has not ended.
    return sorted(leases.values(), key=lambda lease: lease.since)


def _permit(number: int, owner: Owner) -> str:
    return f"{number}/{owner.limit or '?'}" if owner.limit or number > 1 else ""


def _states(lock: HeldLock) -> Iterator[str]:
    yield lock.state
    if lock.permit:
        yield "permit"
    if lock.expires_in is None:
        yield "no-expiry"  # Also if it is foreign.


def _searchable(lock: HeldLock) -> str:
    texts = (getattr(lock.owner, field) for field, (_, kind) in OWNER.items() if kind == "text")
    return "\n".join([lock.name, str(lock.owner), *texts]).casefold()
