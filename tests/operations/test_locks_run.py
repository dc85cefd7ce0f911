"""``manage.py locks run``, and ``python -m django_redislock run``: any command under a lock."""

import os
import re
import shlex
import signal
import socket
import sys
from datetime import UTC, datetime
from functools import partial

import pytest

from django_redislock import held, task_runs
from tests import ROOT
from tests.operations.commands import Outcome, from_a_shell, locks_command
from tests.support.others import held_by
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("locks")


@pytest.fixture
def start(start):
    """Start jobs in processes of their own."""
    return partial(start, "run")


def here(*arguments):
    """Run one in this process; its status, and what it says."""
    outcome = locks_command("run", *arguments)
    return outcome.status, outcome.err


# --- a run ----------------------------------------------------------------------------------------


def test_so_many_run_at_a_time_and_each_is_told_the_number_of_its_permit(start):
    script = "echo $REDISLOCK_PERMIT; exec sleep 60"
    jobs = [start("encode", "--limit", "2", "--", "sh", "-c", script) for _ in range(2)]
    wait_until(lambda: sorted(job.out for job in jobs) == ["1\n", "2\n"])
    status, line = here("encode", "--limit", "2", "--", "true")
    assert status == 75
    assert line.startswith("Skipped: 'encode' is held by ")


def test_a_rate_admits_so_many_starts_and_takes_no_lock(start):
    rated = ("mails", "--rate", "2/h", "--burst", "2", "--", "sh", "-c")
    for _ in range(2):
        job = start(*rated, "echo ${REDISLOCK_FENCE-none}; exit 7")
        assert (job.wait(), job.out) == (7, "none\n")
    third = start(*rated, "echo never")
    assert third.wait() == 75
    assert "Skipped: 'mails' has no start left, until 20" in third.err
    assert here("mails", "--rate", "2/d", "--", "true")[1].startswith("The rate of Rate('mails')")


def test_the_command_runs_under_the_lock_and_its_exit_status_is_ours(start):
    script = 'echo "$REDISLOCK_NAME $REDISLOCK_FENCE $*"; read line; exit 7'
    job = start("backup", "--ttl", "5", "--", "sh", "-c", script, "-", "--ttl", "--help", "--", "x")
    assert job.wait() == 7
    name, fence, *arguments = job.out.split()
    assert (name, arguments) == ("backup", ["--ttl", "--help", "--", "x"])
    [lease] = held.detail("backup").past
    assert str(lease.fence) == fence
    assert lease.ended == "failed"
    assert lease.owner.place == f"{socket.gethostname()}:{job.process.pid}"
    assert lease.owner.command.endswith(" --ttl --help -- x")
    assert job.err == ""


