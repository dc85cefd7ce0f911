"""What became of the runs of tasks: the last success, failure and skip under each lock.

Also who waits in the broker's queue to run, for tasks that are queued one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock.activity import current_owner, described
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFAULT_ALIAS
from django_redislock.rules.steps import Call
from django_redislock.rules.stored import Owner, is_number

if TYPE_CHECKING:
    from django_redislock.backends.base import Backend
    from django_redislock.lease import Lease
    from django_redislock.rules.scripts import Script


KEPT = 30 * 86_400.0  # Seconds for which a record is kept after the last run.
ASKED_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a task, or one that was skipped."""

    at: float  # When it ended, in seconds since the epoch, by the server's clock; or else began.
    ago: float
    owner: Owner  # Who ran it; of one that was skipped, who did not.
    lasted: float | None  # None: it was skipped, or its end is not known.
    why: str  # Why it was skipped: "busy" or "done"; else "".

    def as_dict(self) -> dict[str, Any]:
        """For ``manage.py locks runs --json``. Keys are added, never renamed or removed."""
        return {
            "at": round(self.at, 3),
            "ago": round(self.ago, 3),
            "lasted": None if self.lasted is None else round(self.lasted, 3),
            "why": self.why or None,
            **described(self.owner),
        }


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of the task runs under one lock. None: there was none in the last 30 days.

    Attributes:
        name: The lock.
        alias: Its alias in REDISLOCK.
        last_success: The last run that ended well.
        last_failure: The last that raised.
        last_skip: The last that did not happen because of the lock.
        skips: How many were skipped since the last success.
        under_way: The runs that hold the lock right now; several if the task has a limit.
        last_unended: The last run that began, whose lease is over, and of which neither success nor
            failure is known: its process was killed, or it lost the lease.
    """

    name: str
    alias: str
    last_success: Run | None = None
    last_failure: Run | None = None
    last_skip: Run | None = None
    skips: int = 0
    under_way: tuple[Run, ...] = ()
    last_unended: Run | None = None

    @property
    def known(self) -> bool:
        """Whether anything is."""
        runs = self.last_success, self.last_failure, self.last_skip, self.last_unended
        return any(runs) or bool(self.under_way)

    def as_dict(self) -> dict[str, Any]:
        """For ``manage.py locks runs --json``. Keys are added, never renamed or removed."""
        runs = {
            "last_success": self.last_success,
            "last_failure": self.last_failure,
            "last_skip": self.last_skip,
            "last_unended": self.last_unended,
        }
        return {
            "name": self.name,
            "alias": self.alias,
            **{key: run and run.as_dict() for key, run in runs.items()},
            "skips": self.skips,
            "under_way": [run.as_dict() for run in self.under_way],
        }


class Records(list[Record]):
    """A list of records; ``partial`` says that there are more than it has."""

    partial = False


def records(*, using: str = DEFAULT_ALIAS, limit: int = 1000) -> Records:
    """What became of the task runs under up to *limit* locks, the last to run first.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    names, total = backend.ran_names(limit)
    found = Records()
    for start in range(0, len(names), ASKED_AT_ONCE):
        some = _records(backend, names[start : start + ASKED_AT_ONCE])
        found.extend(record for record in some if record is not None)
    found.partial = total > limit
    return found


