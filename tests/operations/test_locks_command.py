"""``manage.py locks``: what it prints, what it does, and its exit statuses."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, patch
from zoneinfo import ZoneInfo

import django
import pytest
from django.core.management import CommandError, call_command

from django_redislock import distributed_lock, held, process, task_runs
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.management import live_view
from django_redislock.management import terminal as table
from django_redislock.management import terminal as text
from django_redislock.management.commands.locks import Command
from django_redislock.management.console import logging_afterwards
from django_redislock.process import is_gone
from django_redislock.rules import scripts
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.options import Options
from django_redislock.rules.stored import Owner
from django_redislock.testing import LockTestKit
from tests import ROOT
from tests.support.circles import a_circle
from tests.support.nursery import environment_for, start_python
from tests.support.others import held_by, waiters
from tests.support.processes import hear, say
from tests.support.stored import NEWER_ID, newer_lease
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = pytest.mark.usefixtures("locks")


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


def locks_command(*args):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    try:
        call_command("locks", *args, stdout=out, stderr=err, no_color=True)
    except CommandError as error:
        status = error.returncode
        err.write(str(error))
    return Outcome(status, out.getvalue(), err.getvalue())


@pytest.fixture
def shell(settings):
    """Run the command as from a shell."""

    def run(*args, answer="", forked=True, **environ):
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            files[0].write(answer.encode())
            for file in files:
                file.seek(0)
            process = start_python(
                "tests.operations.manage:main",
                *("locks", *args),
                files=[file.fileno() for file in files],
                environment=environment(settings) | environ,
                forked=forked,
            )
            status = process.wait(HUNG)
            said = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in files[1:]]
        return Outcome(status, *said)

    return run


def environment(settings):
    return environment_for() | {"TESTS_REDISLOCK": json.dumps(settings.REDISLOCK)}


@pytest.fixture
def answers(monkeypatch):
    """Let somebody answer the command's question."""

    def answer(text):
        monkeypatch.setattr("builtins.input", lambda: text)

    return answer


def test_metrics_are_utf_8_whatever_the_terminal_takes(shell):
    with held_by("Gerät:報"):
        outcome = shell("metrics", "--no-doctor", forked=False, PYTHONIOENCODING="ascii")
        assert 'name="Gerät:報"' in outcome.out
        assert "Ger\\xe4t" in shell("list", forked=False, PYTHONIOENCODING="ascii").out


# --- list -----------------------------------------------------------------------------------------


def test_without_an_act_it_lists():
    with held_by("lottery"):
        assert [one["name"] for one in locks_command("--json").json] == ["lottery"]
        assert locks_command().out.startswith("NAME")


def test_no_held_lock_is_said_so():
    assert locks_command("list") == Outcome(0, "No lock is held.\n", "")
    assert locks_command("list", "--json").json == []


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
        assert table.width(row.partition("held")[0]) == head.index("STATE")
        assert table.width(row.partition("web-3")[0]) == head.index("HOLDER")


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
        assert table.width(line) <= columns or line in {"宝" * 60, f"    doing {doing}"}, line
    for lock in found:
        assert sum(lock.id in line for line in lines) == 1
    for part in ("'report 2026-11'", "宝" * 60, "worker-7d9f8b6c5d-x2x4z:4711", doing):
        assert any(part in line for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.no_permit("a child process lists the bystander too")
def test_a_list_fits_the_terminal(terminal, columns):
    with held_by("lottery", "worker-7d9f8b6c5d-x2x4z", "lottery.tasks.draw"):
        process, read = terminal("list", COLUMNS=str(columns))
        assert process.wait(HUNG) == 0
        lines = read().splitlines()
    assert len(lines) == (2 if columns == 120 else 3)
    assert all(len(line) <= columns for line in lines)


def test_the_schema_of_json_is_the_documented_one():
    with held_by("lottery", task="lottery.tasks.draw"):
        (lock,) = locks_command("list", "--json").json
    fence, id_ = lock.pop("fence"), lock.pop("id")
    held_for, expires_in = lock.pop("held_for"), lock.pop("expires_in")
    process = {"host": "web-3", "pid": 4711, "task": "lottery.tasks.draw", "task_id": "id-1"}
    assert lock == {
        "name": "lottery",
        "alias": "default",
        "where": None,
        "state": "held",
        **process,
        "owner": {
            **process,
            "birth": None,
            "thread": "MainThread",
            "command": None,
            "path": None,
            "limit": None,
            "names": None,
            "deferred": None,
            "waited": None,
            "traceparent": None,
            "called": None,
            "operator": None,
            "reason": None,
        },
        "permit": None,
        "ttl": 60.0,
        "renewals": 0,
        "waiters": 0,
        "note": None,
        "gone": False,
        "newer_format": None,
        "handed_over": False,
        "starts_left": None,
        "waits_for": None,
        "circle": None,
    }
    assert isinstance(fence, int)
    assert len(id_) == 16
    assert 0 <= held_for < 30
    assert 30 < expires_in <= 60


def test_what_is_unknown_is_null(locks):
    locks.redis.set(lock_keys(locks.prefix, "odd").lock, "somebody's")
    lock = locks_command("show", "odd", "--json").json
    assert lock["state"] == "foreign"
    assert "a string of 10 bytes" in lock["note"]
    unknown = ("host", "pid", "task", "task_id", "fence", "held_for", "expires_in", "ttl")
    assert all(lock[key] is None for key in unknown)


@pytest.mark.django_db
def test_a_foreign_key_may_expire_after_the_last_year_that_python_knows(locks):
    locks.redis.set(lock_keys(locks.prefix, "lottery").lock, "foreign", px=9_000_000_000_000_000)
    assert not distributed_lock("lottery", wait=0).acquire()
    assert locks_command("show", "lottery").status == 0
    assert locks_command("list").status == 0


@pytest.mark.django_db
def test_what_a_newer_version_holds_is_shown_as_that_and_can_be_released(locks):
    key = lock_keys(locks.prefix, "lottery").lock
    locks.redis.set(key, newer_lease(), px=60_000)
    assert not distributed_lock("lottery", wait=0).acquire()
    _, line = locks_command("list").out.splitlines()
    assert line.split()[:3] == ["lottery", "held", "(newer)"]
    assert "web-9:4711" in line
    says = "runs a newer version of django_redislock"
    assert says in locks_command("show", "lottery").out
    assert f"shop.draw[id-9] on web-9:4711 got the lock (lease {NEWER_ID}). Its holder {says}" in (
        locks_command("explain", "lottery").out
    )
    shown = locks_command("show", "lottery", "--json").json
    assert (shown["state"], shown["newer_format"], shown["host"]) == ("held", 2, "web-9")
    assert says in shown["note"]
    locks_command("release", "lottery", "--id", NEWER_ID, "--yes")
    assert not locks.redis.exists(key)


def test_json_and_alias_may_stand_before_and_after_the_act():
    with held_by("lottery"):
        before = locks_command("--json", "--alias", "default", "list").json
        after = locks_command("list", "--json", "--alias", "default").json
    assert [one["name"] for one in before] == [one["name"] for one in after] == ["lottery"]


@pytest.mark.parametrize(
    ("criterion", "found"),
    [
        (("--host", "web-1"), ["a:1"]),
        (("--task", "shop.tasks.pay"), ["b:1"]),
        (("--prefix", "a:"), ["a:1", "a:2"]),
        (("--prefix", "a:", "--host", "web-2"), ["a:2"]),
        (("--search", "SHOP"), ["b:1"]),
        (("--search", "b:"), ["b:1"]),
        (("--search", "web-2:4711"), ["a:2", "b:1"]),
        (("--state", "cooling"), []),
        (("--state", "permit"), ["b:1"]),
        (("--older-than", "10m"), []),
        (("--older-than", "0"), ["a:1", "a:2", "b:1"]),
    ],
    ids=" ".join,
)
def test_a_list_can_be_narrowed(criterion, found):
    with (
        held_by("a:1", "web-1", ttl=50),
        held_by("a:2", "web-2", ttl=60),
        held_by("b:1", "web-2", task="shop.tasks.pay", ttl=70, limit=2),
    ):
        listed = locks_command("list", "--json", *criterion).json
    assert [one["name"] for one in listed] == found


def test_all_aliases_are_listed_unless_one_is_named(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "KEY_PREFIX": "test-other"}}
    with held_by("lottery"), distributed_lock("prizes", using="other"):
        assert [lock["alias"] for lock in locks_command("--json").json] == ["default", "other"]
        assert "ALIAS" in locks_command().out
        (lock,) = locks_command("--json", "--alias", "other").json
        assert lock["name"] == "prizes"
        assert "ALIAS" not in locks_command("--alias", "other").out


