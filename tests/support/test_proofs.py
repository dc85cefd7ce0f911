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


def test_a_test_of_what_nobody_promised_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = proves\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest('pytest_plugins = ["tests.support.proofs"]')
    claims = {"test_unknown": '"P11"', "test_partly": '"R1", "R0"', "test_nothing": ""}
    for name, names in claims.items():
        test = f"import pytest\n@pytest.mark.proves({names})\ndef {name}(): pass"
        pytester.makepyfile(**{name: test})
    result = pytester.runpytest()
    result.assert_outcomes(errors=len(claims))
    for name in claims:
        result.stdout.fnmatch_lines_random([f"*::{name} proves *P1 to P10, R1 to R15*"])
