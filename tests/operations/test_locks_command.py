"""``manage.py locks``: what it does, its exit statuses, and how it is used on a terminal.

What each act prints, what it refuses, and what it says of a silent server is in tests/golden.
"""

import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from unittest.mock import Mock, patch
from zoneinfo import ZoneInfo

import django
import pytest
from django.core.management import CommandError, call_command

from django_redislock import distributed_lock, held, process, task_runs
from django_redislock.holder import Activity, busy_with
from django_redislock.humanize import parse_duration
from django_redislock.management import live_view
from django_redislock.management import terminal as text
from django_redislock.management.console import logging_afterwards
from django_redislock.process import is_gone
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.names import check_name
from django_redislock.rules.stored import Owner
from django_redislock.testing import LockTestKit
from tests.operations.commands import SILENT, Outcome, from_a_shell, locks_command, ran, typed
from tests.operations.test_once_command import add_run
from tests.support.circles import a_circle
from tests.support.others import held_by, waiters
from tests.support.processes import hear, say
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = pytest.mark.usefixtures("locks")


# --- list -----------------------------------------------------------------------------------------


def test_without_an_act_it_lists_and_options_may_stand_before_and_after_the_act():
    assert locks_command() == Outcome(0, "No lock is held.\n", "")
    assert locks_command("list", "--host", "typo").out == "No lock is held.\n"
    assert locks_command("list", "--json").json == []
    with held_by("lottery"):
        for arguments in ("--json", "--json --alias default list", "list --json --alias default"):
            assert [one["name"] for one in locks_command(*arguments.split()).json] == ["lottery"]
        outcome = locks_command("list", "--host", "typo")
        assert outcome.out == "1 lock is held, but none matches --host typo.\n"
        assert len(locks_command("list", "--limit", "9" * 30, "--json").json) == 1


@pytest.mark.parametrize("columns", [None, 80, 120, 200])
def test_the_table_is_aligned_also_with_wide_characters(columns):
    names = ["lottery", "宝くじ", "복권", "e\u0301\u0323x", "\uff4c\uff4f", "🎟"]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(held_by(name))
        head, *rows = text.locks(held.list(), columns)
    rows = [row for row in rows if not row.startswith(" ")]
    assert len(rows) == len(names)
    for row in rows:
        assert text.width(row.partition("held")[0]) == head.index("STATE")
        assert text.width(row.partition("web-3")[0]) == head.index("HOLDER")


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_a_table_on_a_narrow_terminal_cuts_nothing(columns):
    names, task = ["lottery", "宝" * 60, "report 2026-11"], "shop.tasks." + "t" * 30
    doing = f"{task} id-1"
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(held_by(name, "worker-7d9f8b6c5d-x2x4z", task))
        found = held.list()
        lines = list(text.locks(found, columns, with_alias=True))
    for line in lines:
        assert text.width(line) <= columns or line in {"宝" * 60, f"    doing {doing}"}, line
    for lock in found:
        assert sum(lock.id in line for line in lines) == 1
    for part in ("'report 2026-11'", "宝" * 60, "worker-7d9f8b6c5d-x2x4z:4711", doing):
        assert any(part in line for line in lines)


@pytest.mark.no_permit("a child process lists the bystander too")
def test_a_list_fits_the_terminal(terminal):
    with held_by("lottery", "worker-7d9f8b6c5d-x2x4z", "lottery.tasks.draw"):
        process, read = terminal("list", COLUMNS="80")
        assert process.wait(HUNG) == 0
    assert [len(line) <= 80 for line in read().splitlines()] == [True] * 3


@pytest.mark.parametrize(
    ("criterion", "found"),
    [
        (("--host", "web-1"), ["a:1"]),
        (("--task", "shop.tasks.pay"), ["caf\u00e9"]),
        (("--prefix", "a:"), ["a:1", "a:2"]),
        (("--prefix", "a:", "--host", "web-2"), ["a:2"]),
        (("--host", "web-1", "--prefix", "c"), []),
        (("--search", "SHOP"), ["caf\u00e9"]),
        (("--search", "cafe\u0301"), ["caf\u00e9"]),
        (("--prefix", "cafe\u0301"), ["caf\u00e9"]),
        (("--search", "web-2:4711"), ["a:2", "caf\u00e9"]),
        (("--state", "cooling"), []),
        (("--state", "permit"), ["caf\u00e9"]),
        (("--older-than", "10m"), []),
        (("--older-than", "0"), ["a:1", "a:2", "caf\u00e9"]),
    ],
    ids=lambda value: ascii(" ".join(value)),
)
def test_options_choose_what_is_listed_and_what_clean_frees(criterion, found):
    with (
        held_by("a:1", "web-1", ttl=50),
        held_by("a:2", "web-2", ttl=60),
        held_by("caf\u00e9", "web-2", task="shop.tasks.pay", ttl=70, limit=2),
    ):
        assert [one["name"] for one in locks_command("list", "--json", *criterion).json] == found
        if criterion[0] not in {"--search", "--state"}:
            assert locks_command("clean", *criterion, "--yes").status == 0
            left = [name for name in ("a:1", "a:2", "caf\u00e9") if name not in found]
            assert [lock.name for lock in held.list()] == left


