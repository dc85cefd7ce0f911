"""``manage.py locks metrics``: the servers' knowledge of locks and jobs, for Prometheus."""

from __future__ import annotations

import io
import os
import re
import secrets
import stat
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock import conf, doctor, held, task_runs
from django_redislock.humanize import visible
from django_redislock.management.console import finish, misuse
from django_redislock.rules.names import Permit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from django_redislock.management.console import Console


# --- prometheus's text format, and a file that is whole whenever it is read -----------------------

# https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sample(NamedTuple):
    """One number of a metric."""

    metric: str
    value: float
    labels: Mapping[str, str]


def text(helps: Mapping[str, str], samples: Iterable[Sample]) -> str:
    """The *samples*, all of them gauges, in the order of their metrics in *helps*."""
    lines: dict[str, list[str]] = {metric: [] for metric in helps}
    for metric, value, labels in samples:
        told = ",".join(f'{key}="{said.translate(_ESCAPED)}"' for key, said in labels.items())
        braced = f"{{{told}}}" if told else ""
        lines[metric].append(f"{metric}{braced} {round(value, 3):.16g}")
    return "".join(
        "\n".join([f"# HELP {metric} {helps[metric]}", f"# TYPE {metric} gauge", *some, ""])
        for metric, some in lines.items()
        if some
    )


def write(content: str, path: Path) -> None:
    """Put *content* into a file in one step, so that no reader sees a part of it.

    Raises:
        OSError: There is no such directory, it cannot be written, or *path* is no regular file.
    """
    if path.exists() and not path.is_file():  # As root, /dev/null would become a file.
        raise OSError(f"{path} is no regular file, so it cannot be replaced in one step.")
    path = Path(os.path.realpath(path))  # A link stays one, and does not become the file.
    # Not *.prom: node_exporter would read that. Not by mkstemp: node_exporter could not read it
    # later. Not by the process id: containers that share a volume may have the same.
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(content, encoding="utf-8")
        with suppress(OSError):  # It keeps a mode that it was given: cron has a umask of its own.
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


# These names differ from those of contrib/otel, whose metrics are of one process each. The label of
# a job is "job_name": Prometheus has a label "job" of its own, and would rename ours.
GAUGES = {
    "redislock_metrics_timestamp_seconds": "When these metrics were asked for.",
    "redislock_up": "1 if locks of the alias could be looked at, else 0.",
    "redislock_server_up": "1 if the server answered, else 0.",
    "redislock_locks": "Held locks and permits by state; unseen: beyond the first 10,000.",
    "redislock_lock_held_seconds": "The longest time that a lock of this name has been held.",
    "redislock_lock_waiters": "Waiters for the locks of this name.",
    "redislock_lock_wait_seconds": "The longest time that a waiter has waited for this name.",
    "redislock_job_last_timestamp_seconds": "When the last run of the job with this outcome ended;"
    " unended: when it began.",
    "redislock_job_skips": "Skips of the job since its last success under the same lock.",
    "redislock_job_blocked_seconds": "The longest time from the last run under a lock of the job"
    " to its last skip as busy, while no run holds it.",
    "redislock_job_runs": "Runs of the job under way.",
    "redislock_job_run_seconds": "How long the longest of them has lasted.",
    "redislock_records": "Locks with records of runs.",
    "redislock_records_limit": "For how many locks records are kept: RECORDS.",
    "redislock_memory_bytes": "Memory that the server uses, by its INFO.",
    "redislock_memory_limit_bytes": "Memory that the server may use, if that is limited.",
    "redislock_findings": "How often `locks doctor` says warn or fail.",
}
OTHER = "other"  # The name of all that have no label of their own.

# Parts of names that differ from object to object: a UUID, a hexadecimal id, a number or a date.
_VARIABLE = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
    r"|(?<![0-9a-z])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9a-z])"
    r"|[0-9]+(?:[-:._/][0-9]+)*",
    re.IGNORECASE,
)


