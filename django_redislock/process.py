"""Which process this is, what a fork changes, and whether another process is still there."""

from __future__ import annotations

import os
import socket
from typing import Protocol
from weakref import WeakSet


class Process:
    """One process. It is told apart from others by identity: process ids are used again."""


class Forked(Protocol):
    """What has threads, connections or leases that a forked child must not use."""

    def after_fork(self) -> None:
        """In a forked child: leave the parent's alone, and begin anew."""


current = Process()  # This one.

_to_tell: WeakSet[Forked] = WeakSet()


def tell_after_fork(one: Forked) -> None:
    """Call ``after_fork()`` of *one* in each child that is forked from now on."""
    _to_tell.add(one)


def is_gone(host: str, pid: int | None) -> bool:
    """Whether the process *pid* of *host* was one of this host, and does not exist any more.

    False also means that nobody can tell: another host's process, or one whose id is in use again.
    A container that shares its host's name, but not its process ids, makes this wrong; see
    docs/locks-command.md.
    """
    # On Windows os.kill() would not ask, but kill.
    if os.name != "posix" or host != socket.gethostname():
        return False
    if pid is None or pid <= 0:  # These would mean whole groups of processes.
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # Another user's; or a number that is no process id.
        return False
    return False


def _after_fork_in_child() -> None:
    global current  # noqa: PLW0603 - a forked child is another process
    current = Process()
    for one in list(_to_tell):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
