"""Servers that take seconds to start: all processes of a test run share one of each.

The first process that needs one starts it. A guardian, tests/support/guardian.py, ends it and
removes its files when the last process that might use it has ended, be it by SIGKILL.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from xdist import is_xdist_worker

from tests.support import guardian
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until

# Seconds that one may take to start. RabbitMQ needs eight of a processor, which on a busy machine
# come to more than a minute.
STARTS_WITHIN = 3 * HUNG


class RunServer(ABC):
    """A server in a folder of its own, whose files say how to reach it."""

    ended_by = signal.SIGKILL

    def __init__(self, folder):
        self.folder = folder

    @property
    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    @abstractmethod
    def prepare(self):
        """Make its files, and return the commands that run it."""

    def environment(self):
        return dict(os.environ)

    def user(self):
        """Whom it runs as, as Popen takes it."""
        return {}

    def start(self, users, known):
        """Start it under a guardian, and return when it answers."""
        (self.folder / "log").touch()
        job = {
            "commands": [tied_to_us([str(one) for one in each]) for each in self.prepare()],
            "as": self.user(),
            "signal": self.ended_by,
            "users": str(users),
            "known": str(known),
        }
        subprocess.run(
            [sys.executable, "-E", "-S", guardian.__file__, json.dumps(job)],
            cwd=self.folder,
            env=self.environment(),
            # Ctrl-C is for the tests.
            start_new_session=True,
            check=True,
        )

        def is_ready():
            assert guardian.ENDED not in self.log, self.log
            return self.ready in self.log

        wait_until(is_ready, STARTS_WITHIN, f"{self.name} answers")


class RunServers:
    """Those of a run; as long as this is open, none of them ends."""

    def __init__(self, folder):
        self._folder = folder
        self._users = folder / "users"
        self._use = self._users.open("a")
        fcntl.flock(self._use, fcntl.LOCK_SH)

    def get(self, kind, name):
        """The server of that kind, started if it does not run yet."""
        known = self._folder / name
        with (self._folder / f"{name}.lock").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not known.exists():
                # Short, because the path of a unix socket may have no more than 107 bytes.
                folder = Path(tempfile.mkdtemp(prefix="redislock-"))
                try:
                    kind(folder).start(self._users, known)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                known.write_text(str(folder))
            return kind(Path(known.read_text()))

    def close(self):
        """Use them no more."""
        self._use.close()


@pytest.fixture(scope="session")
def run_servers(request, tmp_path_factory):
    """The servers that all processes of this run share."""
    folder = tmp_path_factory.getbasetemp()
    servers = RunServers(folder.parent if is_xdist_worker(request) else folder)
    yield servers
    servers.close()