@pytest.mark.parametrize("act", ["list", "watch"])
def test_an_alias_whose_server_is_silent_does_not_hide_the_others(settings, act):
    one = settings.REDISLOCK["default"]
    silent = {"LOCATION": "redis://127.0.0.1:1/0"}
    settings.REDISLOCK = {"silent": silent, "default": one}
    with held_by("lottery"):
        outcome = locks_command(act)
        assert outcome.status == 3
        assert "lottery" in outcome.out
        assert "The server 127.0.0.1:1 (silent) cannot answer" in outcome.err
        as_json = locks_command(act, "--json")
        assert (as_json.status, [lock["name"] for lock in as_json.json]) == (3, ["lottery"])
        found = locks_command("list", "--fail")
        assert found.status == 1
        assert "(silent) cannot answer" in found.err
    outcome = locks_command("list")
    assert (outcome.status, outcome.out) == (3, "")  # Nobody knows that no lock is held.


def test_an_alias_with_a_wrong_setting_does_not_hide_the_others(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"wrong": {**one, "TTL": "soon"}, "default": one}
    ran("report", "first")
    with held_by("lottery"):
        (lock,) = locks_command("--alias", "default", "--json").json
        for act in (
            ("list",),
            ("watch",),
            ("runs",),
            ("runs", "--no-success-for", "26h"),
            ("metrics", "--no-doctor"),
        ):
            outcome = locks_command(*act)
            assert outcome.status == 3, act
            assert any(one in outcome.out for one in ("lottery", "report", "success")), act
            assert "REDISLOCK['wrong']['TTL'] must be a number of seconds" in outcome.err, act
        assert locks_command("release", "--id", "0123456789abcdef").status == 3
        assert locks_command("release", "--id", lock["id"], "--yes").status == 0
    assert locks_command("list", "--alias", "wrong").status == 2
    settings.REDISLOCK = {"wrong": {**one, "TTL": "soon"}}
    assert locks_command("list").status == 2


@pytest.mark.parametrize("option", ["--prefix", "--search"])
def test_a_name_is_found_in_any_form_of_the_same_letters(option):
    with held_by("caf\u00e9"):
        assert len(locks_command("list", option, "cafe\u0301", "--json").json) == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--host", "typo"), "2 locks are held, but none matches --host typo."),
        (
            ("--task", "a b", "--older-than", "10m"),
            "2 locks are held, but none matches --task 'a b' --older-than 10m.",
        ),
        (("--state", "cooling"), "2 locks are held, but none matches --state cooling."),
        (("--search", "\x1b[2J"), "2 locks are held, but none matches --search $'\\033[2J'."),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_list_that_nothing_matches_is_not_said_to_be_of_all(asked, says):
    with held_by("a"), held_by("b"):
        assert locks_command("list", *asked) == Outcome(0, f"{says}\n", "")
        assert locks_command("list", *asked, "--json") == Outcome(0, "[]\n", f"{says}\n")
        if "--state" not in asked and "--search" not in asked:
            assert locks_command("clean", *asked, "--yes") == Outcome(0, f"{says}\n", "")
    assert locks_command("list", *asked).out == "No lock is held.\n"


def test_one_lock_that_does_not_match_is_one():
    with held_by("a"):
        outcome = locks_command("list", "--host", "typo")
        assert outcome.out == "1 lock is held, but none matches --host typo.\n"


def test_a_part_of_a_list_is_said_to_be_one():
    with held_by("a"), held_by("b"):
        outcome = locks_command("list", "--limit", "1", "--json")
        assert len(outcome.json) == 1
        assert "not all" in outcome.err
        assert locks_command("list", "--limit", "2").err == ""


# --- show -----------------------------------------------------------------------------------------


def test_show_tells_who_waits_and_who_held_it_before(spawn):
    for outcome in (True, False):
        lock = distributed_lock("lottery", ttl=10)
        assert lock.acquire()
        lock.lease.renew()  # Long enough to be remembered.
        lock.release(success=outcome)
    with distributed_lock("lottery"):
        child = spawn(wait_for, "lottery")
        wait_until(lambda: locks_command("show", "lottery", "--json").json["waiters"] == 1)
        shown = locks_command("show", "lottery", "--json").json
        assert shown["state"] == "held"
        assert [one["pid"] for one in shown["waiting"]] == [child.pid]
        assert [one["ended"] for one in shown["past"]] == ["done", "failed"]
        assert all(one["until"] >= one["since"] for one in shown["past"])
        text = locks_command("show", "lottery").out
        for part in ("Waiting", f":{child.pid}", "Held before", "failed"):
            assert part in text


@pytest.mark.parametrize(("zone", "offset"), [("UTC", "+00:00"), ("Asia/Kolkata", "+05:30")])
def test_show_tells_absolute_times_in_the_zone_of_the_settings(settings, zone, offset):
    settings.TIME_ZONE = zone
    with distributed_lock("lottery") as lease:
        lease.renew()
    with distributed_lock("lottery", ttl=60):
        shown = locks_command("show", "lottery", "--json").json
        (past,) = shown["past"]
        assert shown["expires_at"] - shown["taken_at"] == pytest.approx(60, abs=1)
        assert shown["taken_at"] >= past["until"] - 0.002
        taken, before = (
            datetime.fromtimestamp(at, ZoneInfo(zone)) for at in (shown["taken_at"], past["since"])
        )
        text = locks_command("show", "lottery").out
        assert re.search(rf"(?m)^taken at    {taken:%F %T}{re.escape(offset)}$", text)
        assert re.search(rf"(?m)^expires at  \d{{4}}-.* \d\d:\d\d:\d\d{re.escape(offset)}$", text)
        assert f"  {before:%F %T}{offset}" in text
    shown = locks_command("show", "lottery", "--json").json
    assert "taken_at" not in shown


