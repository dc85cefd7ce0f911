"""`make demo-chaos` from the outside: much goes wrong, and each lottery is drawn once."""

import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.demo.test_demo import MANAGE, processes_of, surroundings

__all__ = ["surroundings"]  # A fixture.


def lines_of_chaos(surroundings, *arguments, lotteries):
    """Run the demo to its end, which is to be a good one."""
    command = [sys.executable, str(MANAGE), "demo_chaos", "--lotteries", str(lotteries)]
    demo = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=surroundings,
        stdout=subprocess.PIPE,
        text=True,
        timeout=170,
        check=True,
    )
    return demo.stdout.splitlines()


@pytest.mark.proves("P8")
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "strike", "lotteries"),
    [("kill", "killed worker-", 40), ("pause", "stopped worker-", 30), ("flush", "FLUSHDB", 20)],
)
def test_whatever_goes_wrong_each_lottery_is_drawn_once(
    surroundings, tmp_path, fault, strike, lotteries
):
    lines = lines_of_chaos(surroundings, "--fault", fault, lotteries=lotteries)
    drawn = f"RESULT lotteries={lotteries} drawn_once={lotteries} drawn_twice=0 lost=0"
    assert lines[-1] == drawn
    assert any(strike in line for line in lines)
    assert processes_of(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_winners_that_are_stopped_draw_twice_without_the_database(surroundings):
    lines = lines_of_chaos(surroundings, "--fault", "pause", "--guard", "off", lotteries=30)
    (drawn_twice,) = re.findall(r"RESULT .* drawn_twice=(\d+) lost=0", lines[-1])
    assert int(drawn_twice) > 0


@pytest.mark.parametrize(
    ("argument", "known"), [("--fault", "'kill', 'pause', 'flush'"), ("--guard", "'on', 'off'")]
)
def test_what_the_demo_does_not_know_is_refused(surroundings, argument, known):
    demo = subprocess.run(
        [sys.executable, str(MANAGE), "demo_chaos", argument, "flood"],
        env=surroundings,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert demo.returncode != 0
    assert f"argument {argument}: invalid choice: 'flood' (choose from {known})" in demo.stderr
