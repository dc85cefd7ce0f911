"""The option and the files of tests/golden/."""

from pathlib import Path

import pytest

WRITTEN = Path(__file__).parent


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
