"""Runs another program as if this process were it. This module knows nothing of locks.

The program has our terminal, files and process group. Signals are passed on to it, and its exit
status is ours. If this process is killed, so is the program: see tied.py.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from django_redislock.management import tied

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

NOT_EXECUTABLE, NOT_FOUND = tied.NOT_EXECUTABLE, tied.NOT_FOUND  # Exit statuses, as of a shell.

# Windows lacks most of them.
PASSED_ON = [
    number
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT", "SIGWINCH")
    if (number := getattr(signal, name, None))
]
# A terminal sends these to every process in its foreground, so to the program, too.
OF_TERMINALS = ("SIGINT", "SIGQUIT", "SIGWINCH")
TIED_BY_KERNEL = sys.platform == "linux"
LOOK_EVERY = 0.05  # Seconds, where no signal says that the program has ended.

_END = b"\0"  # No signal has this number.


class Child:
    """One program."""

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
        # The inbox of the loop in run(): the numbers of signals, and _END.
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._kill_at: float | None = None  # math.inf once it was killed.

    def run(self) -> int:
        """Run it to its end. Returns its exit status, or 128 plus the signal that killed it."""
        with (
            self._inbox,
            self._outbox,
            self._passing_signals_on(),
            self._started() as process,
        ):
            while process.poll() is None:
                self._attend_to(process)
        status: int = process.returncode
        return 128 - status if status < 0 else status

    def end(self) -> None:
        """End it by SIGTERM, or by SIGKILL if that takes too long. Any thread may call this."""
        # If the box is full, the loop is about to look; if it is closed, the program has ended.
        with suppress(OSError):
            self._outbox.send(_END)

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The program while it runs. If the block raises, it is killed."""
        # A guard reads this pipe. If it ends without a last word, this process was killed.
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                [*tied.command(TIED_BY_KERNEL, theirs), *self._command],
                env=self._environment,
                pass_fds=[theirs],
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        try:
            yield process
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            with suppress(BrokenPipeError):
                os.write(ours, tied.OVER)
            os.close(ours)

    def _attend_to(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until there is something to do, and do it."""
        until = math.inf if self._kill_at is None else self._kill_at
        left = max(until - time.monotonic(), 0.001)
        if not _is_main_thread() or _is_sigchld_blocked():
            left = min(left, LOOK_EVERY)
        self._inbox.settimeout(None if math.isinf(left) else left)
        try:
            news = self._inbox.recv(1000)
        except TimeoutError:
            news = b""
        for number in news:
            if number == _END[0] and self._kill_at is None:
                process.terminate()
                self._kill_at = time.monotonic() + self._grace
            elif number in PASSED_ON and not _was_sent_by_terminal(number, process.pid):
                process.send_signal(number)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            process.kill()
            self._kill_at = math.inf

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Leave signals to the loop. An ignored signal stays ignored, by the program as well."""
        if not _is_main_thread():
            yield
            return
        before = {}
        # Any thread that gets a signal puts its number into the box at once. A handler of Python's
        # would wait until this sleeping thread runs on.
        woken_before = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        try:
            for number in (*PASSED_ON, signal.SIGCHLD):
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                    before[number] = signal.signal(number, _left_to_loop)
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


def _left_to_loop(number: int, frame: FrameType | None) -> None:
    """The handler of signals that Child looks after."""


def _was_sent_by_terminal(number: int, pid: int) -> bool:
    """Whether a signal seems to come from our terminal, which has sent it to *pid* as well."""
    if signal.Signals(number).name not in OF_TERMINALS:
        return False
    with suppress(OSError):  # There is no terminal, or the process has ended.
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp() == os.getpgid(pid)
        finally:
            os.close(terminal)
    return False


def _is_sigchld_blocked() -> bool:
    """Whether we were started so; the program gets our mask, so that is not changed."""
    return signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
