"""Tables in the documents are those of the code. --write-golden writes them anew."""

import inspect
import re
from dataclasses import MISSING, fields

import pytest

import django_redislock
from django_redislock import LockError
from django_redislock.celery.options import TaskArguments
from django_redislock.conf import Conf
from django_redislock.jobs.options import JobArguments
from django_redislock.options import LockArguments, options_in
from tests import ROOT


def meaning(option):
    return option.brief.replace("``", "`")


def default_of(value):
    return "" if value is None else f"`{value!r}`".replace("'", '"')


def rows(arguments, but_of=()):
    """Those of a table, without those that another has too."""
    others = {row.meaning for row in options_in(but_of).values()} if but_of else set()
    for name, row in options_in(arguments).items():
        if row.meaning not in others:
            yield f"| `{name}` | {default_of(row.default)} | {meaning(row)} |"


def flags():
    for name, row in options_in(JobArguments).items():
        if row.shell:
            yield f"| `--{name.replace('_', '-')} {row.shell}` | {meaning(row)} |".replace(
                "|inf`", " or inf`"
            )


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


@pytest.mark.parametrize(
    ("page", "mark", "lines"),
    [
        ("locks.md", "options", rows(LockArguments)),
        ("jobs.md", "options", rows(JobArguments, but_of=LockArguments)),
        ("celery.md", "options", rows(TaskArguments, but_of=JobArguments)),
        ("commands.md", "options", flags()),
        ("settings.md", "options", settings()),
        ("locks.md", "errors", errors()),
    ],
    ids=["locks", "jobs", "tasks", "locks run", "settings", "errors"],
)
def test_a_table_is_that_of_the_code(request, page, mark, lines):
    path, table = ROOT / "docs" / page, "\n".join(lines)
    text = path.read_text()
    found = re.search(rf"<!-- {mark} -->\n.*\n.*\n((?:\|.*\n)*)", text)
    if request.config.getoption("write_golden"):
        path.write_text(text[: found.start(1)] + table + "\n" + text[found.end(1) :])
    else:
        assert found[1].rstrip() == table
