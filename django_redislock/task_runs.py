"""Records of the runs of jobs and tasks: how the last runs ended, which are under way.

Also the announced call that waits in the broker's queue, of a task with unique_queued.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock.backends.registry import backends
from django_redislock.held_lock import Fact, Jsonable, known_facts, limit_of
from django_redislock.holder import current_owner
from django_redislock.humanize import counted, duration, visible
from django_redislock.process import is_gone
from django_redislock.rules import flows, scripts
from django_redislock.rules.names import Permit, check_name, normalized
from django_redislock.rules.options import DEFAULT_ALIAS
from django_redislock.rules.replies import (
    CallsReply,
    RunsReply,
    TurnReply,
    in_seconds,
)
from django_redislock.rules.steps import Call
from django_redislock.rules.stored import (
    LONGEST_FIELD,
    Owner,
    as_kept,
    noted_at,
    read_done,
    read_noted_run,
    read_skips,
    read_skips_of_job,
    read_started_run,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.base import Backend
    from django_redislock.lease import Lease
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Flow


LONGEST_LEFT = 86_400.0  # Seconds that a lease is said to last, if it is longer or never ends.
ASKED_AT_ONCE = 1000
# Lists are bounded, whatever the server holds: names are cheap, records are not.
MOST_NAMES = 100_000
MOST_DEFERRED_NAMED = 100
KEPT_FOR_LATE = 86_400.0  # Seconds, as in lua/announce.lua.
BECAUSE_OF = "\n"  # In a note of a skip, between the reason and the other owner.
# What may become of a run, and how the last such run is called.
OUTCOMES = {
    "success": "last success",
    "failure": "last failure",
    "skip": "last skip",
    "abandoned": "abandoned",
    "unended": "never ended",
}


@dataclass(frozen=True, kw_only=True)
class Run(Jsonable):
    """A run of a job, or one that was skipped or abandoned."""

    at: float  #: When it ended, or else began, in seconds since the epoch by the server's clock.
    ago: float
    lasted: float | None  #: None: skipped or abandoned, or its end is not known.
    #: Why it was skipped: "busy", "paused", "cooling", "done", "duplicate" or
    #: "replaced". Why it was abandoned.
    #: Else "".
    why: str
    #: The owner that had the lock, or had done the work, so that it was skipped. Else "".
    by: str = ""
    owner: Owner  #: The process that ran or skipped it.

    @property
    def reason(self) -> str:
        """Why it was skipped, with the other owner; or why it was abandoned."""
        return f"{self.why} ({self.by})" if self.by else self.why

    @property
    def gone(self) -> bool:
        """Whether its owner was a process of this host, and does not exist any more."""
        return is_gone(self.owner.host, self.owner.pid, self.owner.birth)

    def __str__(self) -> str:
        """What became of it, for humans. Anybody may have written its owner."""
        when = f"{duration(self.ago)} ago"
        if self.lasted is not None:
            when = f"{when}, took {duration(self.lasted)}"
        elif self.why:
            when = f"{when}, because it was {self.reason}"
        else:
            when = f"began {when}"
        return f"{when}, {self.owner}"


@dataclass(frozen=True, kw_only=True)
class JobSkips(Jsonable):
    """The skips of one job under a lock, without duplicates."""

    job: str
    skips: int  #: Since its last success.
    skipped_at: tuple[float, ...]  #: The last ones, as in Record.


@dataclass(frozen=True, kw_only=True)
class Record(Jsonable):
    """What became of the runs under one lock. None: no such run is known.

    Attributes:
        name: The lock.
        alias: Its alias in REDISLOCK.
        last_success: The last run that ended well.
        last_failure: The last that raised.
        last_skip: The last that did not happen because of the lock.
        last_abandoned: The last call that give_up_after did not start again.
        last_unended: The last run that began and never reported its end, though its lease is over:
            its process was killed, or it lost the lease.
        skips: How many runs were skipped since the last success, without duplicates.
        under_way: The runs that hold the lock right now; several if the task has a limit.
        skipped_at: When the last runs were skipped, in seconds since the epoch by the server's
            clock, the oldest first: 30 at most, and no duplicates.
        by_job: The skips of each job, if several share the lock.
    """

    name: str
    alias: str
    last_success: Run | None = None
    last_failure: Run | None = None
    last_skip: Run | None = None
    last_abandoned: Run | None = None
    last_unended: Run | None = None
    skips: int = 0
    under_way: tuple[Run, ...] = ()
    skipped_at: tuple[float, ...] = ()
    by_job: tuple[JobSkips, ...] = ()

    @property
    def last(self) -> dict[str, Run]:
        """The last run of each outcome, if it is known; see OUTCOMES."""
        return {one: run for one in OUTCOMES if (run := getattr(self, f"last_{one}"))}

    @property
    def facts(self) -> list[Fact]:
        """All that is shown of it."""
        return known_facts(
            Fact("Under way", self.under_way, "runs"),
            *(Fact(OUTCOMES[one].capitalize(), run, "run") for one, run in self.last.items()),
            Fact("Skips", f"{self.skips} since the last success" if self.skips else ""),
        )

    @property
    def known(self) -> bool:
        """Whether any run is known."""
        return bool(self.last or self.under_way)

    @property
    def tasks(self) -> set[str]:
        """The full names of the tasks whose runs are known."""
        return {
            *(run.owner.task for run in self.runs),
            *(one.job for one in self.by_job),
        } - {""}

    @property
    def limit(self) -> int:
        """How many permits the lock has, by the known runs; or 1."""
        return limit_of(run.owner for run in self.runs)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All known runs."""
        return (*self.last.values(), *self.under_way)


