"""Child processes that are gone when the demo ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STOP_WITHIN = 5  # seconds, before a child is killed


class ChildDied(Exception):
    """A child failed."""


class Child:
    """A process; what it writes is kept in files."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str],
        abrupt: bool,
    ) -> None:
        self._name = name
        self._last_signal = signal.SIGKILL if abrupt else signal.SIGTERM
        self._out = directory / f"{name}.out"
        self._err = directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # A group of its own: Ctrl-C reaches only the demo, which then ends the children.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def out(self) -> str:
        """What it has written to standard output so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    def err(self) -> str:
        """What it has written to standard error so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    @property
    def status(self) -> int | None:
        """Its exit status; negative if a signal has killed it, None as long as it runs."""
        return self._process.poll()

    def check(self, *, may_end: bool = True) -> None:
        """Raise ChildDied, with its last words, if it has failed, or ended though it may not."""
        if self.status or (self.status is not None and not may_end):
            last_words = "\n".join((self.out() + self.err()).splitlines()[-20:])
            raise ChildDied(f"{self._name} ended with {self.status}:\n{last_words}")

    def kill(self) -> None:
        """End it at once, without a chance to clean up (SIGKILL)."""
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def go_on(self) -> None:
        """Let it go on, if it is stopped (SIGSTOP)."""
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end; one that is to end abruptly is not asked."""
        self._signal_group(self._last_signal)
        self.go_on()  # One that is stopped would not hear of it.

    def wait(self, deadline: float) -> None:
        """Wait for its end; kill it if that has not come by the (monotonic) deadline."""
        try:
            self._process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: int) -> None:
        # The pid of a process that has not been waited for is still its own.
        if self.status is None:
            os.killpg(self.pid, number)


class Children:
    """The children started through it; leaving the block ends them all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._children: list[Child] = []

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, abrupt: bool = False
    ) -> Child:
        """Start a child; it is killed at the end if *abrupt*, else asked to end."""
        child = Child(name, command, directory=self._directory, env=env, abrupt=abrupt)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for child in self._children:
            child.terminate()
        deadline = time.monotonic() + STOP_WITHIN
        for child in self._children:
            child.wait(deadline)
