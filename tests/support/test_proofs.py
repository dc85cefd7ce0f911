"""docs/guarantees.md names what proves each promise: none without a test, no test left out."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.support.proofs import PROMISES, RULES, files_that_prove

pytest_plugins = ["pytester"]

DOCS = (ROOT / "docs" / "guarantees.md").read_text()


def test_each_promise_and_rule_names_the_files_that_prove_it_and_no_others() -> None:
    rows = re.findall(r"^\| ([PR]\d+) \| .+ \| (.+) \|$", DOCS, flags=re.MULTILINE)
    documented = {name: re.findall(r"`(.+?)`", files) for name, files in rows}
    assert documented == {name: sorted(files) for name, files in files_that_prove().items()}
    assert tuple(documented) == PROMISES + RULES


@pytest.mark.parametrize("names", ['"P11"', '"R1", "R0"', ""])
def test_a_test_of_what_nobody_promised_is_refused(names: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["tests.support.proofs"]')
    pytester.makepyfile(f"import pytest\n@pytest.mark.proves({names})\ndef test_it(): pass")
    result = pytester.runpytest("-o", "asyncio_default_fixture_loop_scope=function")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it proves *P1 to P10, R1 to R15*"])
