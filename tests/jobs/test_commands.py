"""SingleInstanceMixin: management commands of which one run happens at a time."""

import io
import os
import pickle
import re
import signal
import sys
import time
from contextlib import nullcontext

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand

from django_redislock import (
    InvalidLockName,
    Limit,
    LockTimeout,
    Skipped,
    distributed_lock,
    held,
    single_instance,
)
from django_redislock.jobs import current_lease
from django_redislock.management import SingleInstanceMixin
from django_redislock.testing import LockTestKit
from tests.support.processes import say
from tests.support.waiting import wait_until

TTL = 60  # Seconds: that no test waits for.
JOB = "manage.py test_commands"  # After this module, as Django names commands.


class Import(SingleInstanceMixin, BaseCommand):
    """Imports a source; which one is an option."""

    requires_system_checks = ()
    single_instance = {"name": "import:{source}", "ttl": TTL}

    def add_arguments(self, parser):
        parser.add_argument("source", nargs="?", default="eu")

    def handle(self, *args, **options):
        lease = current_lease()
        if options["source"] == "nowhere":
            raise CommandError("No such source.")
        return lease.name


def variant(handle=Import.handle, **options):
    """The same command with other options, and perhaps another body."""
    how = {"single_instance": options, "handle": handle, "__module__": __name__}
    return type("Variant", (Import,), how)()


def test_its_options_name_the_lock_and_its_runs_have_records(redislock):
    assert call_command(Import(), stdout=io.StringIO()) == "import:eu"
    assert call_command(Import(), "us", stdout=io.StringIO()) == "import:us"
    with pytest.raises(CommandError, match="No such source"):
        call_command(Import(), "nowhere")
    record = held.job(JOB)
    assert (record.last_success is None, record.last_failure is None) == (False, False)
    assert call_command(variant(), stdout=io.StringIO()) == "test_commands"  # The default.


@pytest.mark.parametrize(
    ("code", "is_success"), [(None, True), (0, True), (3, False), ("no", False)]
)
def test_a_body_that_exits_is_a_success_if_its_status_is_0(redislock, code, is_success):
    exits = variant(lambda self, **options: sys.exit(code), name="exits", once=TTL)
    with pytest.raises(SystemExit) as end:
        call_command(exits)
    assert end.value.code == code
    with nullcontext() if is_success else pytest.raises(SystemExit):
        assert call_command(exits, stderr=io.StringIO())["skipped"] == "done"


def test_a_skip_is_one_line_and_no_error(redislock):
    told = io.StringIO()
    with redislock.simulate_held_by_other("import:eu"):
        skipped = call_command(Import(), stderr=told)
        assert skipped == Skipped(
            skipped="busy", lock="import:eu", holder="another-host:1 simulated"
        )
        assert told.getvalue() == "Skipped: 'import:eu' is held by another-host:1 simulated\n"
        call_command(Import(), stderr=told, verbosity=0)
        assert told.getvalue().count("\n") == 1
        with pytest.raises(CommandError) as error:
            call_command(variant(name="import:{source}", skip_exit=4))
        for raised in (error.value, pickle.loads(pickle.dumps(error.value))):
            assert (raised.returncode, raised.skipped) == (4, skipped)
            assert str(raised) == "'import:eu' is held by another-host:1 simulated"


def test_a_body_that_returns_the_skip_of_another_job_was_not_skipped_itself(redislock):
    def call_inner(self, **options):
        return single_instance("inner")(lambda: 1)()

    told, both = io.StringIO(), variant(call_inner, name="both", skip_exit=4)
    with redislock.simulate_held_by_other("inner"):
        outcome = call_command(both, stdout=told, stderr=told)
    assert (outcome["lock"], told.getvalue()) == ("inner", "")
    record = held.job(JOB)
    assert (record.last_success is None, record.skips) == (False, 0)


def test_what_the_lock_raises_is_an_error_of_one_line(redislock):
    with redislock.simulate_unavailable():
        with pytest.raises(CommandError, match=r"^Lock 'import:eu' is unavailable") as error:
            call_command(Import())
        assert error.value.returncode == 3
        with pytest.raises(CommandError, match=r"^Lock 'import:gb' is unavailable"):
            call_command(variant(name="import:gb", limit=2))
    with redislock.simulate_held_by_other("import:eu"):
        with pytest.raises(CommandError, match=r"^Lock 'import:eu' is busy"):
            call_command(variant(name="import:{source}", on_conflict="raise"))
        ask = variant(name="import:{source}", on_conflict=answer)
        assert call_command(ask) == (JOB, "eu")


