"""``manage.py locks clean --queued``: forgets the calls that unique_queued has announced."""

import pytest

from django_redislock import distributed_lock, held, task_runs
from django_redislock.rules.names import check_name
from tests.operations.test_locks_command import locks_command
from tests.support.matrix import needs_scripts

pytestmark = [pytest.mark.usefixtures("locks"), needs_scripts]

IMPORT, EXPORT = "shop.tasks.import", "shop.tasks.export"


@pytest.fixture(autouse=True)
def _announced(locks):
    for name, task_id, task in (
        ("import:1", "id-1", f"{IMPORT}|and more"),
        ("import:{2}", "id-2", IMPORT),
        ("export", "id-3", EXPORT),
    ):
        assert task_runs.announce(check_name(name), task_id, 60, task=task, using="default") == ""
    task_runs.announce("over", "id-4", 60, task=EXPORT, using="default")
    task_runs.retract("over", "id-4", using="default")


def standing():
    """The calls that stand for others."""
    return {calls.queued for _, calls in task_runs.announced(using="default").locks}


def test_it_forgets_all_and_asks_nothing():
    outcome = locks_command("clean", "--queued")
    assert outcome.status == 0
    assert outcome.out.endswith("Forgot 3 announced calls.\n")
    assert standing() == set()
    assert task_runs.announce("export", "id-5", 60, task=EXPORT, using="default") == ""


def test_or_those_of_one_task():
    outcome = locks_command("clean", "--queued", "--task", IMPORT)
    assert "Forgot 2 announced calls." in outcome.out
    assert standing() == {"id-3"}


def test_a_dry_run_prints_what_it_would_forget():
    outcome = locks_command("clean", "--queued", "--dry-run", "--task", EXPORT)
    assert outcome.status == 0
    headers, row, rest = outcome.out.splitlines()
    assert headers.split() == ["NAME", "TASK", "ID", "UNTIL"]
    assert row.split()[:3] == ["export", EXPORT, "id-3"]
    assert rest == "Would forget 1 announced call."
    assert standing() == {"id-1", "id-2", "id-3"}


def test_for_programs():
    for more, forgotten in (["--dry-run"], False), ([], True):
        found = locks_command("clean", "--queued", "--json", *more).json
        assert {one["id"]: (one["name"], one["task"]) for one in found} == {
            "id-1": ("import:1", IMPORT),
            "id-2": ("import:{2}", IMPORT),
            "id-3": ("export", EXPORT),
        }
        for one in found:
            assert (one["alias"], one["forgotten"]) == ("default", forgotten)
            assert one["until"] is not None
    assert locks_command("clean", "--queued", "--json").json == []


def test_a_call_that_waits_after_all_has_the_last_calls_arguments():
    how = {"task": EXPORT, "arguments": b"the last", "using": "default"}
    assert task_runs.announce("export", "id-6", 60, **how) == "id-3"
    assert locks_command("clean", "--queued").status == 0
    assert task_runs.retract("export", "id-3", using="default") == b"the last"


@pytest.mark.parametrize(
    "more",
    [("--all",), ("--dead-here",), ("--prefix", "x"), ("--host", "x"), ("--older-than", "1h")],
    ids=" ".join,
)
def test_it_chooses_by_task_alone(more):
    with distributed_lock("lottery"):
        outcome = locks_command("clean", "--queued", "--yes", *more)
        assert (outcome.status, outcome.err) == (
            2,
            "--queued goes with --task alone: a call that waits has no holder.",
        )
        assert held.get("lottery") is not None
    assert len(standing()) == 3


def test_without_a_server_it_says_so(settings):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
    outcome = locks_command("clean", "--queued")
    assert outcome.status == 3
    assert not outcome.out