def record(name: str, *, using: str = DEFAULT_ALIAS) -> Record | None:
    """What became of the task runs under the lock *name*; None if it has seen none.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    return _records(backends[using], [check_name(name)])[0]


def _records(backend: Backend, names: list[str]) -> list[Record | None]:
    answers = _ask_runs(backend, names)
    # A run that has begun goes on if it holds the lock. One that does not has ended meanwhile, or
    # never will: then it is still there at a second look.
    begun = [(name, entry) for name, answer in answers.items() for entry in answer.started]
    seen = backend.look_many([_lock_of(name, entry) for name, entry in begun])
    over = [
        (name, entry)
        for (name, entry), one in zip(begun, seen, strict=True)
        if one.holding is None or one.holding.id != _lease_of(entry)
    ]
    answers |= _ask_runs(backend, list(dict.fromkeys(name for name, _ in over)))
    return [
        _record(backend, name, answers[name], {entry for one, entry in over if one == name})
        for name in names
    ]


class _Answer(NamedTuple):
    """What the script says, see lua/runs.lua."""

    now: float  # Seconds since the epoch.
    success: str
    failure: str
    skip: str
    unended: str
    started: list[str]
    skips: int


def _ask_runs(backend: Backend, names: list[str]) -> dict[str, _Answer]:
    calls = [Call(scripts.RUNS, name, (), backend.within) for name in names]
    found = {}
    for name, answer in zip(names, backend.ask_many(calls) if calls else (), strict=True):
        now_ms, *notes, started, skips = answer
        success, failure, skip, unended = map(_text, notes)
        found[name] = _Answer(
            int(now_ms) / 1000,
            success,
            failure,
            skip,
            unended,
            [_text(entry) for entry in started],
            int(skips),
        )
    return found


def _text(note: bytes) -> str:
    return note.decode(errors="replace")


def _record(backend: Backend, name: str, answer: _Answer, over: set[str]) -> Record | None:
    def run(note: str) -> Run | None:
        return _run(note, answer.now)

    def begun(note: str) -> Run | None:
        found = run(note)
        return found and replace(found, why="", lasted=None)

    unended = [begun(answer.unended)]
    under_way = []
    for entry in answer.started:
        one = begun(entry.partition("|")[2])
        if entry in over:
            unended.append(one)
        elif one:
            under_way.append(one)
    found = Record(
        name=name,
        alias=backend.alias,
        last_success=run(answer.success),
        last_failure=run(answer.failure),
        last_skip=run(answer.skip),
        skips=answer.skips,
        under_way=tuple(under_way),
        last_unended=max(filter(None, unended), key=lambda one: one.at, default=None),
    )
    return found if found.known else None


def _lock_of(name: str, entry: str) -> str:
    """The lock that a run which has begun holds while it goes on: that of its permit, if any."""
    return name + entry.partition("|")[0]


def _lease_of(entry: str) -> str:
    return "".join(entry.split("|")[3:4])


def _run(note: str, now: float) -> Run | None:
    at, _, rest = note.partition("|")
    lasted, _, rest = rest.partition("|")
    why, _, owner = rest.partition("|")
    if not is_number(at) or not is_number(lasted):
        return None
    return Run(
        at=int(at) / 1000,
        ago=max(0.0, now - int(at) / 1000),
        owner=Owner.unpack(owner),
        lasted=None if why else int(lasted) / 1000,
        why=why,
    )


# What follows is for the package's own integrations.


def note_skip(name: str, why: str, *, using: str) -> None:
    """Note that what this thread is busy with did not happen because of the lock *name*.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    _ask(scripts.SKIP, name, why, current_owner().packed, using=using)


def note_start(name: str, lease: Lease, *, using: str) -> None:
    """Note that a run begins that holds a permit of many; an acquire tells of its own name only.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    permit = lease.name.removeprefix(name)
    _ask(scripts.START, name, permit, lease.id, current_owner().packed, using=using)


def note_end(
    name: str, run: flows.Run, lease: Lease, *, success: bool, lasted: float, using: str
) -> None:
    """Note how a run ended that held a permit of many; a release tells of its own name only.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    what = "success" if success else "failure"
    times = flows.milliseconds(lasted), flows.milliseconds(run.recognised_for)
    owner, permit = current_owner().packed, lease.name.removeprefix(name)
    ended = (what, times[0], owner, run.id, times[1], permit, lease.id)
    _ask(scripts.FINISH, name, *ended, using=using)


def note_retried(name: str, run: flows.Run, *, using: str) -> None:
    """Note that a run has finished, but its task goes on: it has published its own retry.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    recognised_for = flows.milliseconds(run.recognised_for)
    # Its start, and that of its lease, end with the release or with note_end().
    _ask(scripts.FINISH, name, "retried", 0, b"", run.id, recognised_for, "", "", using=using)


def announce(name: str, task_id: str, ttl: float, *, using: str) -> str:
    """Say that a call is about to be queued; one at a time is, for *ttl* seconds.

    Returns:
        "" if it is the one, else the id of the one that is, which stands for this one too.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    waiting: bytes = _ask(scripts.ANNOUNCE, name, task_id, flows.milliseconds(ttl), using=using)
    return waiting.decode()


def requeue(name: str, task_id: str, ttl: float, *, using: str) -> float | None:
    """The announced call goes back into the queue, for *ttl* seconds. Harmless if it is another.

    Returns:
        How many seconds ago it last stood for another call; None if it has not.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    ago = int(_ask(scripts.REQUEUE, name, task_id, flows.milliseconds(ttl), using=using))
    return None if ago < 0 else ago / 1000


def retract(name: str, task_id: str, *, using: str) -> None:
    """The announced call has started, or never will. Harmless if it is not the one.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    _ask(scripts.RETRACT, name, task_id, using=using)


def _ask(script: Script, name: str, *args: str | bytes | int, using: str) -> Any:
    backend = backends[using]
    return backend.run(flows.ask(Call(script, name, args, backend.within)))
