"""``manage.py locks once``: the completed runs of a database. It asks no lock server."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from django_redislock import conf, fencing
from django_redislock.completed_runs import CompletedRun
from django_redislock.fences import missing_table
from django_redislock.humanize import counted, duration, visible
from django_redislock.management import terminal
from django_redislock.management.console import FOUND, UNAVAILABLE, misuse, operator
from django_redislock.management.terminal import pasteable
from django_redislock.rules.names import check_name
from django_redislock.transactions import is_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from django_redislock.completed_runs import CompletedRuns
    from django_redislock.management.console import Console


def show(
    console: Console,
    *,
    database: str,
    older_than: float | None,
    search: str,
    limit: int,
    **options: Any,
) -> None:
    """List the completed runs, the latest first."""
    rows = _rows(console, database)
    if older_than is not None:
        rows = rows.filter(completed_at__lt=_ago(older_than))
    if search:
        rows = rows.matching(search)
    with _reporting_errors(database):
        found = list(rows.order_by("-completed_at", "-pk")[: limit + 1])
    shown = found[:limit]
    such = " such" if search or older_than is not None else ""
    lines: Iterable[str] = [f"Database {database!r} has no{such} completed run."]
    if shown:
        several = console.alias is None and len(conf.aliases()) > 1
        lines = terminal.completed(shown, console.columns, with_alias=several)
    console.answer([run.as_dict() for run in shown], lines)
    if len(found) > limit:
        console.err.write("These are not all of them; see --limit.")


def forget(
    console: Console,
    *,
    names: list[str],
    database: str,
    older_than: float | None,
    yes: bool,
    dry_run: bool,
    reason: str,
    **options: Any,
) -> None:
    """Delete the rows of these names, or all rows that are so old."""
    if bool(names) == (older_than is not None):
        raise misuse("Say which runs: NAME..., or --older-than TIME.")
    rows = _rows(console, database)
    confirm = partial(console.confirm, yes=yes or dry_run, done="forgotten")
    log = {"by": operator(), "reason": reason}
    forgotten = 0
    unknown: list[str] = []
    with _reporting_errors(database):
        if older_than is not None:
            before = _ago(older_than)
            total = rows.filter(completed_at__lt=before).count()
            if total:
                old = f"{counted(total, 'completed run')} older than {duration(older_than)}"
                confirm(f"Forget {old}?")
            if total and not dry_run:
                forgotten = rows.prune(before, **log)
        else:
            found = {name: list(rows.of(name)) for name in map(check_name, names)}
            unknown = [name for name, runs in found.items() if not runs]
            runs = [run for some in found.values() for run in some]
            total = len(runs)
            if total:
                table = partial(terminal.completed, runs)
                confirm(f"Forget {counted(total, 'completed run')}?", table=table)
            if total and not dry_run:
                forgotten = rows.filter(pk__in=[run.pk for run in runs]).forget(**log)
    would, number = ("Would forget", total) if dry_run else ("Forgot", forgotten)
    console.answer({"forgotten": forgotten}, [f"{would} {counted(number, 'completed run')}."])
    if unknown:
        raise CommandError(
            "\n".join(
                f"Database {database!r} has no completed run of {pasteable(name)}."
                for name in unknown
            ),
            returncode=FOUND,
        )


def _rows(console: Console, database: str) -> CompletedRuns:
    """The rows of the alias that was given, or else of all."""
    try:
        fencing.check_database(database, "--database")
    except ValueError as error:
        raise misuse(str(error)) from None
    rows = CompletedRun.objects.using(database)
    return rows if console.alias is None else rows.filter(alias__in=console.aliases)


def _ago(seconds: float) -> datetime:
    return timezone.now() - timedelta(seconds=seconds)


@contextmanager
def _reporting_errors(database: str) -> Iterator[None]:
    """Turn errors of this database into exit statuses. Commit, also without autocommit."""
    try:
        yield
        if is_by_hand(connections[database]):
            transaction.commit(using=database)
    except DatabaseError as error:
        if problem := missing_table(CompletedRun, database):
            raise misuse(problem[0].upper() + problem[1:]) from error
        problem = visible(f"The database {database!r} cannot answer: {error}")
        raise CommandError(problem, returncode=UNAVAILABLE) from error
