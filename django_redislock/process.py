"""Which process this is, as opposed to the one it was forked from, and what a fork changes."""

from __future__ import annotations

import os
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


def _after_fork_in_child() -> None:
    global current  # noqa: PLW0603 - a forked child is another process
    current = Process()
    for one in list(_to_tell):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
