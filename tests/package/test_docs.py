"""What the documents say is so: links lead somewhere, code compiles, the README's example works."""

import ast
import os
import re
from configparser import ConfigParser
from urllib.parse import unquote

import pytest

from tests import ROOT
from tests.support.processes import python

PACKAGE = ROOT / "django_redislock"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FOLDERS = ("benchmarks", "docs", "example_project", "tests")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(one for at in FOLDERS for one in (ROOT / at).rglob("*.md"))]
)

of_each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_of(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text):
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.+)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@of_each_document
def test_links_within_the_project_lead_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text()))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue  # Another site's.
        path, _, anchor = unquote(link).partition("#")
        target = document if not path else (document.parent / path).resolve()
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leads out of the project"
        assert not anchor or anchor in anchors_of(target.read_text()), f"{link}: no such heading"


def prose_of(text):
    """Without code and without what a program has measured; a span of code is one word."""
    text = re.sub(r"<!-- measured: .*?^<!-- .*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]+`", "code", without_code(text))
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def long_cells(text):
    """The cells of tables with more than 25 words."""
    rows = re.findall(r"^\|(.+)\|\s*$", prose_of(text), flags=re.MULTILINE)
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(cell.split()) > 25]


def long_sentences(text):
    """Those outside of tables with more than 30 words. A colon or a semicolon ends one too."""
    lines = ["" if line.startswith("|") else line for line in prose_of(text).splitlines()]
    items = re.split(r"\n\s*\n|\n(?=#)|\n\s*(?:[-*>]|\d+\.) ", "\n".join(lines))
    ends = r"(?<=[.?!:;])[)*\"]*\s+"
    sentences = [one for item in items for one in re.split(ends, item.strip())]
    return [one for one in sentences if len(one.split()) > 30]


@of_each_document
def test_no_cell_of_a_table_and_no_sentence_is_long(document):
    text = document.read_text()
    assert long_cells(text) == []
    assert long_sentences(text) == []


def test_long_cells_and_sentences_are_found():
    cell, sentence = "word " * 26, "word " * 31
    code = f"- `{sentence}`\n\n```\n{sentence}\n```\n"
    text = f"| a | {cell}|\n\nShort. {sentence}\n\n{code}"
    assert long_cells(text) == [cell.strip()]
    assert long_sentences(text) == [sentence.strip()]


@of_each_document
def test_python_in_documents_compiles(document):
    for code in code_of(document.read_text(), "python"):
        compile(code, str(document), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@of_each_document
def test_make_targets_in_documents_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", document.read_text(), flags=re.MULTILINE)
    assert set(named) <= targets


def lines_of_definitions(path):
    """The lines of each class and function in a file, methods as "Lock.release"; "" is all."""
    lines = path.read_text().splitlines()
    found = {"": lines}
    if path.suffix == ".lua":
        for start, line in enumerate(lines):
            if name := re.match(r"local function (\w+)", line):
                found[name[1]] = lines[start : lines.index("end", start) + 1]
        return found

    def look(parent, prefix):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                start = min(one.lineno for one in (node, *node.decorator_list))
                found[prefix + node.name] = lines[start - 1 : node.end_lineno]
                look(node, f"{prefix}{node.name}.")

    look(ast.parse("\n".join(lines)), "")
    return found


def named_in_architecture(pattern):
    """What stands there between backquotes and matches, as the groups of *pattern*."""
    text = " ".join(without_code(ARCHITECTURE.read_text()).split())
    spans = re.findall(r"`([^`]+)`", text)
    return [found.groups() for span in spans if (found := re.fullmatch(pattern, span))]


CODE = r"((?!tests/)[\w/]+\.(?:py|lua))(?:: ([\w.]+))?"


def test_every_file_and_function_in_the_architecture_exists():
    named = named_in_architecture(CODE)
    assert len(named) > 50
    missing = []
    for name, definition in named:
        path = PACKAGE / name
        if not path.is_file() or (definition or "") not in lines_of_definitions(path):
            missing.append(f"{name}: {definition}")
    assert missing == []


def test_each_idea_of_the_ten_second_questions_has_one_place():
    table = ARCHITECTURE.read_text().partition("## Ten-second questions")[2].partition("\n## ")[0]
    _, *places = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", table, flags=re.MULTILINE)
    assert len(places) > 20
    assert [place for place in places[1:] if not re.fullmatch(f"`{CODE}`", place)] == []
    assert len(set(places)) == len(places)


def test_every_method_that_the_architecture_names_without_its_file_exists():
    files = [*PACKAGE.rglob("*.py")]
    defined = {name for path in files for name in lines_of_definitions(path)}
    methods = {name for (name,) in named_in_architecture(r"([A-Z]\w+\.\w+)\(\)")}
    assert methods - defined == set()


def test_the_picture_of_the_rooms_is_that_of_the_layers():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:package"]["layers"].strip().splitlines()
    (picture,) = [one for one in code_of(ARCHITECTURE.read_text(), "") if "rules/" in one]
    drawn = [re.split(r"\s{3,}", line)[0] for line in picture.splitlines()]
    shown = [sorted(re.findall(r"\w+", line)) for line in drawn]
    assert shown[: len(layers)] == [sorted(re.findall(r"\w+", layer)) for layer in layers]


def test_the_glossary_has_few_words_each_once_and_each_in_use():
    """What one file alone says is explained there."""
    glossary = CONTRIBUTING.read_text().partition("## Words of the code")[2]
    _, *words = re.findall(r"^\| ([a-z ]+) \|", glossary, flags=re.MULTILINE)
    assert 30 < len(words) <= 50
    assert words == sorted(set(words))
    files = [path.read_text() for kind in ("py", "lua") for path in PACKAGE.rglob(f"*.{kind}")]
    for word in words:
        is_used = re.compile(rf"(?<![a-z]){word.replace(' ', '[ _-]')}", flags=re.IGNORECASE)
        assert sum(bool(is_used.search(text)) for text in files) > 1, word


def words_of(text):
    """How many there are, without the marks of tables."""
    return len(re.findall(r"\S*\w\S*", text))


def test_the_start_page_is_read_in_minutes():
    assert words_of((ROOT / "README.md").read_text()) <= 900


@pytest.mark.slow
def test_the_example_of_the_readme_works_as_pasted(server, tmp_path):
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
    python("manage.py", "migrate", cwd=tmp_path, env=environment)
    outputs = [python("-c", run, cwd=tmp_path, env=environment) for _ in range(2)]
    first, second = (output.stdout + output.stderr for output in outputs)
    assert re.fullmatch(r"drawing under fence \d+\nNone\n", first)
    assert re.search(r"'skipped': 'done', 'lock': 'tasks.run_lottery:\d{4}-\d\d-\d\d'", second)