@pytest.mark.parametrize("act", ["list", "runs", "watch", "explain x", "explain x --job"])
@pytest.mark.django_db
def test_a_silent_server_is_no_empty_document(settings, act):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
    outcome = locks_command(*act.split(), "--json")
    assert (outcome.status, outcome.out) == (3, "")
    assert "The server 127.0.0.1:1 (default) cannot answer" in outcome.err


def test_show_tells_the_past_of_all_permits():
    for number, task_id in enumerate(("first", "second"), start=1):
        with ExitStack() as stack:
            for _ in range(number - 1):
                stack.enter_context(distributed_lock("gpu", limit=2, ttl=60))
            with busy_with(Activity(task="video", task_id=task_id)):
                stack.enter_context(distributed_lock("gpu", limit=2, ttl=60)).renew()
    past = locks_command("show", "gpu", "--json").json["past"]
    known = [(one["task_id"], one["permit"]) for one in past]
    assert known == [("first", "1/2"), ("second", "2/2")]
    assert re.search(r"PERMIT  TAKEN .*\n  2/2 .*\n  1/2 ", locks_command("show", "gpu").out)
    (only,) = locks_command("show", "gpu#2", "--json").json["past"]
    assert only["task_id"] == "second"


def test_audit_lines_on_the_terminal_come_after_the_answer(settings):
    with held_by("lottery"), held_by("nightly"):
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m django locks release lottery nightly --yes 2>&1"],
            cwd=ROOT,
            env=environment(settings),
            stdout=subprocess.PIPE,
            text=True,
            timeout=HUNG,
            check=True,
        )
    _headers, _first, _second, answer, *audit = done.stdout.splitlines()
    assert answer == "Released 2 locks."
    assert ["released by" in line for line in audit] == [True, True]


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
    assert re.search(
        r"start  .* ago; records of runs begin there", says("doctor", "--alias", "default")
    )
    ran("nightly")
    assert not re.search(begins, says("runs"))  # All is well.
    own_server.client().config_set("appendonly", "yes")
    assert "records of runs begin there" not in says("doctor", "--alias", "default")


def test_show_of_a_free_lock_says_whether_anything_is_known_of_it():
    task_runs.note_skip("lottery", "busy", using="default")
    assert "lottery: nobody holds it\n" in locks_command("show", "lottery").out
    assert "Nothing is known" not in locks_command("show", "lottery").out
    shown = locks_command("show", "lottery", "--json").json
    assert (shown["state"], shown["known"], shown["similar"]) == ("free", True, [])


def test_of_a_misspelt_name_similar_ones_are_shown():
    task_runs.note_skip("lottery", "busy", using="default")
    with held_by("lottery:1"), held_by("something else"):
        shown = locks_command("show", "lotery", "--json").json
        assert (shown["state"], shown["known"]) == ("free", False)
        assert shown["similar"] == ["lottery", "lottery:1"]
        outcome = locks_command("show", "lotery")
        assert outcome.status == locks_command("show", "lotery", "--json").status == 1
        assert "lotery: Nothing is known of it" in outcome.err
        assert "Did you mean lottery or lottery:1?" in outcome.err
        assert "Did you mean" not in locks_command("show", "x").err
        assert locks_command("show", "TTERY:", "--json").json["similar"] == ["lottery:1"]
        outcome = locks_command("release", "lotery", "--yes")
        assert outcome.status == 1
        assert "Nobody holds it. Did you mean lottery or lottery:1?" in outcome.err
        assert "mean" not in locks_command("show", "lottery:1").out
        assert "lotery: Did you mean lottery or lottery:1?\n" in locks_command("runs", "lotery").out
        runs = locks_command("runs", "lotery", "lottery", "lottery:1", "x", "--json").json
        assert [one["similar"] for one in runs] == [["lottery", "lottery:1"], [], [], []]
        assert runs[0]["note"] is None


def wait_for(name):
    """In a child."""
    with distributed_lock(name, wait=60):
        hear()


# --- runs -----------------------------------------------------------------------------------------


@contextmanager
def running(name, id, ttl=10, task=""):  # noqa: A002
    """Run a task, as far as locks see one."""
    with (
        busy_with(Activity(task=task or f"tasks.{name}", task_id=id)),
        Lock(name, Options(ttl=ttl, wait=0), RunMarker(id, 60)),
    ):
        yield


def ran(name, id="ran", task=""):  # noqa: A002
    with running(name, id, task=task):
        pass


def run_until_killed(name):
    """In a child."""
    with running(name, "killed", ttl=6):
        say("running")
        hear()


def test_runs_tells_what_became_of_each_task(spawn):
    assert locks_command("runs").out.startswith("No run of a task is known.\n")
    child = spawn(run_until_killed, "killed")
    child.read()
    child.kill()
    wait_until(lambda: held.get("killed") is None)
    ran("nightly", "first")
    with pytest.raises(ZeroDivisionError), running("nightly", "second"):
        raise ZeroDivisionError
    task_runs.note_skip("nightly", "busy", using="default")
    with running("hourly", "third"):
        lines = {line.split()[0]: line for line in locks_command("runs").out.splitlines()[:4]}
        assert sorted(lines) == ["NAME", "hourly", "killed", "nightly"]
        assert list(lines)[-1] == "killed"  # The last to run comes first.
        by_name = {one["name"]: one for one in locks_command("runs", "--json").json}
        text = locks_command("show", "hourly").out
        assert re.search(r"under way     for \d+\.\d s", text)
    assert re.search(r"for \d+\.\d s", lines["hourly"])
    assert by_name["hourly"]["under_way"][0]["task_id"] == "third"
    assert by_name["hourly"]["last_success"] is None
    assert by_name["nightly"]["last_success"]["task_id"] == "first"
    assert by_name["nightly"]["last_failure"]["task_id"] == "second"
    assert (by_name["nightly"]["last_skip"]["why"], by_name["nightly"]["skips"]) == ("busy", 1)
    assert by_name["killed"]["last_unended"]["pid"] == child.pid
    assert by_name["killed"]["last_success"] is None


def test_runs_of_some_names_alone(settings):
    ran("nightly")
    ran("hourly")
    found = locks_command("runs", "hourly", "typo", "hourly", "--json").json
    assert [(one["name"], bool(one["last_success"])) for one in found] == [
        ("hourly", True),
        ("typo", False),
    ]
    assert "never seen" in locks_command("runs", "typo").out
    assert "never seen" not in locks_command("runs", "hourly").out


def test_runs_as_a_probe(locks):
    fresh = ("--no-success-for", "26h", "--fail")
    outcome = locks_command("runs", *fresh)
    assert outcome.status == 1
    assert outcome.err == "Nothing is known, so all are without a success in the last 1 d 2 h."
    ran("nightly")
    assert locks_command("runs", *fresh) == Outcome(0, f"{EACH}\n", "")
    assert locks_command("runs", "nightly", *fresh).status == 0
    assert locks_command("runs", "nightly", *fresh, "--json") == Outcome(0, "[]\n", "")
    missing = locks_command("runs", "nightly", "typo", *fresh)
    assert (missing.status, missing.err) == (1, "1 lock without a success in the last 1 d 2 h.")
    assert "typo" in missing.out
    assert "nightly" not in missing.out
    with suppress(ZeroDivisionError), running("fails", "x"):
        raise ZeroDivisionError
    assert [one["name"] for one in locks_command("runs", *fresh, "--json").json] == ["fails"]
    assert locks_command("runs", *fresh).status == 1
    assert locks_command("runs", "--no-success-for", "26h").status == 0
    make_older(locks, "nightly", 27)
    assert locks_command("runs", "nightly", *fresh).status == 1
    assert locks_command("runs", "nightly", "--no-success-for", "28h", "--fail").status == 0


