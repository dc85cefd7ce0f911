"""docs/celery.md says what the tests prove: no row without a test, no test without a row."""

import ast
import re
from pathlib import Path

from tests import ROOT
from tests.package.test_docs import DOCUMENTS, code_of

TESTS = Path(__file__).parent
EXAMPLE = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
DOCS = (ROOT / "docs" / "celery.md").read_text()


def section(title):
    """The text under a heading."""
    return DOCS.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_each_row_of_the_table_names_its_tests_and_each_test_is_named():
    proven = {
        row
        for path in TESTS.glob("test_*.py")
        for row in re.findall(r'pytest\.mark\.row\("(.+?)"\)', path.read_text())
    }
    rows = [line for line in section("What happens to a run").splitlines() if line.startswith("| ")]
    documented = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split(" | ")[-1])}
    assert documented == proven


def test_each_example_keeps_what_it_promises_when_a_worker_is_killed():
    """With min_hold or once the others skip, so the message must outlive the one that does not."""
    programs = [code for path in DOCUMENTS for code in code_of(path.read_text(), "python")]
    programs += [path.read_text() for path in (ROOT / "example_project").rglob("*.py")]
    examples = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for code in programs
        for node in ast.walk(compile(code, "", "exec", EXAMPLE))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "single_instance_task"
    ]
    kept = [one for one in examples if {"min_hold", "once"} & one.keys()]
    assert len(kept) >= 4
    assert [one for one in kept if one.get("acks_late") != "True"] == []
