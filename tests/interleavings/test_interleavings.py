"""A search finds the races that are known to be races; longer ones by `make interleavings`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.interleavings.free_threads import Book

FRONTRUN = Path(sys.executable).with_name("frontrun")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def search(name, *, seconds):
    command = [
        FRONTRUN,
        sys.executable,
        "-m",
        "tests.interleavings",
        "--seconds",
        seconds,
        "--only",
        name,
    ]
    return run(command)


def run(command):
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_left_in_an_inbox_is_taken_in_every_interleaving():
    assert "TwoOfEach: holds" in search("TwoOfEach", seconds="5")


@pytest.mark.parametrize("control", ["ForgettingInbox", "ForgettingWatchdog"])
def test_a_race_is_found(control):
    assert f"{control}: breaks" in search(control, seconds="100")


def test_threads_and_event_loops_of_one_process_are_never_two_at_a_lock():
    said = run([sys.executable, "-m", "tests.interleavings.free_threads", "--seconds", "2"])
    assert re.fullmatch(r"GIL (on|off): [1-9]\d* leases\n", said)


def test_a_second_holder_and_a_fence_that_does_not_grow_are_told():
    book = Book()
    for fence in (1, 1):
        book.begins(fence)
    assert book.wrong == ["2 held the lock at once", "a fence did not grow"]
