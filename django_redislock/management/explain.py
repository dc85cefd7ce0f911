"""``manage.py locks explain``: what became of a call, in sentences with absolute times."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError

from django_redislock import held, task_runs
from django_redislock.completed_runs import CompletedRun
from django_redislock.conf import conf
from django_redislock.exceptions import InvalidLockName
from django_redislock.humanize import counted, duration, visible
from django_redislock.jobs.options import is_skip
from django_redislock.management.console import FOUND, finish, misuse, noting, of_each
from django_redislock.management.terminal import local_time, pasteable
from django_redislock.rules.arguments import DEFAULT_DATABASE
from django_redislock.rules.names import Permit, meant_by
from django_redislock.rules.stored import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django_redislock.completed_runs import CompletedRuns
    from django_redislock.management.console import Console

MOST_EXAMINED = 1000  # Names of each index under which a task id is looked for.
LOOKED_AT_ONCE = 100

_ENDED = {
    "done": "It ended well",
    "failed": "It ended without success",
    "replaced": "A newer call replaced it",
    "forced": "The lock was released by force",
}


class Fact(NamedTuple):
    """One thing that is known of a call."""

    at: float  # Seconds since the epoch; it sorts by this.
    lock: str
    says: str  # Sentences.
    owner: Owner


class Known(NamedTuple):
    """All that was found."""

    facts: list[Fact]
    notes: list[str]  # More sentences: about what was not, or could not be, looked at.
    problems: dict[str, str]  # By alias: why it did not answer, or not in full.


def explain(console: Console, *, what: str, job: bool, **options: Any) -> None:
    """Say what is known of a lock, of a job, or of a task's call."""
    if not what:
        raise misuse("Name a lock, a job, or the id of a task.")
    known = Known([], [], {})
    asked = console.aliases
    if job:
        _add_job(known, what, asked)
    else:
        _add_name(known, what, console.using, asked)
        if known.facts:
            asked = [console.using]
        else:
            _add_task(known, what, asked)
    unrecorded: list[str] = []
    for one in asked:
        with noting({}, one, asked):  # The problem is known by now.
            if says := task_runs.unrecorded(one):
                unrecorded.append(one)
                known.notes.append(says)
    facts = sorted(known.facts, key=lambda fact: fact.at)
    found = [
        {
            "at": round(fact.at, 3),
            "lock": fact.lock or None,
            "task_id": fact.owner.task_id or None,
            "says": fact.says,
        }
        for fact in facts
    ]
    document = {"about": what, "facts": found, "notes": known.notes}
    recorded = [one for one in asked if one not in {*known.problems, *unrecorded}]
    lines = _lines(what, facts, known, recorded) if facts else ()
    console.answer(document, lines, known=bool(found) or not known.problems)
    if not facts and not known.problems:
        notes = [] if console.json else map(visible, known.notes)
        raise CommandError(
            " ".join([f"Nothing is known of {pasteable(what)}.", *notes]), returncode=FOUND
        )
    finish(known.problems.values())


def _lines(
    what: str, facts: Sequence[Fact], known: Known, recorded: Sequence[str]
) -> Iterator[str]:
    several = any(fact.lock != what for fact in facts)
    for fact in facts:
        lock = f"{pasteable(fact.lock)}: " if several and fact.lock else ""
        yield f"{_time(fact.at)}  {lock}{visible(fact.says)}"
    yield from map(visible, known.notes)
    if kept := min((conf(one).records_for for one in recorded), default=0):
        yield f"No more is known. Records are kept for {duration(kept)}."


def _add_job(known: Known, job: str, asked: list[str]) -> None:
    """Add what became of the runs of a job, under all its locks."""
    answers, problems = of_each(
        asked, lambda one: held.records(using=one, limit=task_runs.MOST_NAMES, task=job)
    )
    known.problems.update(problems)
    for records in answers.values():
        facts = _of_record(records.of_job(job), set())
        known.facts.extend(fact._replace(lock="") for fact in facts)  # Of no lock in particular.
    completed = CompletedRun.objects.using(DEFAULT_DATABASE)
    _add_completed(known, completed.filter(task=job, alias__in=asked))


