"""`make demo-chaos` from the outside: much goes wrong, and each lottery is drawn once."""

import re

import pytest

pytestmark = pytest.mark.timeout(180)


def drawn(demos, fault, *, workers, lotteries, guard="on"):
    """Run the demo to its end, which is to be a good one: its lines."""
    options = {"fault": fault, "workers": workers, "lotteries": lotteries, "guard": guard}
    status, lines = demos.run("demo_chaos", *(f"--{name}={one}" for name, one in options.items()))
    assert status == 0
    return lines


@pytest.mark.proves("P8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strike", "workers", "lotteries"),
    [
        ("kill", "killed worker-", 3, 30),
        ("pause", "stopped worker-", 3, 30),
        ("flush", "FLUSHDB", 2, 20),
    ],
)
def test_whatever_goes_wrong_each_lottery_is_drawn_once(demos, fault, strike, workers, lotteries):
    lines = drawn(demos, fault, workers=workers, lotteries=lotteries)
    assert lines[-1] == f"RESULT lotteries={lotteries} drawn_once={lotteries} drawn_twice=0 lost=0"
    assert any(strike in line for line in lines)


@pytest.mark.slow
def test_winners_that_are_stopped_draw_twice_without_the_database(demos):
    lines = drawn(demos, "pause", workers=3, lotteries=30, guard="off")
    (drawn_twice,) = re.findall(r"RESULT .* drawn_twice=(\d+) lost=0", lines[-1])
    assert int(drawn_twice) > 0


@pytest.mark.slow
def test_what_the_demo_does_not_know_is_refused(demos):
    for argument, known in (("--fault", "'kill', 'pause', 'flush'"), ("--guard", "'on', 'off'")):
        status, lines = demos.run("demo_chaos", argument, "flood")
        assert status != 0
        says = f"argument {argument}: invalid choice: 'flood' (choose from {known})"
        assert says in lines[-1]
