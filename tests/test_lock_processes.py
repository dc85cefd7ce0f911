"""Locks between processes, and what a forked child has of its parent's."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from django_redislock import LockMisuse, distributed_lock, held
from tests.processes import hear, say

if TYPE_CHECKING:
    from tests.conftest import Locks, Spawn


def hold(name: str, ttl: float) -> None:
    """In a child: hold the lock until told to let go."""
    with distributed_lock(name, ttl=ttl) as lease:
        say({"pid": os.getpid(), "fence": lease.fence, "holder": str(lease.owner)})
        hear()
    say("released")


def fork_while_holding(name: str) -> None:
    """In a child: fork within the block, and tell what the grandchild saw."""
    lock = distributed_lock(name, ttl=1)
    read, write = os.pipe()
    with lock as lease:
        threads = threading.active_count()
        if not (pid := os.fork()):
            seen = [str(lease.held), str(threading.active_count())]
            with distributed_lock(name + ":child", wait=0) as own:
                seen.append(str(own.held))
            seen.append(str(distributed_lock(name, wait=0, reentrant=True).acquire()))
            try:
                lock.release()
            except LockMisuse as error:
                seen.append(f"misuse: {error}")
            lock.__exit__(None, None, None)
            os.write(write, "|".join(seen).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        lease.ensure_held(verify=True)
        say({"threads": threads, "seen": os.read(read, 4096).decode().split("|")})
    say("released")


def test_processes_exclude_each_other(locks: Locks, spawn: Spawn) -> None:
    child = spawn(hold, "lottery", 10)
    told = child.read()
    lock = distributed_lock("lottery", wait=0)
    assert not lock.acquire()
    seen = held.get("lottery")
    assert seen is not None
    assert seen.owner.pid == child.pid == told["pid"]
    assert str(seen.owner) == told["holder"]
    child.send(None)
    assert child.read() == "released"
    assert lock.acquire()
    lock.release()


def test_the_fence_grows_over_processes(locks: Locks, spawn: Spawn) -> None:
    fences = []
    for _ in range(2):
        with distributed_lock("lottery") as lease:
            fences.append(lease.fence)
        child = spawn(hold, "lottery", 10)
        fences.append(child.read()["fence"])
        child.send(None)
        child.read()
    assert fences == sorted(set(fences))


def test_a_killed_holder_costs_at_most_its_ttl(locks: Locks, spawn: Spawn) -> None:
    child = spawn(hold, "lottery", 0.5)
    child.read()
    child.kill()
    assert distributed_lock("lottery", wait=5).acquire()


def test_a_forked_child_has_nothing_of_its_parents_lease(locks: Locks, spawn: Spawn) -> None:
    child = spawn(fork_while_holding, "lottery")
    told = child.read()
    held_there, threads, own, re_entered, misuse = told["seen"]
    assert held_there == "False"
    assert (told["threads"], threads) == (2, "1")  # The watchdog stays behind.
    assert own == "True"
    assert re_entered == "False"
    assert misuse.startswith("misuse: Lock 'lottery': its lease belongs to the parent process")
    # The parent's lease was still its own, and is released by it.
    assert child.read() == "released"
    assert held.get("lottery") is None


def test_a_loop_that_has_ended_leaves_nothing_behind(locks: Locks) -> None:
    async def once() -> ReferenceType[asyncio.AbstractEventLoop]:
        async with distributed_lock("lottery"):
            return ref(asyncio.get_running_loop())

    loops = [asyncio.run(once()) for _ in range(5)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 5