class Records(list[Record]):
    """A list of records.

    Attributes:
        partial: Whether more records exist than the list has.
        silent: Of several servers, those that did not answer. Their records are missing.
    """

    partial: bool = False
    silent: Sequence[str] = ()

    def of_job(self, name: str) -> Record | None:
        """One record of the job *name*, combined from these; None if it has not run.

        Its name is that of the job. It counts the job's own skips since its last
        success under each lock.
        """

        task = as_kept(name)

        def last(outcome: str) -> Run | None:
            runs = [
                run for one in self if (run := one.last.get(outcome)) and run.owner.task == task
            ]
            return max(runs, key=lambda run: run.at, default=None)

        mine = [one for one in self if task in one.tasks]
        skips = [its for one in mine for its in one.by_job if its.job == task]
        if not mine:
            return None
        lasts: dict[str, Any] = {f"last_{one}": last(one) for one in OUTCOMES}
        return Record(
            **lasts,
            name=name,
            alias=mine[0].alias,
            skips=sum(one.skips for one in skips),
            skipped_at=tuple(sorted(at for one in skips for at in one.skipped_at)),
            under_way=tuple(run for one in mine for run in one.under_way if run.owner.task == task),
        )


def records(
    *, using: str = DEFAULT_ALIAS, limit: int = 1000, task: str = "", prefix: str = ""
) -> Records:
    """The records of up to *limit* locks, the last to run first.

    Args:
        using: Alias in REDISLOCK.
        limit: How many locks at most, up to 100,000.
        task: If given, only locks whose last runs include one of this task, by its full name.
        prefix: If given, only locks whose name begins like this.

    Raises:
        LockUnavailable: The server did not or could not answer.
        ValueError: The limit is negative.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative: {limit}.")
    limit, task = min(limit, MOST_NAMES), as_kept(task)
    backend = backends[using]
    listed = MOST_NAMES if task or prefix else limit
    permits, total, silent = backend.ran_permits(listed)
    prefix = normalized(prefix)  # As names are.
    names = [one.name for one in permits if one.name.startswith(prefix)]
    found = Records()
    found.partial = total > listed
    found.silent = silent
    for start in range(0, len(names), ASKED_AT_ONCE):
        some = _records(backend, names[start : start + ASKED_AT_ONCE])
        found.extend(one for one in some if one is not None and (not task or task in one.tasks))
        if len(found) >= limit:
            looked = start + ASKED_AT_ONCE
            found.partial = found.partial or len(found) > limit or len(names) > looked
            del found[limit:]
            break
    return found


def record(name: str, *, using: str = DEFAULT_ALIAS) -> Record | None:
    """The record of the lock *name*; None if no run under it is known.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    return _records(backends[using], [check_name(name)])[0]