def test_all_aliases_are_looked_at_unless_one_is_named(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "KEY_PREFIX": "test-other"}}
    prizes = distributed_lock("prizes", using="other")
    with held_by("lottery"):
        assert prizes.acquire()
        assert [lock["alias"] for lock in locks_command("--json").json] == ["default", "other"]
        assert "ALIAS" in locks_command().out
        (lock,) = locks_command("--json", "--alias", "other").json
        assert lock["name"] == "prizes"
        assert "ALIAS" not in locks_command("--alias", "other").out
        release = ("release", "--id", prizes.lease.id)
        assert locks_command(*release, "--alias", "default").status == 1
        (released,) = locks_command(*release, "--json").json
        assert (released["name"], released["alias"]) == ("prizes", "other")
        assert [lock["name"] for lock in locks_command("--json").json] == ["lottery"]
        says = f"No lease '{prizes.lease.id}' is held."
        assert locks_command(*release) == Outcome(1, "", says)


# --- show -----------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("zone", ["Asia/Kolkata", None])
def test_commands_tell_times_in_the_zone_of_the_settings_or_of_the_system(settings, zone):
    settings.USE_TZ, settings.TIME_ZONE = bool(zone), zone
    with distributed_lock("lottery") as lease:
        lease.renew()  # Long enough to be remembered.
    with distributed_lock("lottery", ttl=60):
        shown = locks_command("show", "lottery", "--json").json
        (past,) = shown["past"]
        assert shown["expires_at"] - shown["taken_at"] == pytest.approx(60, abs=1)
        assert shown["taken_at"] >= past["until"] - 0.002
        taken, before = (
            datetime.fromtimestamp(at, UTC).astimezone(zone and ZoneInfo(zone)).isoformat(" ")
            for at in (shown["taken_at"], past["since"])
        )
        told = locks_command("show", "lottery").out
        second, offset = taken[:19], taken[-6:]
        assert f"\ntaken at    {second}{offset}\n" in told
        assert re.search(rf"(?m)^expires at  \d{{4}}-.*{re.escape(offset)}$", told)
        assert f"  {before[:19]}{offset}" in told
        assert second in locks_command("explain", "lottery").out
        assert locks_command("pause", "other", "--for", "2h").out.startswith("Paused: other, until")
    assert "taken_at" not in locks_command("show", "lottery", "--json").json


def test_those_who_wait_for_any_permit_are_shown_and_counted_once():
    waits = distributed_lock("gpu", limit=2, wait=HUNG)
    with held_by("gpu", limit=2), held_by("gpu", "web-4", limit=2):
        waiting = in_thread(waits.acquire)
        wait_until(lambda: waiters("gpu") == 1)
        shown = locks_command("watch").out
        assert "held: 2  waiting: 1" in shown
        assert shown.count("waiting 1.") == 1
        metrics = locks_command("metrics", "--no-doctor").out
        assert 'redislock_locks{alias="default",state="held"} 2\n' in metrics
        assert 'redislock_lock_waiters{alias="default",name="gpu"} 1\n' in metrics
        shown = locks_command("show", "gpu").out
        assert "Waiting, 1 in all" in shown
        assert re.search(r"Other permits:\n.*\n +gpu#2 +permit 2/2 .*web-4:4711", shown)
        exact = locks_command("show", "gpu", "--permit", "2", "--json").json
        assert (exact["name"], exact["permit"], exact["host"]) == ("gpu#2", "2/2", "web-4")
        assert [one["name"] for one in exact["others"]] == ["gpu"]
        assert locks_command("show", "gpu#2", "--permit", "1", "--json").json["state"] == "free"
        assert locks_command("release", "gpu#2", "--yes").status == 0
        assert waiting.result(HUNG)
    waits.release()


@pytest.mark.waits
@pytest.mark.no_permit("a circle needs all holders to wait, and the bystander does not")
def test_holders_who_wait_for_each_other_are_seen(locks):
    locks.configure(TTL=30, WAIT=HUNG)
    with a_circle("a", "b"):
        for act, (name, other) in product(("list", "watch"), ("ab", "ba")):
            row = rf"(?m)^{name} +circle .*, waits for {other} "
            assert re.search(row, locks_command(act).out)
        shown = locks_command("show", "a").out
        assert re.search(r"(?m)^waits for +b$", shown)
        assert "note        Its holder waits, and that would never end: 'b' is held by" in shown
        lock = locks_command("show", "a", "--json").json
        assert (lock["state"], lock["waits_for"]) == ("held", "b")
        assert "'b' is held by" in lock["circle"]