def show(console: Console, *, limit: int, output: str, no_doctor: bool, **options: Any) -> None:
    """Print the metrics, or write them to a file. A silent alias does not hide the others."""
    if console.json:
        raise misuse(
            "metrics has the text format of Prometheus only; list, runs and doctor have --json."
        )
    problems: list[str] = []
    notes: list[str] = []
    samples = [Sample("redislock_metrics_timestamp_seconds", time.time(), {})]
    for using in console.aliases:
        samples += _look(using, limit, problems, notes, with_doctor=not no_doctor)
    content = "".join(f"# {one}\n" for one in notes) + text(GAUGES, samples)
    if output:
        try:
            write(content, Path(output))
        except OSError as error:
            raise misuse(f"--output: {error}") from error
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # Prometheus reads nothing else.
        console.out.write(content, str, ending="")
    finish(problems)


def pattern(name: str) -> str:
    """The label of a lock: its name, with {} for each part that differs from object to object."""
    return visible(_VARIABLE.sub("{}", name))


def _look(
    using: str, limit: int, problems: list[str], notes: list[str], *, with_doctor: bool
) -> Iterator[Sample]:
    """The samples of one alias. Adds why some are missing, to *problems* or *notes*."""
    silent: set[str] = set()
    problem = ""
    try:
        yield from _locks(using, limit, silent)
        if unrecorded := task_runs.unrecorded(using):
            notes.append(unrecorded)
        else:
            yield from _jobs(using, limit, silent)
    except held.PROBLEMS as error:
        problem = held.problem(error, using)
    loads = _loads(using)
    if not all(one.scripting for one in loads):
        problem = ""  # It keeps locks, and has no lists of them: the doctor says so.
    yield Sample("redislock_up", not problem, {"alias": using})
    for one in loads:
        yield from _of_server(using, one)
    # A server that kept us waiting would keep the doctor waiting too.
    if with_doctor and not problem:
        yield from _findings(using)
    problems += [*filter(None, [problem]), *held.silence(sorted(silent), using).values()]


# --- locks --------------------------------------------------------------------------------------


class _OfName(NamedTuple):
    """The held locks with one label."""

    wait: float = 0.0
    waiters: int = 0
    held_for: float = 0.0

    def __or__(self, other: _OfName) -> _OfName:
        """Both as one."""
        waiters = self.waiters + other.waiters
        return _OfName(max(self.wait, other.wait), waiters, max(self.held_for, other.held_for))


def _locks(using: str, limit: int, silent: set[str]) -> Iterator[Sample]:
    locks = held.list(using=using, limit=held.MOST_LOOKS)
    silent.update(locks.silent)
    states = Counter(lock.state for lock in locks)
    for state in held.STATES:
        if state != "permit":  # It is no state of its own.
            labels = {"alias": using, "state": state}
            yield Sample("redislock_locks", states[state], labels)
    if locks.partial:
        unseen = locks.total - len(locks)
        yield Sample("redislock_locks", unseen, {"alias": using, "state": "unseen"})
    for name, found in _bounded(_by_name(using, locks), limit).items():
        labels = {"alias": using, "name": name}
        yield Sample("redislock_lock_held_seconds", found.held_for, labels)
        yield Sample("redislock_lock_waiters", found.waiters, labels)
        yield Sample("redislock_lock_wait_seconds", found.wait, labels)


def _by_name(using: str, locks: held.HeldLocks) -> dict[str, _OfName]:
    # The permits of a name have one queue.
    waited_for = {lock.key.name: lock for lock in locks if lock.waiters}
    most = sorted(waited_for.values(), key=lambda lock: lock.waiters, reverse=True)
    details = held.details([lock.key for lock in most[: held.LOOKED_AT_ONCE]], using=using)
    waits = {
        one.key.name: max((waiter.waiting_for for waiter in one.waiters), default=0.0)
        for one in details
    }
    found: dict[str, _OfName] = {}
    for lock in locks:
        name = lock.key.name
        is_counted = waited_for.get(name) is lock
        one = _OfName(
            waits.get(name, 0.0),
            lock.waiters if is_counted else 0,
            (lock.held_for or 0.0) if _is_work(lock) else 0.0,
        )
        label = pattern(name)
        found[label] = found.get(label, _OfName()) | one
    return found


def _is_work(lock: held.HeldLock) -> bool:
    """Whether somebody works under it: not by a pause, a rate, or while it cools down."""
    return lock.state not in {"cooling", "rate"} and not lock.owner.operator


