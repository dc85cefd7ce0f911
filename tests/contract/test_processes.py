"""Locks between processes, what a forked child has of its parent's, and clocks that are set."""

import asyncio
import gc
import os
import threading
import time
import warnings

import pytest

from django_redislock import LockMisuse, distributed_lock, held
from tests.support.backends import PATIENT
from tests.support.clocks import WallClock
from tests.support.faults import in_fork, takes
from tests.support.matrix import CLUSTER, QUORUM, places
from tests.support.processes import hear, say
from tests.support.servers import KIND, Server
from tests.support.waiting import HUNG, wait_until


def hold(name, ttl):
    """In a child: hold the lock until told to let go."""
    with distributed_lock(name, ttl=ttl) as lease:
        say({"pid": os.getpid(), "fence": lease.fence, "holder": str(lease.owner)})
        hear()
    say("released")


def fork_while_holding(name):
    """In a child: fork within the block, and tell what the grandchild saw."""
    lock = distributed_lock(name, ttl=10)
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


@pytest.mark.proves("P1", "R9")
def test_processes_exclude_each_other_and_the_fence_grows_over_them(locks, spawn):
    fences, lock = [], distributed_lock("lottery", wait=0)
    for _ in range(2):
        with lock as lease:
            fences.append(lease.fence)
        child = spawn(hold, "lottery", 10)
        told = child.read()
        fences.append(told["fence"])
        assert not lock.acquire()
        seen = held.get("lottery")
        assert seen.owner.pid == child.pid == told["pid"]
        assert str(seen.owner) == told["holder"]
        child.send(None)
        assert child.read() == "released"
    assert fences == sorted(set(fences))


@pytest.mark.proves("P2")
def test_a_killed_holder_costs_at_most_its_ttl(locks, spawn):
    locks.configure(OPTIONS=PATIENT)
    child = spawn(hold, "lottery", 3)
    child.read()
    child.kill()
    with takes(at_most=3):
        assert distributed_lock("lottery", wait=HUNG).acquire()


@pytest.mark.proves("P10", "R8")
def test_a_forked_child_has_nothing_of_its_parents_lease(locks, spawn):
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


# Clocks


@pytest.fixture
def shift_clock(locks, tmp_path, monkeypatch):
    """Let the wall clock of children be so many seconds ahead of ours; see clock_shim.c."""
    clock = WallClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock.shift


def hold_while_the_clock_is_set(name, min_hold):
    """In a child: hold the lock over a step of the wall clock, until it was renewed after it."""
    before, began = time.time(), time.monotonic()
    with distributed_lock(name, ttl=6, min_hold=min_hold) as lease:
        say("held")
        hear()
        step = time.time() - before - (time.monotonic() - began)
        renewals, expires_in, still = lease.renewals, lease.expires_in, lease.held
        wait_until(lambda: lease.renewals > renewals + 1)
        say([step, still, expires_in, lease.held])
    say("released")


@pytest.mark.proves("R2")
@pytest.mark.parametrize("seconds", [86_400, -86_400])
def test_a_holder_does_not_mind_when_its_wall_clock_is_set(seconds, shift_clock, locks, spawn):
    began = time.monotonic()
    child = spawn(hold_while_the_clock_is_set, "lottery", 60)
    child.read()
    shift_clock(seconds)
    child.send(None)
    step, still, expires_in, after_renewals = child.read()
    assert step == pytest.approx(seconds, abs=5)
    assert (still, after_renewals) == (True, True)
    assert 0 < expires_in < 6
    assert child.read() == "released"
    # min_hold counts from the grant, by the server's clock.
    seen = held.get("lottery")
    assert seen.state == "cooling"
    assert 60 - (time.monotonic() - began) - 0.1 < seen.expires_in < 60


def test_a_server_clock_that_is_set_back_does_not_prolong_min_hold(locks, server_kind):
    with Server(server_kind, movable_clock=True) as server:
        locks.on(server)
        with distributed_lock("lottery", min_hold=60):
            server.shift_clock(-3600)
        seen = held.get("lottery")
        assert seen.expires_in <= 60


@places(KIND, CLUSTER, QUORUM)
def test_a_grandchild_that_collects_its_garbage_leaves_the_event_loop_awake(place):
    """All three processes share the selector of the loop, so no copy of the loop may be closed."""

    async def use_a_lock():
        async with distributed_lock("lottery") as lease:
            assert lease.held

    def fork_once_more():
        warnings.simplefilter("ignore")  # As an error it would stop the end of the loop.
        loops.clear()
        gc.collect()
        asyncio.run(use_a_lock())
        in_fork(gc.collect)

    loops = [asyncio.new_event_loop()]  # No variable refers to it, as the child has them too.
    try:
        loops[0].run_until_complete(use_a_lock())
        in_fork(fork_once_more)
        with takes(at_most=HUNG / 2):  # At HUNG the loop wakes anyway.
            sleeping = asyncio.to_thread(time.sleep, 0.2)
            loops[0].run_until_complete(asyncio.wait_for(sleeping, HUNG))
    finally:
        loops[0].run_until_complete(loops[0].shutdown_asyncgens())  # Closes our connection.
        loops[0].run_until_complete(loops[0].shutdown_default_executor())
        loops[0].close()
