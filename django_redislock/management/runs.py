"""``manage.py locks runs``: what became of the runs of jobs, also as a probe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from django_redislock import conf, held
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import counted, duration
from django_redislock.management import arguments, terminal
from django_redislock.management.console import (
    beginnings,
    failure,
    finish,
    misuse,
    noting,
    of_each,
)
from django_redislock.management.terminal import pasteable
from django_redislock.rules.names import check_name
from django_redislock.rules.stored import as_kept
from django_redislock.task_runs import MOST_NAMES, unrecorded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_redislock.management.console import Console
    from django_redislock.monitors import Ping


def show(console: Console, *, ping: Ping | None, **options: Any) -> None:
    """Show the records of these locks, of all chosen ones, of a job, or of all."""
    try:
        _show(console, ping=ping, **options)
    except (LockUnavailable, ImproperlyConfigured) as error:
        if ping and (untold := _tell(ping, [held.problem(error, console.using)])):
            raise failure(error, console.using, f"\n{untold}") from error
        raise


def _show(
    console: Console,
    *,
    names: list[str],
    task: str,
    prefix: str,
    job: str,
    no_success_for: float | None,
    fail: bool,
    ping: Ping | None,
    verbosity: int = 1,
    **options: Any,
) -> None:
    if (fail or ping) and no_success_for is None:
        option = "--fail" if fail else "--ping"
        raise misuse(f"{option} goes with --no-success-for.")
    chosen = arguments.spelled({"task": task, "prefix": prefix})
    if names and chosen:
        raise misuse("NAME goes with neither --task nor --prefix.")
    if job and (names or chosen):
        raise misuse("--job goes with neither NAME nor --task nor --prefix.")
    chosen = f"--job {pasteable(job)}" if job else chosen
    asked = [console.using] if names else console.aliases
    without = _unrecorded(asked)
    if no_success_for is not None:
        _check_known(no_success_for, asked, without)
    known, problems, partial = _records(names, asked, task, prefix, job)
    found = known
    if no_success_for is not None:
        known = [_with_success_of(task, one) for one in known]
        found = _overdue(known, no_success_for, bool(chosen))
    notes = {one.name: _what_else_is_known(one) for one in found if not one.known}
    similar = {
        one.name: held.similar(one.name, using=one.alias)
        for one in found
        if notes.get(one.name) == ""
    }
    complaint = ""
    if fail or ping:
        complaint = _complaint(known, found, problems, chosen, no_success_for, of_job=bool(job))
    wrong = [*problems.values()]
    # Before anything is printed: that may fail.
    untold = _tell(ping, [*wrong, *filter(None, [complaint])]) if ping else ""
    lines: Iterable[str] = ()
    if found:
        several = len(asked) > 1
        lines = terminal.runs(found, console.columns, notes, similar, with_alias=several)
    elif known and verbosity:  # cron mails whatever is printed.
        lines = [_good_news(known, no_success_for, chosen=bool(chosen), of_job=bool(job))]
    elif not known and not problems and len(without) < len(asked):
        lines = [f"No run is known of {chosen}." if chosen else "No run of a task is known."]
    document = [
        {
            **one.as_dict(),
            "note": notes.get(one.name) or None,
            "similar": similar.get(one.name, []),
        }
        for one in found
    ]
    console.answer(document, lines, known=bool(found) or not problems)
    if not console.json and (not known or any(not one.last_success for one in found)):
        answering = [one for one in asked if one not in problems]
        console.print(beginnings(answering))
    console.err.write("\n".join(without), ending="\n" * bool(without))
    if partial:
        console.err.write(f"Only the {MOST_NAMES} locks that ran last are looked at.")
    _finish(wrong, complaint * fail, untold)


def _finish(problems: list[str], complaint: str, untold: str) -> None:
    """As finish(). What the monitor was not told leaves a silent server its exit status."""
    if untold and problems:
        finish([*problems, untold], complaint)
    finish(problems, "\n".join(filter(None, [complaint, untold])))


def _complaint(
    known: list[held.Record],
    found: list[held.Record],
    problems: dict[str, str],
    chosen: str,
    no_success_for: float | None,
    *,
    of_job: bool,
) -> str:
    """The complaint, as far as the servers have answered; "" if there is none."""
    if chosen:
        if problems or (known and not found):
            return ""  # A server that did not answer may know of a success.
        among = f", among {counted(len(found), 'lock')}" if found and not of_job else ""
        return f"No success of {chosen} in the last {duration(no_success_for)}{among}."
    if found or not (known or problems):
        without = counted(len(found), "lock") if found else "Nothing is known, so all are"
        return f"{without} without a success in the last {duration(no_success_for)}."
    return ""


def _tell(ping: Ping, wrong: list[str]) -> str:
    """Tell a monitor whether all is well, or what is wrong. Returns why that failed, or ""."""
    try:
        ping.send("/fail" * bool(wrong), says="\n".join(wrong))
    except OSError as error:
        return f"The {ping!r} did not succeed: {error}"
    return ""


def _records(
    names: list[str], asked: list[str], task: str, prefix: str, job: str
) -> tuple[list[held.Record], dict[str, str], bool]:
    """The records of these locks, of a job, or of all chosen ones.

    Also the problems by alias, and whether there are more records.
    """
    if names:
        (using,) = asked
        found = [
            held.record(name, using=using) or held.Record(name=name, alias=using)
            for name in dict.fromkeys(map(check_name, names))
        ]
        return found, {}, False
    answers, problems = of_each(
        asked,
        lambda using: held.records(using=using, limit=MOST_NAMES, task=job or task, prefix=prefix),
    )
    if job:
        found = [one for records in answers.values() if (one := records.of_job(job))]
    else:
        found = [record for records in answers.values() for record in records]
    return found, problems, any(records.partial for records in answers.values())


def _unrecorded(asked: list[str]) -> list[str]:
    """A sentence about each of these aliases that keeps no records."""
    says: list[str] = []
    for alias in asked:
        with noting({}, alias, asked):  # The problem is told where its records are read.
            says += filter(None, [unrecorded(alias)])
    return says


def _check_known(no_success_for: float, using: list[str], without: list[str]) -> None:
    """Refuse a time for which records are not kept; or any, if none are kept at all."""
    if len(without) == len(using):
        raise misuse("\n".join(without))
    for alias in using:
        longest = math.inf
        with noting({}, alias, using):  # The problem is told where its records are read.
            longest = conf.conf(alias).records_for
        if no_success_for > longest:
            raise misuse(
                f"--no-success-for must be {duration(longest)} at most: records are not kept for"
                f" longer, see REDISLOCK[{alias!r}]['RECORDS_FOR']."
            )


def _with_success_of(task: str, record: held.Record) -> held.Record:
    """The record, but without the success of another task that shares the lock."""
    success = record.last_success
    is_anothers = task and success and success.owner.task != as_kept(task)
    return replace(record, last_success=None) if is_anothers else record


def _overdue(known: list[held.Record], no_success_for: float, together: bool) -> list[held.Record]:
    """The locks without a success for so long. If *together*, any success counts for all."""
    overdue = [
        one for one in known if not one.last_success or one.last_success.ago > no_success_for
    ]
    return [] if together and len(overdue) < len(known) else overdue


def _good_news(
    known: list[held.Record], no_success_for: float | None, *, chosen: bool, of_job: bool
) -> str:
    """A sentence instead of an empty table."""
    if not chosen:
        return f"Each had a success in the last {duration(no_success_for)}."
    ago, name = min((one.last_success.ago, one.name) for one in known if one.last_success)
    under = "" if of_job else f", under {pasteable(name)}"  # A job has many locks.
    return f"The last success was {duration(ago)} ago{under}."


def _what_else_is_known(record: held.Record) -> str:
    """A note on a name under which no job has run; "" if nothing is known of it."""
    name, using = record.name, record.alias
    detail = held.detail(name, using=using)
    leases = len(detail.past) + bool(detail.lock)
    by_task = held.records(using=using, limit=MOST_NAMES, task=name)
    by_prefix = held.records(using=using, limit=MOST_NAMES, prefix=name)
    says = [
        f"`locks show` has {counted(leases, 'lease')}" * bool(leases),
        f"--task {pasteable(name)} finds {counted(len(by_task), 'lock')}" * bool(by_task),
        f"--prefix {pasteable(name)} finds {counted(len(by_prefix), 'lock')}" * bool(by_prefix),
    ]
    known = "; ".join(filter(None, says))
    return f"no task has run under this name; {known}" if known else ""
