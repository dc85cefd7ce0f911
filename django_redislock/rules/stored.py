"""How the values on the server are written and read.

lua/_lease.lua defines the layout of a lease. Anybody may have written a value, so reading one never
raises.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from django_redislock.humanize import counted, visible
from django_redislock.process import cached_property

LONGEST_OWNER = 4096  # Bytes: a lease with it is shorter than SIGHT, see lua/_lease.lua.

LONGEST_FIELD = 200  # Characters of each field of an owner.
LONGEST_ID = 960  # Bytes of its task id. How that is cut depends on no other field.

TOKEN_LENGTH = 32
PAUSE = "hold"  # The token of a pause begins with it, as it always has; see lua/_queue.lua.
FORCED_VALUE_AT = 16  # Where the value begins in the key "forced"; see lua/_absence.lua.
# The states of a lock, as its key holds them.
HELD, UNCONFIRMED, COOLING = b"h", b"c", b"k"
_STATES = {HELD: "held", UNCONFIRMED: "unconfirmed", COOLING: "cooling"}
BATON = b"baton:"  # In place of a channel, see lua/_lease.lua.
_RENEWS = ("-", "r")


def renews_flag(renews: bool) -> str:
    """Whether an owner is going to renew its lease, as the server keeps it."""
    return _RENEWS[renews]


def renewal_count(renews: bool, count: int) -> str:
    """The same flag, followed by how often the lease was renewed."""
    return f"{_RENEWS[renews]}{min(count, 99_999):05}"


def read_renewal_count(count: bytes) -> int:
    """How often a lease was renewed, from what renewal_count() has written."""
    return int(count[1:])


class DoneMarkers(NamedTuple):
    """The done markers that make an acquire pointless; see lua/_done_markers.lua."""

    once: bool = False  # Whether to look at that of a `once` of this name.
    # The run whose marker to look at, and its task's. None: it is no run. "": a run without an id.
    run: str | None = None
    retention: str = ""  # For a run, how records are kept: see retention_of().

    @property
    def packed(self) -> str:
        """As scripts take them; "" if there is none to look at."""
        if not self.once and self.run is None:
            return ""
        return f"{self.once:d}{self.retention}|{self.run or ''}"


NO_MARKERS = DoneMarkers()


def retention_of(records_for: float, records: int, timeline: int) -> str:
    """How the server keeps records: for how many seconds, of how many locks, and how many leases
    in the timeline of each. See lua/_runs.lua.
    """
    return f"{int(records_for * 1000)}/{records}/{timeline}"


def is_number(text: str, digits: int = 14) -> bool:
    """Whether *text* may be a number of ours; anybody may have written it.

    Args:
        text: A part of a value.
        digits: How many it may have at most. A time in ms that fits a calendar has up to 14.
    """
    return len(text) <= digits and text.isascii() and text.isdecimal()


_NUMBERS = ("pid", "limit")  # Of an owner.
LONGEST_CHAR = 12  # Bytes of a character in JSON: two surrogates, such as \ud83d\ude00.
LONGEST_WAITED = 366 * 86_400.0  # Seconds. A longer wait was not written by us.


class Deferral(NamedTuple):
    """How a task run was deferred before it got the lock."""

    times: int
    since: float  # Seconds since the epoch.
    by: str  # The owner that was in its way last; "" if unknown.


@dataclass(frozen=True)
class Owner:
    """Who holds or wants a lock, for humans; never a proof. Carries no task arguments."""

    host: str = ""
    pid: int | None = None
    thread: str = ""
    command: str = ""  #: What the process was started as, e.g. "manage.py import_users".
    path: str = ""  #: Path of the HTTP request being served.
    task: str = ""
    task_id: str = ""
    limit: int = 0  #: How many permits the lock has; 0 if it was taken without a limit.
    names: str = ""  #: "a, b" if it is one of several locks that are held together.
    operator: str = ""  #: The operator of a pause: keeps the lock from everybody, runs nothing.
    reason: str = ""  #: Why the operator keeps it.
    #: How often its run was deferred before, since when (seconds since the epoch), and which owner
    #: was in its way last: "4 1795222800 worker-2:311".
    deferred: str = ""
    waited: float = 0.0  #: Seconds for which it was queued, if at least one; added by the server.
    traceparent: str = ""  #: The span in which it asks, as W3C Trace Context writes it.
    #: When its call was made, in ms since the epoch, if a newer one replaces it.
    called: str = ""
    birth: str = ""  #: Tells its process from others with the same pid: see process.py.

    @cached_property
    def packed(self) -> bytes:
        """As the server keeps it: JSON without the empty fields, LONGEST_OWNER bytes at most."""
        known = {field: value for field, value in vars(self).items() if value}
        if self.task_id:
            known["task_id"] = _short_id(self.task_id)
        packed = _written(known, LONGEST_FIELD)
        if len(packed) > LONGEST_OWNER:
            texts = sum(isinstance(value, str) for value in known.values())
            # What each may have, if all its characters are of the longest, and numbers too.
            room = LONGEST_OWNER - LONGEST_ID - sum(len(field) + 24 for field in known)
            packed = _written(known, room // (LONGEST_CHAR * texts))
        return packed

    @classmethod
    def unpack(cls, data: str) -> Owner:
        """Read what :attr:`packed` wrote. Never raises."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(found, dict):
            return cls()
        known = {
            # Text that cannot be encoded could not be shown either.
            field.name: as_kept(str(found[field.name]))
            for field in fields(cls)
            if field.type == "str" and field.name in found
        }
        pid, limit = (number if type(number := found.get(f)) is int else None for f in _NUMBERS)
        waited = found.get("waited")
        if type(waited) is not float or not 0 <= waited <= LONGEST_WAITED:
            waited = 0.0
        return cls(pid=pid, limit=limit or 0, waited=waited, **known)

    def is_task(self, task_id: str) -> bool:
        """Whether it is a run of this task, even if the server has only a part of a long id."""
        return _short_id(self.task_id) == _short_id(task_id)

    @property
    def deferral(self) -> Deferral | None:
        """What ``deferred`` says; None if its run was not deferred."""
        times, _, rest = self.deferred.partition(" ")
        since, _, by = rest.partition(" ")
        if not (times and since and is_number(times) and is_number(since, 10)):
            return None
        return Deferral(int(times), float(since), by)

    @property
    def doing(self) -> str:
        """Its task, request or command; of an operator, the reason."""
        return self.task or self.path or self.command or self.reason

    @property
    def place(self) -> str:
        """Its process, as "host:pid"; of a pause, its operator; "" if nobody knows."""
        if self.operator:
            return visible(self.operator)
        return visible(
            f"{self.host or 'unknown'}:{self.pid}" if self.pid is not None else self.host
        )

    def __str__(self) -> str:
        # Anybody may have written it, and a client chooses the path: it must not forge log lines.
        doing = self.task_id or self.task or self.path or self.command
        return f"{self.place} {visible(doing)}".strip() or "unknown"