# Of a project without a zone; and as setproctitle does, which moves the environment first.
WITHOUT_ZONE = "USE_TZ, TIME_ZONE = False, None"
WITH_A_LONG_TITLE = """
import ctypes
TIME_ZONE = "Asia/Tokyo"
with open("/proc/self/stat") as stat:
    start, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
ctypes.memset(start, ord(" "), end - start - 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells the former value")
@pytest.mark.parametrize(
    ("of_project", "zone"),
    [
        ("", ""),
        ("", "Asia/Tokyo"),
        (WITHOUT_ZONE, ""),
        (WITHOUT_ZONE, "UTC"),
        (WITH_A_LONG_TITLE, "Asia/Tokyo"),
    ],
    ids=["none", "of-the-shell", "neither", "of-the-shell-alone", "titled"],
)
def test_the_command_has_the_time_zone_that_we_were_started_with(tmp_path, of_project, zone):
    (tmp_path / "of_a_project.py").write_text(f"from tests.settings import *\n{of_project}\n")
    line = "$LOCKS run backup -- sh -c 'echo ${TZ-none}'"
    own = {"DJANGO_SETTINGS_MODULE": "of_a_project", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    assert from_a_shell(line, TZ=zone, **own) == Outcome(0, f"{zone or 'none'}\n", "")


def test_the_command_is_told_of_no_permit_of_a_run_around_it():
    inner = "$LOCKS run inner -- sh -c 'echo $REDISLOCK_NAME ${REDISLOCK_PERMIT-none}'"
    outcome = from_a_shell('$LOCKS run outer --limit 2 -- sh -c "$INNER"', INNER=inner)
    assert outcome == Outcome(0, "inner none\n", "")


def test_without_a_place_for_output_an_act_does_what_it_does():
    def status(line):
        return from_a_shell(f"$LOCKS {line}").status

    assert from_a_shell("$LOCKS run backup -- sh -c 'exit 7' >&-") == Outcome(7, "", "")
    assert status("run backup -- true >&- 2>&-") == 0
    assert status("list >&-") == 0
    with held_by("backup"):
        assert status("run backup -- true >&- 2>&-") == 75
        assert status("list --fail >&- 2>&-") == 1


def test_an_ignored_sigterm_stays_ignored_by_us_and_by_the_command():
    command = "sh -c 'kill -TERM $PPID $$; exit 3'"
    assert from_a_shell(f"trap '' TERM; $LOCKS run backup -- {command}") == Outcome(3, "", "")


def test_its_runs_have_records():
    assert here("backup", "--", "true") == (0, "")
    assert here("backup", "--", "false") == (1, "")
    with held_by("backup"):
        assert here("backup", "--", "ls", "-l")[0] == 75
    record = task_runs.record("backup")
    runs = record.last_success, record.last_failure, record.last_skip
    assert [run and run.owner.command for run in runs] == ["true", "false", "ls -l"]
    assert {run and run.owner.task for run in runs} == {"backup"}
    assert record.last_skip.why == "busy"


def test_its_job_is_called_as_the_lock_or_as_told(start):
    job = start("cafe\u0301:1", "--", "sh", "-c", "echo $REDISLOCK_NAME")
    assert (job.wait(), job.out) == (0, "caf\u00e9:1\n")
    assert here("cafe\u0301:2", "--job", "caf\u00e9", "--", "false")[0] == 1
    records = held.records()
    assert records.of_job("caf\u00e9:1").last_success is not None
    assert records.of_job("caf\u00e9").last_failure is not None


def test_a_command_whose_lease_is_lost_is_ended_with_all_that_it_has_started(start, tmp_path):
    pids = tmp_path / "pids"
    deaf = f"sleep 600 | sh -c 'trap : TERM; echo $$ >{pids}; while :; do sleep 1; done' &"
    script = f"{deaf} trap 'echo asked' TERM; echo on; while :; do sleep 0.05; done"
    job = start("backup", "--ttl", "4", "--grace", "0.3", "--", "sh", "-c", script)
    wait_until(lambda: job.out and pids.exists() and pids.read_text())
    found = held.get("backup")
    assert held.force_release("backup", found.id, by="test", reason="")
    assert job.wait() == 76
    assert job.out == "on\nasked\n"
    assert "an operator released it by force" in job.err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_signals_reach_the_command_and_the_lock_is_free_after_it(start):
    job = start(
        "backup", "--", "sh", "-c", "trap 'exit 9' TERM; echo on; while :; do sleep 0.05; done"
    )
    wait_until(lambda: job.out)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 9
    assert held.get("backup") is None


def test_a_command_that_a_setting_ends_is_told_which_one(locks):
    locks.configure(MAX_HOLD=2)
    says = "The lease of lock 'backup' is not held: its max_hold of 2 s was over.\n"
    assert here("backup", "--", "sleep", "60") == (76, says)


def test_of_five_that_wait_one_does_the_work_and_all_succeed(start, tmp_path):
    work = f"echo done >> {tmp_path}/work; sleep 0.2"
    options = ("--wait", "inf", "--once", "1h", "--ttl", "20")
    jobs = [start("migrate", *options, "--", "sh", "-c", work) for _ in range(5)]
    assert [job.wait() for job in jobs] == [0] * 5
    assert (tmp_path / "work").read_text() == "done\n"
    told = [job.err for job in jobs if job.err]
    assert len(told) == 4
    assert all(re.fullmatch(r"Skipped: 'migrate' is done, by .+ ago\n", line) for line in told)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_that_is_ended_while_it_waits_leaves_nothing(start, number, status):
    with held_by("backup"):
        job = start("backup", "--wait", "10m", "--", "true")
        wait_until(lambda: (lock := held.get("backup")) is not None and lock.waiters)
        os.kill(job.process.pid, number)
        assert job.wait() == status
        lock = held.get("backup")
        assert not lock.waiters


# --- no run ---------------------------------------------------------------------------------------


def test_a_skip_is_one_line_and_a_status():
    with held_by("backup"):
        status, line = here("backup", "--wait", "0.1", "--", "true")
        assert status == 75
        holder = held.get("backup")
        assert line == f"Skipped: 'backup' is held by {holder.owner}\n"
        assert here("backup", "--busy-exit", "9", "-v", "0", "--", "true") == (9, "")


def test_while_an_operator_has_paused_the_lock_nothing_runs_and_the_line_says_why():
    held.pause("backup", 60, by="ann", reason="new disk")
    status, line = here("backup", "--", "true")
    assert (status, line) == (75, "Skipped: 'backup' is paused, by ann: new disk\n")
    held.resume("backup")
    assert here("backup", "--", "true")[0] == 0


def test_after_a_success_it_cools_down_or_is_done():
    assert here("short", "--min-hold", "10m", "--", "true") == (0, "")
    status, line = here("short", "--", "true")
    assert status == 75
    assert line.startswith("Skipped: 'short' cools down after ")
    assert re.search(r" ago, until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line)
    assert here("daily", "--once", "1d", "--", "true") == (0, "")
    status, line = here("daily", "--once", "1d", "--", "true")
    assert status == 0
    assert line.startswith("Skipped: 'daily' is done, by ")
    assert here("nightly", "--once-per", "day", "--", "true") == (0, "")
    status, line = here("nightly", "--once-per", "day", "--", "true")
    assert status == 0
    assert line.startswith(f"Skipped: 'nightly:{datetime.now(UTC):%Y-%m-%d}' is done, by ")
    assert here("nightly", "--once-per", "15m", "--", "true") == (0, "")


# --- without a project ----------------------------------------------------------------------------


def test_no_project_is_needed(locks):
    def run(*arguments, **environ):
        line = shlex.join([sys.executable, "-m", "django_redislock", "run", *arguments])
        return from_a_shell(line, DJANGO_SETTINGS_MODULE="", **environ)

    name = f"{locks.prefix}-backup"
    done = run("--redis", locks.server.url, name, "--", "sh", "-c", "echo $REDISLOCK_FENCE; exit 4")
    assert (done.status, done.err) == (4, "")
    assert int(done.out) > 0
    wrong = run(name, "--", "true", REDISLOCK_URL="http://127.0.0.1")
    assert wrong.status == 2
    assert "is not a URL" in wrong.err
    nowhere = run(name, "--", "true")
    assert nowhere.status == 2
    assert "--redis URL" in nowhere.err
