"""The public surface: each name that docs/reference/ documents, and how it is called."""

import importlib
import inspect
import re
from pathlib import Path

from tests import ROOT

DIRECTIVE = re.compile(r"^ *\.\. (\w+):: ([\w.]+)(\(\))?.*\n((?: +\S.*\n)*)", re.MULTILINE)


def documented():
    """What the reference documents: full name, whether users call it, and its members."""
    for page in sorted(Path(ROOT, "docs/reference").glob("*.md")):
        module = ""
        for kind, name, uncalled, options in DIRECTIVE.findall(page.read_text()):
            if kind == "currentmodule":
                module = f"{name}."
            elif kind.startswith("auto") and kind != "automodule":
                members = re.search(r":members:([^:]*)", options)
                full = name if name.startswith("django_redislock.") else f"{module}{name}"
                yield full, not uncalled, members and members[1].replace(",", " ").split()


def looked_up(name):
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return getattr(looked_up(module), attribute)


def called(value):
    """How it is called, without where its types come from."""
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<function ([\w.<>]+) at 0x[0-9a-f]+>", r"\1", signature)


def lines_of(name, is_called, members):
    value = looked_up(name)
    yield f"{name}{called(value) if is_called else ''}"
    if members == []:  # All.
        known = {*dir(value), *getattr(value, "__annotations__", {})}
        members = sorted(one for one in known if not one.startswith("_"))
    for member in members or ():
        found = inspect.getattr_static(value, member, None)
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        yield f"    {member}{called(found) if callable(found) else ''}"


def test_the_documented_names_are_called_as_it_was_written_down(golden):
    lines = [line for one in sorted(documented()) for line in lines_of(*one)]
    golden("public_names.txt", "\n".join([*lines, ""]))