def test_a_server_that_came_back_empty_is_said_to_begin_there(locks, own_server):
    locks.on(own_server)

    def says(*args):
        return "".join(locks_command(*args)[1:])

    task_runs.note_skip("nightly", "busy", using="default")
    begins = r"The server \S+ \(default\) was started at \d.* ago\. Records of runs begin there\."
    own_server.restart()
    wait_until(lambda: re.search(begins, says("runs")))
    for args in (("show", "nightly"), ("runs", "nightly")):
        assert re.search(begins, says(*args))
    doctor = says("doctor", "--alias", "default")
    assert re.search(r"start  .* ago; records of runs begin there", doctor)
    ran("nightly")
    assert not re.search(begins, says("runs"))  # All is well.
    own_server.client().config_set("appendonly", "yes")
    assert "records of runs begin there" not in says("doctor", "--alias", "default")


# --- runs -----------------------------------------------------------------------------------------

FRESH = ("--no-success-for", "26h", "--fail")


def make_older(locks, name, hours):
    """Let the last success of a task be some hours longer ago."""
    runs = lock_keys(locks.prefix, name).runs
    at, _, rest = locks.redis.hget(runs, "success").partition(b"|")
    locks.redis.hset(runs, "success", b"%d|%b" % (int(at) - hours * 3_600_000, rest))


def test_a_probe_finds_what_had_no_success_for_so_long(locks):
    says = "Nothing is known, so all are without a success in the last 1 d 2 h."
    outcome = locks_command("runs", *FRESH)
    assert (outcome.status, outcome.err) == (1, says)
    ran("nightly")
    each = "Each had a success in the last 1 d 2 h.\n"
    assert locks_command("runs", *FRESH) == Outcome(0, each, "")
    assert locks_command("runs", *FRESH, "-v", "0") == Outcome(0, "", "")  # cron mails nothing.
    assert locks_command("runs", "nightly", *FRESH, "--json") == Outcome(0, "[]\n", "")
    make_older(locks, "nightly", 27)
    assert "nightly" in locks_command("runs", "nightly", *FRESH, "-v", "0").out
    assert locks_command("runs", "nightly", *FRESH).status == 1
    assert locks_command("runs", "nightly", *FRESH[:-1]).status == 0
    assert locks_command("runs", "nightly", "--no-success-for", "28h", "--fail").status == 0


@pytest.mark.parametrize("chosen", [("--task", "tasks.report"), ("--prefix", "report:")])
def test_of_all_locks_of_a_task_the_latest_success_counts(locks, chosen):
    """Of a daily job with the date in its key, yesterday's lock is of no interest."""
    ran("nightly")
    for day in ("2026-11-21", "2026-11-22", "2026-11-23"):
        ran(f"report:{day}", day, task="tasks.report")
    task_runs.note_skip("report:2026-11-24", "busy", using="default")
    names = [one["name"] for one in locks_command("runs", *chosen, "--json").json]
    assert names[-3:] == [f"report:2026-11-{day}" for day in (23, 22, 21)]
    make_older(locks, "report:2026-11-21", 50)
    make_older(locks, "report:2026-11-22", 25)
    make_older(locks, "report:2026-11-23", 27)
    says = "The last success was 1 d 1 h ago, under report:2026-11-22.\n"
    assert locks_command("runs", *chosen, *FRESH) == Outcome(0, says, "")
    assert locks_command("runs", *chosen, *FRESH, "--json") == Outcome(0, "[]\n", "")
    make_older(locks, "report:2026-11-22", 2)
    outcome = locks_command("runs", *chosen, *FRESH)
    assert outcome.status == 1
    assert outcome.err.startswith(f"No success of {' '.join(chosen)} in the last 1 d 2 h, among ")
    assert "report:2026-11-22" in outcome.out
    assert "nightly" not in outcome.out


def test_the_success_of_another_task_under_the_same_lock_does_not_count():
    ran("account:7", "x", task="tasks.bill", error=ZeroDivisionError)
    ran("account:7", task="tasks.export")
    outcome = locks_command("runs", "--task", "tasks.bill", *FRESH)
    assert outcome.status == 1
    assert outcome.err == "No success of --task tasks.bill in the last 1 d 2 h, among 1 lock."
    assert locks_command("runs", "--job", "tasks.bill", *FRESH).status == 1
    assert locks_command("runs", "--task", "tasks.export", *FRESH).status == 0
    # The same task may have it under another lock.
    ran("account:8", task="tasks.bill")
    outcome = locks_command("runs", "--task", "tasks.bill", *FRESH)
    assert (outcome.status, outcome.err) == (0, "")
    assert re.fullmatch(r"The last success was \S+ s ago, under account:8\.\n", outcome.out)


def test_programs_choose_records_too():
    for name, task in {"a:1": "tasks.a", "a:2": "tasks.a", "b:1": "tasks.b"}.items():
        ran(name, name, task=task)
    ran("caf\u00e9", "x", task="tasks.a", error=ZeroDivisionError)

    def names(**chosen):
        return sorted(one.name for one in held.records(**chosen))

    assert names(task="tasks.a", prefix="a:") == ["a:1", "a:2"]
    assert names(prefix="cafe\u0301") == ["caf\u00e9"]
    assert names(task="tasks") == names(prefix="1") == []
    some, all_of_it = (held.records(task="tasks.a", limit=limit) for limit in (1, 3))
    assert [(len(one), one.partial) for one in (some, all_of_it)] == [(1, True), (3, False)]
    assert len(held.records(limit=2**70)) == 4
    with pytest.raises(ValueError, match="limit must not be negative"):
        held.records(limit=-1)