def _written(known: dict[str, Any], most: int) -> bytes:
    """An owner as JSON, with so many characters of each text but the id."""
    for field, value in known.items():
        if isinstance(value, str) and len(value) > most and field != "task_id":
            known[field] = value[:most]
    return _encoder.encode(known).encode()


_encoder = json.JSONEncoder(separators=(",", ":"))


def as_kept(text: str) -> str:
    """A field of an owner as it is read again: the beginning of a long name."""
    return text[:LONGEST_FIELD].encode(errors="replace").decode()


def _short_id(task_id: str) -> str:
    """A task id as the server keeps it. No two become alike: a run knows its duplicates by it."""
    if len(task_id) <= LONGEST_FIELD and len(json.dumps(task_id)) <= LONGEST_ID:
        return task_id
    digest = hashlib.sha256(task_id.encode(errors="replace")).hexdigest()
    return f"{task_id[:60]}...{digest[:16]}"


@dataclass(frozen=True, slots=True)
class Holding:
    """The current lease of a lock as the server knows it, without its token."""

    id: str  # The lease id. Of a value that is not ours, an id made of it: see lua/_sight.lua.
    owner: Owner
    state: str  # "held", "unconfirmed" (handed over), "cooling", "rate" or "foreign".
    fence: int | None = None
    since: float | None = None  # Server time of the grant, seconds since the epoch.
    ttl: float | None = None  # Seconds it lasts unless renewed.
    renewals: int = 0
    renews: bool = False  # Whether its owner is going to renew it after a third of the ttl.
    strange: str = ""  # If the value is not ours: "a list of 3 elements".
    is_baton: bool = False  # Whether the bearer of a baton may take it up.
    newer_format: int | None = None  # The format of the value, if only a newer version reads it.

    @property
    def holder(self) -> str:
        """Its owner, as ``host:pid task-id``, and whether only a newer version can read it."""
        if self.newer_format is None:
            return str(self.owner)
        return f"{self.owner}, which runs a newer version of django_redislock (update this one too)"


