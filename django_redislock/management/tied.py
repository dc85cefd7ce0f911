"""Becomes another program. When the process that started this one is gone, the program is killed.

A Python without site-packages runs it as a file: in a process with threads, no Python code may run
between the fork and the exec.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

NOT_EXECUTABLE, NOT_FOUND = 126, 127
OVER = b"."  # Written to the pipe when the program has ended.

_PR_SET_PDEATHSIG = 1


def command(by_kernel: bool, pipe: int) -> list[str]:
    """The command to start this with. The program and its arguments follow it.

    Args:
        by_kernel: Whether the kernel kills the program, or else a guard of ours.
        pipe: A guard reads it. It ends when we are gone.
    """
    how = "kernel" if by_kernel else "guard"
    return [sys.executable, "-I", "-S", __file__, how, str(os.getpid()), str(pipe)]


def main() -> None:
    """Tie this process to its parent, and become the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Without a traceback.
    how, parent, pipe, *program = sys.argv[1:]
    if how == "kernel":
        os.close(int(pipe))
        _tie(int(parent))
    else:
        _guard(int(pipe))
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and so would the program.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # A script without a #! line: as shells do it.
            os.execvp("sh", ["sh", _found(program[0]), *program[1:]])
        sys.stderr.write(f"{program[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE)


def _tie(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # The parent was gone before.
        os.kill(os.getpid(), signal.SIGKILL)


def _guard(pipe: int) -> None:
    """Leave a process that kills this one when the pipe ends. It is no child of the program."""
    program = os.getpid()
    if go_between := os.fork():
        os.waitpid(go_between, 0)
        os.close(pipe)
        return
    if os.fork():
        sys.exit()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):  # A reader of the program's output waits for its end.
        os.dup2(nothing, file)
    if os.read(pipe, 1) != OVER:
        os.kill(program, signal.SIGKILL)
    sys.exit()


def _found(program: str) -> str:
    import shutil

    return shutil.which(program) or program


if __name__ == "__main__":
    main()
