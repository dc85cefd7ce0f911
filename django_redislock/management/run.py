"""``manage.py locks run``: any command under a lock, as a job with records."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings

from django_redislock.exceptions import LockLost
from django_redislock.holder import Activity, busy_with
from django_redislock.humanize import visible
from django_redislock.jobs.options import JobArguments, JobOptions, Skipped
from django_redislock.jobs.run import current_lease, run_job
from django_redislock.management import guard
from django_redislock.management.console import LOST, line_of, misuse, no_second_line
from django_redislock.management.single_instance import release_on_sigterm
from django_redislock.options import options_in
from django_redislock.rules.limit import Rate
from django_redislock.rules.names import check_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from django_redislock.management.console import Console


# --- runs another program as if this process were it. This module knows nothing of locks ----------

# The program has our terminal, files and process group. Signals are passed on to it, and its exit
# status is ours. If this process is killed, so are the program and all that it has started.

NOT_EXECUTABLE, NOT_FOUND = guard.NOT_EXECUTABLE, guard.NOT_FOUND  # Exit statuses, as of a shell.


class Child:
    """One program, and all that it starts."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], grace: float
    ) -> None:
        """A program that run() starts.

        Args:
            command: The program and its arguments.
            environment: All its variables.
            grace: Seconds from SIGTERM to SIGKILL.
        """
        self._command = command
        self._environment = environment
        self._grace = grace
        # Only the guard, which awaits its children, can send signals that meet no other process.
        self._to_guard, self._of_guard = socket.socketpair()
        self._to_guard.setblocking(False)

    def run(self) -> int:
        """Run it to its end. Returns its exit status, or 128 plus the signal that killed it.

        If this raises, all processes of the program are killed first.
        """
        with self._to_guard, self._passing_signals_on():
            with self._of_guard:
                process = subprocess.Popen(
                    [*guard.command(self._of_guard.fileno(), self._grace), *self._command],
                    env=self._environment,
                    pass_fds=[self._of_guard.fileno()],
                )
            try:
                status = process.wait()
            except BaseException:
                self._to_guard.close()
                process.wait()
                raise
        return 128 - status if status < 0 else status

    def end(self) -> None:
        """End them by SIGTERM, or by SIGKILL if that takes too long. Any thread may call this."""
        with suppress(OSError):  # The program has ended.
            self._to_guard.send(guard.END)

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Leave signals to the guard. An ignored signal stays ignored, by the program as well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {}
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # No exit status would be known.
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The number of each signal goes to the guard at once, whatever this thread does.
        woken_before = signal.set_wakeup_fd(self._to_guard.fileno(), warn_on_full_buffer=False)
        try:
            for number in guard.PASSED_ON:
                if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, _left_to_guard)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            signal.set_wakeup_fd(woken_before)


def cannot_run(program: str) -> tuple[int, str] | None:
    """Why a program cannot be started: an exit status, and the reason. None if it can."""
    if shutil.which(program):
        return None
    if os.sep in program and Path(program).is_dir():
        return NOT_EXECUTABLE, "it is a directory"
    if shutil.which(program, os.F_OK):
        return NOT_EXECUTABLE, "it is not executable"
    return NOT_FOUND, "command not found"


def _left_to_guard(number: int, frame: FrameType | None) -> None:
    """The handler of signals that the guard passes on."""


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
    rate: str = "",
    burst: int | None = None,
    verbosity: int = 1,
    **options: Any,
) -> int:
    """Run *command* under the lock *name*, or skip it. Returns the exit status."""
    if json:
        raise misuse("The output of COMMAND is printed as it is; leave out --json.")
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
            if rate or burst:
                options["limits"] = [_rate(check_name(name), rate, burst)]
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
    given = {name: options[name] for name in options_in(JobArguments) if name in options}
    if given.get("wait") is not None:
        given["on_conflict"] = "wait"
    try:
        return JobOptions(**given, using=alias)
    except ValueError as error:
        raise misuse(str(error)) from None


def _rate(name: str, rate: str, burst: int | None) -> Rate:
    try:
        return Rate(name, rate, burst=burst)
    except ValueError as error:
        raise misuse(str(error)) from None


def _execute(name: str, command: Sequence[str], grace: float) -> None:
    """Run *command* to its end. If the lease is lost, that comes soon.

    Raises:
        LockLost: The lease is lost.
        _Failed: The command has failed.
    """
    lease = current_lease()
    assert lease is not None  # Without an answer of the server no job runs here.
    lock = check_name(name)  # As it is kept, so that equal names are equal here too.
    environment = _environment() | {"REDISLOCK_NAME": lock}
    for variable, value in (("FENCE", lease.fence), ("PERMIT", lease.permit)):
        environment.pop(f"REDISLOCK_{variable}", None)  # Of a run around this one.
        if value is not None:
            environment[f"REDISLOCK_{variable}"] = str(value)
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
