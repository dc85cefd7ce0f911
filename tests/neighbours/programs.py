"""Programs of the neighbours, with a session of their own; and the journal of what they did."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest

from tests import ROOT
from tests.conftest import closed_later
from tests.support.nursery import environment_for
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until


class Program:
    """A Python program, ``python -m ...``, and all processes that it starts."""

    def __init__(self, *arguments, environment):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self.process = subprocess.Popen(
            tied_to_us([sys.executable, "-m", *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def log(self):
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_for_log(self, text):
        wait_until(lambda: text in self.log or self._ended(), message=f"{text!r} is in the log")

    def _ended(self):
        assert self.process.poll() is None, f"it ended\n{self.log}"

    def kill(self):
        """Kill all its processes, as when the machine loses power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(HUNG)

    def close(self):
        self.kill()
        self._log.close()


@pytest.fixture
def program(request, settings, locks):
    """Start programs, with the REDISLOCK of the test and its journal."""
    with closed_later(request, "log of a program", lambda started: started.log) as note:

        def start(*arguments, **variables):
            environment = environment_for() | variables
            environment["TESTS_REDISLOCK"] = json.dumps(settings.REDISLOCK)
            environment["TESTS_JOURNAL"] = locks.server.url
            return note(Program(*arguments, environment=environment))

        yield start


class Journal:
    """What tests/celery/project/journal.py writes, of one key."""

    def __init__(self, redis, key):
        self._redis, self.key = redis, key

    def events(self, *kinds):
        """What happened, in order; of these kinds, if named."""
        entries = map(json.loads, self._redis.lrange(f"journal:{self.key}", 0, -1))
        return [one for one in entries if not kinds or one["event"] in kinds]

    def wait_for(self, kind, count=1):
        """Return the *count*-th event of this kind once it is there."""
        what = f"{kind!r} number {count}"
        return wait_until(lambda: self.events(kind)[count - 1 :], message=what, every=0.02)[0]

    def open_gate(self, times=1):
        """Let bodies that stand at the gate go on, now or when they come."""
        self._redis.rpush(f"gate:{self.key}", *["go"] * times)


@pytest.fixture
def journal(locks, key_prefix):
    """The journal of the test; its key is that of no other test."""
    return Journal(locks.redis, key_prefix)
