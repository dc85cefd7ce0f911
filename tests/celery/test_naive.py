"""The tests of the table are worth something: with a naive lock, each of them fails.

project/naive.py has what people write: ``SET NX EX`` around the body, return if it is there, delete
it in the end.
"""

import os
import subprocess
import sys

import pytest

from tests import ROOT

# At the same time, each with workers of its own; each test of the table is in one of them.
PARTS = ["test_delivery", "not test_delivery"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_with_a_naive_lock_every_test_of_the_table_fails(part):
    command = [sys.executable, "-m", "pytest", "-m", "row", "-k", part, "-q", "-rA", "--tb=no"]
    files = sorted((ROOT / "tests" / "celery").glob("test_*.py"))
    tests = [str(file) for file in files if "@pytest.mark.row(" in file.read_text()]
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
