"""``manage.py locks run``, and ``python -m django_redislock run``: any command under a lock."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from django_redislock import held, task_runs
from django_redislock.jobs.options import Skipped
from django_redislock.management.console import line_of
from tests import ROOT
from tests.support.nursery import environment_for, start_python
from tests.support.others import held_by
from tests.support.waiting import HUNG, wait_until

pytestmark = pytest.mark.usefixtures("locks")


class Job:
    """``manage.py locks run`` in a process of its own."""

    def __init__(self, *arguments, redislock):
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        with Path(os.devnull).open("rb") as nothing:
            self.process = start_python(
                "django.core.management:execute_from_command_line",
                *("locks", "run", *arguments),
                files=(nothing.fileno(), self._out.fileno(), self._err.fileno()),
                environment=environment_for() | {"TESTS_REDISLOCK": json.dumps(redislock)},
            )

    @property
    def out(self):
        """What it printed so far."""
        self._out.seek(0)
        return self._out.read().decode()

    @property
    def err(self):
        """The same of standard error."""
        self._err.seek(0)
        return self._err.read().decode()

    def wait(self):
        """Return its exit status."""
        return self.process.wait(HUNG)

    def close(self):
        """End it whatever its state."""
        self.process.kill()
        self.process.wait(HUNG)
        self._out.close()
        self._err.close()


@pytest.fixture
def start(settings):
    """Start jobs."""
    jobs = []

    def job(*arguments):
        jobs.append(Job(*arguments, redislock=settings.REDISLOCK))
        return jobs[-1]

    yield job
    for one in jobs:
        one.close()


def here(*arguments):
    """Run the command in this process, where that starts no other; its status, and what it says."""
    err = io.StringIO()
    try:
        call_command("locks", "run", *arguments, stderr=err, no_color=True)
    except SystemExit as end:
        return int(end.code or 0), err.getvalue()
    except CommandError as error:
        return error.returncode, str(error)
    return 0, err.getvalue()


# --- a run ----------------------------------------------------------------------------------------


def test_with_a_limit_the_command_is_told_the_number_of_its_permit(start):
    command = ("encode", "--limit", "2", "--", "sh", "-c", "echo $REDISLOCK_PERMIT; exec sleep 60")
    jobs = [start(*command) for _ in range(2)]
    wait_until(lambda: sorted(job.out for job in jobs) == ["1\n", "2\n"])
    assert start(*command).wait() == 75


def test_a_rate_admits_so_many_starts_and_takes_no_lock(start):
    rated = ("mails", "--rate", "2/h", "--burst", "2", "--", "sh", "-c")
    for _ in range(2):
        job = start(*rated, "echo ${REDISLOCK_FENCE-none}; exit 7")
        assert (job.wait(), job.out) == (7, "none\n")
    third = start(*rated, "echo never")
    assert third.wait() == 75
    assert "Skipped: 'mails' has no start left, until 20" in third.err
    assert here("mails", "--rate", "2/d", "--", "true")[1].startswith("The rate of Rate('mails')")
    assert here("mails", "--rate", "2/h", "--ttl", "9", "--", "true")[1].startswith(
        "ttl has no effect"
    )
    assert here("mails", "--burst", "2", "--", "true")[0] == 2


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


def as_from_a_shell(line, settings, **environ):
    """Run a line of a shell; "$LOCKS" begins a command of a Python of its own, and no fork."""
    environment = environment_for() | {"TESTS_REDISLOCK": json.dumps(settings.REDISLOCK)}
    environment["LOCKS"] = f"{sys.executable} -m django locks"
    return subprocess.run(
        ["sh", "-c", line],
        cwd=ROOT,
        env={name: value for name, value in (environment | environ).items() if value},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells the former value")
@pytest.mark.parametrize("zone", ["", "Asia/Tokyo"])
def test_the_command_has_the_time_zone_that_we_were_started_with(settings, zone):
    line = "$LOCKS run backup -- sh -c 'echo ${TZ-none}'"
    done = as_from_a_shell(line, settings, TZ=zone)
    assert (done.stdout, done.stderr) == (f"{zone or 'none'}\n", "")


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
    ("lines", "zone"),
    [(WITHOUT_ZONE, ""), (WITHOUT_ZONE, "UTC"), (WITH_A_LONG_TITLE, "Asia/Tokyo")],
    ids=["neither", "of-the-shell", "titled"],
)
def test_the_command_starts_whatever_the_settings_do_to_the_time_zone_and_the_title(
    settings, tmp_path, lines, zone
):
    (tmp_path / "of_a_project.py").write_text(f"from tests.settings import *\n{lines}\n")
    line = "$LOCKS run backup -- sh -c 'echo ${TZ-none}'"
    own = {"DJANGO_SETTINGS_MODULE": "of_a_project", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = as_from_a_shell(line, settings, TZ=zone, **own)
    assert (done.stdout, done.stderr) == (f"{zone or 'none'}\n", "")


def test_the_command_is_told_the_name_as_the_lock_has_it(start):
    job = start("cafe\u0301", "--", "sh", "-c", "echo $REDISLOCK_NAME")
    assert job.wait() == 0
    assert job.out == "caf\u00e9\n"


def test_the_command_is_told_of_no_permit_of_a_run_around_it(settings):
    inner = "$LOCKS run inner -- sh -c 'echo $REDISLOCK_NAME ${REDISLOCK_PERMIT-none}'"
    done = as_from_a_shell('$LOCKS run outer --limit 2 -- sh -c "$INNER"', settings, INNER=inner)
    assert (done.stdout, done.stderr) == ("inner none\n", "")


@pytest.mark.parametrize("status", [0, 7])
def test_without_standard_output_the_exit_status_is_that_of_the_command(settings, status):
    done = as_from_a_shell(f"$LOCKS run backup -- sh -c 'exit {status}' >&-", settings)
    assert (done.returncode, done.stderr) == (status, "")
    done = as_from_a_shell(f"$LOCKS run backup -- sh -c 'exit {status}' >&- 2>&-", settings)
    assert done.returncode == status


def test_an_ignored_sigterm_stays_ignored_by_us_and_by_the_command(settings):
    command = "sh -c 'kill -TERM $PPID $$; exit 3'"
    done = as_from_a_shell(f"trap '' TERM; $LOCKS run backup -- {command}", settings)
    assert (done.returncode, done.stderr) == (3, "")


def test_without_a_place_for_output_an_act_does_what_it_does(settings):
    assert as_from_a_shell("$LOCKS list >&-", settings).returncode == 0
    with held_by("backup"):
        assert as_from_a_shell("$LOCKS run backup -- true >&- 2>&-", settings).returncode == 75
        assert as_from_a_shell("$LOCKS list --fail >&- 2>&-", settings).returncode == 1


def test_its_runs_have_records(start):
    assert start("backup", "--", "true").wait() == 0
    assert start("backup", "--", "false").wait() == 1
    with held_by("backup"):
        assert here("backup", "--", "ls", "-l")[0] == 75
    record = task_runs.record("backup")
    runs = record.last_success, record.last_failure, record.last_skip
    assert [run and run.owner.command for run in runs] == ["true", "false", "ls -l"]
    assert {run and run.owner.task for run in runs} == {"backup"}
    assert record.last_skip.why == "busy"


def test_its_job_is_called_as_the_lock_or_as_told(start):
    assert start("cafe\u0301:1", "--", "true").wait() == 0
    assert start("cafe\u0301:2", "--job", "caf\u00e9", "--", "false").wait() == 1
    records = held.records()
    assert records.of_job("caf\u00e9:1").last_success is not None
    assert records.of_job("caf\u00e9").last_failure is not None


def test_a_lost_lease_ends_what_the_command_has_started(start, tmp_path):
    pids = tmp_path / "pids"
    line = f"sleep 600 | sh -c 'trap : TERM; echo $$ >{pids}; while :; do sleep 1; done' & wait"
    job = start("backup", "--ttl", "4", "--grace", "0.3", "--", "sh", "-c", line)
    wait_until(lambda: pids.exists() and pids.read_text())
    found = held.get("backup")
    assert held.force_release("backup", found.id, by="test", reason="")
    assert job.wait() == 76
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


def test_a_command_whose_lease_is_lost_is_ended(start):
    script = "trap 'echo asked' TERM; echo on; while :; do sleep 0.05; done"
    job = start("backup", "--ttl", "4", "--grace", "0.3", "--", "sh", "-c", script)
    wait_until(lambda: job.out)
    found = held.get("backup")
    assert held.force_release("backup", found.id, by="test", reason="")
    assert job.wait() == 76
    assert job.out == "on\nasked\n"
    assert "an operator released it by force" in job.err


def test_a_command_that_a_setting_ends_is_told_which_one(locks, start):
    locks.configure(MAX_HOLD=2)
    job = start("backup", "--", "sleep", "60")
    assert job.wait() == 76
    says = "The lease of lock 'backup' is not held: its max_hold of 2 s was over."
    assert job.err.splitlines()[-1] == says


def test_of_ten_that_wait_one_does_the_work_and_all_succeed(start, tmp_path):
    work = f"echo done >> {tmp_path}/work; sleep 0.2"
    options = ("--wait", "inf", "--once", "1h", "--ttl", "20")
    jobs = [start("migrate", *options, "--", "sh", "-c", work) for _ in range(10)]
    assert [job.wait() for job in jobs] == [0] * 10
    assert (tmp_path / "work").read_text() == "done\n"
    told = [job.err for job in jobs if job.err]
    assert len(told) == 9
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


def test_a_skip_says_why_as_far_as_that_is_known():
    skipped = Skipped(skipped="paused", lock="backup", holder="ann", reason="new disk")
    assert line_of(skipped) == "Skipped: 'backup' is paused, by ann: new disk"
    skipped = Skipped(skipped="done", lock="backup", by="ann", ago=61.0)
    assert line_of(skipped) == "Skipped: 'backup' is done, by ann, 1 min 01 s ago"


def test_after_a_success_it_cools_down_or_is_done(start):
    assert start("short", "--min-hold", "10m", "--", "true").wait() == 0
    status, line = here("short", "--", "true")
    assert status == 75
    assert line.startswith("Skipped: 'short' cools down after ")
    assert re.search(r" ago, until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line)
    assert start("daily", "--once", "1d", "--", "true").wait() == 0
    status, line = here("daily", "--once", "1d", "--", "true")
    assert status == 0
    assert line.startswith("Skipped: 'daily' is done, by ")
    assert " daily, " in line


def test_it_runs_once_in_each_period(start):
    assert start("nightly", "--once-per", "day", "--", "true").wait() == 0
    status, line = here("nightly", "--once-per", "day", "--", "true")
    assert status == 0
    assert line.startswith(f"Skipped: 'nightly:{datetime.now(UTC):%Y-%m-%d}' is done, by ")
    assert here("nightly", "--once-per", "15m", "--", "true") == (0, "")
    status, line = here("nightly", "--once-per", "7m", "--", "true")
    assert status == 2
    assert "a part of a day" in line


def test_so_many_run_at_a_time(start):
    jobs = [
        start("export", "--limit", "2", "--", "sh", "-c", "echo on; exec sleep 600") for _ in "ab"
    ]
    wait_until(lambda: all(job.out for job in jobs))
    status, line = here("export", "--limit", "2", "--", "true")
    assert status == 75
    assert line.startswith("Skipped: 'export' is held by ")


def test_a_server_that_does_not_answer(locks):
    locks.configure(LOCATION="redis://127.0.0.1:1/0")
    status, says = here("backup", "--", "true")
    assert status == 3
    assert "cannot answer" in says


def test_what_cannot_be_run_takes_no_lock(tmp_path):
    assert here("backup", "--", "no-such-program") == (127, "no-such-program: command not found\n")
    status, says = here("backup", "--", str(tmp_path))
    assert (status, says) == (126, f"{tmp_path}: it is a directory\n")
    assert task_runs.record("backup") is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["backup"], "no COMMAND; write it after --"),
        (["backup", "--"], "no COMMAND; write it after --"),
        (["backup", "pg_dump", "-Fc", "shop"], "no COMMAND; write it after --"),
        (["backup", "more", "--", "true"], "unrecognized arguments: more"),
        (["--", "true"], "required: NAME"),
        (["backup", "--ttl", "soon", "--", "true"], "--ttl: 'soon' is no duration"),
        (["backup", "--ttl", "0.001", "--", "true"], "ttl must be at least 0.05 seconds"),
        (["backup", "--busy-exit", "256", "--", "true"], "'256' is no exit status"),
        (["backup", "--busy-exit", "0000300", "--", "true"], "'0000300' is no exit status"),
        (["backup", "--limit", "2", "--once", "5m", "--", "true"], "once and limit exclude"),
        (["backup", "--using", "jobs", "--", "true"], "no alias 'jobs'"),
        (["back\nup", "--", "true"], "Invalid lock name"),
        (["backup", "--job", "", "--", "true"], "--job: it is empty"),
    ],
)
def test_wrong_usage_is_explained(arguments, says):
    with pytest.raises(CommandError, match=says):
        call_command("locks", "run", *arguments)


def test_it_prints_no_json():
    with pytest.raises(CommandError, match="leave out --json"):
        call_command("locks", "--json", "run", "backup", "--", "true")


# --- without a project ----------------------------------------------------------------------------


def test_no_project_is_needed(locks):
    def run(*arguments, **environ):
        environment = {name: os.environ[name] for name in os.environ if "DJANGO" not in name}
        return subprocess.run(
            [sys.executable, "-m", "django_redislock", "run", *arguments],
            cwd=ROOT,
            env=environment | environ,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
        )

    name = f"{locks.prefix}-backup"
    done = run("--redis", locks.server.url, name, "--", "sh", "-c", "echo $REDISLOCK_FENCE; exit 4")
    assert (done.returncode, done.stderr) == (4, "")
    assert int(done.stdout) > 0
    wrong = run(name, "--", "true", REDISLOCK_URL="http://127.0.0.1")
    assert wrong.returncode == 2
    assert "is not a URL" in wrong.stderr
    nowhere = run(name, "--", "true")
    assert nowhere.returncode == 2
    assert "--redis URL" in nowhere.stderr