EACH = "Each had a success in the last 1 d 2 h."


def make_older(locks, name, hours):
    """Let the last success of a task be some hours longer ago."""
    runs = lock_keys(locks.prefix, name).runs
    at, _, rest = locks.redis.hget(runs, "success").partition(b"|")
    locks.redis.hset(runs, "success", b"%d|%b" % (int(at) - hours * 3_600_000, rest))


@pytest.mark.parametrize("chosen", [("--task", "tasks.report"), ("--prefix", "report:")])
def test_of_all_locks_of_a_task_the_latest_success_counts(locks, chosen):
    """Of a daily job with the date in its key, yesterday's lock is of no interest."""
    fresh = (*chosen, "--no-success-for", "26h", "--fail")
    ran("nightly")
    unknown = locks_command("runs", *fresh)
    assert unknown.status == 1
    assert unknown.out.startswith(f"No run is known of {' '.join(chosen)}.\n")
    assert unknown.err == f"No success of {' '.join(chosen)} in the last 1 d 2 h."
    for day in ("2026-11-21", "2026-11-22", "2026-11-23"):
        ran(f"report:{day}", day, task="tasks.report")
    task_runs.note_skip("report:2026-11-24", "busy", using="default")
    names = [one["name"] for one in locks_command("runs", *chosen, "--json").json]
    assert names[-3:] == [f"report:2026-11-{day}" for day in (23, 22, 21)]
    make_older(locks, "report:2026-11-21", 50)
    make_older(locks, "report:2026-11-22", 25)
    make_older(locks, "report:2026-11-23", 27)
    outcome = locks_command("runs", *fresh)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == "The last success was 1 d 1 h ago, under report:2026-11-22.\n"
    assert locks_command("runs", *fresh, "--json") == Outcome(0, "[]\n", "")
    make_older(locks, "report:2026-11-22", 2)
    outcome = locks_command("runs", *fresh)
    assert outcome.status == 1
    assert outcome.err.startswith(f"No success of {' '.join(chosen)} in the last 1 d 2 h, among ")
    assert "report:2026-11-22" in outcome.out
    assert "nightly" not in outcome.out
    assert locks_command("runs", *fresh[:-1]).status == 0


def test_the_success_of_another_task_under_the_same_lock_does_not_count():
    fresh = ("--no-success-for", "26h", "--fail")
    with suppress(ZeroDivisionError), running("account:7", "x", task="tasks.bill"):
        raise ZeroDivisionError
    ran("account:7", task="tasks.export")
    outcome = locks_command("runs", "--task", "tasks.bill", *fresh)
    assert outcome.status == 1
    assert outcome.err == "No success of --task tasks.bill in the last 1 d 2 h, among 1 lock."
    assert locks_command("runs", "--job", "tasks.bill", *fresh).status == 1
    assert locks_command("runs", "--task", "tasks.export", *fresh).status == 0
    # Nor for the same task under another lock.
    ran("account:8", task="tasks.bill")
    outcome = locks_command("runs", "--task", "tasks.bill", *fresh)
    assert (outcome.status, outcome.err) == (0, "")
    assert re.fullmatch(r"The last success was \S+ s ago, under account:8\.\n", outcome.out)


def test_a_silent_server_may_know_of_a_success(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"silent": {"LOCATION": "redis://127.0.0.1:1/0"}, "default": one}
    with suppress(ZeroDivisionError), running("report:1", "x"):
        raise ZeroDivisionError
    alarm = ("--prefix", "report:", "--no-success-for", "26h", "--fail")
    outcome = locks_command("runs", *alarm)
    assert outcome.status == 3
    assert "No success" not in outcome.err
    assert locks_command("runs", "--alias", "default", *alarm).status == 1
    ran("report:2")
    assert locks_command("runs", *alarm).status == 3


def test_of_a_name_without_runs_it_is_said_what_is_known():
    with distributed_lock("shop.tasks.import") as lease:
        lease.renew()  # So that it is noted.
    ran("report:2026-11-23", task="report")
    alarm = ("--no-success-for", "26h", "--fail")
    command = locks_command("runs", "shop.tasks.import", *alarm)
    assert command.status == 1
    note = "no task has run under this name; `locks show` has 1 lease"
    assert f"shop.tasks.import: {note}\n" in command.out
    assert "no task run" in command.out
    with distributed_lock("shop.tasks.import"):
        assert "`locks show` has 2 leases" in locks_command("runs", "shop.tasks.import").out
    (found,) = locks_command("runs", "shop.tasks.import", "--json").json
    assert (found["note"], found["last_success"]) == (note, None)
    says = "--task report finds 1 lock; --prefix report finds 1 lock"
    assert (
        f"report: no task has run under this name; {says}\n" in locks_command("runs", "report").out
    )
    assert locks_command("runs", "report:2026-11-23", "--json").json[0]["note"] is None


def test_programs_choose_records_too():
    for name, task in (("a:1", "tasks.a"), ("a:2", "tasks.a"), ("b:1", "tasks.b")):
        ran(name, name, task=task)
    with pytest.raises(ZeroDivisionError), running("caf\u00e9", "x", task="tasks.a"):
        raise ZeroDivisionError

    def names(**chosen):
        return sorted(one.name for one in held.records(**chosen))

    assert names(task="tasks.a") == ["a:1", "a:2", "caf\u00e9"]
    assert names(task="tasks.a", prefix="a:") == ["a:1", "a:2"]
    assert names(prefix="cafe\u0301") == ["caf\u00e9"]
    assert names(task="tasks") == names(prefix="1") == []
    one = held.records(task="tasks.a", limit=1)
    assert (len(one), one.partial) == (1, True)
    assert held.records(task="tasks.a", limit=4).partial is False
    assert len(held.records(limit=2**70)) == 4
    for wrong in (-1, -3):
        with pytest.raises(ValueError, match="limit must not be negative"):
            held.records(limit=wrong)


def test_a_task_is_found_by_a_name_that_is_kept_in_part():
    task = "tasks." + 300 * "x"
    ran("a:1", "a:1", task=task)
    assert [one.name for one in held.records(task=task)] == ["a:1"]
    job = held.job(task)
    assert (job.name, job.last_success is None) == (task, False)
    overdue = ("--no-success-for", "1h", "--fail")
    locks_command("runs", "--task", task, *overdue)
    locks_command("runs", "--job", task, *overdue)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fail",), "--fail goes with --no-success-for"),
        (("--no-success-for", "31d", "--fail"), "must be 30 d 0 h at most"),
        (("nightly", "--task", "tasks.nightly"), "NAME goes with neither --task nor --prefix"),
        (("--no-success-for", "soon", "--fail"), "no duration"),
        (("--no-success-for", "-5", "--fail"), "no duration"),
        (("line\nbreak",), "control"),
    ],
    ids=ascii,
)
def test_a_probe_that_cannot_mean_anything_is_refused(shell, arguments, says):
    outcome = shell("runs", *arguments)
    assert outcome.status == 2
    assert says in outcome.err


