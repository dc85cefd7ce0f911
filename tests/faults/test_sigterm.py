"""release_on_sigterm: a process that is told to end frees its locks first."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from django_redislock import distributed_lock, held
from django_redislock.management import release_on_sigterm
from django_redislock.rules import flows
from tests.support.backends import UNHURRIED
from tests.support.others import waiters
from tests.support.processes import say
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

TTL = 60  # Seconds: that no test waits for.


def go_on():
    """In a child, until a signal ends it."""
    while True:
        time.sleep(0.01)


@release_on_sigterm()
def hold() -> None:
    """In a child."""
    with distributed_lock("lottery", ttl=TTL):
        say("held")
        go_on()


def hold_and_fork():
    """In a child, whose own child inherits the block."""
    with release_on_sigterm(), distributed_lock("lottery", ttl=TTL):
        pid = os.fork()
        if pid == 0:
            try:
                # Not before: Python drops what signals come while it starts a forked child.
                say(os.getpid())
                go_on()
            finally:
                os._exit(1)  # It must not come here: this is the parent's to clean up.
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        go_on()


async def ahold():
    """In a child."""
    with release_on_sigterm():
        async with distributed_lock("lottery", ttl=TTL):
            say("held")
            await asyncio.sleep(TTL)


def hold_with_care():
    """In a child: SIGTERM comes once more while it cleans up."""
    with release_on_sigterm(), distributed_lock("lottery", ttl=TTL):
        try:
            say("held")
            go_on()
        finally:
            say("cleaning up")
            go_on()


def wait():
    """In a child, which has time to leave the queue."""
    flows.UNDO_WITHIN = HUNG
    with release_on_sigterm():
        say("waiting")
        with distributed_lock("lottery", wait=TTL):
            pass


@pytest.mark.proves("R4")
@pytest.mark.parametrize("work", [hold, ahold])
def test_sigterm_frees_the_lock_at_once_and_ends_the_process_with_143(work, locks, spawn):
    child = spawn(work)
    assert child.read() == "held"
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 143
    assert held.get("lottery") is None
    assert distributed_lock("lottery", wait=0).acquire()


@pytest.mark.proves("R4")
def test_sigterm_while_it_waits_leaves_the_queue(locks, spawn):
    locks.configure(OPTIONS=UNHURRIED)
    with distributed_lock("lottery"):
        child = spawn(wait)
        wait_until(lambda: waiters("lottery"))
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait() == 143
        assert waiters("lottery") == 0


def test_a_second_sigterm_still_frees_the_lock(locks, spawn):
    child = spawn(hold_with_care)
    for said in ("held", "cleaning up"):
        assert child.read() == said
        os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 143
    assert held.get("lottery") is None


def test_a_forked_child_dies_as_it_would_without_it(locks, spawn):
    child = spawn(hold_and_fork)
    os.kill(child.read(), signal.SIGTERM)
    assert child.read() == -signal.SIGTERM
    assert held.get("lottery") is not None
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait() == 143
    assert held.get("lottery") is None


def test_afterwards_and_in_another_thread_sigterm_does_what_it_did_before():
    before = signal.getsignal(signal.SIGTERM)

    def handler():
        with release_on_sigterm():
            return signal.getsignal(signal.SIGTERM)

    assert handler() is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert in_thread(handler).result(HUNG) is before


async def awaited():
    """A body that runs after the call."""


def generates():
    """Another one."""
    yield 1


@pytest.mark.parametrize("function", [awaited, generates])
def test_it_decorates_no_function_whose_body_runs_after_the_call(function):
    with pytest.raises(TypeError, match=rf"decorate {function.__name__}\(\).*asyncio\.run"):
        release_on_sigterm()(function)