def _add_name(known: Known, name: str, using: str, asked: Sequence[str]) -> None:
    """Add what is known of the lock *name*. If it cannot be one, it may be a task's id."""
    try:
        meant = meant_by(name)
    except InvalidLockName:
        return
    with noting(known.problems, using, asked):
        known.facts.extend(_of_locks(meant, using))
    completed = CompletedRun.objects.using(DEFAULT_DATABASE)
    _add_completed(known, completed.of(meant[-1].label).filter(alias=using))


def _add_task(known: Known, task_id: str, asked: Sequence[str]) -> None:
    """Add what is known of the call with this id: to the lock servers, a database and Celery."""
    for using in asked:
        with noting(known.problems, using, asked):
            _add_calls(known, task_id, using)
    completed = CompletedRun.objects.using(DEFAULT_DATABASE)
    _add_completed(known, completed.filter(task_id=task_id, alias__in=asked))
    _add_result(known, task_id)


def _add_calls(known: Known, task_id: str, using: str) -> None:
    """Add what the lock servers of an alias know of the call with this id."""
    permits, partial, silent = held.known_permits(MOST_EXAMINED, using=using)
    by_name: dict[str, list[Permit]] = {}  # The permits of a name are told of together.
    for permit in permits:
        by_name.setdefault(permit.name, []).append(permit)
    names = iter(by_name.values())
    while some := [*islice(names, LOOKED_AT_ONCE)]:
        facts = _of_locks([*chain.from_iterable(some)], using, task_id)
        known.facts.extend(fact for fact in facts if fact.owner.is_task(task_id))
    if partial:
        known.notes.append(
            f"Only {counted(len(permits), 'lock')} of {using!r} were looked at: those that end"
            " first, and those that tasks ran under last."
        )
    if silent:
        known.problems[using] = " ".join(held.silence(silent, using).values())


def _of_locks(permits: Sequence[Permit], using: str, task_id: str = "") -> Iterator[Fact]:
    """The server's facts about these locks. With *task_id*, only its calls without a lease."""
    details = [*held.details(permits, using=using)]
    names = list(dict.fromkeys(one.name for one in permits))
    records = task_runs.records_of(names, using=using)
    # Of a name with a limit all other permits too: a free one has a past.
    limits = {one.name: one.limit for one in records if one}
    more = [
        Permit(one.key.name, number)
        for one in details
        if one.number == 1
        for number in range(2, max(one.limit, limits.get(one.key.name, 1)) + 1)
    ]
    details += held.details([one for one in more if one not in permits], using=using)
    noted: set[tuple[str, int]] = set()  # Runs that a lease has told of: see _key().
    waiting = set(names)  # Names whose waiters are still to be told, once for all permits.
    for detail in details:
        yield from _of_leases(detail, noted, with_waiters=detail.key.name in waiting)
        waiting.discard(detail.key.name)
    for record in records:
        yield from _of_record(record, noted)
    if task_runs.unrecorded(using):
        return
    calls = task_runs.calls(names, task_id=task_id, using=using)
    for name, its_calls in zip(names, calls, strict=True):
        yield from _of_calls(name, its_calls, task_id)


def _key(owner: Owner, ended: float = 0.0) -> tuple[str, int]:
    """Tells a run from others: by its owner, and when it ended, if it has."""
    return _who(owner), round(ended * 1000)


def _of_leases(
    detail: held.Detail, noted: set[tuple[str, int]], *, with_waiters: bool
) -> Iterator[Fact]:
    """The leases of one lock, or of one permit, and its waiters."""
    for past in detail.past:
        # An unreleased lease is known by its beginning, like a run that never ended.
        noted.add(_key(past.owner, past.since if past.until is None else past.until))
        ended = "Nobody released the lease; it expired"
        if past.owner.task:
            ended += ": its process was killed, or it lost the lease"
        if past.until is not None and past.lasted is not None:
            how = "The pause ended" if past.owner.operator else _ENDED[past.ended]
            ended = f"{how} at {_time(past.until)}, after {duration(past.lasted)}"
        got = _got(past.owner, detail.number)
        if past.owner.operator:
            got = _paused(past.owner, "paused")
        says = f"{got} (lease {past.id}, fence {past.fence}). {ended}."
        yield Fact(past.since, detail.name, says, past.owner)
    now = detail.server_time
    if lock := detail.lock:
        since = now - (lock.held_for or 0.0)
        noted.add(_key(lock.owner))
        yield Fact(since, detail.name, _holder(lock, now), lock.owner)
    for before, waiter in enumerate(detail.waiters if with_waiters else ()):
        place = f"{counted(before, 'waiter')} before it" if before else "the next to get it"
        says = f"{_who(waiter.owner)} began to wait for the lock. It is waiting now, {place}."
        if waiter.owner.operator:
            says = f"{_paused(waiter.owner, 'will pause')}, as soon as it is free."
        yield Fact(now - waiter.waiting_for, detail.name, says, waiter.owner)