def oldest_run(*, using: str = DEFAULT_ALIAS) -> Run | None:
    """The oldest known run under the lock that jobs ran under longest ago; None if there is none.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    permits = backend.ran_permits(1, latest_first=False).permits
    records = _records(backend, [one.name for one in permits])
    runs = (run for one in records if one for run in one.runs)
    return max(runs, key=lambda run: run.ago, default=None)


def job(name: str, *, using: str = DEFAULT_ALIAS) -> Record | None:
    """What became of a job, over all names of its locks; None if no run of it is known.

    Args:
        name: The full name of the job: of the function or task, or "manage.py" and the command.
        using: Alias in REDISLOCK.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    return records(using=using, limit=MOST_NAMES, task=name).of_job(name)


class Deferred(NamedTuple):
    """A run that waits in the line of deferred runs; see celery/defer.py."""

    task_id: str
    since: float  # Seconds since the epoch, like all times here.
    back_by: float  # By when it must be back, or else is given up.
    before: int  # How many deferred runs stand before it.


class Calls(NamedTuple):
    """Calls under one lock that have no lease, as the server knows them. "", None: unknown."""

    server_time: float
    queued: str  # The task id of the call that waits in the broker's queue and stands for others.
    queued_task: str  # The name of its task.
    queued_until: float | None  # It stands for others until then.
    runs_from: float | None  # It does not run earlier.
    done_at: float | None  # When the run succeeded after which `once` skips others,
    done_until: float | None  # until this time.
    done_by: Owner
    succeeded_at: float | None  # When the task of *task_id* did.
    deferred: list[Deferred]


def calls(names: Sequence[str], *, task_id: str = "", using: str = DEFAULT_ALIAS) -> list[Calls]:
    """For each of these locks: its calls that have no lease, or only the call of one task.

    Args:
        names: The locks, without permits.
        task_id: The id of the task; "" for all.
        using: Alias in REDISLOCK.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    args = task_id.encode(errors="replace"), MOST_DEFERRED_NAMED
    steps = [Call(scripts.CALLS, name, args, backend.within) for name in names]
    parts = (steps[start : start + ASKED_AT_ONCE] for start in range(0, len(steps), ASKED_AT_ONCE))
    answers = (answer for part in parts for answer in backend.results_of(part))
    return [_read_calls(CallsReply(*answer), task_id) for answer in answers]


class Announced(NamedTuple):
    """The locks with a call that unique_queued has announced, each with its calls."""

    locks: list[tuple[str, Calls]]
    partial: bool  # Whether there are more of them.
    silent: Sequence[str]  # Of several servers, those that did not answer. Their locks are missing.


def announced(*, using: str) -> Announced:
    """The locks with an announced call, up to 100,000.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    permits, total, silent = backends[using].announced_permits(MOST_NAMES)
    names = [one.name for one in permits]
    found: list[tuple[str, Calls]] = []
    for start in range(0, len(names), ASKED_AT_ONCE):
        some = names[start : start + ASKED_AT_ONCE]
        found += zip(some, calls(some, using=using), strict=True)
    locks = [(name, one) for name, one in found if one.queued]
    return Announced(locks, total > MOST_NAMES, silent)


