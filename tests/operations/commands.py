"""Ways to run ``manage.py locks``, and what it is to tell of.

==================  ===============================================================================
locks_command       in this process, as code calls it
typed               in this process, as it is typed: with its usage, and the status of a shell
Started             in a process of its own; see the fixtures `start`, `shell` and `terminal`
from_a_shell        a line of a shell that runs it
running, ran        a run of a task, as far as locks see one
==================  ===============================================================================
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import NamedTuple

from django.conf import settings
from django.core.management import CommandError, call_command

from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.management.commands.locks import Command
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.options import Options
from tests import ROOT
from tests.support.nursery import environment_for, start_python
from tests.support.waiting import HUNG

DAY = 86_400.0
SILENT = {"LOCATION": "redis://127.0.0.1:1/0"}  # Nobody listens there.


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def locks_command(*args, err=None):
    out, err, status = io.StringIO(), err or io.StringIO(), 0
    try:
        call_command("locks", *args, stdout=out, stderr=err, no_color=True)
    except CommandError as error:
        status = error.returncode
        err.write(str(error))
    except SystemExit as end:  # Of `run`.
        status = end.code
    return Outcome(status, out.getvalue(), err.getvalue())


def typed(*args):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            Command().run_from_argv(["manage.py", "locks", *args])
        except SystemExit as end:
            status = end.code
    return Outcome(status, out.getvalue(), err.getvalue())


def environment():
    return environment_for() | {"TESTS_REDISLOCK": json.dumps(settings.REDISLOCK)}


class Started:
    """A command in a process of its own, with files for what it reads and prints."""

    def __init__(self, *args, answer="", forked=True, **environ):
        self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 (see close)
        self._files[0].write(answer.encode())
        self._files[0].seek(0)
        self.process = start_python(
            "tests.operations.manage:main",
            *("locks", *args),
            files=[file.fileno() for file in self._files],
            environment=environment() | environ,
            forked=forked,
        )

    @property
    def out(self):
        """What it printed so far."""
        return self._read(1)

    @property
    def err(self):
        """The same of standard error."""
        return self._read(2)

    def _read(self, number):
        return os.pread(self._files[number].fileno(), 1 << 24, 0).decode()

    def wait(self):
        """Return its exit status."""
        return self.process.wait(HUNG)

    def close(self):
        """End it whatever its state."""
        self.process.kill()
        self.process.wait(HUNG)
        for file in self._files:
            file.close()


def from_a_shell(line, **environ):
    """Run a line of a shell; "$LOCKS" begins a command of a Python of its own, and no fork."""
    environ = environment() | {"LOCKS": f"{sys.executable} -m django locks"} | environ
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={name: value for name, value in environ.items() if value},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextmanager
def running(name, id, task="", **options):  # noqa: A002
    with (
        busy_with(Activity(task=task or f"tasks.{name}", task_id=id)),
        Lock(name, Options(**{"ttl": 10, "wait": 0, **options}), RunMarker(id, DAY)) as lease,
    ):
        yield lease


def ran(name, id="ran", task="", error=None):  # noqa: A002
    """A run that has ended: with success, unless it was to end by an error."""
    try:
        with running(name, id, task=task):
            if error:
                raise error
    except ZeroDivisionError:
        pass