def test_a_probe_of_a_silent_server_is_no_success(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"silent": {"LOCATION": "redis://127.0.0.1:1/0"}, "default": one}
    ran("nightly")
    outcome = locks_command("runs", "--no-success-for", "26h", "--fail")
    assert outcome.status == 3
    assert "(silent) cannot answer" in outcome.err
    assert "nightly" in locks_command("runs").out


def test_show_tells_of_the_runs_also_of_a_permit_and_of_a_free_lock():
    ran("report", "first")
    with held_by("report", limit=5), held_by("report", task="tasks.report", limit=5):
        for name in ("report", "report#2"):
            assert "last success" in locks_command("show", name).out
            shown = locks_command("show", name, "--json").json["runs"]
            assert (shown["name"], shown["last_success"]["task_id"]) == ("report", "first")
    assert locks_command("show", "other", "--json").json["runs"] is None
    assert "Runs" not in locks_command("show", "other").out


# --- release --------------------------------------------------------------------------------------


def test_release_asks_and_frees_the_lease_that_it_has_shown(answers):
    with held_by("lottery"):
        answers("y")
        outcome = locks_command("release", "lottery")
        assert outcome.status == 0
        assert "web-3:4711" in outcome.out
        assert "Released 1 lock." in outcome.out
        assert held.get("lottery") is None


@pytest.mark.parametrize("answer", ["", "n", "yess", "j"])
def test_release_frees_nothing_without_a_yes(answers, answer):
    with held_by("lottery"):
        answers(answer)
        assert locks_command("release", "lottery").status == 1
        assert held.get("lottery") is not None


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
def test_release_with_an_id_asks_nothing_and_frees_only_that_lease():
    with held_by("lottery"):
        lock = held.get("lottery")
        other = locks_command("release", "lottery", "--id", "0" * 16)
        assert other.status == 1
        assert "Somebody else" in other.err
        assert held.get("lottery") is not None
        assert locks_command("release", "lottery", "--id", lock.id).status == 0
        again = locks_command("release", "lottery", "--id", lock.id)
        assert again.status == 1
        assert "Nobody holds it" in again.err


def test_release_of_several_names_reports_each():
    with held_by("a"), held_by("b"):
        outcome = locks_command("release", "a", "free", "b", "--yes", "--json")
        assert outcome.status == 1
        assert [(one["name"], one["released"]) for one in outcome.json] == [
            ("a", True),
            ("free", False),
            ("b", True),
        ]
        assert "free was not released" in outcome.err


def test_release_by_id_needs_no_name(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "KEY_PREFIX": "test-other"}}
    handle = distributed_lock("lottery", using="other")
    with held_by("lottery"):
        assert handle.acquire()
        assert locks_command("release", "--id", handle.lease.id, "--alias", "default").status == 1
        outcome = locks_command("release", "--id", handle.lease.id, "--json")
        assert outcome.status == 0
        (released,) = outcome.json
        assert (released["name"], released["alias"]) == ("lottery", "other")
        assert held.get("lottery", using="other") is None
        assert held.get("lottery") is not None
        again = locks_command("release", "--id", handle.lease.id)
        assert (again.status, again.out) == (1, "")
        assert again.err == f"No lease '{handle.lease.id}' is held."


def test_release_by_id_says_when_there_are_too_many_locks_to_look_through(monkeypatch):
    with held_by("a"), held_by("b"):
        monkeypatch.setattr(held, "MOST_LOOKS", 1)
        assert "say its NAME too" in locks_command("release", "--id", "0" * 16).err


def test_release_wants_to_know_what_is_meant():
    outcome = locks_command("release")
    assert (outcome.status, outcome.err) == (2, "Say which locks: NAME..., or --id LEASE.")


def test_a_name_that_is_given_twice_is_released_once():
    with held_by("lottery"):
        outcome = locks_command("release", "lottery", "lottery", "--yes", "--json")
        assert outcome.status == 0
        assert [one["released"] for one in outcome.json] == [True]


@pytest.mark.parametrize("arguments", [("release", "lottery"), ("clean", "--all")], ids=" ".join)
@pytest.mark.no_permit("a child process lists the bystander too")
def test_with_json_the_leases_and_the_question_are_not_on_standard_output(shell, arguments):
    with held_by("lottery"):
        outcome = shell(*arguments, "--json", answer="y\n")
        assert [one["released"] for one in outcome.json] == [True]
        assert "web-3:4711" in outcome.err
        assert "Release 1 lock? The holders are not stopped. [y/N]" in outcome.err


def test_a_lease_id_that_cannot_be_one_frees_nothing(shell):
    with held_by("lottery"):
        for lease in ("\udcff", "", "x y", "*"):
            outcome = shell("release", "lottery", "--id", lease)
            assert (outcome.status, "Traceback" in outcome.err) == (1, False)
        assert held.get("lottery") is not None


def test_a_holder_in_another_process_learns_that_it_was_forced(spawn):
    child = spawn(hold_until_lost, "lottery")
    lease = child.read()
    assert locks_command("release", "lottery", "--id", lease).status == 0
    assert child.read() == "forced"


def hold_until_lost(name):
    """In a child."""
    with distributed_lock(name, ttl=6) as lease:
        say(lease.id)
        wait_until(lambda: lease.lost_reason)
        say(lease.lost_reason)
        hear()


def test_the_audit_log_says_who_released_it_and_why(caplog):
    with held_by("lottery"):
        locks_command("release", "lottery", "--yes", "--reason", "stuck\nsince noon")
    (record,) = [one for one in caplog.records if one.name == "django_redislock.audit"]
    message = record.getMessage()
    for part in ("'lottery'", "web-3:4711", "manage.py locks", r"stuck\nsince noon"):
        assert part in message


@pytest.mark.parametrize(
    "line",
    [
        "clean --yes --older-than 0 --host",
        "clean --yes --older-than 0 --task",
        "clean --yes --older-than 0 --prefix",
        "clean --yes --all --alias",
        "release --yes lottery --alias",
        "list --fail --search",
        "runs --no-success-for 1h --fail --task",
        "runs --no-success-for 1h --fail --job",
        "run lottery --using",
        "once --database",
        "metrics --output",
    ],
)
def test_an_option_of_an_unset_variable_is_refused(line):
    command = ["--", "true"] if line.startswith("run ") else []
    with held_by("lottery"):
        outcome = locks_command(*line.split(), "", *command)
        assert f"argument {line.rsplit(maxsplit=1)[-1]}" in outcome.err
        assert "it is empty" in outcome.err
        assert held.get("lottery") is not None


# --- clean ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "left"),
    [
        (("--host", "web-1"), ["a:2", "b:1"]),
        (("--prefix", "a:"), ["b:1"]),
        (("--task", "shop.tasks.pay"), ["a:1", "a:2"]),
        (("--host", "web-1", "--prefix", "b:"), ["a:1", "a:2", "b:1"]),
        (("--older-than", "1h"), ["a:1", "a:2", "b:1"]),
        (("--all",), []),
    ],
    ids=" ".join,
)
def test_clean_frees_only_what_is_meant(criterion, left):
    with (
        held_by("a:1", "web-1", ttl=50),
        held_by("a:2", "web-2", ttl=60),
        held_by("b:1", "web-2", task="shop.tasks.pay", ttl=70, limit=2),
    ):
        assert locks_command("clean", *criterion, "--yes").status == 0
        assert [lock.name for lock in held.list()] == left


