"""A demo from the outside: what `make demo` and the others run, and that nothing is left of it."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.waiting import HUNG

MANAGE = ROOT / "example_project" / "manage.py"


class Demos:
    """Demos whose processes and files can be told from all others: they live in a home."""

    def __init__(self, home):
        self.home = home
        self.env = {**os.environ, "TMPDIR": str(home)}
        for name in ("REDIS_URL", "DATABASE_PATH", "DJANGO_SETTINGS_MODULE", "PYTHONPATH"):
            self.env.pop(name, None)

    @contextmanager
    def running(self, *command):
        """One that is started and not waited for; nothing may be left of it when it has ended."""
        with subprocess.Popen(
            [sys.executable, str(MANAGE), *command],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as demo:
            try:
                yield demo
            finally:
                if demo.poll() is None:
                    demo.terminate()
        assert self.processes() == {}
        assert list(self.home.iterdir()) == []

    def run(self, *command, timeout=170):
        """Run one to its end: exit status and lines."""
        with self.running(*command) as demo:
            output, _ = demo.communicate(timeout=timeout)
        return demo.returncode, output.splitlines()

    def python(self, *arguments):
        """What another Python of the example project prints."""
        command = [sys.executable, *arguments]
        return subprocess.check_output(command, cwd=ROOT, env=self.env, text=True)

    def processes(self):
        """The processes that work in or know of the home: pid and command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = (process / "environ").read_bytes()
                # Valkey writes its title over its environment, but it works in the directory.
                works_there = (process / "cwd").readlink().is_relative_to(self.home)
                if works_there or bytes(self.home) in environ:
                    found[int(process.name)] = (process / "cmdline").read_bytes().decode()
            except OSError:
                continue  # It has ended, or is not ours.
        return found


@pytest.fixture
def demos(tmp_path):
    if not Path("/proc/self/environ").exists():
        pytest.skip("looks into /proc")
    return Demos(tmp_path)


def lines_up_to(demo, what):
    """What the demo says, until it says *what*."""
    said = []
    for line in demo.stdout:
        said.append(line)
        if what in line:
            return said
    pytest.fail(f"The demo has never come to say {what!r}, but:\n{''.join(said)}")


def ended_by(demo, number):
    """Send it a signal: what it says until it has ended."""
    demo.send_signal(number)
    return demo.communicate(timeout=HUNG)[0]
