"""Runs another program as if this process were it. This module knows nothing of locks.

The program has our terminal, files and process group. Signals are passed on to it, and its exit
status is ours. If this process is killed, so are the program and all that it has started.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from django_redislock.management import guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

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