def test_a_dry_run_prints_what_clean_would_free_and_frees_nothing():
    with held_by("a:1"), held_by("b:1"):
        outcome = locks_command("clean", "--prefix", "a:", "--dry-run")
        assert outcome.status == 0
        assert "a:1" in outcome.out
        assert "b:1" not in outcome.out
        assert "Would release 1 lock." in outcome.out
        assert len(held.list()) == 2
        (lock,) = locks_command("clean", "--prefix", "a:", "--dry-run", "--json").json
        assert (lock["name"], lock["released"]) == ("a:1", False)


def test_clean_asks_first(answers):
    with held_by("lottery"):
        answers("no")
        assert locks_command("clean", "--all").status == 1
        assert held.get("lottery") is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Say which locks"),
        (("--yes",), "Say which locks"),
        (("--all", "--host", "web-1"), "--all means every lock; leave it out"),
        (("--all", "--dead-here"), "--all means every lock; leave it out"),
    ],
    ids=str,
)
def test_clean_wants_to_know_what_is_meant(arguments, says):
    with held_by("lottery"):
        outcome = locks_command("clean", *arguments)
        assert outcome.status == 2
        assert says in outcome.err
        assert held.get("lottery") is not None


def hold(name):
    """In a child."""
    with distributed_lock(name, ttl=60, renew=False):
        say("held")
        hear()


@pytest.fixture
def gone(spawn):
    """A lock whose holder was killed."""
    child = spawn(hold, "gone")
    child.read()
    child.kill()
    return "gone"


def test_a_holder_of_this_host_whose_process_ended_is_said_to_be_gone(gone):
    with distributed_lock("mine"), held_by("theirs"):
        by_name = {lock["name"]: lock["gone"] for lock in locks_command("--json").json}
        assert by_name == {"mine": False, "theirs": False, gone: True}
        lines = locks_command("list").out.splitlines()
        assert [line.split()[0] for line in lines if "(gone)" in line] == [gone]
        assert "gone: no such process on this host" in locks_command("show", gone).out
        assert "gone" not in locks_command("show", "mine").out
        assert locks_command("show", gone, "--json").json["gone"] is True


def test_clean_dead_here_frees_what_gone_processes_hold(gone, answers):
    with distributed_lock("mine") as lease, held_by("theirs"):
        dry = locks_command("clean", "--dead-here", "--dry-run", "--json").json
        assert [(lock["name"], lock["released"]) for lock in dry] == [(gone, False)]
        answers("n")
        assert locks_command("clean", "--dead-here").status == 1
        other = locks_command("clean", "--dead-here", "--prefix", "x", "--yes")
        assert other.out == "3 locks are held, but none matches --prefix x --dead-here.\n"
        assert locks_command("clean", "--dead-here", "--yes").status == 0
        assert {lock.name for lock in held.list()} == {"mine", "theirs"}
        lease.ensure_held(verify=True)
        assert locks_command("clean", "--dead-here", "--all", "--yes").status == 2


def cool(name):
    """In a child: end in an orderly way, with success."""
    with distributed_lock(name, min_hold=60):
        pass


def test_a_lock_that_cools_down_is_not_taken_for_that_of_a_dead_process(spawn):
    assert spawn(cool, "lottery").wait() == 0
    assert locks_command("show", "lottery", "--json").json["gone"] is False
    locks_command("clean", "--dead-here", "--yes")
    assert held.get("lottery") is not None


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


def test_a_container_knows_its_own_dead_processes_and_no_others(settings):
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    setup = "import django, os; django.setup(); from django_redislock import distributed_lock, held"
    take = "distributed_lock('lottery', ttl=600, renew=False).acquire(); os._exit(0)"
    look = "print(held.get('lottery').gone)"
    python = f'{sys.executable} -c "{setup}; '
    done = subprocess.run(
        [*unshare, "sh", "-c", f'{python}{take}" && {python}{look}"'],
        cwd=ROOT,
        env=environment(settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=HUNG,
        check=True,
    )
    assert done.stdout == "True\n"
    found = held.get("lottery")
    assert found.gone is False
    assert "Would release" not in locks_command("clean", "--dead-here", "--dry-run").out


def test_a_process_that_proc_hides_is_not_gone():
    with patch.object(os, "kill", side_effect=PermissionError):
        assert is_gone(HERE, NOBODYS, OURS) is False


def test_without_proc_nobody_is_gone(monkeypatch):
    monkeypatch.setattr(process, "current", process.Process())
    monkeypatch.setattr(os, "readlink", Mock(side_effect=FileNotFoundError))
    assert process.current.birth == ""
    assert is_gone(HERE, NOBODYS, OURS) is False


def test_clean_frees_more_locks_than_a_list_shows(locks, monkeypatch):
    monkeypatch.setattr(held, "MOST_NAMES", 3)
    handles = [distributed_lock(f"lottery:{number}", renew=False) for number in range(10)]
    assert all(handle.acquire() for handle in handles)
    assert "Released 10 locks." in locks_command("clean", "--all", "--yes").out
    assert held.list() == []


# --- exit statuses and bad input ------------------------------------------------------------------


def test_fail_turns_a_find_into_status_1():
    assert locks_command("list", "--fail").status == 0
    with held_by("lottery"):
        assert locks_command("list", "--fail", "--older-than", "10m").status == 0
        outcome = locks_command("list", "--fail")
        assert (outcome.status, outcome.err) == (1, "1 lock found.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("show", "lottery"),
        ("release", "lottery", "--yes"),
        ("release", "lottery", "--id", "0" * 16),
        ("clean", "--all", "--yes"),
        ("watch",),
        ("runs",),
        ("runs", "lottery", "--no-success-for", "26h", "--fail"),
    ],
    ids=" ".join,
)
def test_a_server_that_does_not_answer_is_status_3(locks, make_proxy, arguments):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    proxy.refuse()
    outcome = locks_command(*arguments)
    assert outcome.status == 3
    assert f"127.0.0.1:{proxy.port} (default) cannot answer" in outcome.err


def test_a_search_for_a_lease_names_the_server_that_does_not_answer(settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "silent": {"LOCATION": "redis://127.0.0.1:1/0"}}
    outcome = locks_command("release", "--id", "0123456789abcdef")
    assert outcome.status == 3
    assert "The server 127.0.0.1:1 (silent) cannot answer" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "line\nbreak"),
        ("show", ""),
        ("release", "x" * 201, "--yes"),
        ("list", "--alias", "nope"),
        ("doctor", "--alias", "nope"),
        ("release", "a", "b", "--id", "0" * 16),
    ],
    ids=ascii,
)
def test_bad_input_is_status_2(arguments):
    assert locks_command(*arguments).status == 2


