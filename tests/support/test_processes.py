"""Children of a test run its code under its settings, obey, and end with it."""

import os
import signal

import pytest

from tests.support.processes import hear, say


def echo(greeting, *, times):
    """In a child: say *greeting*, then whatever is heard."""
    for _ in range(times):
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


def test_a_silent_child_is_not_waited_for_without_end(spawn):
    child = spawn(echo, "hello", times=1)
    child.read()
    with pytest.raises(AssertionError, match=r"said nothing for 0\.05 s"):
        child.read(timeout=0.05)


def test_a_frozen_child_goes_on_later(spawn):
    child = spawn(echo, "hello", times=1)
    child.read()
    child.stop()
    child.send("anyone there?")
    with pytest.raises(AssertionError, match="said nothing"):
        child.read(timeout=0.1)
    child.cont()
    assert child.read() == "anyone there?"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_child_is_dead(spawn, frozen):
    child = spawn(echo, "hello", times=1)
    child.read()
    if frozen:
        child.stop()
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_a_child_ends_quietly_when_nobody_talks_to_it_any_more(spawn):
    child = spawn(echo, "hello", times=1)
    child.read()
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