def test_a_task_is_found_by_a_name_that_is_kept_in_part():
    task = "tasks." + 300 * "x"
    ran("a:1", "a:1", task=task)
    assert [one.name for one in held.records(task=task)] == ["a:1"]
    job = held.job(task)
    assert (job.name, job.last_success is None) == (task, False)
    for option in ("--task", "--job"):
        assert locks_command("runs", option, task, *FRESH).status == 0


# --- release and clean ----------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["release lottery", "clean --all"])
def test_nothing_is_freed_without_a_yes(answers, act):
    with held_by("lottery"):
        for answer in ("", "n", "yess", "j"):
            answers(answer)
            outcome = locks_command(*act.split())
            assert (outcome.status, outcome.err) == (1, "Nothing was released.")
            assert "web-3:4711" in outcome.out
        assert held.get("lottery") is not None
        answers("y")
        assert locks_command(*act.split()).out.endswith("[y/N] Released 1 lock.\n")
        assert held.get("lottery") is None


@pytest.mark.no_permit("a child process lists the bystander too")
def test_with_json_the_leases_and_the_question_are_not_on_standard_output(shell):
    with held_by("lottery"):
        outcome = shell("clean", "--all", "--json", answer="y\n")
        assert [one["released"] for one in outcome.json] == [True]
        assert "web-3:4711" in outcome.err
        assert "Release 1 lock? The holders are not stopped. [y/N]" in outcome.err


@pytest.mark.proves("P9")
def test_release_frees_no_newer_lease_than_the_one_shown(monkeypatch):
    with held_by("lottery"):

        def while_it_is_asked():
            shown = held.get("lottery")
            held.force_release("lottery", shown.id)
            assert later.acquire()
            return "y"

        later = distributed_lock("lottery")
        monkeypatch.setattr("builtins.input", while_it_is_asked)
        outcome = locks_command("release", "lottery")
        assert outcome.status == 1
        assert "Somebody else holds it now" in outcome.err
        later.lease.ensure_held(verify=True)
        later.release()


@pytest.mark.proves("P9")
def test_release_with_an_id_asks_nothing_and_frees_only_that_lease(shell):
    with held_by("lottery"):
        lock = held.get("lottery")
        for other in ("0" * 16, "", "x y", "*"):
            outcome = locks_command("release", "lottery", "--id", other)
            assert outcome.status == 1
            assert "Somebody else" in outcome.err
        undecodable = shell("release", "lottery", "--id", "\udcff")
        assert (undecodable.status, "Traceback" in undecodable.err) == (1, False)
        assert held.get("lottery") is not None
        assert locks_command("release", "lottery", "--id", lock.id).status == 0
        again = locks_command("release", "lottery", "--id", lock.id)
        assert again.status == 1
        assert "Nobody holds it" in again.err


def test_release_by_id_says_when_there_are_too_many_locks_to_look_through(monkeypatch):
    with held_by("a"), held_by("b"):
        monkeypatch.setattr(held, "MOST_LOOKS", 1)
        assert "say its NAME too" in locks_command("release", "--id", "0" * 16).err


def test_audit_lines_say_who_and_why_and_come_after_the_answer_on_the_terminal():
    with held_by("lottery"), held_by("nightly"):
        line = r"$LOCKS release lottery nightly --yes --reason $'stuck\nsince noon' 2>&1"
        _headers, _first, _second, answer, *audit = from_a_shell(line).out.splitlines()
    assert answer == "Released 2 locks."
    assert ["'lottery'" in line for line in audit] == [True, False]
    for line in audit:
        assert "of 'web-3:4711' released by" in line
        assert r"by manage.py locks', reason 'stuck\nsince noon'" in line


def test_a_log_file_has_an_audit_line_at_once(tmp_path):
    handler = logging.FileHandler(tmp_path / "audit.log")
    held.audit.addHandler(handler)
    try:
        with logging_afterwards(held.audit):
            held.audit.warning("at once")
            assert (tmp_path / "audit.log").read_text() == "at once\n"
    finally:
        held.audit.removeHandler(handler)
        handler.close()


def test_clean_frees_more_locks_than_a_list_shows(locks, monkeypatch):
    monkeypatch.setattr(held, "MOST_NAMES", 3)
    handles = [distributed_lock(f"lottery:{number}", renew=False) for number in range(10)]
    assert all(handle.acquire() for handle in handles)
    assert "Released 10 locks." in locks_command("clean", "--all", "--yes").out
    assert held.list() == []


