"""The demo from the outside: what `make demo` runs, its ends, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.waiting import HUNG

MANAGE = ROOT / "example_project" / "manage.py"

# Until then, a test that stands still for a moment comes before the draw.
LATE_NOON = "--noon-in=30"

# Each server is two processes that take a second to start; some tests need no more than these.
ONE, TWO = ("--servers", "1"), ("--servers", "2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]


@pytest.fixture
def surroundings(tmp_path):
    """An environment by which the processes of this test can be told from all others."""
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    for name in ("REDIS_URL", "DATABASE_PATH", "DJANGO_SETTINGS_MODULE", "PYTHONPATH"):
        surroundings.pop(name, None)
    return surroundings


def processes_of(home):
    """The processes that work in or know of this directory: pid and command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes()
            # Valkey writes its title over its environment, but it works in the directory.
            if bytes(home) in environ or (process / "cwd").readlink().is_relative_to(home):
                found[int(process.name)] = (process / "cmdline").read_bytes().decode()
        except OSError:
            continue  # It has ended, or is not ours.
    return found


@contextmanager
def running_demo(surroundings, *arguments, command="demo", stderr=None):
    """The demo, started and not waited for; asked to end if the test ends before it."""
    with subprocess.Popen(
        [sys.executable, str(MANAGE), command, *arguments],
        cwd=ROOT,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            if demo.poll() is None:
                demo.terminate()


def run_demo(surroundings, *arguments):
    """Run the demo to its end: exit status and lines."""
    with running_demo(surroundings, *arguments) as demo:
        output, _ = demo.communicate(timeout=100)
    return demo.returncode, output.splitlines()


def test_of_four_servers_exactly_one_draws(surroundings, tmp_path):
    status, lines = run_demo(surroundings)

    assert lines[-1] == "RESULT servers=4 draws=1 winners=10 skipped=3"
    assert status == 0
    rows = [line.split() for line in lines if line.startswith("server-")]
    assert sorted(row[4] for row in rows) == ["drew", *["skipped,"] * 3]
    drawer = next(row[0] for row in rows if row[4] == "drew")
    assert all(row[7] == drawer for row in rows if row[4] == "skipped,")
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["sentinel", "cluster", "quorum"])
def test_exactly_one_draws_while_a_server_of_the_locks_is_killed(backend, surroundings, tmp_path):
    status, lines = run_demo(surroundings, "--backend", backend, *TWO)

    assert lines[-1] == "RESULT servers=2 draws=1 winners=10 skipped=1"
    assert status == 0
    (strike,) = [line for line in lines if " s  strike " in line]
    assert " is killed, pid " in strike
    assert lines.index(strike) < next(at for at, line in enumerate(lines) if line.endswith(" drew"))
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_without_the_lock_every_server_draws(surroundings, tmp_path):
    status, lines = run_demo(surroundings, *TWO, "--without-lock")

    assert lines[-1] == "RESULT servers=2 draws=2 winners=20 skipped=0"
    assert status == 0
    assert processes_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("number", "moment", "processes"),
    [
        (signal.SIGHUP, "redis", 2),
        (signal.SIGTERM, "database", 2),
        (signal.SIGINT, "noon", 4),
    ],
)
def test_a_signal_ends_the_demo_and_all_its_processes(
    surroundings, tmp_path, number, moment, processes
):
    with running_demo(surroundings, LATE_NOON, *ONE) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if f" s  {moment} " in line:
                break
        else:
            pytest.fail(f"The demo has never come to say {moment!r}.")
        assert len(processes_of(tmp_path)) >= processes

        demo.send_signal(number)
        rest, _ = demo.communicate(timeout=HUNG)

    assert demo.returncode == 128 + number
    assert "RESULT" not in rest
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_demo_reports_a_server_that_dies(surroundings, tmp_path):
    with running_demo(surroundings, LATE_NOON, *ONE) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "server-1" in line and "ready, pid" in line:
                os.kill(int(line.split()[-1]), signal.SIGKILL)
                break
        output, _ = demo.communicate(timeout=HUNG)

    assert demo.returncode == 1
    assert "RESULT" not in output
    assert processes_of(tmp_path) == {}


def test_the_lottery_is_not_drawn_under_an_old_fence(surroundings, tmp_path):
    surroundings["DATABASE_PATH"] = str(tmp_path / "lottery.sqlite3")
    surroundings["REDIS_URL"] = "redis://127.0.0.1:1/0"  # The locks are in memory.
    program = """
from django.core.management import call_command
from django.db.models import F

from django_redislock import StaleFence
from django_redislock.models import Fence
from django_redislock.testing import LockTestKit
from lottery.models import Draw
from lottery.tasks import run_lottery

for command in ("migrate", "populate"):
    call_command(command, verbosity=0)
with LockTestKit() as locks:
    run_lottery()
    locks.advance(60)  # It is free again.
    Fence.objects.update(fence=F("fence") + 10**12)
    try:
        run_lottery()
    except StaleFence:
        print("stale")
print(Draw.objects.count())
"""
    manage = subprocess.run(
        [sys.executable, str(MANAGE), "shell", "-c", program, "-v", "0"],
        env=surroundings,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert manage.stdout.splitlines() == ["stale", "1"]


def test_processes_that_start_together_share_one_embedded_server(surroundings, tmp_path):
    ask = [
        sys.executable,
        "-c",
        "from example_project import embedded_server; print(embedded_server.url())",
    ]
    stop = [sys.executable, "-m", "example_project.embedded_server", "stop"]
    try:
        askers = [
            subprocess.Popen(ask, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        answers = [asker.communicate(timeout=HUNG)[0] for asker in askers]

        assert answers[0].startswith("redis://")
        assert set(answers) == {answers[0]}
        assert len(processes_of(tmp_path)) == 1
    finally:
        stopped = subprocess.run(
            stop, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True, check=True
        )
    assert "has stopped" in stopped.stdout
    deadline = time.monotonic() + HUNG
    while remaining := processes_of(tmp_path):
        assert time.monotonic() < deadline, remaining
