"""What the documents say is so: links lead somewhere, code compiles, the README's example works."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from tests import ROOT
from tests.support.processes import python

if TYPE_CHECKING:
    from tests.support.servers import Server

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("example_project/*.md")]
)

of_each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_of(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@of_each_document
def test_links_within_the_project_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text()))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue  # Another site's.
        path, _, anchor = unquote(link).partition("#")
        target = document if not path else (document.parent / path).resolve()
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leads out of the project"
        assert not anchor or anchor in anchors_of(target.read_text()), f"{link}: no such heading"


@of_each_document
def test_python_in_documents_compiles(document: Path) -> None:
    for code in code_of(document.read_text(), "python"):
        compile(code, str(document), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@of_each_document
def test_make_targets_in_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", document.read_text(), flags=re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.slow
def test_the_example_of_the_readme_works_as_pasted(server: Server, tmp_path: Path) -> None:
    python("-m", "django", "startproject", "shop", str(tmp_path))
    example = code_of((ROOT / "README.md").read_text(), "python")[0]
    for part in re.split(r"^# (?=\w+\.py$)", example, flags=re.MULTILINE):
        name, _, code = part.partition("\n")
        if not code:
            continue
        where = tmp_path / "shop" / name if name == "settings.py" else tmp_path / name
        with where.open("a") as file:
            file.write(code.replace("redis://127.0.0.1:6379/0", server.url))
    run = "import django; django.setup(); import tasks\nprint(tasks.run_lottery())"
    path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": path}
    outputs = [python("-c", run, cwd=tmp_path, env=environment) for _ in range(2)]
    first, second = (output.stdout + output.stderr for output in outputs)
    assert re.fullmatch(r"drawing under fence \d+\nNone\n", first)
    assert re.search(r"'skipped': 'busy'.*'holder': '.+'", second)