def test_clean_queued_forgets_the_announced_calls_of_one_task_or_all():
    def announce(name, task_id, task, **how):
        return task_runs.announce(check_name(name), task_id, 60, task=task, using="default", **how)

    def standing():
        return {calls.queued for _, calls in task_runs.announced(using="default").locks}

    assert announce("import:1", "id-1", "tasks.import|and more") == ""
    assert announce("import:{2}", "id-2", "tasks.import") == ""
    assert announce("export", "id-3", "tasks.export") == ""
    announce("over", "id-4", "tasks.export")
    task_runs.retract("over", "id-4", using="default")
    assert locks_command("clean", "--queued", "--dry-run").out.endswith(
        "forget 3 announced calls.\n"
    )
    assert standing() == {"id-1", "id-2", "id-3"}
    outcome = locks_command("clean", "--queued", "--task", "tasks.import")
    assert outcome.status == 0
    assert outcome.out.endswith("\nForgot 2 announced calls.\n")
    assert standing() == {"id-3"}
    # A call that waits after all has the arguments of the last one.
    assert announce("export", "id-6", "tasks.export", arguments=b"the last") == "id-3"
    assert locks_command("clean", "--queued").status == 0
    assert standing() == set()
    assert task_runs.retract("export", "id-3", using="default") == b"the last"
    assert announce("export", "id-5", "tasks.export") == ""


def test_a_server_that_falls_silent_while_it_releases_leaves_it_known_how_far_it_came(
    locks, make_proxy
):
    proxy = make_proxy(locks.server)
    with held_by("a"), held_by("b"):
        locks.on(proxy, OPTIONS={"socket_timeout": 1})
        last = lock_keys(locks.prefix, "b").lock.encode()
        sha = scripts.FORCE_RELEASE.sha.encode()
        match = lambda args: args[0] == sha and last in args  # noqa: E731
        proxy.rule("EVALSHA", "hang_after", match=match, times=None)
        outcome = locks_command("release", "a", "b", "--yes")
    assert outcome.status == 3
    assert "cannot answer" in outcome.err
    assert outcome.err.endswith(" Released 1 lock, and perhaps one more.")


def test_ctrl_c_while_it_releases_says_how_far_it_has_come(monkeypatch):
    force_release = held.force_release

    def interrupted(name, *args, **options):
        if name == "b":
            raise KeyboardInterrupt
        return force_release(name, *args, **options)

    with held_by("a"), held_by("b"):
        monkeypatch.setattr(held, "force_release", interrupted)
        outcome = locks_command("release", "a", "b", "--yes")
        assert outcome.status == 130
        assert outcome.err == "Interrupted. Released 1 lock, and perhaps one more."


# --- processes that are gone ----------------------------------------------------------------------


def hold(name):
    """In a child: end one lease in an orderly way, and hold another lock until the kill."""
    with distributed_lock("cooled", min_hold=60):
        pass
    with distributed_lock(name, ttl=60, renew=False):
        say("held")
        hear()


def test_what_processes_that_are_gone_hold_is_shown_and_freed(spawn, answers):
    child = spawn(hold, "gone")
    child.read()
    child.kill()
    with distributed_lock("mine") as lease, held_by("theirs"):
        by_name = {lock["name"]: lock["gone"] for lock in locks_command("--json").json}
        assert by_name == {"cooled": False, "mine": False, "theirs": False, "gone": True}
        lines = locks_command("list").out.splitlines()
        assert [line.split()[0] for line in lines if "(gone)" in line] == ["gone"]
        assert "gone: no such process on this host" in locks_command("show", "gone").out
        assert "gone" not in locks_command("show", "mine").out

        dry = locks_command("clean", "--dead-here", "--dry-run", "--json").json
        assert [(lock["name"], lock["released"]) for lock in dry] == [("gone", False)]
        answers("n")
        assert locks_command("clean", "--dead-here").status == 1
        assert held.get("gone") is not None
        assert locks_command("clean", "--dead-here", "--yes").status == 0
        assert {lock.name for lock in held.list()} == {"cooled", "mine", "theirs"}
        lease.ensure_held(verify=True)


HERE, OURS = socket.gethostname(), process.current.birth
BOOT, NAMESPACE, STARTED = OURS.split(".")
OTHER_CONTAINER = f"{BOOT}.{int(NAMESPACE) + 1}.{STARTED}"
BEFORE_THIS_BOOT = f"another.{NAMESPACE}.{STARTED}"
NOBODYS = 2**22 + 1  # Greater than any process id on Linux.


@pytest.mark.parametrize(
    ("host", "pid", "birth", "answer"),
    [
        pytest.param(HERE, os.getpid(), OURS, False, id="this process"),
        pytest.param(HERE, os.getpid(), f"{BOOT}.{NAMESPACE}.1", True, id="its id before"),
        pytest.param(HERE, NOBODYS, OURS, True, id="no process"),
        pytest.param(HERE, NOBODYS, OTHER_CONTAINER, False, id="in another container"),
        pytest.param(HERE, NOBODYS, BEFORE_THIS_BOOT, False, id="before this boot"),
        pytest.param(HERE, NOBODYS, "", False, id="of an older version"),
        pytest.param(HERE, 2**80, OURS, False, id="no process id"),
        pytest.param(HERE, 0, OURS, False, id="0"),
        pytest.param(HERE, -1, OURS, False, id="-1"),
        pytest.param(HERE, None, OURS, False, id="unknown"),
        pytest.param("another-host", NOBODYS, OURS, False, id="on another host"),
        pytest.param("", NOBODYS, OURS, False, id="on no host"),
    ],
)
def test_only_what_surely_does_not_exist_is_gone(host, pid, birth, answer):
    assert is_gone(host, pid, birth) is answer


