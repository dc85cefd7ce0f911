"""Fixtures of the tests that run ``manage.py locks``; see commands.py."""

import os
import pty

import pytest

from tests.operations.commands import Outcome, Started, environment
from tests.support.nursery import start_python
from tests.support.waiting import HUNG


@pytest.fixture
def answers(monkeypatch):
    """Let somebody answer the command's question."""

    def answer(text):
        monkeypatch.setattr("builtins.input", lambda: text)

    return answer


@pytest.fixture
def start():
    """Start commands in processes of their own."""
    started = []

    def command(*args, **how):
        started.append(Started(*args, **how))
        return started[-1]

    yield command
    for one in started:
        one.close()


@pytest.fixture
def shell(start):
    """Run a command in a process of its own, to its end."""

    def run(*args, **how):
        one = start(*args, **how)
        return Outcome(one.wait(), one.out, one.err)

    return run


@pytest.fixture
def terminal():
    """Start a command on a terminal of its own; returns it, and what reads its screen."""
    started = []

    def run(*args, keys=b"", **environ):
        ours, theirs = pty.openpty()
        os.write(ours, keys)
        os.set_blocking(ours, False)
        size = {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        process = start_python(
            "tests.operations.manage:main",
            *("locks", *args),
            files=[theirs] * 3,
            environment=environment() | size | environ,
        )
        os.close(theirs)
        started.append((process, ours))
        screen = bytearray()

        def read():
            try:
                while chunk := os.read(ours, 65536):
                    screen.extend(chunk)
            except OSError:  # There is no more, yet or for ever.
                pass
            return screen.decode(errors="replace")

        return process, read

    yield run
    for process, ours in started:
        process.kill()
        process.wait(HUNG)
        os.close(ours)