def forget_announced(name: str, found: Calls, *, using: str) -> None:
    """Let the announced call of announced() stand for no others. It may be in the queue still.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    # Then it runs with the last call's arguments.
    left = (found.queued_until or 0.0) - found.server_time
    retract(name, found.queued, keep=left + KEPT_FOR_LATE, using=using)


def _read_calls(reply: CallsReply, task_id: str) -> Calls:
    now = in_seconds(reply.server_ms)
    queued_until, queued = _read_until(reply.queued)
    if not queued_until or queued_until <= now or (task_id and queued != task_id):
        queued_until, queued = None, ""
    done_until, done = _read_until(reply.done)
    done_at, done_by = read_done(done.encode())
    runs_from = noted_at(reply.runs_from) / 1000 if queued else 0.0
    return Calls(
        server_time=now,
        queued=queued,
        queued_task=_task_in(reply.task, queued),
        queued_until=queued_until,
        runs_from=runs_from or None,
        done_at=done_at,
        done_until=done_until,
        done_by=done_by,
        succeeded_at=noted_at(reply.finished) / 1000 or None,
        deferred=[
            Deferred(
                one.id.decode(errors="replace"), one.since, in_seconds(one.back_by_ms), one.before
            )
            for one in reply.line
        ],
    )


def _task_in(note: bytes, task_id: str) -> str:
    """Take the name out of id "|" name of the task "|" more, if it is of this id."""
    found, _, known = note.decode(errors="replace").partition("|")
    return known.partition("|")[0] if task_id and found == task_id else ""


def _read_until(note: bytes) -> tuple[float | None, str]:
    """Take apart until(ms) "|" rest."""
    return noted_at(note) / 1000 or None, note.partition(b"|")[2].decode(errors="replace")


def unrecorded(using: str) -> str:
    """A sentence if runs are not recorded under an alias; else ""."""
    if backends[using].supports_records:
        return ""
    return f"REDISLOCK[{using!r}] is a quorum, which keeps no records of runs."


def records_of(names: Sequence[str], *, using: str = DEFAULT_ALIAS) -> list[Record | None]:
    """The record of each of these locks; None if no run under it is known.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    return _records(backends[using], [*names])


class _Started(NamedTuple):
    """A run that has started, and whose end is not noted."""

    permit: int
    lease_id: str
    run: Run


def _records(backend: Backend, names: list[str]) -> list[Record | None]:
    if not backend.supports_records:
        return [None] * len(names)
    noted = _noted(backend, names)
    # A run that has started is under way while its lease holds the lock. If the lease is over, the
    # run may have noted its end since we asked, so ask again. If no end is noted then, it never
    # ended.
    runs = [(name, one) for name, (_, started) in noted.items() for one in started]
    looks = backend.look_many([Permit(name, one.permit) for name, one in runs])
    over = {
        (name, one.lease_id)
        for (name, one), look in zip(runs, looks, strict=True)
        if (holding := look.holding) is None or holding.id != one.lease_id
    }
    noted |= _noted(backend, list(dict.fromkeys(name for name, _ in over)))
    found = []
    for name in names:
        record, started = noted[name]
        under_way = tuple(one.run for one in started if (name, one.lease_id) not in over)
        unended = [one.run for one in started if (name, one.lease_id) in over]
        last_unended = max(
            filter(None, [record.last_unended, *unended]), key=lambda run: run.at, default=None
        )
        record = replace(record, under_way=under_way, last_unended=last_unended)
        found.append(record if record.known else None)
    return found


def _noted(backend: Backend, names: list[str]) -> dict[str, tuple[Record, list[_Started]]]:
    """Ask for the notes of the runs under each lock, see lua/runs.lua."""
    calls = [Call(scripts.RUNS, name, (), backend.within) for name in names]
    noted = {}
    for name, answer in zip(names, backend.results_of(calls) if calls else (), strict=True):
        runs = RunsReply(*answer)
        now = in_seconds(runs.server_ms)
        last_started = _read_started(b"|" + runs.unended, now)
        record = Record(
            name=name,
            alias=backend.alias,
            last_success=_read_run(runs.success, now),
            last_failure=_read_run(runs.failure, now),
            last_skip=_read_run(runs.skip, now),
            last_abandoned=_read_run(runs.abandoned, now),
            last_unended=last_started and last_started.run,
            skips=int(runs.skips),
            skipped_at=read_skips(runs.skipped),
            by_job=tuple(map(_read_job_skips, runs.by_job)),
        )
        started = (_read_started(note, now) for note in runs.started)
        noted[name] = record, list(filter(None, started))
    return noted


def _read_job_skips(note: bytes) -> JobSkips:
    job, skips, times = read_skips_of_job(note)
    return JobSkips(job=job, skips=skips, skipped_at=times)


def _read_started(note: bytes, now: float) -> _Started | None:
    if (found := read_started_run(note)) is None:
        return None
    permit, noted = found
    run = Run(at=noted.at, ago=max(0.0, now - noted.at), lasted=None, why="", owner=noted.owner)
    return _Started(permit, noted.why, run)