def _holder(lock: held.HeldLock, now: float) -> str:
    """The sentences about a lock that is held."""
    if lock.state in {"foreign", "rate"}:
        return lock.note
    ends = "The lease never ends."
    if lock.expires_in is not None:
        ends = f"The lock expires at {_time(now + lock.expires_in)} {lock.ends}".rstrip() + "."
    lease = f"lease {lock.id}, fence {lock.fence}"
    if lock.owner.operator:
        return f"{_paused(lock.owner, 'has paused')} ({lease}). {ends}"
    if lock.newer_format is not None:
        return f"{_got(lock.owner, lock.number)} (lease {lock.id}). {lock.note} {ends}"
    got = f"{_got(lock.owner, lock.number)} ({lease})."
    if lock.state == "cooling":
        return f"{got} It has succeeded, and min_hold keeps the lock. {ends}"
    if lock.handed_over:
        return f"{got} It has handed the lock over by a baton. {ends}"
    gone = " Its process does not exist any more." if lock.gone else ""
    return f"{got} It has it now, after {counted(lock.renewals, 'renewal')}.{gone} {ends}"


def _of_record(record: held.Record | None, noted: set[tuple[str, int]]) -> Iterator[Fact]:
    """The last run of each kind under a lock, and those under way, unless they were told."""
    if record is None:
        return
    ended = {
        "It ended well": record.last_success,
        "It ended without success": record.last_failure,
        "was skipped": record.last_skip,
        "was abandoned": record.last_abandoned,
    }
    for how, run in ended.items():
        if run is None or _key(run.owner, run.at) in noted:
            continue
        if run.lasted is None:
            says = f"{_who(run.owner)} {how}{_deferred(run.owner)}: {run.reason}."
            if run is record.last_skip and record.skips > 1:
                says += f" Since the last success {record.skips} runs were skipped."
            yield Fact(run.at, record.name, says, run.owner)
            continue
        says = f"{_got(run.owner)}. {how} at {_time(run.at)}, after {duration(run.lasted)}."
        yield Fact(run.at - run.lasted, record.name, says, run.owner)
    for run in record.under_way:
        if _key(run.owner) not in noted:
            yield Fact(run.at, record.name, f"{_got(run.owner)}. It is under way.", run.owner)
    if (run := record.last_unended) and _key(run.owner, run.at) not in noted:
        says = (
            f"{_who(run.owner)} began to run. Its end was never noted: its process was killed, or"
            " it lost the lease."
        )
        yield Fact(run.at, record.name, says, run.owner)


def _of_calls(name: str, calls: task_runs.Calls, task_id: str) -> Iterator[Fact]:
    """The calls that have no lease now."""
    if calls.queued:
        starts = f" It does not run before {_time(calls.runs_from)}." if calls.runs_from else ""
        until = f" until {_time(calls.queued_until)}" if calls.queued_until else ""
        says = (
            f"Now the call {calls.queued} is announced by unique_queued, as waiting in the broker's"
            f" queue. It stands for further calls{until} at most.{starts}"
        )
        yield Fact(calls.server_time, name, says, Owner(task_id=calls.queued))
    for run in calls.deferred:
        place = "it is the first"
        if run.before:
            place = (
                f"{counted(run.before, 'run')} {'stands' if run.before == 1 else 'stand'} before it"
            )
        back = f"it comes back by {_time(run.back_by)}, or else is given up"
        if run.back_by <= calls.server_time:
            back = f"it was to be back by {_time(run.back_by)}, and has not come"
        says = (
            f"The call {run.task_id} was deferred, and took its place in line. Now {place},"
            f" and {back}."
        )
        yield Fact(run.since, name, says, Owner(task_id=run.task_id))
    if calls.done_at is not None and calls.done_until is not None:
        says = (
            f"{_who(calls.done_by)} succeeded, and runs with `once` will be skipped as done until"
            f" {_time(calls.done_until)}."
        )
        yield Fact(calls.done_at, name, says, calls.done_by)
    if calls.succeeded_at is not None:
        says = "The call succeeded, or a newer one replaced it: no duplicate of it runs."
        yield Fact(calls.succeeded_at, name, says, Owner(task_id=task_id))