def _bounded(found: dict[str, _OfName], limit: int) -> dict[str, _OfName]:
    """At most *limit* names: the longest waited for or held. All others become one."""
    by_rank = sorted(found.items(), key=lambda item: item[1], reverse=True)
    bounded = dict(by_rank[:limit])
    for _, other in by_rank[limit:]:
        bounded[OTHER] = bounded.get(OTHER, _OfName()) | other
    return bounded


# --- jobs ---------------------------------------------------------------------------------------


def _jobs(using: str, limit: int, silent: set[str]) -> Iterator[Sample]:
    records = held.records(using=using, limit=task_runs.MOST_NAMES)
    silent.update(records.silent)
    yield Sample("redislock_records", len(records), {"alias": using})
    yield Sample("redislock_records_limit", conf.conf(using).records, {"alias": using})
    by_job: dict[str, held.Records] = {}
    for record in records:  # The last to run come first.
        for job in sorted(record.tasks):
            by_job.setdefault(job, held.Records()).append(record)
    jobs = list(by_job)[:limit]
    blocked = _blocked(using, {job: by_job[job] for job in jobs})
    for job in jobs:
        if (of_all := by_job[job].of_job(job)) is not None:
            yield from _of_job(of_all)
            labels = {"alias": using, "job_name": visible(job)}
            yield Sample("redislock_job_blocked_seconds", blocked[job], labels)


def _blocked(using: str, by_job: dict[str, held.Records]) -> dict[str, float]:
    """By job, redislock_job_blocked_seconds. Its other locks do not hide a stuck one."""
    skipped = [
        (seconds, job, record.name)
        for job, records in by_job.items()
        for record in records
        if (seconds := _only_skipped(record, job))
    ]
    skipped = sorted(skipped, reverse=True)[: held.MOST_LOOKS]
    locks = {name: Permit(name) for _, _, name in skipped}
    found = held.look_at(locks.values(), using=using)
    stuck = {lock.key.name for lock in found if _is_work(lock)}
    longest = dict.fromkeys(by_job, 0.0)
    for seconds, job, name in skipped:
        if name in stuck:
            longest[job] = max(longest[job], seconds)
    return longest


def _only_skipped(record: held.Record, job: str) -> float:
    """Seconds from the last run under a lock to the last skip of the job, if it was busy then."""
    skip = record.last_skip
    if record.under_way or not skip or skip.why != "busy" or skip.owner.task != job:
        return 0.0
    runs = record.last_success, record.last_failure, record.last_unended
    first = max([run.at for run in runs if run], default=min(record.skipped_at, default=skip.at))
    return max(0.0, skip.at - first)


def _of_job(record: held.Record) -> Iterator[Sample]:
    labels = {"alias": record.alias, "job_name": visible(record.name)}
    for outcome, run in record.last.items():
        # A run may be abandoned for a reason in many words.
        reason = run.why if outcome == "skip" else ""
        told = {**labels, "outcome": outcome, "reason": reason}
        yield Sample("redislock_job_last_timestamp_seconds", run.at, told)
    yield Sample("redislock_job_skips", record.skips, labels)
    yield Sample("redislock_job_runs", len(record.under_way), labels)
    longest = max((run.ago for run in record.under_way), default=0.0)
    yield Sample("redislock_job_run_seconds", longest, labels)


# --- servers ------------------------------------------------------------------------------------


def _loads(using: str) -> list[doctor.Load]:
    try:
        return doctor.loads(using)
    except held.PROBLEMS:
        return []


def _of_server(using: str, load: doctor.Load) -> Iterator[Sample]:
    labels = {"alias": using, "server": load.place}
    yield Sample("redislock_server_up", load.answers, labels)
    if load.memory:
        yield Sample("redislock_memory_bytes", load.memory, labels)
    if load.memory_limit:
        yield Sample("redislock_memory_limit_bytes", load.memory_limit, labels)


def _findings(using: str) -> Iterable[Sample]:
    found = Counter(
        (one.about, one.level, one.id) for one in doctor.examine(using) if one.level != "ok"
    )
    for (about, level, id_), number in found.items():
        labels = {"alias": using, "about": about, "level": level, "id": id_}
        yield Sample("redislock_findings", number, labels)