def _read_run(note: bytes, now: float) -> Run | None:
    if (noted := read_noted_run(note)) is None:
        return None
    at, lasted, why, owner = noted
    ended = None if why else lasted  # A skipped run has no length.
    why, _, by = why.partition(BECAUSE_OF)
    return Run(at=at, ago=max(0.0, now - at), lasted=ended, why=why, by=by, owner=owner)


# What follows is for the package's own integrations.


def note_skip(name: str, why: str, by: str = "", *, using: str) -> None:
    """Note that the run of this thread was skipped because of the lock *name*.

    Args:
        name: The lock.
        why: As Skipped says it.
        by: The owner that had the lock, or had done the work.
        using: The alias.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backends[using].run(_noting_skip(name, why, by, using))


async def anote_skip(name: str, why: str, by: str = "", *, using: str) -> None:
    """See note_skip(). It uses no thread: those of the event loop may wait for this very run."""
    await backends[using].arun(_noting_skip(name, why, by, using))


def _noting_skip(name: str, why: str, by: str, using: str) -> Flow[Any]:
    by = visible(by).replace("|", "/")[:LONGEST_FIELD]  # A bar ends a part of the note.
    noted = (f"{why}{BECAUSE_OF}{by}" if by else why).encode(errors="replace")
    owner = current_owner().packed
    return _asking(scripts.SKIP, name, "skip", noted, owner, notes=True, using=using)


def note_abandoned(name: str, starts: int, *, using: str) -> None:
    """Note that the run of this thread was abandoned, after *starts* starts that never ended.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    why = f"started {counted(starts, 'time')} and never ended"
    _call(scripts.SKIP, name, "abandoned", why, current_owner().packed, notes=True, using=using)


def note_end(name: str, *, success: bool, using: str) -> None:
    """Note that a run without a lease, under the lock *name*, has ended in this thread.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    what, owner = "success" if success else "failure", current_owner().packed
    _call(scripts.SKIP, name, what, "", owner, notes=True, using=using)


def count_start(name: str, marker: flows.RunMarker, lease: Lease, *, using: str) -> int:
    """Count that the body of a run starts under this lease.

    Returns:
        How many earlier starts of the same call have not ended.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backends[using].check_records("give_up_after")
    start = lease.id, marker.id, flows.milliseconds(marker.recognised_for)
    return int(_call(scripts.COUNT_START, name, *start, using=using))


def uncount_start(name: str, marker: flows.RunMarker, lease: Lease, *, using: str) -> None:
    """Take back count_start(): the body under this lease has ended.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    _call(scripts.UNCOUNT_START, name, lease.id, marker.id, using=using)


def note_retried(name: str, marker: flows.RunMarker, *, using: str) -> None:
    """Note that a run has finished but its task goes on, since it has published its own retry.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    _call(scripts.FINISH, name, marker.id, flows.milliseconds(marker.recognised_for), using=using)


def forget_start(name: str, lease: Lease, *, using: str) -> None:
    """Forget that a run has begun under this lease: its body was not started.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backends[using].run(_forgetting_start(name, lease, using))


async def aforget_start(name: str, lease: Lease, *, using: str) -> None:
    """See forget_start()."""
    await backends[using].arun(_forgetting_start(name, lease, using))


def _forgetting_start(name: str, lease: Lease, using: str) -> Flow[Any]:
    return _asking(scripts.FORGET_START, name, lease.id, permit=lease.permit_number, using=using)


def announce(
    name: str,
    task_id: str,
    ttl: float,
    *,
    delay: float = 0.0,
    lives: float = math.inf,
    arguments: bytes = b"",
    task: str = "",
    way: str = "",
    using: str,
) -> str:
    """Announce a call that is about to be queued. For *ttl* seconds it is the only one.

    Args:
        name: The lock of its run.
        task_id: Its id.
        ttl: See above.
        delay: Seconds until it may run.
        lives: Seconds until its message expires.
        arguments: With which the call that stands for this one is to run; retract() returns them.
            b"" leaves that call its own. b"-" means too long to keep, so no call stands for this
            one.
        task: The name of its task, with more if not all of its calls are the same. A call with
            another one, under the same lock, neither stands for this one nor makes way for it.
        way: The queue, routing key and priority of its message. A call that goes another way does
            not stand for this one. "" stands for any.
        using: The alias of the lock.

    Returns:
        "" if this call is to be queued. Else the id of the queued call, which stands for this one
        too: it runs no later, and expires no earlier, give or take a second.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backends[using].check_records("unique_queued")
    times = flows.milliseconds(ttl), flows.milliseconds(delay) if delay > 0 else 0
    end = "" if math.isinf(lives) else flows.milliseconds(max(lives, 0.0))
    told = (one.encode(errors="replace") for one in (task, way))
    asked = task_id, *times, end, arguments, *told
    waiting: bytes = _call(scripts.ANNOUNCE, name, *asked, using=using)
    return waiting.decode()


