"""The samples of a page in docs/, as files of a project: what a reader would paste.

A block of Python that begins with ``# shop/tasks.py`` is that file, or goes on with it. A block
without a language is for a shell.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from django.conf import settings

from tests import ROOT
from tests.package.test_docs import anchors_of, without_code
from tests.support.nursery import environment_for, start_python
from tests.support.waiting import HUNG


def text_of(path):
    """The text of a page below docs/, or of a section of it: "recipes.md#rate-limits"."""
    path, _, anchor = path.partition("#")
    text = (ROOT / "docs" / path).read_text()
    if not anchor:
        return text
    (section,) = [
        part
        for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)
        if anchor in anchors_of(part.partition("\n")[0])
    ]
    return section


def sections_of(path):
    """The anchors of the sections of a page below docs/."""
    headings = re.findall(r"^## .+", without_code((ROOT / "docs" / path).read_text()), re.MULTILINE)
    return {anchor for heading in headings for anchor in anchors_of(heading)}


class Page:
    """A page, and the project in *folder* into which its samples are pasted.

    Args:
        path: Below docs/; with "#anchor", that section alone.
        others: What the project has beside the samples: source by the path of its file.
        changes: Replacements in the samples: addresses, and seconds that a test has no time for.
    """

    def __init__(self, path, folder, others, changes):
        self.folder = folder
        self._text = text_of(path)
        for old, new in changes.items():
            assert old in self._text, f"{old!r} is not in {path}"
            self._text = self._text.replace(old, new)
        for name, source in others.items():
            self.write(name, textwrap.dedent(source))
        for code in self.blocks("python"):
            if named := re.match(r"# ([\w/]+\.py)\n", code):
                self.write(named[1], code)

    def write(self, name, source):
        """Add to a file of the project."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(source)
        return path

    def blocks(self, language=""):
        """The blocks of code in a language."""
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", self._text, re.MULTILINE | re.DOTALL)
        return [code for of, code in blocks if of == language]

    def settings(self, **begin):
        """The settings that shop/settings.py makes of those it begins with."""
        names = dict(begin)
        exec((self.folder / "shop/settings.py").read_text(), names)
        return {name: value for name, value in names.items() if name.isupper()}

    def module(self, name):
        """Import a file of the project."""
        return importlib.import_module(name)

    def manage(self, line):
        """Run a line that is ``manage.py`` and its arguments: its status, and what it prints."""
        arguments = shlex.split(line, comments=True)
        while arguments.pop(0) != "manage.py":
            pass
        with Path(os.devnull).open("rb") as nothing, tempfile.TemporaryFile() as said:
            process = start_python(
                "tests.operations.manage:main",
                *arguments,
                files=(nothing.fileno(), said.fileno(), said.fileno()),
                environment=self._environment(),
            )
            status = process.wait(HUNG)
            said.seek(0)
            return status, said.read().decode()

    def shell(self, code):
        """Run a block in a shell. Each ``manage.py`` in it takes seconds of a busy machine."""
        source = f'#!/bin/sh\nexec {sys.executable} -m django "$@"\n'
        program = self.folder / ".programs/manage.py"
        if not program.exists():
            self.write(".programs/manage.py", source).chmod(0o755)
        environment = self._environment()
        environment["PATH"] = os.pathsep.join([str(program.parent), environment["PATH"]])
        return subprocess.run(
            ["bash", "-c", code],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
        )

    @staticmethod
    def _environment():
        return environment_for() | {"TESTS_REDISLOCK": json.dumps(settings.REDISLOCK)}
