"""Tables and lists in the documents are those of the code. --write-golden writes them anew.

Each line of the log that warns is in docs/troubleshooting.md, see
tests/package/test_troubleshooting.py; the others are in a table of their own, see test_logs.py.
"""

import inspect
import json
import re
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import django_redislock
from django_redislock import LockError
from django_redislock.celery.options import TaskArguments
from django_redislock.conf import Conf
from django_redislock.jobs.options import JobArguments
from django_redislock.management.metrics import GAUGES
from django_redislock.options import LockArguments, options_in
from tests.package.test_logs import logged


def rows(arguments, but_of=()):
    """Those of a table, without those that another has too."""
    others = {row.meaning for row in options_in(but_of).values()} if but_of else set()
    for name, row in options_in(arguments).items():
        if row.meaning not in others:
            yield f"| `{name}` | {default_of(row.default)} | {meaning(row)} |"


def meaning(option):
    return option.brief.replace("``", "`")


def default_of(value):
    return "" if value is None else f"`{value!r}`".replace("'", '"')


def flags():
    for name, row in options_in(JobArguments).items():
        if row.shell:
            value = row.shell.replace("|inf", " or inf")
            yield f"| `--{name.replace('_', '-')} {value}` | {meaning(row)} |"


def settings():
    for one in fields(Conf):
        if "brief" in one.metadata:
            default = None if one.default in {MISSING, ""} else one.default
            yield f"| `{one.name.upper()}` | {default_of(default)} | {one.metadata['brief']} |"


def errors():
    """Of each error what its docstring says in its first paragraph, and its attributes."""
    public = [getattr(django_redislock, name) for name in django_redislock.__all__]
    for error in public:
        if isinstance(error, type) and issubclass(error, LockError):
            says, _, more = inspect.getdoc(error).partition("\n\n")
            attributes = re.findall(r"^    (\w+): ", more.partition("Attributes:")[2], re.MULTILINE)
            named = ", ".join(f"`{one}`" for one in attributes)
            yield f"| `{error.__name__}` | {' '.join(says.split())} | {named} |"


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


@pytest.mark.parametrize(
    ("page", "mark", "lines"),
    [
        ("locks.md", "options", rows(LockArguments)),
        ("jobs.md", "options", rows(JobArguments, but_of=LockArguments)),
        ("celery.md", "options", rows(TaskArguments, but_of=JobArguments)),
        ("commands.md", "options", flags()),
        ("settings.md", "options", settings()),
        ("locks.md", "errors", errors()),
        ("monitoring.md", "metrics", metrics()),
        ("monitoring.md", "loggers", loggers()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_is_that_of_the_code(documented, page, mark, lines):
    documented(page, mark, lines)


def test_each_line_has_the_logger_and_the_levels_that_were_written_down(golden):
    golden("logs.txt", "\n".join(f"{one.loggers} | {one.levels} | {one.text}" for one in logged()))


# --- JSON -----------------------------------------------------------------------------------------

# What has these keys, and where it stands in the document that an act has printed.
OBJECTS = {
    "A held lock (`list`, `watch`; `clean` adds `released`)": ("list", ""),
    "`show` adds, and leaves out most of a free lock": ("show import:7", ""),
    "`owner`, wherever it stands": ("list", ".owner"),
    "`waiting`": ("show import:7", ".waiting"),
    "`past`": ("show report:False", ".past"),
    "A record (`runs`)": ("runs", ""),
    "A run": ("runs", ".last_success"),
    "`by_job`": ("runs", ".by_job"),
    "`explain`": ("explain import:7", ""),
    "A fact": ("explain import:7", ".facts"),
    "`release`": ("release repor:False --yes", ""),
    "`resume`": ("resume nobody", ""),
}
SAID_BEFORE = {"`show` adds, and leaves out most of a free lock": ("list", "")}


def printed():
    """The keys of each kind of object that an act has printed, by (act, place)."""
    found = {}
    text = Path(__file__).with_name("json.txt").read_text()
    for part in re.split(r"^[$] ", text, flags=re.MULTILINE)[1:]:
        act, _, document = part.partition("\n")
        if document.startswith(("[", "{")):
            unmasked = re.sub(r"(?<=[ \[\n])<\w+>", "0", document)
            look(json.JSONDecoder().raw_decode(unmasked)[0], act, "", found)
    return found


def look(value, act, place, found):
    if isinstance(value, list):
        for one in value:
            look(one, act, place, found)
    elif isinstance(value, dict):
        found.setdefault((act, place), dict.fromkeys(value))
        for key, one in value.items():
            look(one, act, f"{place}.{key}", found)


def objects():
    found = printed()
    for title, at in OBJECTS.items():
        before = found[SAID_BEFORE[title]] if title in SAID_BEFORE else ()
        keys = [f"`{key}`" for key in found[at] if key not in before]
        line = f"- {title}: {', '.join(keys)}."
        yield textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False)


def test_the_keys_in_the_document_are_those_printed(documented):
    place = "<!-- {} -->\n\n((?:.*\n)*?)\n<!-- end of json -->"
    documented("locks-command.md", "json", objects(), place)