def requeue(name: str, task_id: str, ttl: float, *, using: str) -> float | None:
    """Put the announced call back into the queue, for *ttl* seconds. Harmless for another call.

    Returns:
        Seconds since another call was last merged into this one; None if none was.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    ago = int(_call(scripts.REQUEUE, name, task_id, flows.milliseconds(ttl), using=using))
    return None if ago < 0 else ago / 1000


def retract(name: str, task_id: str, *, keep: float = 0.0, using: str) -> bytes:
    """Say that the announced call has started, or never will. Harmless for another call.

    Args:
        name: The lock of its run.
        task_id: Its id.
        keep: Seconds that the server keeps the arguments, in case of a second delivery.
        using: The alias of the lock.

    Returns:
        The arguments of the last call that it stands for, if announce() got any; else b"".

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    kept_for = flows.milliseconds(keep) if keep else 0
    found: bytes = _call(scripts.RETRACT, name, task_id, kept_for, using=using)
    return found


def stand_in_line(
    name: str,
    task_id: str,
    ticket: int,
    busy: flows.Busy,
    *,
    spacing: float,
    permits: int,
    using: str,
) -> tuple[int, int, float]:
    """Give a run that finds the lock busy its position in the line of deferred runs, or keep it.

    Args:
        name: The lock.
        task_id: The id of the task.
        ticket: Its position from before; 0 for a new one, at the end.
        busy: The outcome of its acquire.
        spacing: Seconds for which each run keeps the lock at least.
        permits: How many runs may be under way at a time.
        using: The alias.

    Returns:
        Its ticket, how many runs are before it, and the seconds until its turn.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    holding, left = busy.holding, min(busy.expires_in, LONGEST_LEFT)
    began = busy.server_time if holding.since is None else holding.since
    times = math.floor(began * 1000), flows.milliseconds(left)
    args = (task_id, ticket, *times, holding.state, math.ceil(spacing * 1000), permits)
    turn = TurnReply(*_call(scripts.STAND_IN_LINE, name, *args, using=using))
    return int(turn.ticket), int(turn.before), in_seconds(turn.left_ms)


def leave_line(name: str, task_id: str, *, using: str) -> None:
    """Take the run out of the line. Harmless if it was not in it.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    _call(scripts.LEAVE_LINE, name, task_id, using=using)


_OF_RECORDS = {scripts.SKIP, scripts.FINISH, scripts.FORGET_START}


def _call(
    script: Script,
    name: str,
    *args: str | bytes | int,
    notes: bool = False,
    permit: int = 1,
    using: str,
) -> Any:
    """Run a script, see _asking()."""
    asking = _asking(script, name, *args, notes=notes, permit=permit, using=using)
    return backends[using].run(asking)


def _asking(
    script: Script,
    name: str,
    *args: str | bytes | int,
    notes: bool = False,
    permit: int = 1,
    using: str,
) -> Flow[Any]:
    """Run a script. If it *notes* a run, pass it how long records are kept; or note nothing."""
    backend = backends[using]
    if script in _OF_RECORDS and not backend.supports_records:
        return None
    args = (*args, backend.retention) if notes else args
    call = Call(script, name, args, backend.within, permit=permit)
    return (yield from flows.result_of(call))