def test_a_container_knows_its_own_dead_processes_and_no_others():
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    setup = "import django, os; django.setup(); from django_redislock import distributed_lock, held"
    take = "distributed_lock('lottery', ttl=600, renew=False).acquire(); os._exit(0)"
    look = "print(held.get('lottery').gone)"
    python = f'{sys.executable} -c "{setup}; '
    inside = f'{python}{take}" && {python}{look}"'
    outcome = from_a_shell(f'{" ".join(unshare)} sh -c "$INSIDE"', INSIDE=inside)
    assert (outcome.status, outcome.out) == (0, "True\n")
    assert held.get("lottery").gone is False
    assert "Would release" not in locks_command("clean", "--dead-here", "--dry-run").out


def test_where_proc_tells_nothing_nobody_is_gone(monkeypatch):
    with patch.object(os, "kill", side_effect=PermissionError):  # It hides those of others.
        assert is_gone(HERE, NOBODYS, OURS) is False
    monkeypatch.setattr(process, "current", process.Process())
    monkeypatch.setattr(os, "readlink", Mock(side_effect=FileNotFoundError))
    assert process.current.birth == ""
    assert is_gone(HERE, NOBODYS, OURS) is False


# --- a shell --------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_djangos_own_options_may_stand_before_and_after_the_act(shell):
    options = ("--no-color", "-v0", "--skip-checks")
    for act in (["list"], ["show", "x"], ["release", "x", "--yes"], ["doctor"], ["watch"]):
        before, after = typed(*options, *act), typed(*act, *options)
        assert "usage:" not in before.err + after.err
        assert (before.status, before.err) == (after.status, after.err)
        assert typed(*act, "--version").out == f"{django.get_version()}\n"
    # Django looks for these before it knows the act.
    options = ("--settings=tests.settings", "--pythonpath=.", "--traceback")
    for line in ((*options, "list"), ("list", *options)):
        assert shell(*line, DJANGO_SETTINGS_MODULE="") == Outcome(0, "No lock is held.\n", "")


@pytest.mark.django_db
def test_djangos_options_after_the_act_are_heeded(shell):
    assert "\x1b[" in typed("doctor", "--force-color").out
    assert "\x1b[" not in typed("doctor").out
    assert "Traceback" in shell("show", "", "--traceback").err
    assert "Traceback" not in shell("show", "").err
    nowhere = shell("list", "--settings", "nowhere", forked=False)
    assert "No module named 'nowhere'" in nowhere.err


@pytest.mark.django_db
def test_no_color_is_heeded(terminal, monkeypatch):
    coloured, read = terminal("doctor")
    coloured.wait(HUNG)
    assert "\x1b[" in read()
    plain, read = terminal("doctor", NO_COLOR="1")
    plain.wait(HUNG)
    assert "ok" in read()
    assert "\x1b[" not in read()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in typed("doctor", "--force-color").out


def test_every_help_text_is_a_sentence_about_what_is_done():
    for act in ("list", "show", "runs", "release", "clean", "doctor", "watch"):
        usage, says, *options = typed(act, "--help").out.split("\n\n")
        assert usage.startswith(f"usage: manage.py locks {act} ")
        assert re.fullmatch(r"[A-Z][^.]*[.](\s[A-Z][^.]*[.])*", says), says
        for option in re.split(r"^  (?=-)", "\n".join(options), flags=re.MULTILINE)[1:]:
            assert re.search(r"\s\s[a-z]+", option), f"{act}: {option} says nothing"


def test_letters_that_the_terminal_lacks_are_written_out_and_metrics_are_utf_8(shell):
    with held_by("Gerät:報"):
        listed = shell("list", forked=False, PYTHONIOENCODING="ascii")
        assert (listed.status, listed.err) == (0, "")
        assert r"Ger\xe4t:\u5831" in listed.out
        metrics = shell("metrics", "--no-doctor", forked=False, PYTHONIOENCODING="ascii")
        assert 'name="Gerät:報"' in metrics.out


