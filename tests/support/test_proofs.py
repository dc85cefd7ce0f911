"""tests/CLAIMS.md names what proves each claim: none without a test, no test left out."""

import pytest

from tests.support.claims import (
    PAGE,
    README,
    claims_of_the_docs,
    claims_of_the_readme,
    files_of_the_readme,
    page,
)
from tests.support.proofs import KNOWN, proofs_of_claims

pytest_plugins = ["pytester"]


def test_each_claim_has_a_test_and_no_test_proves_anything_else():
    assert set(claims_of_the_docs()) == set(KNOWN) == set(proofs_of_claims())


def test_each_claim_of_the_readme_names_what_proves_it():
    assert len(README) > 10
    assert list(claims_of_the_readme()) == list(README)
    named = {one for proofs in README.values() for one in proofs.split() if "/" not in one}
    assert named <= set(KNOWN)
    assert [str(file) for file in files_of_the_readme() if not file.exists()] == []


def test_the_page_is_that_of_today():
    assert PAGE.read_text() == page(), "run python -m tests.support.claims"


@pytest.fixture
def collect(pytester):

    def run(source, *arguments):
        pytester.makeconftest('pytest_plugins = ["tests.support.proofs"]')
        pytester.makepyfile(f"import pytest\n{source}")
        scope = "asyncio_default_fixture_loop_scope=function"
        return pytester.runpytest("--collect-only", "-o", scope, *arguments)

    return run


@pytest.mark.parametrize("names", ['"P11"', '"R1", "R0"', '"N8"', ""])
def test_a_test_of_what_nobody_claimed_is_refused(names, collect):
    result = collect(f"@pytest.mark.proves({names})\ndef test_it(): pass")
    result.stdout.fnmatch_lines(["*test_it proves *P1 to P10, R1 to R15, N1 to N7*"])
    assert result.ret != 0


def test_the_tests_of_one_claim_run_alone(collect):
    result = collect(
        '@pytest.mark.proves("P1", "R2")\ndef test_one(): pass\n'
        '@pytest.mark.proves("P2")\ndef test_two(): pass\n'
        "def test_three(): pass\n",
        *("--proves", "R2"),
    )
    result.stdout.fnmatch_lines(["*test_one*"])
    result.stdout.no_fnmatch_line("*Function test_t*")
