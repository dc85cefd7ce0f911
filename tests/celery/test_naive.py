"""The tests of the table are worth something: with a naive lock, each of them fails.

project/naive.py has what people write: ``SET NX EX`` around the body, return if it is there, delete
it in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

# Each for a test, so that none takes longer than others; each test of the table is in one of them.
PARTS = ["TestCrash", "test_delivery and not TestCrash", "not test_delivery and not TestCrash"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_with_a_naive_lock_every_test_of_the_table_fails(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "row", "-k", part, "-q", "-rA", "--tb=no"]
    tests = map(str, sorted((ROOT / "tests" / "celery").glob("test_*.py")))
    run = subprocess.run(
        [*command, "-n", "0", "-p", "no:randomly", *tests],
        check=False,
        env=os.environ | {"TESTS_NAIVE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    outcomes = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in run.stdout.splitlines()
        if line.startswith(("PASSED ", "FAILED ", "ERROR "))
    }
    passed = sorted(test for test, outcome in outcomes.items() if outcome == "PASSED")
    assert len(outcomes) > 5, run.stdout
    assert passed == []