def answer(conflict):
    return conflict.job, conflict.kwargs["source"]


async def aanswer(conflict):
    """What no command awaits."""


def test_errors_of_other_locks_in_the_body_are_left_alone(redislock):
    def take_another(self, source, **options):
        with distributed_lock(source, wait=0):
            pass

    command = variant(take_another)
    with redislock.simulate_held_by_other("other"), pytest.raises(LockTimeout):
        call_command(command, "other")
    with pytest.raises(InvalidLockName):
        call_command(command, "")


def run_in_shell(*args):
    """In a child: as manage.py does."""
    Import().run_from_argv(["manage.py", "test_commands", *args])


def hold_in_shell(source):
    """In a child: a command that goes on until a signal ends it."""

    def hold(self, **options):
        say("held")
        while True:
            time.sleep(0.01)

    command = variant(hold, **Import.single_instance)
    command.run_from_argv(["manage.py", "test_commands", source])


def test_in_a_shell_a_skip_exits_with_0_and_sigterm_releases(locks, spawn):
    holder = spawn(hold_in_shell, "eu")
    assert holder.read() == "held"
    second = spawn(run_in_shell, "eu")
    assert second.wait() == 0
    line = rf"Skipped: 'import:eu' is held by \S+:{holder.pid} {re.escape(JOB)}\n"
    assert re.fullmatch(line, second.stderr)
    os.kill(holder.pid, signal.SIGTERM)
    assert holder.wait() == 128 + signal.SIGTERM
    wait_until(lambda: held.get("import:eu") is None)
    record = held.job(JOB)
    assert (record.last_failure.owner.pid, record.skips) == (holder.pid, 1)


def run_outer(busy=None):
    """In a child: a command that calls another job; a lock is busy, or else no server answers."""

    def call_inner(self, **options):
        single_instance("inner", on_unavailable="run")(lambda: None)()

    outer = variant(call_inner, name="outer", on_unavailable="run")
    with (
        LockTestKit() as kit,
        kit.simulate_held_by_other(busy) if busy else kit.simulate_unavailable(),
    ):
        call_command(outer)


@pytest.mark.parametrize(
    ("busy", "says"),
    [
        (None, [f"{JOB} runs WITHOUT", "runs WITHOUT its lock"]),
        ("inner", ["Skipped tests.jobs.test_commands.run_outer"]),
        ("outer", ["Skipped: 'outer' is held by"]),
    ],
)
def test_without_logging_a_command_says_each_thing_once(locks, spawn, busy, says):
    child = spawn(run_outer, busy)
    assert child.wait() == 0
    lines = child.stderr.splitlines()
    assert len(lines) == len(says), lines
    assert all(part in line for part, line in zip(says, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("import", TypeError, "must be a dictionary"),
        ({"skip_exit": "4"}, ValueError, "skip_exit must be"),
        ({"tll": 4}, TypeError, "takes no argument 'tll'"),
        ({"name": "a:{"}, InvalidLockName, "no format string"),
        ({"name": 5}, InvalidLockName, "it is int, not str"),
        ({"name": "gpu#2", "limit": 2}, InvalidLockName, "ends in # and a number"),
        ({"on_conflict": aanswer}, TypeError, "on_conflict cannot be aanswer"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_import(options, error, message):
    with pytest.raises(error, match=message):
        type("Command", (SingleInstanceMixin, BaseCommand), {"single_instance": options})
    with pytest.raises(TypeError, match="write SingleInstanceMixin before"):
        type("Command", (BaseCommand, SingleInstanceMixin), {"single_instance": {}})


@pytest.mark.parametrize(
    ("single_instance", "source", "says"),
    [
        ({"name": "import:{source}"}, "x" * 200, "207 bytes of UTF-8, at most 200"),
        ({"name": "import:{source}"}, "e\nu", "control characters"),
        ({"name": "{source}"}, "", "it is empty"),
        ({"name": "{source}", "limit": 2}, "eu#2", "ends in # and a number"),
        ({"name": "import:{country}"}, "eu", "'country', which.*does not have; it has: .*source"),
        ({"limits": [Limit("{source}", 2)]}, "", "it is empty"),
    ],
)
def test_an_option_that_cannot_be_in_a_locks_name_is_an_error_of_one_line(
    redislock, single_instance, source, says
):
    with pytest.raises(CommandError, match=says) as error:
        call_command(variant(**single_instance), source)
    assert (error.value.returncode, "\n" in str(error.value)) == (2, False)
    assert not held.list()
