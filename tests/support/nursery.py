"""Python processes that are ready at once: forks of one that has imported what takes long.

To start Python with Django and Celery takes half a second of processor time, and hundreds of tests
start some. A fork takes milliseconds. It is a child of the test's process as any other, with an
environment, files and a session of its own.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from tests import ROOT
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PACKAGE = "TESTS_PACKAGE"  # In an environment, the folder of the package if it is another one.


def environment_for(settings="tests.settings", *, package=""):
    """That of a Python with these Django settings, which finds the tests.

    Args:
        settings: The module.
        package: A folder with another version of the package, which it finds in place of ours.
    """
    path = os.pathsep.join(filter(None, [package, str(ROOT), os.getenv("PYTHONPATH")]))
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": settings, "PYTHONPATH": path}
    if package:
        # Else it would look first where it is started, and find ours.
        environment |= {_PACKAGE: package, "PYTHONSAFEPATH": "1"}
    return environment


def start_python(
    function, *arguments, files, environment, prelude="", forked=True, start_new_session=False
):
    """Call *function*, named as "module:name", in a Python of its own.

    Args:
        arguments: Of its command line.
        files: Its stdin, stdout and stderr.
        prelude: Source that runs before any import.
        forked: It may be a fork, unless it has a prelude, or begins otherwise by its environment.
    """
    forked = forked and not prelude and sys.platform == "linux"
    if forked and (home := nursery(environment.get(_PACKAGE, ""))).begins_as_in(environment):
        return home.fork(function, arguments, files, environment, start_new_session)
    module, _, name = function.partition(":")
    code = f"{prelude}\nfrom {module} import {name}\n{name}()"
    stdin, stdout, stderr = files
    return subprocess.Popen(
        tied_to_us([sys.executable, "-c", code, *arguments]),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=ROOT,
        start_new_session=start_new_session,
    )


class Fork:
    """What a Popen has that tests use."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None
        self._reaping = threading.Lock()  # The status is there for one thread only.

    def poll(self):
        """The exit status, if it has ended."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout=HUNG):
        """Return the exit status once it has ended."""
        wait_until(lambda: self.poll() is not None, timeout, f"{self.pid} ends", every=0.002)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that forks on demand, with a version of the package: see environment_for()."""

    def __init__(self, package):
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = environment_for(package=package)
        code = f"from tests.support import nursery; nursery.serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            tied_to_us([sys.executable, "-c", code]),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=self._environment,
        )
        theirs.close()
        atexit.register(self.close)

    def begins_as_in(self, environment):
        """Whether a new Python would begin as this one has begun."""

        def at_the_start(variables):
            read = ("PYTHON", "LD_", "DJANGO_SETTINGS_MODULE")
            return {name: variables[name] for name in variables if name.startswith(read)}

        return at_the_start(environment) == at_the_start(self._environment)

    def fork(self, function, arguments, files, environment, start_new_session):
        """See start_python()."""
        job = [function, arguments, dict(environment), start_new_session, os.getpid()]
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Its grandchild, an orphan, is to be our child.
        try:
            socket.send_fds(self._line, [json.dumps(job).encode()], files)
            return Fork(int(self._line.recv(100)))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self):
        self._line.close()
        self._process.wait(HUNG)


@functools.cache
def nursery(package=""):
    """That of this process for a version, from when it is first asked for."""
    return Nursery(package)


def serve(line):
    """In the nursery: fork whenever told to, until nobody is there to tell."""
    import celery.bin.celery
    import celery.bin.worker
    import celery.concurrency.prefork  # noqa: F401
    import django
    import pytest  # noqa: F401 - for the test modules

    django.setup()
    # At its end a fork would look through all that is here for garbage, and so copy each page of
    # it: 0.3 s of processor time instead of 0.05.
    gc.freeze()
    with socket.socket(fileno=line) as orders:
        while True:
            job, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
            if not job:
                return
            answer, pid = os.pipe()
            if not (go_between := os.fork()):
                if not (child := os.fork()):
                    break
                os.write(pid, str(child).encode())
                os._exit(0)
            os.waitpid(go_between, 0)
            orders.send(os.read(answer, 100))
            for file in (answer, pid, *files):
                os.close(file)
        os.close(answer)
        os.close(pid)
    _live(job, files)


def _live(job, files):
    """In a fork: become what is asked for, and do it."""
    from django.conf import settings

    function, arguments, environment, start_new_session, parent = json.loads(job)
    while os.getppid() != parent:
        time.sleep(0.001)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if start_new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv += arguments
    settings.REDISLOCK = json.loads(environment["TESTS_REDISLOCK"])
    module, _, name = function.partition(":")
    getattr(__import__(module, fromlist=[name]), name)()


def _prctl(option, value):
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
