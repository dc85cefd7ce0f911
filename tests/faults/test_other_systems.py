"""Where a system lacks what Linux has: /proc, prctl(), CLOCK_BOOTTIME, eventfd(). As on macOS."""

import asyncio
import sys

from django.core.management import call_command

from django_redislock import distributed_lock, doctor, held
from django_redislock.management import guard
from tests.support.processes import say
from tests.support.waiting import wait_until
from tests.support.ways import Blocking, InLoop

HIDDEN = """
import os, pathlib, sys, time, zoneinfo  # The last looks for the platform that Python was made for.
sys.platform = "freebsd14"
vars(time).pop("CLOCK_BOOTTIME", None)
vars(os).pop("eventfd", None)

def hide(name):
    shown = getattr(pathlib.Path, name)
    def hidden(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(str(path))
        return shown(path, *args, **kwargs)
    setattr(pathlib.Path, name, hidden)

for name in ("open", "read_bytes", "read_text", "readlink"):
    hide(name)
shown = pathlib.Path.glob
pathlib.Path.glob = lambda path, *args: () if str(path) == "/proc" else shown(path, *args)
"""


def use_locks():
    with Blocking() as threads, InLoop() as tasks:
        for caller in (threads, tasks):
            with caller.block(distributed_lock("lottery", ttl=0.5)) as lease:
                waiting = threads.begin(waiter := distributed_lock("lottery"))
                wait_until(lambda lease=lease: lease.renewals > 1)
                (listed,) = held.list()
                assert (listed.name, listed.id) == ("lottery", lease.id)
            assert waiting.result()
            threads.release(waiter)
    levels = {one.level for one in doctor.examine("default")}
    say([asyncio.get_event_loop_policy().__class__.__module__, "fail" in levels])


def run_programs():
    program = f"{HIDDEN}\nimport runpy; runpy.run_path({guard.__file__!r}, run_name='__main__')"
    guard.command = lambda pipe, grace: [sys.executable, "-c", program, str(pipe), str(grace)]
    ended = []
    for status in (0, 3):
        try:
            call_command("locks", "run", "job", "--", "sh", "-c", f"exit {status}")
        except SystemExit as end:
            ended.append(end.code)
        else:
            ended.append(0)
    say([ended, len(held.list())])


def test_locks_are_taken_renewed_awaited_and_listed_without_what_only_linux_has(locks, spawn):
    assert spawn(use_locks, prelude=HIDDEN).read() == ["asyncio.unix_events", False]


def test_locks_run_runs_a_program_without_what_only_linux_has(locks, spawn):
    assert spawn(run_programs, prelude=HIDDEN).read() == [[0, 3], 0]
