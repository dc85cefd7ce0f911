"""The test processes of a run share servers, and leave none behind, however they end."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import hear, say
from tests.support.run_servers import RunServer, RunServers
from tests.support.waiting import wait_until

SERVER = "import os, time; print(os.getpid(), 'is ready', flush=True); time.sleep(600)"


class Sleeper(RunServer):
    """A server that does nothing."""

    name = "sleeper"
    ready = "is ready"

    def prepare(self):
        return [[sys.executable, "-S", "-c", SERVER]]

    @property
    def pid(self):
        return int(self.log.split()[0])


class Broken(RunServer):
    name = "broken"
    ready = "is ready"

    def prepare(self):
        return [[sys.executable, "-S", "-c", "print('no room'); raise SystemExit(3)"]]


def use(folder):
    """In a child: use the server until told to end."""
    servers = RunServers(Path(folder))
    server = servers.get(Sleeper, Sleeper.name)
    say([server.pid, str(server.folder)])
    hear()


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_share_a_server_until_the_last_of_them_is_killed(spawn, tmp_path):
    children = [spawn(use, str(tmp_path)) for _ in range(3)]
    (pid, folder), *others = [child.read() for child in children]
    assert others == [[pid, folder]] * 2
    children[0].kill()
    children[1].kill()
    latecomer = spawn(use, str(tmp_path))
    assert latecomer.read() == [pid, folder]
    assert runs(pid)
    children[2].kill()
    latecomer.kill()
    wait_until(lambda: not runs(pid) and not Path(folder).exists(), message="the server is gone")
    again = spawn(use, str(tmp_path))
    assert again.read()[0] != pid


def test_a_server_that_ends_at_once_says_why(tmp_path):
    servers = RunServers(tmp_path)
    with pytest.raises(AssertionError, match=r"(?s)no room.*has ended with 3"):
        servers.get(Broken, Broken.name)
    servers.close()
