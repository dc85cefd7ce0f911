"""``manage.py locks clean --queued``: forgets the calls that unique_queued has announced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from django_redislock import held, logs, task_runs
from django_redislock.humanize import counted
from django_redislock.management.console import USAGE, finish, operator
from django_redislock.management.terminal import moment, pasteable, table

if TYPE_CHECKING:
    from django_redislock.management.console import Console

audit = logs.logger("django_redislock.audit")


def forget(
    console: Console, *, only: held.Selection, others: bool, dry_run: bool, reason: str
) -> None:
    """Forget the announced calls, or those of one task. At worst a call is published twice.

    Args:
        console: Where to print.
        only: Nothing but a task may be chosen.
        others: Whether other options choose locks.
        dry_run: Only print them.
        reason: Why, for the audit log.
    """
    if others or only != held.Selection(task=only.task):
        raise CommandError(
            "--queued goes with --task alone: a call that waits has no holder.", returncode=USAGE
        )
    using = console.using
    listed = task_runs.announced(using=using)
    found = [one for one in listed.locks if only.task in {"", one[1].queued_task}]
    if found and not dry_run:
        for name, calls in found:
            task_runs.forget_announced(name, calls, using=using)
        says = "%d announced calls of %r (%s) forgotten by %r, reason %r"
        extra = logs.of(alias=using, job=only.task or None, reason=reason or None)
        audit.warning(
            says, len(found), only.task or "all tasks", using, operator(), reason, extra=extra
        )
    document: list[dict[str, Any]] = [
        {
            "name": name,
            "alias": using,
            "task": calls.queued_task,
            "id": calls.queued,
            "until": round(calls.queued_until or 0.0, 3),
            "forgotten": not dry_run,
        }
        for name, calls in found
    ]
    rows = [
        (pasteable(one["name"]), one["task"] or "-", one["id"], moment(one["until"]))
        for one in document
    ]
    lines = table(("NAME", "TASK", "ID", "UNTIL"), rows, console.columns) if rows else ()
    did = "Would forget" if dry_run else "Forgot"
    console.answer(document, [*lines, f"{did} {counted(len(found), 'announced call')}."])
    if listed.partial:
        console.err.write("These were not all of them; do it again.")
    finish(held.silence(listed.silent, using).values())
