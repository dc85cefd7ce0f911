"""``manage.py locks run``: any command under a lock, as a job with records."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import CommandError

from django_redislock.activity import Activity, busy_with
from django_redislock.exceptions import LockLost
from django_redislock.humanize import visible
from django_redislock.jobs.options import JobOptions
from django_redislock.jobs.run import current_lease, run_job
from django_redislock.jobs.skipped import Skipped
from django_redislock.management.child import NOT_EXECUTABLE, Child, cannot_run
from django_redislock.management.console import LOST, USAGE
from django_redislock.management.sigterm import release_on_sigterm
from django_redislock.management.skips import line_of, no_second_line
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.management.console import Console


class _Failed(Exception):
    """Tells the job that its body is no success: the command has ended with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def run(
    console: Console,
    *,
    name: str,
    command: Sequence[str],
    alias: str | None,
    grace: float,
    busy_exit: int,
    json: bool,
    job: str | None = None,
    verbosity: int = 1,
    **options: Any,
) -> int:
    """Run *command* under the lock *name*, or skip it. Returns the exit status."""
    if json:
        raise CommandError(
            "The output of COMMAND is printed as it is; leave out --json.", returncode=USAGE
        )
    if problem := cannot_run(command[0]):
        status, why = problem
        return _end(console, status, f"{shlex.quote(command[0])}: {why}")
    body, job = partial(_execute, name, command, grace), job or check_name(name)
    try:
        with (
            release_on_sigterm(),
            no_second_line(job),
            busy_with(Activity(command=shlex.join(command))),
        ):
            outcome = run_job(job, name, body, _options(alias, options))
    except _Failed as failed:
        return failed.status
    except LockLost as lost:
        return _end(console, LOST, str(lost))
    except OSError as error:
        return _end(console, NOT_EXECUTABLE, f"{shlex.quote(command[0])}: {error.strerror}")
    if not isinstance(outcome, Skipped):
        return 0
    if verbosity:
        console.err.write(line_of(outcome), str)
    return 0 if outcome["skipped"] == "done" else busy_exit


def _options(alias: str | None, options: dict[str, Any]) -> JobOptions:
    given = {key: options[key] for key in JobOptions.names() if options.get(key) is not None}
    if "wait" in given:
        given["on_conflict"] = "wait"
    try:
        return JobOptions.parse({**given, "using": alias or DEFAULT_ALIAS})
    except ValueError as error:
        raise CommandError(str(error), returncode=USAGE) from None


def _execute(name: str, command: Sequence[str], grace: float) -> None:
    """Run *command* to its end. If the lease is lost, that comes soon.

    Raises:
        LockLost: The lease is lost.
        _Failed: The command has failed.
    """
    lease = current_lease()
    assert lease is not None  # Without an answer of the server no job runs here.
    lock = check_name(name)  # As it is kept, so that equal names are equal here too.
    environment = _environment() | {"REDISLOCK_NAME": lock, "REDISLOCK_FENCE": str(lease.fence)}
    environment.pop("REDISLOCK_PERMIT", None)  # Of a run around this one.
    if lease.permit is not None:
        environment["REDISLOCK_PERMIT"] = str(lease.permit)
    child = Child(command, environment, grace)
    lease.on_lost(lambda lost: child.end())
    status = child.run()
    if lease.lost_reason:
        lease.ensure_held()  # Raises LockLost, with the setting that ended the lease, if one did.
    if status:
        raise _Failed(status)


def _environment() -> dict[str, str]:
    """Our variables, but with the time zone that we were started with: Django has set its own."""
    ours = dict(os.environ)
    if "TZ" in ours and ours["TZ"] == settings.TIME_ZONE:
        with suppress(OSError):  # Only Linux tells what we were started with.
            begun_with = Path("/proc/self/environ").read_bytes().split(b"\0")
            if not any(one.startswith(b"PATH=") for one in begun_with):
                return ours  # A long title of the process was written over it.
            del ours["TZ"]
            for one in begun_with:
                if one.startswith(b"TZ="):
                    ours["TZ"] = os.fsdecode(one[3:])
    return ours


def _end(console: Console, status: int, says: str) -> int:
    console.err.write(visible(says), str)
    return status
