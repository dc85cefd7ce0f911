"""The tables of metrics and loggers in docs/monitoring.md are those of the code.

--write-golden writes them anew. Each line of the log that warns is in docs/troubleshooting.md, see
tests/package/test_troubleshooting.py; the others are in a table of their own, see test_logs.py.
"""

import re

import pytest

from django_redislock.management.metrics import GAUGES
from tests import ROOT
from tests.package.test_logs import logged

PAGE = ROOT / "docs" / "monitoring.md"


def metrics():
    for name, text in GAUGES.items():
        yield f"| `{name}` | {text.rstrip('.')} |"


def loggers():
    """Each logger with its levels from WARNING on."""
    levels = {}
    for event in logged():
        for name in event.loggers.split(", "):
            levels.setdefault(name, set()).update(re.findall("WARNING|ERROR", event.levels))
    for name, found in sorted(levels.items()):
        if found:
            yield f"| `{name}` | {', '.join(sorted(found))} |"


@pytest.mark.parametrize("table", [metrics, loggers], ids=lambda one: one.__name__)
def test_the_table_is_that_of_the_code(request, table):
    text, lines = PAGE.read_text(), "\n".join(table())
    found = re.search(rf"<!-- {table.__name__} -->\n.*\n.*\n((?:\|.*\n)*)", text)
    if request.config.getoption("write_golden"):
        PAGE.write_text(text[: found.start(1)] + lines + "\n" + text[found.end(1) :])
    else:
        assert found[1].rstrip() == lines
