"""The demo from the outside: what `make demo` runs, and its ends."""

import os
import signal
import subprocess

import pytest

from tests import ROOT
from tests.demo.conftest import ended_by, lines_up_to
from tests.support.waiting import HUNG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Until then, a test that stands still for a moment comes before the draw.
LATE_NOON = "--noon-in=30"

# Each server is a process that takes a second to start; some tests need no more than these.
ONE, TWO = ("--servers", "1"), ("--servers", "2")


def test_of_four_servers_exactly_one_draws(demos):
    command = ("demo", "--servers", "4", "--backend", "redis")
    recipe = subprocess.check_output(["make", "--dry-run", "demo"], cwd=ROOT, text=True)
    assert f"example_project/manage.py {' '.join(command)}" in recipe.replace("'", "")
    status, lines = demos.run(*command)
    assert lines[-1] == "RESULT servers=4 draws=1 winners=10 skipped=3"
    assert status == 0
    rows = [line.split() for line in lines if line.startswith("server-")]
    assert sorted(row[4] for row in rows) == ["drew", *["skipped,"] * 3]
    drawer = next(row[0] for row in rows if row[4] == "drew")
    assert all(row[7] == drawer for row in rows if row[4] == "skipped,")


@pytest.mark.parametrize("backend", ["sentinel", "cluster", "quorum"])
def test_exactly_one_draws_while_a_server_of_the_locks_is_killed(backend, demos):
    status, lines = demos.run("demo", "--backend", backend, *TWO)
    assert lines[-1] == "RESULT servers=2 draws=1 winners=10 skipped=1"
    assert status == 0
    (strike,) = [line for line in lines if " s  strike " in line]
    assert " is killed, pid " in strike
    assert lines.index(strike) < next(at for at, line in enumerate(lines) if line.endswith(" drew"))


def test_without_the_lock_every_server_draws(demos):
    status, lines = demos.run("demo", *TWO, "--without-lock")
    assert lines[-1] == "RESULT servers=2 draws=2 winners=20 skipped=0"
    assert status == 0


@pytest.mark.parametrize(
    ("number", "moment", "processes"),
    [(signal.SIGHUP, "redis", 2), (signal.SIGTERM, "database", 2), (signal.SIGINT, "noon", 3)],
)
def test_a_signal_ends_the_demo_and_all_its_processes(demos, number, moment, processes):
    with demos.running("demo", LATE_NOON, *ONE) as demo:
        lines_up_to(demo, f" s  {moment} ")
        assert len(demos.processes()) >= processes
        rest = ended_by(demo, number)
    assert demo.returncode == 128 + number
    assert "RESULT" not in rest


def test_the_demo_reports_a_server_that_dies(demos):
    with demos.running("demo", LATE_NOON, *ONE) as demo:
        *_, ready = lines_up_to(demo, "ready, pid")
        os.kill(int(ready.split()[-1]), signal.SIGKILL)
        rest, _ = demo.communicate(timeout=HUNG)
    assert demo.returncode == 1
    assert "server-1 ended with -9" in rest
    assert "RESULT" not in rest


UNDER_AN_OLD_FENCE = """
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


def test_the_lottery_is_not_drawn_under_an_old_fence(demos):
    demos.env["DATABASE_PATH"] = str(demos.home / "lottery.sqlite3")
    demos.env["REDIS_URL"] = "redis://127.0.0.1:1/0"  # The locks are in memory.
    shell = ("example_project/manage.py", "shell", "-v", "0", "-c")
    assert demos.python(*shell, UNDER_AN_OLD_FENCE) == "stale\n1\n"


FOUR_ASK_FOR_IT = """
import os
from example_project import embedded_server
os.fork(), os.fork()
print(embedded_server.url(), flush=True)
"""


def test_processes_that_start_together_share_one_embedded_server(demos):
    try:
        address, *others = demos.python("-c", FOUR_ASK_FOR_IT).split()
        assert address.startswith("redis://")
        assert others == [address] * 3
        assert len(demos.processes()) == 1
    finally:
        stopped = demos.python("-m", "example_project.embedded_server", "stop")
    assert "has stopped" in stopped
    wait_until(lambda: not demos.processes())