def test_exit_statuses_reach_the_shell(shell):
    with held_by("lottery"):
        assert shell("list").status == 0
        assert shell("list", "--fail").status == 1
        assert shell("frobnicate").status == 2
        assert shell("list", "--older-than", "soon").status == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--limit", "0"),
        ("list", "--limit", "-1"),
        ("list", "--limit", "1e3"),
        ("list", "--older-than", "10x"),
        ("list", "--older-than", "9" * 400 + "d"),
        ("clean", "--older-than", "9" * 5000),
        ("watch", "--interval", "-1"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_a_number_that_makes_no_sense_is_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as exited:
        Command().run_from_argv(["manage.py", "locks", *arguments])
    assert exited.value.code == 2
    assert f"argument {arguments[1]}" in capsys.readouterr().err


@pytest.mark.no_permit("a child process lists the bystander too")
def test_a_limit_beyond_all_bounds_gives_what_there_is(shell):
    with held_by("lottery"):
        outcome = shell("list", "--limit", "9" * 30, "--json")
        assert (outcome.status, len(outcome.json)) == (0, 1)


DJANGOS = ("--settings=tests.settings", "--pythonpath=.", "--traceback", "--no-color", "-v0")


@pytest.mark.parametrize("act", ["list", "show x", "release x --yes", "doctor", "watch"])
def test_djangos_own_options_may_stand_before_and_after_the_act(shell, act):
    # Django looks for --settings before it knows the act: once, no variable names them as well.
    environ = {"DJANGO_SETTINGS_MODULE": ""} if act == "list" else {}
    before = shell(*DJANGOS, "--skip-checks", *act.split(), **environ)
    after = shell(*act.split(), *DJANGOS, "--skip-checks", **environ)
    assert "usage:" not in before.err + after.err
    assert (before.status, before.err) == (after.status, after.err)
    assert shell(*act.split(), "--version").out == f"{django.get_version()}\n"


def test_djangos_options_after_the_act_are_heeded(shell):
    assert "\x1b[" in shell("doctor", "--force-color").out
    assert "\x1b[" not in shell("doctor").out
    assert "Traceback" in shell("show", "", "--traceback").err
    assert "Traceback" not in shell("show", "").err
    nowhere = shell("list", "--settings", "nowhere", forked=False)
    assert "No module named 'nowhere'" in nowhere.err


def test_no_color_is_heeded(terminal, shell):
    coloured, read = terminal("doctor")
    coloured.wait(HUNG)
    assert "\x1b[" in read()
    plain, read = terminal("doctor", NO_COLOR="1")
    plain.wait(HUNG)
    assert "ok" in read()
    assert "\x1b[" not in read()
    assert "\x1b[" in shell("doctor", "--force-color", NO_COLOR="1").out


def test_every_help_text_is_a_sentence_about_what_is_done(capsys):
    for act in ("list", "show", "runs", "release", "clean", "doctor", "watch"):
        with pytest.raises(SystemExit):
            Command().run_from_argv(["manage.py", "locks", act, "--help"])
        usage, says, *options = capsys.readouterr().out.split("\n\n")
        assert usage.startswith(f"usage: manage.py locks {act} ")
        assert re.fullmatch(r"[A-Z][^.]*[.](\s[A-Z][^.]*[.])*", says), says
        for option in re.split(r"^  (?=-)", "\n".join(options), flags=re.MULTILINE)[1:]:
            assert re.search(r"\s\s[a-z]+", option), f"{act}: {option} says nothing"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_terminal_lacks_are_written_out(shell, encoding):
    with held_by("日本"):
        outcome = shell("list", PYTHONIOENCODING=encoding)
        assert (outcome.status, outcome.err) == (0, "")
        assert r"\u65e5\u672c" in outcome.out


@pytest.mark.parametrize(
    "arguments", ["", "list --fail", "--json", "doctor", "show x", "list --alias nope 2>&1"]
)
def test_a_reader_who_has_enough_is_no_traceback(settings, arguments):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m django locks {arguments} | true; exit 0"],
        cwd=ROOT,
        env=environment(settings) | {"PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=True,
    )
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
@pytest.mark.parametrize("arguments", ["", "runs --json", "metrics --no-doctor", "list --json"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_without_room_for_the_output_is_a_message(settings, arguments, unbuffered):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m django locks {arguments} >/dev/full"],
        cwd=ROOT,
        env=environment(settings) | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    says = "The output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, says)


def test_a_question_that_nobody_answers_frees_nothing(shell):
    with held_by("lottery"):
        outcome = shell("release", "lottery")
        assert outcome.status == 2
        assert "--yes" in outcome.err
        assert held.get("lottery") is not None
        assert shell("release", "lottery", answer="y\n").status == 0
        assert held.get("lottery") is None


def interrupted(process):
    """Press Ctrl-C; return the exit status.

    Python notices a signal that comes just before it reads a line only when the read has ended. So
    press once more if nothing happens, as a user would.
    """
    process.send_signal(signal.SIGINT)
    with suppress(AssertionError):
        return process.wait(5)
    process.send_signal(signal.SIGINT)
    return process.wait(HUNG)


def test_ctrl_c_at_the_question_frees_nothing_and_is_no_traceback(terminal):
    with held_by("lottery"):
        for act in (("release", "lottery"), ("clean", "--all")):
            process, read = terminal(*act)
            wait_until(lambda: "[y/N]" in read())  # noqa: B023 - called at once
            assert interrupted(process) == 130
            assert "Nothing was released." in read()
            assert "Traceback" not in read()
        assert held.get("lottery") is not None


def test_also_if_it_comes_between_the_question_and_the_wait_for_its_answer(locks):
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
        assert "There was no answer, so nothing was released." in read()
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172_800)],
)
def test_durations_are_written_as_people_do(text, seconds):
    from django_redislock.humanize import parse_duration

    assert parse_duration(text) == seconds


# --- hostile text ---------------------------------------------------------------------------------

HOSTILE = ["\x1b[2J", "a\u202eb", "\u200b", "x" * 200, "../../x", "{a}", "*", "-n", "<b>"]


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\x1b" not in name], ids=ascii)
def test_any_name_can_be_listed_shown_and_released(name):
    with held_by(name):
        assert [lock["name"] for lock in locks_command("--json").json] == [name]
        assert locks_command("show", "--json", "--", name).json["name"] == name
        assert locks_command("release", "--yes", "--", name).status == 0
        assert held.get(name) is None


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


def test_a_name_as_it_is_printed_is_that_name_to_a_shell():
    pasted = " ".join(map(text.pasteable, ODD))
    assert pasted.isprintable()
    shell = ["bash", "-c", f"printf '%s\\0' {pasted}"]
    for language in ("C", "C.UTF-8"):
        said = subprocess.run(shell, check=True, capture_output=True, env={"LC_ALL": language})
        assert said.stdout.decode().split("\0")[:-1] == ODD


@pytest.mark.parametrize("name", ["lottery", "report:2026-11", "a/b.c@d_e", "宝くじ", "-n"])
def test_a_name_that_needs_no_quotes_has_none(name):
    assert text.pasteable(name) == name


def test_a_printed_name_can_be_pasted_back(settings):
    name = "it's\u202e\\odd"
    with held_by(name):
        (line,) = locks_command("list").out.splitlines()[1:]
        pasted = line.partition("  ")[0]
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m django locks release --yes {pasted}"],
            cwd=ROOT,
            env=environment(settings),
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
        )
        assert (done.returncode, done.stdout[-17:]) == (0, "Released 1 lock.\n")
        assert held.get(name) is None
        assert pasted in locks_command("show", name).out
        assert pasted in locks_command("release", name, "--yes").err


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_that_somebody_wrote_moves_the_cursor_or_hides(text):
    owner = Owner(host=f"h{text}", pid=1, task=f"t{text}", task_id=text, thread=text, path=text)
    name = "lottery" if "\x1b" in text else text
    with LockTestKit().simulate_held_by_other(name, owner=owner):
        with busy_with(Activity(task=text, task_id=text)):
            task_runs.note_skip(name, "busy", using="default")
        for outcome in (
            locks_command("list"),
            locks_command("show", "--", name),
            locks_command("watch"),
            locks_command("runs"),
            locks_command("runs", "--", name),
            locks_command("clean", "--all", "--dry-run"),
        ):
            assert all(line.isprintable() for line in outcome.out.splitlines())


