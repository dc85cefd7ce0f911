"""setup.cfg, the matrix and the documents name the same versions."""

import re
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement

from tests import ROOT

CONFIG = ConfigParser(interpolation=None)
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
VERSIONS = (ROOT / "docs" / "versions.md").read_text()
CALLED = {"Django": "Django", "redis": "redis-py", "celery": "Celery"}


def lines(section, key):
    return [line for line in CONFIG[section][key].splitlines() if line and line[0] != "#"]


def classified(what):
    named = [re.fullmatch(rf"{what} :: (\d\.\d+)", one) for one in lines("metadata", "classifiers")]
    return [one[1] for one in named if one]


def oldest():
    """The lowest version of each that setup.cfg allows."""
    required = lines("options", "install_requires") + lines("options.extras_require", "celery")
    found = {"Python": CONFIG["options"]["python_requires"].removeprefix(">=")}
    for one in map(Requirement, required):
        if one.name in CALLED:
            found[CALLED[one.name]] = str(one.specifier).removeprefix(">=")
    return found


def table(heading):
    """The rows of the table below a heading of the page of versions."""
    section = VERSIONS.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_page_of_versions_names_the_lowest_that_may_be_installed():
    rows = {row[0]: row[1] for row in table("What it needs")}
    assert rows == oldest() | {"Redis": "7.0", "Valkey": rows["Valkey"]}


@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "docs/getting-started.md"])
def test_a_document_names_no_other_lowest_version(document):
    text = " ".join((ROOT / document).read_text().split())
    for name, version in oldest().items():
        assert {*re.findall(rf"{name} (\d+\.\d+)\b(?! to)", text)} <= {version}, name


def test_the_classifiers_name_the_versions_that_were_run():
    pythons = classified("Programming Language :: Python")
    djangos = classified("Framework :: Django")
    newest = {row[0]: row[2] for row in table("What it needs")}
    assert (pythons[0], djangos[0]) == (oldest()["Python"], oldest()["Django"])
    assert (pythons[-1], djangos[-1]) == (newest["Python"], newest["Django"])
    assert [row[0] for row in table("Pythons and libraries")] == pythons


def test_the_matrix_has_no_versions_of_its_own():
    code = (ROOT / "noxfile.py").read_text().split('"""', 2)[2]
    assert 'lines("metadata", "classifiers")' in code
    assert 'lines("options", "install_requires")' in code
    assert re.findall(r"\d+\.\d+", code) == ["2026.2"]  # Of nox.
