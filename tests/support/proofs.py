"""Which tests prove which promise, and which rule of the protocol behind the promises.

    @pytest.mark.proves("P6", "R14")
    def test_a_newcomer_never_overtakes_a_waiter(...): ...

docs/guarantees.md says what P1 and R1 are, and lists the files that prove them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMISES = tuple(f"P{number}" for number in range(1, 11))
RULES = tuple(f"R{number}" for number in range(1, 16))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a test that claims to prove what nobody has promised."""
    for mark in metafunc.definition.iter_markers("proves"):
        if unknown := [name for name in mark.args or [None] if name not in PROMISES + RULES]:
            pytest.fail(f"{metafunc.definition.nodeid} proves {unknown}: P1 to P10, R1 to R15")


def files_that_prove() -> dict[str, set[str]]:
    """For each promise and rule, the files of the marked tests, as "faults/test_network".

    It reads the files, since a run of some of the tests has collected no others.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in _names_proven_in(path.read_text()):
            found[name].add(str(path.relative_to(ROOT / "tests").with_suffix("")))
    return dict(found)


def _names_proven_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                    assert node.name.startswith("test_"), f"{node.name} is no test"
                    yield from (ast.literal_eval(name) for name in mark.args)