def test_garbage_in_the_index_spoils_no_list(locks):
    with held_by("lottery"):
        index = lock_keys(locks.prefix, "lottery").held
        garbage = [
            b"\xff\xfe",
            b"x",
            f"{locks.prefix}:{{gone}}:lock",
            f"{locks.prefix}:{{%00}}:lock",
        ]
        locks.redis.zadd(index, dict.fromkeys(garbage, 9e15))
        locks.redis.lpush(lock_keys(locks.prefix, "list").lock, "x")
        locks.redis.set(lock_keys(locks.prefix, "bytes").lock, b"\x00\xff" * 5000)
        for name in ("list", "bytes"):
            locks.redis.zadd(index, {lock_keys(locks.prefix, name).lock: 9e15})
        listed = {one["name"]: one["state"] for one in locks_command("--json").json}
        assert listed == {"lottery": "held", "list": "foreign", "bytes": "foreign"}
        assert locks_command("release", "bytes", "list", "--yes").status == 0
        assert [one["name"] for one in locks_command("--json").json] == ["lottery"]


def test_an_index_of_the_wrong_type_is_a_message(locks):
    locks.redis.set(lock_keys(locks.prefix, "x").held, "x")
    outcome = locks_command("list")
    assert outcome.status == 3
    assert "WRONGTYPE" in outcome.err


@pytest.mark.waits
@pytest.mark.no_permit("a circle needs all holders to wait, and the bystander does not")
def test_holders_who_wait_for_each_other_are_seen(locks):
    locks.configure(TTL=30, WAIT=HUNG)
    with a_circle("a", "b"):
        for act in ("list", "watch"):
            for name, other in (("a", "b"), ("b", "a")):
                assert re.search(
                    rf"(?m)^{name} +circle .*, waits for {other} ", locks_command(act).out
                )
        for lock in locks_command("list", "--json").json:
            other = {"a": "b", "b": "a"}[lock["name"]]
            assert (lock["state"], lock["waits_for"]) == ("held", other)
            assert f"'{other}' is held by" in lock["circle"]
        shown = locks_command("show", "a").out
        assert re.search(r"(?m)^waits for +b$", shown)
        assert "note        Its holder waits, and that would never end: 'b' is held by" in shown
    assert locks_command("list", "--json").json == []


# --- watch ----------------------------------------------------------------------------------------


def test_watch_without_a_terminal_prints_once():
    with held_by("lottery"):
        outcome = locks_command("watch")
        assert outcome.status == 0
        assert "held: 1" in outcome.out
        assert "lottery" in outcome.out
        assert [lock["name"] for lock in locks_command("watch", "--json").json] == ["lottery"]


@pytest.fixture
def terminal(settings):
    """Run the command on a terminal of its own; returns it and what reads its screen."""
    started = []

    def run(*args, keys=b"", **environ):
        ours, theirs = pty.openpty()
        os.write(ours, keys)
        os.set_blocking(ours, False)
        process = start_python(
            "tests.operations.manage:main",
            *("locks", *args),
            files=[theirs] * 3,
            environment=environment(settings)
            | {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
            | environ,
        )
        os.close(theirs)
        started.append((process, ours))
        screen = bytearray()

        def read():
            try:
                while chunk := os.read(ours, 65536):
                    screen.extend(chunk)
            except (BlockingIOError, OSError):
                pass
            return screen.decode(errors="replace")

        return process, read

    yield run
    for one, ours in started:
        one.kill()
        one.wait(HUNG)
        os.close(ours)


def changes(watching):
    """All that it shows, after one more look."""
    return "\n".join(watching.look()[0])


def test_watch_does_not_take_a_silent_server_for_free_locks(settings):
    one = settings.REDISLOCK["default"]
    watching = live_view.LiveView(["default"])
    watching.look()
    with held_by("lottery"):
        assert "lottery  taken  web-3:4711" in changes(watching)
        settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
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


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_long_name_pushes_nothing_off_the_screen(columns):
    with held_by("x" * 200):
        lines, _ = live_view.LiveView(["default"]).look(24, columns)
        name, row, *_ = lines[lines.index("") + 2 :]
        assert name.endswith("x...") or row.startswith(" ")
        assert "held" in row
        assert "web-3:4711" in "".join(lines)


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
@pytest.mark.parametrize("lines", [6, 10, 24])
def test_watch_fits_the_screen_and_says_what_does_not(lines, columns):
    watching = live_view.LiveView(["default"])
    watching.look(lines, columns)
    with ExitStack() as stack:
        for number in range(30):
            stack.enter_context(held_by(f"宝くじ:{number}", task="lottery.tasks.draw"))
        shown, complaints = watching.look(lines, columns)
    assert complaints == []
    assert len(shown) <= lines
    assert all(table.width(line) <= columns for line in shown)
    rows = [line for line in shown if "宝くじ" in line and "taken" not in line]
    assert f"{30 - len(rows)} more" in shown


@pytest.mark.parametrize("columns", [60, 80])
def test_watch_shows_holder_and_task_of_each_lock_also_on_a_narrow_screen(columns):
    with held_by("lottery", task="lottery.tasks.draw"), held_by("nightly", task="shop.tasks.pay"):
        shown, _ = live_view.LiveView(["default"]).look(24, columns)
    text = "\n".join(shown)
    assert text.count("web-3:4711") == 2
    assert "lottery.tasks.draw" in text
    assert "shop.tasks.pay" in text
    assert all(table.width(line) <= columns for line in shown)


def test_watch_with_room_for_all_leaves_nothing_out():
    with held_by("lottery"):
        shown, _ = live_view.LiveView(["default"]).look(24, 120)
    assert not any("more" in line for line in shown)


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
    assert table.clipped(line, columns) == left


@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
@pytest.mark.no_permit("a child process lists the bystander too")
def test_watch_shows_waiters_and_hand_offs_until_it_is_ended(terminal, spawn, end, status):
    process, read = terminal("watch", "--interval", "0.05")
    lock = distributed_lock("lottery")
    with lock:
        wait_until(lambda: "held: 1" in read())
        child = spawn(wait_for, "lottery")
        wait_until(lambda: "waiting: 1" in read() and f":{child.pid}" in read())
    wait_until(lambda: "handed over" in read())
    process.send_signal(end)
    assert process.wait(HUNG) == status
    assert read().endswith("\x1b[?1049l")  # The screen is as it was.


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


def test_those_who_wait_for_any_permit_are_shown_and_counted_once():
    waits = distributed_lock("gpu", limit=2, wait=HUNG)
    with held_by("gpu", limit=2), held_by("gpu", "web-4", limit=2):
        waiting = in_thread(waits.acquire)
        wait_until(lambda: waiters("gpu") == 1)
        shown = locks_command("watch").out
        assert "held: 2  waiting: 1" in shown
        assert shown.count("waiting 1.") == 1
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
