"""A container: the program is pid 1 there, gets SIGTERM, and SIGKILL when its grace is over."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from django_redislock import distributed_lock, held
from tests import ROOT
from tests.support.nursery import environment_for
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until

CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc")
TTL = 3

pytestmark = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*CONTAINED, "true"], check=False).returncode,
    reason="needs a kernel that gives it a process namespace",
)


@pytest.fixture
def pid_1(settings, locks):
    """Start ``manage.py locks run`` as pid 1, and return its pid as we see it, when it holds."""
    started = []

    def start(*command, ttl=TTL):
        environment = environment_for() | {"TESTS_REDISLOCK": json.dumps(settings.REDISLOCK)}
        arguments = ("locks", "run", "lottery", "--ttl", f"{ttl}s", "--grace", "1s", "--", *command)
        outer = subprocess.Popen(
            tied_to_us([*CONTAINED, sys.executable, "-m", "django", *arguments]),
            env=environment,
            cwd=ROOT,
        )
        started.append(outer)
        wait_until(lambda: held.get("lottery"), message="it holds the lock")
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        return outer, int(children[0])

    yield start
    for outer in started:
        outer.kill()
        outer.wait(HUNG)


def is_free():
    return not distributed_lock("lottery").locked()


# What ignores SIGTERM and is left behind by the command; a command that ignores it goes on.
DEAF = "(trap '' TERM; touch {begun}; sleep 60) & wait"


@pytest.mark.parametrize("command", ["touch {begun}; sleep 60", DEAF])
@pytest.mark.parametrize("at", ["the grant", "work"])
def test_sigterm_ends_all_within_the_grace_and_frees_the_lock(pid_1, command, at, tmp_path):
    begun = tmp_path / "begun"
    outer, inner = pid_1("sh", "-c", command.format(begun=begun), ttl=600)
    if at == "work":
        wait_until(begun.exists)
    os.kill(inner, signal.SIGTERM)
    assert outer.wait(HUNG) == 128 + signal.SIGTERM
    assert is_free()


def test_after_sigkill_nothing_goes_on_and_the_lock_is_free_one_ttl_later(pid_1, tmp_path):
    alive = tmp_path / "alive"
    _, inner = pid_1("sh", "-c", f"while true; do echo >> {alive}; sleep 0.05; done")
    wait_until(alive.exists)
    os.kill(inner, signal.SIGKILL)
    wait_until(is_free, timeout=2 * TTL, message="the lock is free")
    size = alive.stat().st_size
    with distributed_lock("lottery", wait=0):
        assert alive.stat().st_size == size
