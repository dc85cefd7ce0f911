"""`make demo-stale-holder` from the outside: what it shows is what docs/databases.md quotes."""

import re

import pytest

from tests import ROOT
from tests.demo.test_demo import processes_of, pytestmark, running_demo, surroundings
from tests.package.test_docs import code_of

__all__ = ["pytestmark", "surroundings"]  # The same marks, and a fixture.


def shape_of(line):
    """The line as it is in every run: without times, fences and the version of the server."""
    line = re.sub(r"^ *\d+\.\d s", "time", line)
    return re.sub(r"\d{16}", "fence", re.sub(r"Valkey .*", "Valkey", line))


@pytest.mark.proves("N1")
def test_the_update_of_a_stopped_holder_is_lost_without_the_fence_and_refused_with_it(
    surroundings, tmp_path
):
    with running_demo(surroundings, command="demo_stale_holder") as demo:
        output, _ = demo.communicate(timeout=100)
    lines = output.splitlines()
    assert lines[-1] == "RESULT sold=30 without_fence=10 with_fence=30"
    assert demo.returncode == 0
    assert processes_of(tmp_path) == {}

    (quoted,) = [
        code.splitlines()
        for code in code_of((ROOT / "docs" / "databases.md").read_text(), "")
        if "RESULT sold" in code
    ]
    shown = lines[lines.index(quoted[0]) :]
    assert [shape_of(line) for line in shown] == [shape_of(line) for line in quoted]