RATED = "rate"  # The state of what is no lock, but a rate.


class RateSeen(NamedTuple):
    """A rate as it stands, see lua/look.lua."""

    starts_left: int  # How many may be made at once now.
    due_in: float  # Seconds until the next one may be made.
    holding: Holding  # What stands in place of a lease.


def read_rate(data: bytes) -> RateSeen | None:
    """Read a rate; None if there is none."""
    starts, due, *_, owner = _fields(data, 7)
    if not (is_number(starts) and is_number(due)):
        return None
    return RateSeen(int(starts), int(due) / 1000, rated(owner.encode()))


def rated(owner: bytes) -> Holding:
    """What stands in place of a lease under a rate: the *owner* of its last start."""
    return Holding("", Owner.unpack(owner.decode(errors="replace")), RATED)


class LockValue(NamedTuple):
    """What the lock key holds, part by part: see lua/_lease.lua. Numbers are digits."""

    token: bytes
    state: bytes  # HELD, UNCONFIRMED or COOLING.
    renewals: bytes  # See renewal_count().
    id: bytes
    fence: bytes
    since: bytes  # ms
    ttl: bytes  # ms
    confirm_by: bytes = b"0"  # ms
    channel: bytes = b""
    owner: bytes = b""

    @property
    def packed(self) -> bytes:
        """As the server keeps it."""
        return b"|".join([self.token + self.state + self.renewals + self.id, *self[4:]])


_LOCK_VALUE = re.compile(
    rb"(.{32})([hck])([r-]\d{5})([0-9a-fA-F]{16})"
    rb"\|(\d{1,19})\|(\d{1,14})\|(\d{1,14})\|(\d{1,14})\|([^|]*)\|(.*)",
    re.DOTALL,
)
# A lease of a newer format: see lua/_lease.lua.
_NEWER = re.compile(rb".{32}([2-9]).{6}([0-9a-fA-F]{16})(\|.*)", re.DOTALL)


def read_lock_value(value: bytes) -> LockValue | None:
    """Take apart what the lock key holds; None if it is not of our format."""
    parts = _LOCK_VALUE.fullmatch(value)
    return parts and LockValue(*parts.groups())


def read_holding(data: bytes, id: str = "", strange: str = "") -> Holding:  # noqa: A002
    """The current lease, from the value of the lock key. Never raises: that may be anything.

    A lease of a newer format counts as held. Only its id and its owner are known.

    Args:
        data: The value, or as much of it as the server answers.
        id: Its id, if the server made one: see lua/_sight.lua.
        strange: Its type and size, if the server says that it is not ours.
    """
    lock = None if strange else read_lock_value(data)
    if lock is not None:
        return Holding(
            id=id or lock.id.decode(),
            owner=Owner.unpack(lock.owner.decode(errors="replace")),
            state=_STATES[lock.state],
            fence=int(lock.fence),
            since=int(lock.since) / 1000,
            ttl=int(lock.ttl) / 1000,
            renewals=read_renewal_count(lock.renewals),
            renews=lock.renewals[:1] == b"r",
            is_baton=lock.state == UNCONFIRMED and lock.channel == BATON,
        )
    if newer := _NEWER.fullmatch(data):
        number, its_id, rest = newer.groups()
        owner = rest[rest.rfind(b'|{"') + 1 :]
        return Holding(
            id=its_id.decode(),
            owner=Owner.unpack(owner.decode(errors="replace")),
            state="held",
            newer_format=int(number),
        )
    return Holding(id=id, owner=Owner(), state="foreign", strange=_described(strange))


def _described(strange: str) -> str:
    """What the server says of a strange value, in words: "list 3" is a list of 3 elements."""
    kind, _, size = strange.rpartition(" ")
    if not kind:
        return "a string"
    unit = "byte" if kind == "string" else "element"
    return f"a {kind}" if size == "-1" else f"a {kind} of {counted(int(size), unit)}"


def read_done(value: bytes) -> tuple[float | None, Owner]:
    """Read a done marker, when(ms) "|" owner: when it was set, by server time, and by whom."""
    at, owner = _fields(value, 2)
    return int(at) / 1000 if is_number(at) else None, Owner.unpack(owner)


def token_in(value: bytes) -> bytes:
    """The token in the value of a lock key; in a value that is not ours, no owner's token."""
    return value[:TOKEN_LENGTH]