def _add_completed(known: Known, rows: CompletedRuns) -> None:
    """Add the completed runs among *rows*, or a note if the database cannot answer."""
    try:
        found = list(rows.order_by("-completed_at", "-pk")[: MOST_EXAMINED + 1])
    except (DatabaseError, InterfaceError, ImproperlyConfigured):
        note = f"Database {DEFAULT_DATABASE!r} cannot tell of completed runs."
        if note not in known.notes:  # It is asked for a name, and then for a task.
            known.notes.append(note)
        return
    if len(found) > MOST_EXAMINED:
        known.notes.append(f"Only the last {MOST_EXAMINED} completed runs were looked at.")
    for run in found[:MOST_EXAMINED]:
        says = (
            f"A run by {run.by}, fence {run.fence}, was completed in database {DEFAULT_DATABASE!r}."
        )
        owner = Owner(task=run.task, task_id=run.task_id)
        known.facts.append(Fact(run.completed_at.timestamp(), run.name, says, owner))


def _add_result(known: Known, task_id: str) -> None:
    """Add the state in Celery's result backend, or a note that it has none."""
    try:
        from celery import current_app  # Celery is optional.
        from celery.backends.base import DisabledBackend
        from celery.backends.rpc import RPCBackend
    except ImportError:
        return
    try:
        backend = current_app.backend
        if isinstance(backend, DisabledBackend | RPCBackend):
            known.notes.append("Celery has no result backend that could tell of it.")
            return
        meta: dict[str, Any] = backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001 # Each backend has its own.
        known.notes.append(f"Celery's result backend cannot answer: {type(error).__name__}.")
        return
    state, result, done = meta["status"], meta.get("result"), meta.get("date_done")
    if state == "PENDING":  # Also the state of an unknown task.
        known.notes.append("Celery's result backend has nothing of it.")
        return
    says = f"Celery's result backend has the state {state}"
    if is_skip(result):
        details = ", ".join(f"{key}: {value}" for key, value in result.items())
        says = f"{says}, although the run was skipped ({details})"
    elif isinstance(result, Exception):
        says = f"{says}, with {type(result).__name__}: {str(result).rstrip('.')}"
    at = datetime.fromisoformat(done) if isinstance(done, str) else done
    if at is None:
        at, says = datetime.now(UTC), f"{says}, and does not say since when"
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    end = "" if says.endswith(("?", "!")) else "."
    known.facts.append(Fact(at.timestamp(), "", f"{says}{end}", Owner(task_id=task_id)))


def _who(owner: Owner) -> str:
    """A run as in Celery's logs; any other owner by its place."""
    if not owner.task:
        return str(owner)
    run = f"{owner.task}[{owner.task_id}]" if owner.task_id else owner.task
    return f"{run} on {owner.place}" if owner.place else run


def _got(owner: Owner, permit: int | None = None) -> str:
    """The clause that the owner got the lock, and how often it was deferred before."""
    what = f"permit {permit} of {owner.limit}" if permit and owner.limit else "the lock"
    return f"{_who(owner)} got {what}{_deferred(owner)}"


def _paused(owner: Owner, paused: str) -> str:
    """The clause about an operator's pause, with its reason."""
    why = f", because of {owner.reason!r}" if owner.reason else ""
    return f"{owner.operator} {paused} the lock{why}"


def _deferred(owner: Owner) -> str:
    """A clause on how often the owner's run was deferred before; "" if it was not."""
    if (deferral := owner.deferral) is None:
        return ""
    count = "once" if deferral.times == 1 else f"{deferral.times} times"
    by = f", the last time because it was held by {deferral.by}" if deferral.by else ""
    return f", after it was deferred {count} since {_time(deferral.since)}{by}"


def _time(at: float) -> str:
    """A time in the current time zone. Anybody may have written it, so it may be any number."""
    try:
        return f"{local_time(at):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "a time that no calendar has"
