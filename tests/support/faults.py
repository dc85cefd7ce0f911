"""What the fault tests share: a look at what was sent and at what becomes of it, and forks."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest

from django_redislock import LockLost
from django_redislock.rules import scripts
from tests.support.permits import BYSTANDER
from tests.support.stored import value_of
from tests.support.waiting import HUNG

# What was sent


class Run(NamedTuple):
    """One run of a script that went through a proxy."""

    token: str
    link: int
    time: float


def runs(proxy, script):
    """The runs of *script* that were asked for, by its SHA or in full. A permit is acquired too."""
    kinds = {script, scripts.ACQUIRE_PERMIT} if script is scripts.ACQUIRE else {script}
    known = {form for kind in kinds for form in (kind.sha.encode(), kind.source)}
    found = [
        Run(command.args[2 + int(command.args[1])].decode(), command.link, command.time)
        for command in proxy.commands("EVALSHA", "EVAL")
        if command.args[0] in known
    ]
    return [run for run in found if run.token != BYSTANDER]


def calls(stats):
    return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}


# What is to be seen


def lease_of(lock):
    """The lease that somebody has by this handle; lock.lease tells a caller its own only."""
    return next((entry.lease for entry in reversed(lock._entries) if not entry.over), None)


@contextmanager
def hands_over(locks, waiter, lock):
    """Check that the block gives NAME to *waiter*, who asked by *lock*, in the step that frees it.

    How long the waiter takes to hear of it says less, and more about the machine.
    """
    yield
    value = value_of(locks)
    assert waiter.result(HUNG)
    lease = lease_of(lock)
    assert lease.id.encode() in value.split(b"|")[0]


@contextmanager
def loses(reason):
    """Check that leaving the block under a lock raises LockLost, and why."""
    with pytest.raises(LockLost) as caught:
        yield
    assert caught.value.reason == reason


LEAST_SLACK = 2.0


def slack():
    """Seconds that the machine may add: two, or more if more processes want to run than can."""
    return max(LEAST_SLACK, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def takes(*, at_least=0, at_most):
    """Check how many seconds a block takes, however it ends.

    Neither slack() is counted nor what this process stood still, as if the machine had been off.
    """
    begin, standstill = time.monotonic(), Standstill()
    standstill.start()
    try:
        yield
    finally:
        took = time.monotonic() - begin
        late = standstill.end()
        assert at_least <= took <= at_most + slack() + late, (
            f"took {took:.3f} s, not {at_least} to {at_most}; stood still for {late:.3f} s"
        )


class Standstill(threading.Thread):
    """Measures for how long nothing of this process runs: how late a thread is that only sleeps."""

    EVERY = 0.05  # Seconds.

    def __init__(self):
        super().__init__(name="standstill", daemon=True)
        self._seconds = 0.0
        self._over = threading.Event()

    def run(self):
        last, is_over = time.monotonic(), False
        while not is_over:
            is_over = self._over.wait(self.EVERY)
            now = time.monotonic()
            self._seconds += max(0.0, now - last - self.EVERY)
            last = now

    def end(self):
        """Stop measuring, and return the seconds."""
        self._over.set()
        self.join()
        return self._seconds


def block_interpreter(seconds):
    """Sleep in C code that keeps the GIL: no other thread runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


# Forks


def fork_in_c():
    """As os.fork(), but as a server written in C does it: no hook of Python runs."""
    return ctypes.PyDLL(None).fork()


def in_fork(function, timeout=HUNG, fork=os.fork):
    """Call *function* in a forked child of this process, and return its answer, as of JSON."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            os.write(writing, json.dumps(function()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writing)
    deadline, data, is_open = time.monotonic() + timeout, b"", True
    try:
        while is_open:
            if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"the forked child did not end within {timeout:g} s")
            chunk = os.read(reading, 65536)
            data += chunk
            is_open = bool(chunk)
        return json.loads(data or "null")
    finally:
        os.close(reading)
        os.waitpid(pid, 0)
