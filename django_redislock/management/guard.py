"""Runs a program, and ends it with all that it has started: when told so, or when we are gone.

A Python without site-packages runs this as a file, between the process that wants the program and
the program: in a process with threads, no Python code may run between the fork and the exec. On
Linux it adopts what the program leaves behind, so its descendants are all that the program has
started. Elsewhere it misses those whose parent has ended.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

NOT_EXECUTABLE, NOT_FOUND = 126, 127
END = b"\0"  # Ends all of them. Any other byte is the number of a signal for the program.

# Some systems lack some.
PASSED_ON = [
    number
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT", "SIGWINCH")
    if (number := getattr(signal, name, None))
]
# A terminal sends these to every process in its foreground, so to the program, too.
OF_TERMINALS = {"SIGINT", "SIGQUIT", "SIGWINCH"}
# If one of these ends the program, what the program leaves behind is to end, too.
ENDING = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
LOOK_EVERY = 0.05  # Seconds between two looks at what does not end.

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def command(pipe: int, grace: float) -> list[str]:
    """The command to start this with. The program and its arguments follow it.

    Args:
        pipe: Brings signals and END. It ends when we are gone.
        grace: Seconds from SIGTERM to SIGKILL.
    """
    return [sys.executable, "-I", "-S", __file__, str(pipe), str(grace)]


def main() -> None:
    """Run the program, and exit as it does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Without a traceback.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # If it was ignored, no child would be awaited.
    pipe, grace, *program = sys.argv[1:]
    os.set_inheritable(int(pipe), False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if not (child := os.fork()):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # It was gone before.
            os.kill(os.getpid(), signal.SIGKILL)
        _become(program)
    sys.exit(_Guard(child, int(pipe), float(grace)).watch())


class _Guard:
    """Watches over the program and its descendants."""

    def __init__(self, program: int, pipe: int, grace: float) -> None:
        self._program = program
        self._pipe = pipe
        self._grace = grace
        self._status: int | None = None  # Once the program has ended.
        self._must_end = False
        self._kill_at = math.inf
        self._alone = False  # Once the process that has started us is gone.

    def watch(self) -> int:
        """Watch until all that must end have ended. Returns the program's exit status."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        # The number of each signal, at once. The program has its own copy of these, already.
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        while not self._is_over():
            files = [woken] if self._alone else [woken, self._pipe]
            readable, _, _ = select.select(files, [], [], self._seconds_to_wait())
            if woken in readable:
                # A terminal, or `kill` with our process group, has sent these to all of us.
                self._must_end |= not ENDING.isdisjoint(os.read(woken, 1000))
            if self._pipe in readable:
                self._obey(os.read(self._pipe, 1000))
        return self._status or 0

    def _obey(self, orders: bytes) -> None:
        if not orders:  # Nobody holds the lock any more.
            self._alone = self._must_end = True
            self._kill_at = 0.0
        for number in orders:
            if number == END[0]:
                self._end()
            elif number in PASSED_ON:
                self._must_end |= number in ENDING
                if self._status is None and not _was_sent_by_terminal(number, self._program):
                    _send(number, self._program)

    def _end(self) -> None:
        """Ask all to end. After the grace they are killed."""
        self._must_end = True
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + self._grace
            for one in self._all():
                _send(signal.SIGTERM, one)

    def _all(self) -> list[int]:
        """All that must end: the program also where /proc does not tell of it."""
        found = _descendants()
        return found if self._status is not None else [*dict.fromkeys([self._program, *found])]

    def _is_over(self) -> bool:
        """Await who has ended, end who must. Whether that was the last."""
        living = self._all() if self._must_end else []  # First, so that none stays a zombie.
        has_children = True  # As seen from here, nothing can be missed: orphans come to us.
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._program:
                    status = os.waitstatus_to_exitcode(ended[1])
                    self._status = 128 - status if status < 0 else status
        except ChildProcessError:
            has_children = False
        if not self._must_end:
            return self._status is not None
        foreign: list[int] = []
        if time.monotonic() >= self._kill_at:
            # Those of other users cannot be killed, and nobody awaits them without the lock.
            foreign = [one for one in living if not _send(signal.SIGKILL, one)]
            living = [one for one in living if one not in foreign]
        elif self._status is not None and has_children:
            self._end()
        if sys.platform == "linux" and has_children and not foreign:
            return False
        return not living and (self._status is not None or self._alone)

    def _seconds_to_wait(self) -> float | None:
        left = self._kill_at - time.monotonic()
        if self._status is not None or left <= 0:
            return LOOK_EVERY
        return None if left == math.inf else left


def _become(program: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # A script without a #! line: as shells do it.
            os.execvp("sh", ["sh", _found(program[0]), *program[1:]])
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")


def _descendants() -> list[int]:
    """All living processes below this one."""
    children = defaultdict(list)
    for process, parent in _parents():
        children[parent].append(process)
    found, todo = [], [os.getpid()]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return found


def _parents() -> list[tuple[int, int]]:
    """Each process with its parent; none if nobody tells."""
    found = []
    with suppress(OSError):
        if Path("/proc/self").readlink().name != str(os.getpid()):
            return []  # Of another PID namespace: its numbers mean other processes.
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended meanwhile.
            stat = (process / "stat").read_text(errors="replace")
            _, parent = stat.rpartition(") ")[2].split()[:2]
            found.append((int(process.name), int(parent)))
    if found:
        return found
    try:
        ps = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE)
    except FileNotFoundError:
        return []
    rows = [line.split() for line in ps.communicate()[0].splitlines()]
    return [
        (int(process), int(parent))
        for process, parent, state in rows
        if not state.startswith(b"Z") and int(process) != ps.pid
    ]


def _send(number: int, process: int) -> bool:
    """Send a signal. Whether there was somebody to get it."""
    with suppress(ProcessLookupError):  # It has ended, so it is in nobody's way.
        try:
            os.kill(process, number)
        except PermissionError:
            return False
    return True


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


def _found(program: str) -> str:
    import shutil

    return shutil.which(program) or program


if __name__ == "__main__":
    main()