def fence_in(value: bytes) -> int:
    """The fence in the value of a lock key; 0 if the value is not ours."""
    lock = read_lock_value(value)
    return int(lock.fence) if lock is not None else 0


def confirmation_of(value: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The arguments of lua/renew.lua that confirm a lease; None if no waiter has to confirm it."""
    lock = read_lock_value(value)
    if lock is None or lock.state != UNCONFIRMED or lock.channel == BATON:
        return None
    return lock.token, lock.ttl, lock.renewals[:1] + b"00000"


class NotedLease(NamedTuple):
    """An entry of the timeline, see lua/_past.lua. Times are seconds since the epoch."""

    id: str
    fence: int
    since: float
    until: float | None  # None: it was still held when it was noted.
    ended: str  # "done", "failed", "forced" or "replaced"; else "".
    owner: Owner


def read_noted_lease(entry: bytes) -> NotedLease | None:
    """Read an entry of the timeline; None if somebody else has written it."""
    id, fence, since, until, ended, owner = _fields(entry, 6)  # noqa: A001
    if not (is_number(fence, 19) and is_number(since)):
        return None
    end = int(until) / 1000 if is_number(until) else None
    return NotedLease(id, int(fence), int(since) / 1000, end, ended, Owner.unpack(owner))


def read_skips(note: bytes) -> tuple[float, ...]:
    """When runs were skipped last, in seconds since the epoch, the oldest first."""
    times = note.decode(errors="replace").split(",")
    return tuple(int(time) / 1000 for time in times if time and is_number(time))


def read_skips_of_job(note: bytes) -> tuple[str, int, tuple[float, ...]]:
    """Read JOB "|" how many "|" when(ms) ",": the job, its skips, and when the last ones were."""
    rest, _, times = note.rpartition(b"|")
    job, _, count = rest.decode(errors="replace").rpartition("|")
    task = Owner.unpack(f'{{"task":"{job}"}}').task
    return task, int(count) if is_number(count) else 0, read_skips(times)


class NotedRun(NamedTuple):
    """A note of a run, see lua/_runs.lua. Times are seconds."""

    at: float
    lasted: float
    why: str  # Why it was skipped; of one that has begun, the id of its lease.
    owner: Owner


def read_noted_run(note: bytes) -> NotedRun | None:
    """Read a note of a run; None if there is none, or somebody else has written it."""
    at, lasted, why, owner = _fields(note, 4)
    if not is_number(at) or not is_number(lasted):
        return None
    return NotedRun(int(at) / 1000, int(lasted) / 1000, why, Owner.unpack(owner))


def noted_at(note: bytes) -> int:
    """When a run was noted, in ms of server time; 0 without a note that is ours."""
    at = _fields(note, 2)[0]
    return int(at) if is_number(at) else 0


def noted_lease_id(note: bytes) -> str:
    """The id of the lease of a run that has begun, from what read_noted_run() reads."""
    return _fields(note, 4)[2]


def started_lease_id(note: bytes) -> str:
    """The same, from what read_started_run() reads."""
    return noted_lease_id(note.partition(b"|")[2])


def read_started_run(note: bytes) -> tuple[int, NotedRun] | None:
    """Read the permit and the note of a run that has begun: "#2|...", or "|..." of permit 1."""
    permit, _, rest = note.decode(errors="replace").removeprefix("#").partition("|")
    run = read_noted_run(rest.encode())
    return run and (int(permit) if is_number(permit, 4) else 1, run)


class Wait(NamedTuple):
    """A waiter in the queue of a lock, as noted at the leases it holds: see lua/note_wait.lua."""

    alias: str  # In the REDISLOCK of the waiter.
    name: str
    id: str  # Of the lease that it will have.
    ticket: int
    limit: int = 1  # How many permits the lock has.

    @property
    def packed(self) -> str:
        """As the server keeps it, behind the ids of a lease and of the waiter."""
        return f"{self.ticket}|{self.limit}|{quote(self.alias)}|{self.name}"


def read_wait(note: bytes) -> tuple[str, Wait] | None:
    """Read a noted wait, behind the id of the lease at which it is noted; None if there is none."""
    lease_id, id, ticket, limit, alias, name = _fields(note, 6)  # noqa: A001
    if not (is_number(ticket, 19) and is_number(limit, 4) and int(limit)):
        return None
    return lease_id, Wait(unquote(alias), name, id, int(ticket), int(limit))


def _fields(text: bytes, count: int) -> list[str]:
    found = text.decode(errors="replace").split("|", count - 1)
    return [*found, *[""] * (count - len(found))]
