"""Whether ``migrate`` has made the tables that atomic and once="database" write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from django_redislock.findings import Finding
from django_redislock.rules.arguments import DEFAULT_DATABASE

if TYPE_CHECKING:
    from collections.abc import Iterator


def examine_tables() -> Iterator[Finding]:
    """Ask the default database, unless there is none."""
    from django_redislock.completed_runs import CompletedRun
    from django_redislock.fences import Fence, has_table

    database = f"database {DEFAULT_DATABASE!r}"
    try:
        missing = [
            str(model._meta.verbose_name_plural)
            for model in (Fence, CompletedRun)
            if not has_table(model, DEFAULT_DATABASE)
        ]
    except ImproperlyConfigured:
        yield Finding("tables", "ok", "not needed: DATABASES names no default database")
    except Error as error:
        yield Finding(
            "tables",
            "warn",
            f"{database} does not tell whether it has the tables of fences: {error}",
            "Check DATABASES.",
        )
    else:
        if missing:
            yield Finding(
                "tables",
                "warn",
                f"{database} has no table of {' and of '.join(missing)}, which atomic and"
                ' once="database" need',
                "Run manage.py migrate django_redislock.",
            )
        else:
            yield Finding("tables", "ok", f"{database} has the tables of fences")