@pytest.mark.parametrize("arguments", ["list --json", "doctor", "list --alias nope 2>&1"])
def test_a_reader_who_has_enough_is_no_traceback(arguments):
    assert from_a_shell(f"$LOCKS {arguments} | true", PYTHONUNBUFFERED="1").err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("list --json", ""), ("metrics --no-doctor", "1"), ("", "1")]
)
def test_a_disk_without_room_for_the_output_is_a_message(arguments, unbuffered):
    outcome = from_a_shell(f"$LOCKS {arguments} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    says = "The output cannot be written: No space left on device.\n"
    assert outcome == Outcome(1, "", says)


def test_ctrl_c_at_the_question_frees_nothing_and_is_no_traceback(terminal):
    with held_by("lottery"):
        process, read = terminal("release", "lottery")
        wait_until(lambda: "[y/N]" in read())
        process.send_signal(signal.SIGINT)
        # Python notices a signal that comes just before it reads a line only when the read has
        # ended. So press once more if nothing happens, as a user would.
        with suppress(AssertionError):
            process.wait(5)
        process.send_signal(signal.SIGINT)
        assert process.wait(HUNG) == 130
        assert "Nothing was released." in read()
        assert "Traceback" not in read()
        assert held.get("lottery") is not None


def test_also_if_it_comes_between_the_question_and_the_wait_for_its_answer():
    class Terminal(io.StringIO):
        def flush(self):
            if "[y/N]" in self.getvalue():
                raise KeyboardInterrupt

    with held_by("lottery"):
        with pytest.raises(CommandError, match=r"^Nothing was released\.$") as raised:
            call_command("locks", "release", "lottery", stdout=Terminal())
        assert raised.value.returncode == 130
        assert held.get("lottery") is not None


def test_ctrl_d_at_the_question_is_no_yes(terminal):
    with held_by("lottery"):
        process, read = terminal("release", "lottery", keys=b"\x04")
        assert process.wait(HUNG) == 2
        assert "There was no answer, so nothing was released. --yes does not ask." in read()
        assert held.get("lottery") is not None


def test_ctrl_c_while_it_looks_is_no_traceback(terminal, locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    hanging = proxy.rule("*", "hang_before", times=None)
    process, read = terminal("list")
    hanging.wait(timeout=HUNG)
    process.send_signal(signal.SIGINT)
    assert process.wait(HUNG) == 130
    assert "Interrupted." in read()
    assert "Traceback" not in read()


def test_durations_are_written_as_people_do():
    written = {"90": 90, "1.5": 1.5, "90s": 90, "10m": 600, "1h30m": 5400, "2d": 172_800}
    assert {duration: parse_duration(duration) for duration in written} == written
    for endless in ("9" * 400 + "d", "9" * 5000):
        with pytest.raises(ValueError, match="is longer than a hundred years"):
            parse_duration(endless)


# --- hostile text ---------------------------------------------------------------------------------

HOSTILE = ["\x1b[2J", "a\u202eb", "\u200b", "x" * 200, "../../x", "{a}", "*", "-n", "<b>"]
ODD = [
    *HOSTILE,
    'it\'s $HOME `x` "y" !z',
    "back\\slash",
    "back\\slash\u200b'",
    "a\u202e7",
    "\u00a0",
    "#1",
    "report#2",
    "~",
    "=ls",
    "宝くじ",
    "e\u0301",
    "\U000e0041",
    "a{b,c}",
    "$'x'",
    "\\u202e",
]


@pytest.mark.django_db
@pytest.mark.parametrize("odd", HOSTILE, ids=ascii)
def test_nothing_that_somebody_wrote_moves_the_cursor_or_hides(odd):
    owner = Owner(host=f"h{odd}", pid=1, task=f"t{odd}", task_id=odd, thread=odd, path=odd)
    name = "lottery" if "\x1b" in odd else odd
    add_run(name, task_id=f"{odd}\u2028", task=f"t{odd}", place=f"h{odd}\x07:1")
    with LockTestKit().simulate_held_by_other(name, owner=owner):
        with busy_with(Activity(task=odd, task_id=odd)):
            task_runs.note_skip(name, "busy", using="default")
        for act in ("list", "show", "explain", "watch", "runs", "clean --all --dry-run", "once"):
            named = ["--", name] if act in {"show", "explain"} else []
            outcome = locks_command(*act.split(), *named)
            assert outcome.status == 0
            assert all(line.isprintable() for line in outcome.out.splitlines())
        assert all(line.isprintable() for line in locks_command("runs", "--", name).out.split("\n"))
        assert [lock["name"] for lock in locks_command("--json").json] == [name]
        assert locks_command("release", "--yes", "--", name).status == 0
        assert held.get(name) is None
    assert locks_command("explain", "--", f"never{odd}").err.isprintable()


def test_a_name_as_it_is_printed_is_that_name_to_a_shell():
    pasted = " ".join(map(text.pasteable, ODD))
    assert pasted.isprintable()
    for language in ("C", "C.UTF-8"):
        said = from_a_shell(f"printf '%s\\n' {pasted}", LC_ALL=language)
        assert said.out.splitlines(keepends=True) == [f"{name}\n" for name in ODD]
    for name in ("lottery", "report:2026-11", "a/b.c@d_e", "宝くじ", "-n"):
        assert text.pasteable(name) == name


def test_a_printed_name_can_be_pasted_back():
    name = "it's\u202e\\odd"
    with held_by(name):
        (line,) = locks_command("list").out.splitlines()[1:]
        pasted = line.partition("  ")[0]
        outcome = from_a_shell(f"$LOCKS release --yes {pasted}")
        assert (outcome.status, outcome.out[-17:]) == (0, "Released 1 lock.\n")
        assert held.get(name) is None
        assert pasted in locks_command("show", name).out
        assert pasted in locks_command("release", name, "--yes").err


def test_an_index_of_the_wrong_type_is_a_message(locks):
    locks.redis.set(lock_keys(locks.prefix, "x").held, "x")
    outcome = locks_command("list")
    assert outcome.status == 3
    assert "WRONGTYPE" in outcome.err


# --- watch ----------------------------------------------------------------------------------------


def changes(watching):
    """All that it shows, after one more look."""
    return "\n".join(watching.look()[0])


def test_watch_does_not_take_a_silent_server_for_free_locks(settings):
    one = settings.REDISLOCK["default"]
    watching = live_view.LiveView(["default"])
    watching.look()
    with held_by("lottery"):
        assert "lottery  taken  web-3:4711" in changes(watching)
        settings.REDISLOCK = {"default": SILENT}
        assert "lottery  free" not in changes(watching)
        settings.REDISLOCK = {"default": one}
    assert "lottery  free" in changes(watching)


def test_watch_reports_no_change_of_a_lock_for_which_there_was_no_room(monkeypatch):
    monkeypatch.setattr(live_view, "MOST_LOCKS", 1)
    watching = live_view.LiveView(["default"])
    with held_by("b", ttl=50):
        watching.look()
        with held_by("a", ttl=40):
            assert "b  free" not in changes(watching)
        assert "b  taken" not in changes(watching)


def test_watch_fits_the_screen_and_says_what_does_not():
    sizes = [*product((6, 10, 24), (40, 80, 120, 200))]
    views = {size: live_view.LiveView(["default"]) for size in sizes}
    for size, view in views.items():
        view.look(*size)
    with ExitStack() as stack:
        for number in range(30):
            stack.enter_context(held_by(f"宝くじ:{number}", task="lottery.tasks.draw"))
        for (lines, columns), view in views.items():
            shown, complaints = view.look(lines, columns)
            assert complaints == []
            assert len(shown) <= lines
            assert all(text.width(line) <= columns for line in shown)
            rows = [line for line in shown if "宝くじ" in line and "taken" not in line]
            assert f"{30 - len(rows)} more" in shown


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_watch_shows_holder_and_task_of_each_lock_also_on_a_narrow_screen(columns):
    view = live_view.LiveView(["default"])
    with held_by("lottery", task="lottery.tasks.draw"), held_by("nightly", task="shop.tasks.pay"):
        shown, _ = view.look(24, columns)
        assert all(text.width(line) <= columns for line in shown)
        shown = "\n".join(shown)
        assert shown.count("web-3:4711") == 2
        assert "lottery.tasks.draw" in shown
        assert "shop.tasks.pay" in shown
        assert "more" not in shown
    with held_by("x" * 200):  # A long name pushes nothing off the screen.
        lines, _ = view.look(24, columns)
        name, row, *_ = lines[lines.index("") + 2 :]
        assert name.endswith("x...") or row.startswith(" ")
        assert "held" in row
        assert "web-3:4711" in "".join(lines)


@pytest.mark.parametrize(
    ("line", "columns", "left"),
    [
        ("lottery", 7, "lottery"),
        ("lottery", 5, "lo..."),
        ("lottery", 2, ".."),
        ("日本語日本語", 12, "日本語日本語"),
        ("日本語日本語", 9, "日本語..."),
        ("日本語日本語", 8, "日本..."),
        ("e\u0301\u0301e\u0301e\u0301", 3, "e\u0301\u0301e\u0301e\u0301"),
        ("日本語", 0, ""),
    ],
    ids=ascii,
)
def test_a_line_is_clipped_by_its_width(line, columns, left):
    assert text.clipped(line, columns) == left


@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
@pytest.mark.no_permit("a child process lists the bystander too")
def test_watch_shows_waiters_and_hand_offs_until_it_is_ended(terminal, end, status):
    process, read = terminal("watch", "--interval", "0.05")
    lock, waits = distributed_lock("lottery"), distributed_lock("lottery", wait=HUNG)
    with lock:
        wait_until(lambda: "held: 1" in read())
        waiting = in_thread(waits.acquire)
        wait_until(lambda: "waiting: 1" in read() and f"waiting 1.  {HERE}:" in read())
    assert waiting.result(HUNG)
    wait_until(lambda: "handed over" in read())
    process.send_signal(end)
    assert process.wait(HUNG) == status
    assert read().endswith("\x1b[?1049l")  # The screen is as it was.
    waits.release()


def test_watch_prints_once_on_a_terminal_that_is_dumb(terminal):
    process, read = terminal("watch", TERM="dumb")
    assert process.wait(HUNG) == 0
    assert "held: 0" in read()
    assert "\x1b" not in read()


def test_watch_goes_on_while_the_server_does_not_answer(terminal, locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    process, read = terminal("watch", "--interval", "0.05")
    wait_until(lambda: "held: 0" in read())
    proxy.refuse()
    wait_until(lambda: "cannot answer" in read() and "held: unknown" in read())
    proxy.heal()
    seen = len(read())
    wait_until(lambda: "held: 0" in read()[seen:])
    process.send_signal(signal.SIGINT)
    assert process.wait(HUNG) == 0
