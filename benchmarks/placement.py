"""Which cores the clients and the server may use.

On one core the kernel's wake-up of another core, which costs several times what a lock does, drops
out of the figures; on all cores they are what a program on this machine sees.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ONE_CORE = "one core"
ALL_CORES = "all cores"


def placements() -> dict[str, set[int]]:
    """The cores of each placement; without `ONE_CORE` where the system cannot pin processes."""
    if not hasattr(os, "sched_setaffinity"):
        return {ALL_CORES: set()}
    cores = os.sched_getaffinity(0)
    return {ONE_CORE: {min(cores)}, ALL_CORES: cores}


def confine(pid: int, cores: set[int]) -> None:
    """Let every thread of a process run on these cores only; threads to come inherit it."""
    if not cores:
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # It ended meanwhile.
            os.sched_setaffinity(int(thread.name), cores)
