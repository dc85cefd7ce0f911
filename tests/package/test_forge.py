"""What those who host the repository show to who takes part: forms for issues, hooks for git."""

import re

import pytest
import yaml

from tests import ROOT

FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml"))


def read(path):
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_github_accepts(path):
    form = read(path)
    assert form.keys() <= {"name", "description", "labels", "body"}
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert ids
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert "value" in field["attributes"] or "label" in field["attributes"]
        assert field.get("validations", {}).keys() <= {"required"}


def test_a_bug_comes_with_versions_and_what_the_doctor_says():
    (bug,) = (read(path) for path in FORMS if path.stem == "bug")
    required = {
        field["id"]: field["attributes"]["label"]
        for field in bug["body"]
        if field.get("validations", {}).get("required")
    }
    assert {"happened", "reproduce", "versions", "doctor"} <= required.keys()
    assert "manage.py locks doctor --json" in required["doctor"]


def test_what_the_forms_name_exists():
    for path in [*FORMS, ROOT / ".github" / "pull_request_template.md"]:
        for name in re.findall(r"[\w./]+\.md\b", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.name}: {name}"


def test_the_hooks_of_git_need_no_network():
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/"), hook["id"]


def test_the_hooks_check_what_make_lint_checks():
    entries = [
        hook["entry"] for hook in read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    ]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for command in re.findall(r"\$\(BIN\)/(ruff \w+)", recipe):
        assert any(entry.startswith(f".venv/bin/{command} ") for entry in entries), command
