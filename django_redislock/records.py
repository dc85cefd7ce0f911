"""What became of the runs of tasks: the last success, failure and skip under each lock.

Also who waits in the broker's queue to run, for tasks that are queued one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_redislock import flows, scripts
from django_redislock.conf import DEFAULT_ALIAS, backends
from django_redislock.flows import Call
from django_redislock.lease import Owner, is_number
from django_redislock.names import check_name
from django_redislock.owner import current_owner

if TYPE_CHECKING:
    from django_redislock.backends.base import Backend
    from django_redislock.scripts import Script


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a task, or one that was skipped."""

    at: float  # When it ended, in seconds since the epoch, by the server's clock.
    ago: float
    owner: Owner  # Who ran it; of one that was skipped, who did not.
    lasted: float | None  # None: it was skipped.
    why: str  # Why it was skipped: "busy" or "done"; else "".


@dataclass(frozen=True, kw_only=True)
class Record:
    """What became of the task runs under one lock. None: there was none in the last 30 days."""

    name: str
    alias: str
    last_success: Run | None
    last_failure: Run | None
    last_skip: Run | None
    skips: int  # Since the last success.


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
    found = Records(record for record in _records(backend, names) if record is not None)
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
    calls = [Call(scripts.RUNS, name, (), backend.within) for name in names]
    found: list[Record | None] = []
    for name, answer in zip(names, backend.ask_many(calls) if calls else (), strict=True):
        now_ms, *notes, skips = answer
        runs = [_run(note, int(now_ms) / 1000) for note in notes]
        if not any(runs):
            found.append(None)
            continue
        success, failure, skip = runs
        found.append(
            Record(
                name=name,
                alias=backend.alias,
                last_success=success,
                last_failure=failure,
                last_skip=skip,
                skips=int(skips),
            )
        )
    return found


def _run(note: bytes, now: float) -> Run | None:
    at, _, rest = note.decode(errors="replace").partition("|")
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


def note_end(name: str, run: flows.Run, *, success: bool, lasted: float, using: str) -> None:
    """Note how a run ended that held a permit of many; a release tells of its own name only.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    what = "success" if success else "failure"
    times = flows.milliseconds(lasted), flows.milliseconds(run.remembered)
    owner = current_owner().packed
    _ask(scripts.FINISH, name, what, times[0], owner, run.id, times[1], using=using)


def note_retried(name: str, run: flows.Run, *, using: str) -> None:
    """Note that a run has finished, but its task goes on: it has published its own retry.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    remembered = flows.milliseconds(run.remembered)
    _ask(scripts.FINISH, name, "retried", 0, b"", run.id, remembered, using=using)


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
