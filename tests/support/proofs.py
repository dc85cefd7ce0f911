"""Which tests prove which claim: a promise, a rule of the protocol behind it, or a limit.

    @pytest.mark.proves("P6", "R14")
    def test_a_newcomer_never_overtakes_a_waiter(...): ...

docs/guarantees.md says what P1 and N1 are, docs/protocol.md what R1 is. tests/CLAIMS.md lists the
tests of each; `python -m tests.support.claims` writes it. `pytest --proves P1` runs those of P1.
"""

import ast
from collections import Counter, defaultdict

import pytest

from tests import ROOT

PROMISES = tuple(f"P{number}" for number in range(1, 11))
RULES = tuple(f"R{number}" for number in range(1, 16))
LIMITS = tuple(f"N{number}" for number in range(1, 8))
KNOWN = PROMISES + RULES + LIMITS


def pytest_addoption(parser):
    parser.addoption(
        "--proves", metavar="NAME", choices=KNOWN, help="only the tests of this claim, such as P1"
    )


def pytest_generate_tests(metafunc):
    """Refuse a test that claims to prove what nobody has claimed."""
    for mark in metafunc.definition.iter_markers("proves"):
        if unknown := [name for name in mark.args or [None] if name not in KNOWN]:
            pytest.fail(
                f"{metafunc.definition.nodeid} proves {unknown}: P1 to P10, R1 to R15, N1 to N7"
            )


def pytest_collection_modifyitems(config, items):
    if name := config.getoption("proves"):
        others = [
            item
            for item in items
            if not any(name in mark.args for mark in item.iter_markers("proves"))
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def proofs_of_claims():
    """For each claim, how many marked tests are in which file, as "faults/test_network".

    It reads the files, since a run of some of the tests has collected no others.
    """
    found = defaultdict(Counter)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _names_proven_in(path.read_text()):
            found[name][str(path.relative_to(ROOT / "tests").with_suffix(""))] += 1
    return dict(found)


def _names_proven_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                    assert node.name.startswith("test_"), f"{node.name} is no test"
                    yield from (ast.literal_eval(name) for name in mark.args)
