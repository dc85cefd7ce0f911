"""Child processes that take part in a test: they hold locks, and are stopped, killed and forked.

The child runs a function of a test module, or a piece of code, with Django set up for the REDISLOCK
of the test. The two talk in lines of JSON: say() and hear() in the child, read() and send() here.

    def hold(name: str) -> None:
        with distributed_lock(name) as lease:
            say(lease.fence)
            hear()

    def test_a_killed_holder(spawn):
        child = spawn(hold, "lottery")
        fence = child.read()
        child.kill()
"""

import asyncio
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT
from tests.support.nursery import environment_for, start_python
from tests.support.servers import stop_process
from tests.support.waiting import HUNG

PERMIT_LEFT = "TESTS_PERMIT"  # In an environment: see tests/support/permits.py.


def say(value):
    """In a child: tell the test."""
    # In one piece, also where PYTHONUNBUFFERED is set: a forked child of it may speak meanwhile.
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hear():
    """In a child: wait for what the test sends; end quietly when it is gone."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


class Child:
    """A Python process that runs *code*: a function at the top of a module, or source text.

    Args:
        code: What to run. A function gets *args* and *kwargs*, which must survive JSON; source
            finds them under these names, beside ``say`` and ``hear``.
        redislock: The REDISLOCK setting of the child.
        prelude: Source that runs before any import, such as gevent's monkey patching.
        package: A folder with another version of the package, see environment_for().
        forked: It may be a fork. Not worth it for a package that few children have.
    """

    def __init__(self, code, *args, redislock, prelude="", package="", forked=True, **kwargs):
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        heard, self.stdin = _pipe()
        self._stdout, said = _pipe()
        self.process = start_python(
            f"{__name__}:main",
            files=(heard.fileno(), said.fileno(), self._stderr.fileno()),
            environment=environment_for(package=package)
            | {"TESTS_REDISLOCK": json.dumps(redislock)},
            prelude=prelude,
            forked=forked,
        )
        heard.close()
        said.close()
        self._unread = b""
        if not isinstance(code, str):
            assert code.__qualname__ == code.__name__, "a child runs functions of a module only"
            code = f"{code.__module__}:{code.__name__}"
        self.send({"code": code, "args": args, "kwargs": kwargs})

    @property
    def pid(self):
        return self.process.pid

    @property
    def stderr(self):
        """All that the child wrote there so far: its logging, its traceback."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def send(self, value):
        """Send what the child's hear() returns."""
        self.stdin.write(json.dumps(value).encode() + b"\n")

    def read(self, timeout=HUNG):
        """Return the next thing that the child said; fail if it ends or stays silent."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = max(0, deadline - time.monotonic())
            if not select.select([self._stdout], [], [], left)[0]:
                raise AssertionError(f"the child said nothing for {timeout:g} s\n{self.stderr}")
            if not (chunk := os.read(self._stdout.fileno(), 65536)):
                code = self.process.wait(HUNG)
                raise AssertionError(f"the child ended with {code}\n{self.stderr}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def has_spoken(self):
        """Whether read() would not have to wait."""
        return b"\n" in self._unread or bool(select.select([self._stdout], [], [], 0)[0])

    def wait(self, timeout=HUNG):
        """Return the exit status once the child has ended; minus the signal that killed it."""
        return self.process.wait(timeout)

    def stop(self):
        """Freeze the child (SIGSTOP), and return once it stands still."""
        stop_process(self.pid)

    def cont(self):
        """Let a frozen child go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """End the child without a chance to clean up (SIGKILL), also when it is frozen."""
        self.process.kill()
        self.process.wait(HUNG)

    def close(self):
        """End the child whatever its state."""
        self.kill()
        for file in (self.stdin, self._stdout, self._stderr):
            file.close()


def _pipe():
    """The end to read from, and the one to write to."""
    reads, writes = os.pipe()
    return os.fdopen(reads, "rb", buffering=0), os.fdopen(writes, "wb", buffering=0)


def runs(pid):
    """Whether there is such a process, other than as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # It may go while it is looked at.
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def python(*arguments, cwd=ROOT, env=None, timeout=HUNG):
    """Run another Python to its end, and return what it printed; fail if it does."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def main():
    """In a child: set Django up and run what the test asked for."""
    import django

    django.setup()
    job = hear()
    args, kwargs = job["args"], job["kwargs"]
    module, colon, name = job["code"].partition(":")
    if not (colon and name.isidentifier()):
        _in_child()
        names = {"say": say, "hear": hear, "args": args, "kwargs": kwargs, "__name__": "__child__"}
        exec(compile(job["code"], "<child>", "exec"), names)
        return
    function = getattr(importlib.import_module(module), name)
    _in_child()
    answer = function(*args, **kwargs)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)


def _in_child():
    if PERMIT_LEFT in os.environ:  # It knows the package too well for another version of it.
        from tests.support.permits import in_child

        in_child()
