"""A search finds the races that are known to be races; longer ones by `make interleavings`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

FRONTRUN = Path(sys.executable).with_name("frontrun")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def search(name: str, *, seconds: str) -> str:
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
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_left_in_an_inbox_is_taken_in_every_interleaving() -> None:
    assert "TwoOfEach: holds" in search("TwoOfEach", seconds="5")


@pytest.mark.parametrize("control", ["ForgettingInbox", "ForgettingWatchdog"])
def test_a_race_is_found(control: str) -> None:
    assert f"{control}: breaks" in search(control, seconds="100")
