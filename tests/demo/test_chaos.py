"""`make demo-chaos` from the outside: workers killed at random, each lottery drawn once."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import ROOT
from tests.demo.test_demo import MANAGE, processes_of, surroundings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["surroundings"]  # A fixture.


@pytest.mark.proves("P8")
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_however_many_workers_die_each_lottery_is_drawn_once(
    surroundings: dict[str, str],
    tmp_path: Path,
) -> None:
    demo = subprocess.run(
        [sys.executable, str(MANAGE), "demo_chaos", "--lotteries", "40"],
        cwd=ROOT,
        env=surroundings,
        stdout=subprocess.PIPE,
        text=True,
        timeout=170,
        check=True,
    )
    lines = demo.stdout.splitlines()
    assert lines[-1] == "RESULT lotteries=40 drawn_once=40 drawn_twice=0 lost=0"
    assert any(" killed worker-" in line for line in lines)
    assert processes_of(tmp_path) == {}
