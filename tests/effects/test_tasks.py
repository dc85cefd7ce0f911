"""single_instance_task(atomic=...): what a run writes is committed before its lock is released.

With once="database", that it is completed is committed with it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from itertools import count

import pytest
from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry
from django.core.management import call_command
from django.db import OperationalError, connections, transaction

from django_redislock import (
    InvalidLockName,
    LockLost,
    LockMisuse,
    LockTimeout,
    StaleFence,
    completed_runs,
    distributed_lock,
    held,
    signals,
    single_instance_task,
)
from django_redislock.celery import current_lease
from django_redislock.models import CompletedRun, Fence
from tests.effects.conftest import refusal
from tests.effects.models import Entry, written
from tests.support.celery_app import EAGER, celery_app
from tests.support.databases import (
    KINDS,
    MARIADB,
    POSTGRES,
    SQLITE,
    await_blocked,
    described,
    on_mariadb,
    on_sqlite,
    use,
)
from tests.support.others import held_by_other
from tests.support.processes import hear, say
from tests.support.waiting import HUNG

pytestmark = pytest.mark.usefixtures("locks", "eager_app")

ONCE = {"once": "database", "acks_late": True}

_numbers = count(1)


def task_of(body, *, key="lottery", **options):
    """A task with a name of its own."""
    body.__name__ = f"draw_{next(_numbers)}"
    return single_instance_task(key=key, **options)(body)


def draws(database, more=lambda: None, **options):
    """A task that writes one line, and then does *more*."""

    def body():
        Entry.objects.using(database).create(fence=current_lease().fence)
        return more()

    return task_of(body, atomic=database, **options)


def lottery(database, more=lambda: None, **options):
    """Such a task that is done once."""
    return draws(database, more, **{**ONCE, **options})


def completed(database):
    """The locks of the runs that the database has as completed."""
    return list(CompletedRun.objects.using(database).order_by("pk").values_list("name", flat=True))


def lose_the_lease():
    lease = current_lease()
    assert held.force_release(lease.name, lease.id)
    with pytest.raises(LockLost):
        lease.ensure_held(verify=True)


@contextmanager
def whenever(signal, receive):
    """Let a receiver hear of it during a block."""
    signal.connect(receive)
    try:
        yield
    finally:
        signal.disconnect(receive)


# --- the order ------------------------------------------------------------------------------------


def test_the_body_is_committed_before_the_release(database):
    seen = []

    def look(**news):
        seen.append((len(written(database)), connections[database].in_atomic_block))

    with whenever(signals.lock_released, look):
        task = draws(database, lambda: connections[database].in_atomic_block)
        assert task.delay().get() is True
        assert task() is True  # A direct call.
    assert seen == [(1, False), (2, False)]
    row = Fence.objects.using(database).get()
    assert (row.name, row.fence) == ("lottery", written(database)[-1])


@on_sqlite
@pytest.mark.parametrize("how", ["eager", "direct"])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_body_that_replaces_itself_is_committed_before_what_takes_its_place(
    database, how, swallowed
):
    seen = []

    @shared_task(name=f"next-{next(_numbers)}")
    def go_on() -> str:
        in_transaction = connections[database].in_atomic_block
        seen.append((len(written(database)), in_transaction, distributed_lock("lottery").locked()))
        return "went on"

    def replace():
        with suppress(Ignore) if swallowed else nullcontext():
            raise task.replace(go_on.si())

    task = draws(database, replace, min_hold=60)
    if how == "eager":
        assert task.apply().get() == "went on"
    else:
        with pytest.raises(Ignore):
            task()
    assert seen == [(1, False, False)]


@on_sqlite
def test_what_replaces_a_body_that_fails_is_not_published(database):
    seen = []

    @shared_task(name=f"next-{next(_numbers)}")
    def go_on() -> None:
        seen.append(1)

    def replace_and_fail():
        with suppress(Ignore):
            task.replace(go_on.si())
        raise ZeroDivisionError

    task = draws(database, replace_and_fail)
    with pytest.raises(ZeroDivisionError):
        task.delay().get()
    assert (seen, written(database)) == ([], [])


@on_sqlite
@pytest.mark.parametrize("once", [None, "database"])
@pytest.mark.parametrize("how", [{}, {"on_conflict": "wait", "wait": 0.1}], ids=["skip", "wait"])
def test_while_another_has_the_lock_it_has_neither_a_transaction_nor_a_connection(
    database, once, how
):
    """Databases close those that are idle for long, and others may need them."""
    task = draws(database, once=once, **how)
    connections[database].close()
    with held_by_other("lottery"):
        assert task.delay().get()["skipped"] == "busy"
        assert connections[database].connection is None
        refusal(distributed_lock("lottery", wait=0.1, atomic=database), LockTimeout)
    assert connections[database].connection is None


@on_sqlite
def test_an_open_transaction_is_refused_before_the_lock_is_asked_for(database):
    task = draws(database, on_conflict="wait", wait=60)
    for call in (task, lambda: task.delay().get()):
        with (
            held_by_other("lottery"),
            transaction.atomic(using=database),
            pytest.raises(LockMisuse, match=r"is open already.*delay_on_commit\(\)") as refused,
        ):
            call()
        assert "distributed_lock(" not in str(refused.value)
    assert held.record("lottery") is None
    assert written(database) == []


@on_sqlite
def test_each_permit_has_a_fence_of_its_own(database):
    with distributed_lock("lottery", limit=2) as first:
        draws(database, limit=2)()
        with first.atomic(database):  # No later lease of this permit has written.
            pass
    rows = Fence.objects.using(database).order_by("fence").values_list("name", flat=True)
    assert list(rows) == ["lottery", "lottery#2"]


# --- what is skipped ------------------------------------------------------------------------------


def test_a_later_run_is_skipped_with_the_same_result_as_after_seconds(database):
    leases = []
    task = lottery(database, lambda: leases.append(current_lease()))
    first = task.delay()
    assert first.get() is None
    row, (lease,) = CompletedRun.objects.using(database).get(), leases
    assert (row.name, row.alias, row.fence) == ("lottery", "default", lease.fence)
    assert (row.task, row.task_id, row.lease_id) == (task.name, first.id, lease.id)
    assert row.place == lease.owner.place
    assert 0 <= row.ago < 60
    assert task.delay().get() == {
        "skipped": "done",
        "lock": "lottery",
        "by": f"{row.place} {first.id}",
        "ago": pytest.approx(0, abs=HUNG),
    }
    assert len(written(database)) == 1
    record = held.record("lottery")
    assert (record.last_skip.why, record.skips, record.last_failure) == ("done", 1, None)


@pytest.mark.parametrize("id_", ["the same", "long" * 1000], ids=["short", "long"])
def test_a_redelivery_is_skipped_as_a_duplicate(database, id_):
    task = lottery(database)
    task.apply(task_id=id_).get()
    again = task.apply(task_id=id_).get()
    assert id_.startswith(again["by"])
    assert again == {
        "skipped": "duplicate",
        "lock": "lottery",
        "by": again["by"],
        "ago": pytest.approx(0, abs=HUNG),
    }
    assert task.apply(task_id="another").get()["skipped"] == "done"
    assert len(written(database)) == 1


@on_sqlite
def test_each_key_is_drawn_once_in_each_database(make_database):
    one, two = make_database("one"), make_database("two")
    for _ in range(2):
        for alias, key in ((one, "lottery:1"), (one, "lottery:2"), (two, "lottery:1")):
            lottery(alias, key=key).delay()
    assert completed(one) == ["lottery:1", "lottery:2"]
    assert completed(two) == ["lottery:1"]
    assert (len(written(one)), len(written(two))) == (2, 1)


@on_sqlite
def test_what_is_completed_is_not_drawn_again_because_its_lock_has_moved(database, locks, settings):
    default = settings.REDISLOCK["default"]
    other = {**default, "KEY_PREFIX": f"{locks.prefix}-other"}
    settings.REDISLOCK = {"default": default, "other": other}
    lottery(database).delay()
    assert lottery(database, using="other").delay().get()["skipped"] == "done"
    assert len(written(database)) == 1


@on_mariadb
def test_names_that_a_collation_takes_for_the_same_are_drawn_each(database):
    for name in ("lottery", "Lottery", "lottery "):
        lottery(database, key=name).delay()
    assert len(written(database)) == 3


@pytest.mark.django_db
def test_within_a_test_case_it_goes_by_its_database_and_a_direct_call_is_no_duplicate():
    task = lottery("default")
    task()
    assert task()["skipped"] == "done"
    assert (len(written("default")), completed("default")) == (1, ["lottery"])


# --- what is not completed ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, Ignore, Reject, Retry])
def test_what_the_body_raises_rolls_it_back_and_it_runs_again(database, error, caplog):
    outcomes = [error("not yet"), "drawn"]

    def succeed_later():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    caplog.set_level("INFO")
    task = lottery(database, succeed_later)
    with pytest.raises(error):
        task()
    assert (written(database), completed(database)) == ([], [])
    # To Celery it is no error, so the log must say so.
    said = f"ends by {error.__name__}, so what it wrote to database {database!r} is rolled back"
    assert (said in caplog.text) is (error is not ZeroDivisionError)
    assert task() == "drawn"
    assert (len(written(database)), completed(database)) == (1, ["lottery"])


@on_sqlite
def test_a_run_that_has_published_its_own_retry_is_not_completed(database):
    def body(self):
        Entry.objects.using(database).create(fence=0)
        if not self.request.retries:
            self.retry(throw=False)
        return "drawn"

    task = task_of(body, atomic=database, bind=True, **ONCE)
    # In eager mode a retry runs at once, within its first try, which holds the lock.
    task.apply(task_id="the same")
    assert completed(database) == []
    assert task.apply(task_id="the same", retries=1).get() == "drawn"
    assert completed(database) == ["lottery"]
    assert len(written(database)) == 2


def test_a_loss_before_the_commit_fails_the_run_and_rolls_back(database):
    with pytest.raises(LockLost):
        lottery(database, lose_the_lease).delay().get()
    assert (written(database), completed(database)) == ([], [])


@on_sqlite
def test_a_loss_after_the_commit_fails_no_run_that_would_be_retried(database):
    def lose_later():
        lease = current_lease()
        name, id_ = lease.name, lease.id
        transaction.on_commit(lambda: held.force_release(name, id_) or None, using=database)
        return "drawn"

    assert draws(database, lose_later, autoretry_for=(LockLost,)).delay().get() == "drawn"
    assert len(written(database)) == 1


def test_a_later_lease_in_the_database_fails_the_run_before_its_body(database):
    task = draws(database)
    task()
    Fence.objects.using(database).update(fence=2**62, lease_id="of another")
    with pytest.raises(StaleFence):
        task.delay().get()
    assert len(written(database)) == 1
    assert not distributed_lock("lottery").locked()


# --- found only under the lock --------------------------------------------------------------------


def test_what_was_completed_while_it_waited_for_the_lock_is_found_before_the_body(database):
    """As by the run that it has waited for. Nothing is written, and no run has been."""

    def complete(lease, **news):
        signals.lock_acquired.disconnect(complete)
        lease.renew()  # Nor does it look like one that never ended.
        completed_runs.note(lease, database)
        CompletedRun.objects.using(database).update(place="web-1:7", task_id="another")

    task = lottery(database, min_hold=3600)
    with whenever(signals.lock_acquired, complete):
        outcome = task.delay().get()
    assert (outcome["skipped"], outcome["by"]) == ("done", "web-1:7 another")
    assert written(database) == []
    assert Fence.objects.using(database).get().fence == 0
    assert not distributed_lock("lottery").locked()
    record = held.record("lottery")
    assert list(record.last) == ["skip"]
    assert record.under_way == ()
    assert lottery(database).delay().get()["skipped"] == "done"


# --- what Redis forgets, the database does not ----------------------------------------------------

LOSSES = {
    "flushall": lambda locks, make_server: locks.redis.flushall(),
    "a second Redis": lambda locks, make_server: locks.on(make_server()),
    "none": lambda locks, make_server: locks.configure(LOCATION="redis://127.0.0.1:1/0"),
}


@on_sqlite
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_that_it_is_done_needs_no_redis(database, locks, make_server, loss):
    task = lottery(database)
    task.delay()
    loss(locks, make_server)
    assert task.delay().get()["skipped"] == "done"
    assert len(written(database)) == 1


@on_sqlite
def test_with_seconds_it_is_drawn_again_after_flushall(database, locks):
    task = lottery(database, once=3600)
    task.delay()
    assert task.delay().get()["skipped"] == "done"
    locks.redis.flushall()
    assert task.delay().get() is None
    assert len(written(database)) == 2


def draw_and_stand_still(databases, database, when):
    """In a child: draw, and stand still in the body or after the commit."""
    use(**databases)

    def wait():
        say(when)
        hear()

    def more():
        if when == "body":
            wait()
        elif when == "commit":
            transaction.on_commit(wait, using=database)

    signals.lock_acquired.connect(lambda **news: say("granted"), weak=False)
    with celery_app(**EAGER):
        result = lottery(database, more).apply(task_id=when, throw=False)
    say([result.state, result.result if result.successful() else type(result.result).__name__])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database_kind", "when"), [*((kind, "commit") for kind in KINDS), (SQLITE, "body")]
)
def test_a_run_that_was_killed_is_repeated_by_its_redelivery_unless_it_was_committed(
    database, spawn, locks, when
):
    child = spawn(draw_and_stand_still, described(database), database, when)
    assert [child.read(), child.read()] == ["granted", when]
    child.kill()
    assert distributed_lock("lottery").locked()  # Nobody has released it, or acknowledged the call.
    if when == "body":
        locks.redis.flushall()  # Not to wait for the end of its lease.
    again = lottery(database).apply(task_id=when).get()
    if when == "body":
        assert again is None
    else:
        assert again["skipped"] == "duplicate"
    assert (len(written(database)), completed(database)) == (1, ["lottery"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database_kind", "isolation"),
    [(SQLITE, ""), (MARIADB, ""), (POSTGRES, ""), (POSTGRES, "serializable")],
)
def test_of_two_runs_that_two_servers_let_in_one_draws(
    make_database, database_kind, spawn, locks, make_server, isolation
):
    database = make_database("effects", isolation=isolation)
    first = spawn(draw_and_stand_still, described(database), database, "body")
    assert [first.read(), first.read()] == ["granted", "body"]
    locks.on(make_server())
    second = spawn(draw_and_stand_still, described(database), database, "never")
    assert second.read() == "granted"
    if database_kind != SQLITE:
        await_blocked(database)
    first.send("go on")
    assert first.read() == ["SUCCESS", None]
    state, outcome = second.read()
    if isolation:  # Left to the caller, as docs/databases.md says.
        assert (state, outcome) == ("FAILURE", "OperationalError")
    else:
        assert (state, outcome["skipped"]) == ("SUCCESS", "done")
    assert (len(written(database)), completed(database)) == (1, ["lottery"])


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atomic": "defualt"}, "atomic must be the alias of a database, not 'defualt'"),
        ({"atomic": 1}, "atomic must be True or the alias of a database, not 1"),
        ({"atomic": True, "on_unavailable": "run"}, 'atomic and on_unavailable="run" exclude'),
        (ONCE, 'once="database" needs atomic'),
        ({**ONCE, "atomic": False}, 'once="database" needs atomic'),
        ({**ONCE, "atomic": True, "limit": 2}, "once and limit exclude each other"),
        ({"atomic": True, "once": "databse"}, "a timedelta or \"database\", not 'databse'"),
        ({"atomic": True, "once": True}, "once must be a number of seconds or a timedelta"),
        ({"atomic": True, "ttl": "database"}, "ttl must be a number of seconds or a timedelta"),
    ],
)
def test_what_cannot_work_is_refused_at_import(options, message):
    with pytest.raises(ValueError, match=message):

        @single_instance_task(**options)
        def draw() -> None: ...


@on_sqlite
def test_false_is_as_if_it_was_not_given(database):
    task = task_of(
        lambda: connections[database].in_atomic_block, atomic=False, on_unavailable="run"
    )
    assert task() is False


@on_sqlite
def test_a_lock_that_is_named_after_its_task_is_judged_before_the_body(database):
    @single_instance_task(name=f"{next(_numbers):0201}", atomic=database)
    def draw() -> None:
        Entry.objects.using(database).create(fence=0)

    with pytest.raises(InvalidLockName, match="201 bytes"):
        draw.delay().get()
    assert written(database) == []


@on_sqlite
def test_a_missing_table_is_said_before_the_lock_is_asked_for(make_database):
    database = make_database("effects", migrate=False)
    call_command("migrate", "django_redislock", "0002", database=database, verbosity=0)
    with pytest.raises(LockMisuse, match="has no table of completed runs") as refused:
        lottery(database)()
    assert "migrate django_redislock --database=effects" in str(refused.value)
    assert written(database) == []
    assert held.record("lottery") is None


@on_sqlite
def test_an_error_of_the_database_is_left_as_it_is(database, tmp_path):
    connections[database].close()
    connections[database].settings_dict["NAME"] = str(tmp_path / "no" / "such.sqlite3")
    with pytest.raises(OperationalError):
        lottery(database)()
