"""The option and the files of tests/golden/."""

import re
from pathlib import Path

import pytest

from tests import ROOT

WRITTEN = Path(__file__).parent
TABLE = "<!-- {} -->\n.*\n.*\n((?:[|].*\n)*)"  # What stands below its two lines of headers.


def pytest_addoption(parser):
    parser.addoption("--write-golden", action="store_true", help="write down anew what is shown")


@pytest.fixture
def golden(request):
    """Compare a text with the one that was written down."""

    def compare(name, text):
        text = "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n") + "\n"
        if request.config.getoption("write_golden"):
            (WRITTEN / name).write_text(text)
        assert text == (WRITTEN / name).read_text()

    return compare


@pytest.fixture
def documented(request):
    """Compare lines with those of a document, in the place of a mark."""

    def compare(page, mark, lines, place=TABLE):
        path, told = ROOT / "docs" / page, "".join(f"{line}\n" for line in lines)
        text = path.read_text()
        found = re.search(place.format(mark), text)
        if request.config.getoption("write_golden"):
            path.write_text(text[: found.start(1)] + told + text[found.end(1) :])
        else:
            assert found[1] == told

    return compare
