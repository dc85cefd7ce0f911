"""``manage.py locks metrics``: what it tells, and how much of it. See tests/golden too."""

import os
import re
import stat
from contextlib import ExitStack

import pytest

from django_redislock import distributed_lock, held, single_instance
from django_redislock.management import metrics as exposition
from django_redislock.management.metrics import GAUGES, pattern
from tests.operations.commands import SILENT, locks_command
from tests.support.matrix import MEMORY, everywhere, needs_records, unscripted
from tests.support.others import held_by, waiters
from tests.support.prometheus import is_here, promtool
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

JOB = f"{__name__}.report"


@single_instance("report:{month}")
def report(month, error=None):
    if error:
        raise error


def wait_for_a_report():
    with distributed_lock("report:3", wait=HUNG):
        pass


def told(*args):
    """Each sample that is printed, by its metric and labels without the alias default."""
    samples = {}
    for line in locks_command("metrics", "--no-doctor", *args).out.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            samples[re.sub('alias="default",?', "", sample)] = float(value)
    return samples


def of_job(metric, **labels):
    told = {"job_name": JOB, **labels}
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in told.items()) + "}"


@everywhere
@needs_records
def test_it_tells_of_locks_waiters_and_jobs(place):
    report(1)
    with pytest.raises(KeyError):
        report(2, KeyError)
    with held_by("report:3"):
        assert report(3)["skipped"] == "busy"
        waiting = in_thread(wait_for_a_report)
        wait_until(lambda: waiters("report:3"))
        found = told()
    waiting.result(HUNG)
    assert found["redislock_up{}"] == 1
    assert found['redislock_locks{state="held"}'] == 1
    assert found['redislock_lock_waiters{name="report:{}"}'] == 1
    assert 0 <= found['redislock_lock_wait_seconds{name="report:{}"}'] < HUNG
    assert 0 <= found['redislock_lock_held_seconds{name="report:{}"}'] < HUNG
    last = [
        found[of_job("redislock_job_last_timestamp_seconds", outcome=outcome, reason=reason)]
        for outcome, reason in (("success", ""), ("failure", ""), ("skip", "busy"))
    ]
    assert last == sorted(last)
    assert found[of_job("redislock_job_skips")] == 1
    assert found[of_job("redislock_job_runs")] == 0
    assert found["redislock_records{}"] == 3
    assert any(one.startswith("redislock_memory_bytes") for one in found) == (place.name != MEMORY)


@unscripted
def test_a_server_that_forbids_scripts_is_up_and_has_no_lists(place):
    outcome = locks_command("metrics")
    assert outcome.status == 0
    assert 'redislock_up{alias="default"} 1\n' in outcome.out
    assert 'about="scripting"' in outcome.out
    assert "redislock_locks" not in outcome.out


@pytest.mark.skipif(not is_here(), reason="no promtool here")
def test_prometheus_accepts_what_is_printed(locks, settings):
    settings.REDISLOCK = {"gone": SILENT, **settings.REDISLOCK}
    with held_by("lottery"):
        printed = locks_command("metrics").out
    promtool("check", "metrics", said=printed)
    assert {line.split()[2] for line in printed.splitlines() if "# HELP" in line} <= {*GAUGES}


def test_names_are_few_however_many_locks_there_are(locks):
    with ExitStack() as stack:
        for name in ('a"b\\c', "order:1", "order:2", "order:3", "x", "y"):
            stack.enter_context(held_by(name))
        held.pause("z", 60, by="ann")
        found = told("--limit", "2")
        assert r'redislock_lock_waiters{name="a\"b\\c"}' in told()
    names = {one for one in found if one.startswith("redislock_lock_waiters")}
    assert len(names) == 3
    assert 'redislock_lock_waiters{name="other"}' in names
    assert found['redislock_locks{state="held"}'] == 6
    assert found['redislock_locks{state="paused"}'] == 1


def test_a_stuck_lock_of_a_job_is_not_hidden_by_its_others(locks):
    report(1)
    report(2)
    blocked = of_job("redislock_job_blocked_seconds")
    with held_by("report:1"):
        assert told()[blocked] == 0
        report(1)
        report(2)
        assert told()[blocked] > 0
    assert told()[blocked] == 0  # It is free, and nobody has tried since.
    held.pause("report:1", 60, by="ann")
    report(1)
    assert told()[blocked] == 0


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("lottery", "lottery"),
        ("report:2026-11-23", "report:{}"),
        ("order:3f2504e0-4f89-41d3-9a0c-0305e82c3301:pay", "order:{}:pay"),
        ("sync:4e24abd23c8af4a6", "sync:{}"),
        ("cafe:deadbeef", "cafe:deadbeef"),
    ],
)
def test_what_differs_from_object_to_object_is_left_out(name, label):
    assert pattern(name) == label


def test_a_file_is_written_in_one_step_and_keeps_the_mode_that_it_was_given(locks, tmp_path):
    file = tmp_path / "locks.prom"
    assert locks_command("metrics", "--output", str(file)) == (0, "", "")
    assert "redislock_up{" in file.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["locks.prom"]
    (tmp_path / "any").touch()  # node_exporter is another user than cron.
    assert file.stat().st_mode == (tmp_path / "any").stat().st_mode
    file.chmod(0o640)  # The umask of the tests gives another one.
    exposition.write("redislock_up 0\n", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_text() == "redislock_up 0\n"


def test_writers_with_the_same_process_id_do_not_disturb_each_other(tmp_path):
    """As in two containers with one volume; here they are threads."""
    file, content = tmp_path / "locks.prom", "redislock_up 1\n" * 10_000

    def write():
        for _ in range(50):
            exposition.write(content, file)
            assert file.read_text() == content

    for writer in [in_thread(write) for _ in range(3)]:
        writer.result(HUNG)
    assert [one.name for one in tmp_path.iterdir()] == ["locks.prom"]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file_and_a_link_stays_one(locks, tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link.prom", tmp_path / "locks.prom"
    os.mkfifo(pipe)
    status, out, err = locks_command("metrics", "--output", str(pipe))
    assert (status, out) == (2, "")
    assert "--output: " in err
    assert "no regular file" in err
    assert pipe.is_fifo()
    nowhere = locks_command("metrics", "--output", str(tmp_path / "nowhere" / "x.prom"))
    assert nowhere.status == 2
    assert nowhere.err.startswith("--output: ")
    link.symlink_to(file)
    for _ in range(2):  # Its file is new, or old.
        assert locks_command("metrics", "--output", str(link)).status == 0
        assert link.is_symlink()
        assert "redislock_up{" in file.read_text()
    assert len(list(tmp_path.iterdir())) == 3
