"""Children of a test run its code, obey, and end with it; those of a run share its servers."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.faults import block_interpreter, slack, takes
from tests.support.processes import hear, say
from tests.support.run_servers import RunServer, RunServers
from tests.support.test_servers import runs
from tests.support.waiting import wait_until


def echo(greeting):
    """In a child: say *greeting*, then whatever is heard."""
    say(greeting)
    while True:
        say(hear())


def echo_with_a_fork(*, times):
    """In a child: speak at the same time as a forked child of it."""
    pid = os.fork()
    for number in range(times):
        say([pid > 0, number])
    if pid:
        os.waitpid(pid, 0)


def fail():
    """In a child: end by an exception."""
    raise RuntimeError("as planned")


@pytest.fixture
def child(spawn):
    child = spawn(echo, "hello")
    assert child.read() == "hello"
    return child


def test_what_a_child_and_its_fork_say_is_not_mixed_up(spawn, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    child = spawn(echo_with_a_fork, times=1000)
    said = sorted(child.read() for _ in range(2000))
    assert said == [[is_parent, number] for is_parent in (False, True) for number in range(1000)]


def test_a_prelude_runs_before_any_import(spawn):
    child = spawn(
        "say(early)", prelude="import builtins, sys; builtins.early = 'django' in sys.modules"
    )
    assert child.read() is False


def test_a_failed_child_shows_its_traceback(spawn):
    with pytest.raises(AssertionError, match=r"(?s)ended with 1.*RuntimeError: as planned"):
        spawn(fail).read()


def test_a_frozen_child_is_not_waited_for_without_end_and_goes_on_later(child):
    child.stop()
    child.send("anyone there?")
    with pytest.raises(AssertionError, match=r"said nothing for 0\.1 s"):
        child.read(timeout=0.1)
    child.cont()
    assert child.read() == "anyone there?"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_child_is_dead(child, frozen):
    if frozen:
        child.stop()
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_a_child_ends_quietly_when_nobody_talks_to_it_any_more(child):
    child.stdin.close()
    assert child.wait() == 0
    assert child.stderr == ""


def test_every_test_has_a_prefix_and_a_clean_server(locks):
    assert locks.keys() == []
    locks.redis.set(f"{locks.prefix}:for-ever", 1)
    locks.redis.set(f"{locks.prefix}:for-a-minute", 1, ex=60)
    locks.redis.set("foreign", 1)
    assert len(locks.keys()) == 2
    assert locks.without_ttl() == [f"{locks.prefix}:for-ever".encode()]


def test_every_other_test_does_too(locks):
    assert locks.redis.dbsize() == 0


def test_what_a_process_waited_is_counted_and_what_it_stood_still_is_not():
    with takes(at_most=0):
        block_interpreter(slack() + 1)
    with pytest.raises(AssertionError, match="took"), takes(at_most=-2 * slack()):
        time.sleep(0.5)


# --- servers of a run -----------------------------------------------------------------------------

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
