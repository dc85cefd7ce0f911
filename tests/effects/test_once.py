"""single_instance_task(once="database"): that a run is completed is committed with its effects."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from random import Random

import pytest
from celery.exceptions import Ignore
from django.core.management import call_command
from django.db import OperationalError, connections, transaction

from django_redislock import (
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
from django_redislock.testing import LockTestKit
from tests.effects.models import Entry
from tests.support.celery_app import EAGER, celery_app
from tests.support.databases import (
    MARIADB,
    POSTGRES,
    SQLITE,
    await_blocked,
    described,
    on_mariadb,
    on_postgres,
    on_sqlite,
    use,
)
from tests.support.processes import hear, say
from tests.support.waiting import HUNG

pytestmark = pytest.mark.usefixtures("locks", "eager_app")

_names = count(1)


def lottery(database, more=lambda: None, *, key="lottery", **options):
    """A task that writes one line, and then does *more*."""

    def body():
        Entry.objects.using(database).create(fence=0)
        return more()

    body.__name__ = f"draw_once_{next(_names)}"
    return single_instance_task(
        key=key, atomic=database, once="database", acks_late=True, **options
    )(body)


def draws(database):
    return Entry.objects.using(database).count()


def completed(database):
    """The locks of the runs that the database has as completed."""
    return list(CompletedRun.objects.using(database).order_by("pk").values_list("name", flat=True))


# --- what is skipped ------------------------------------------------------------------------------


def test_a_later_run_is_skipped_with_the_same_result_as_after_seconds(database):
    task = lottery(database)
    first = task.delay()
    assert first.get() is None
    assert task.delay().get() == {
        "skipped": "done",
        "lock": "lottery",
        "by": f"{CompletedRun.objects.using(database).get().place} {first.id}",
        "ago": pytest.approx(0, abs=HUNG),
    }
    assert draws(database) == 1
    record = held.record("lottery")
    assert (record.last_skip.why, record.skips, record.last_failure) == ("done", 1, None)


@on_sqlite
def test_the_row_says_which_run_it_was(database):
    leases = []
    task = lottery(database, lambda: leases.append(current_lease()))
    first = task.delay()
    row, (lease,) = CompletedRun.objects.using(database).get(), leases
    assert (row.name, row.alias, row.task, row.task_id) == (
        "lottery",
        "default",
        task.name,
        first.id,
    )
    assert (row.fence, row.lease_id, row.place) == (lease.fence, lease.id, lease.owner.place)
    assert 0 <= row.ago < 60


def test_a_redelivery_is_skipped_as_a_duplicate(database):
    task = lottery(database)
    task.apply(task_id="the same")
    assert task.apply(task_id="the same").get() == {
        "skipped": "duplicate",
        "lock": "lottery",
        "by": "the same",
        "ago": pytest.approx(0, abs=HUNG),
    }
    assert task.apply(task_id="another").get()["skipped"] == "done"
    assert draws(database) == 1


@on_sqlite
def test_of_two_direct_calls_neither_is_a_duplicate(database):
    task = lottery(database)
    task()
    assert task()["skipped"] == "done"
    assert draws(database) == 1


@on_sqlite
def test_each_key_is_drawn_once_in_each_database(make_database):
    one, two = make_database("one"), make_database("two")
    for _ in range(2):
        lottery(one, key="lottery:1").delay()
        lottery(one, key="lottery:2").delay()
        lottery(two, key="lottery:1").delay()
    assert completed(one) == ["lottery:1", "lottery:2"]
    assert completed(two) == ["lottery:1"]
    assert (draws(one), draws(two)) == (2, 1)


@on_sqlite
def test_what_is_completed_is_not_drawn_again_because_its_lock_has_moved(database, locks, settings):
    settings.REDISLOCK = {
        "default": settings.REDISLOCK["default"],
        "other": {**settings.REDISLOCK["default"], "KEY_PREFIX": f"{locks.prefix}-other"},
    }
    lottery(database).delay()
    assert lottery(database, using="other").delay().get()["skipped"] == "done"
    assert draws(database) == 1


@on_mariadb
def test_names_that_a_collation_takes_for_the_same_are_drawn_each(database):
    for name in ("lottery", "Lottery", "lottery "):
        lottery(database, key=name).delay()
    assert draws(database) == 3


@on_sqlite
def test_an_id_of_any_length_fails_no_run_at_its_end(database):
    task = lottery(database)
    task.apply(task_id="long" * 1000).get()
    assert task.apply(task_id="long" * 1000).get()["skipped"] == "duplicate"


@pytest.mark.django_db
def test_within_a_test_case_it_goes_by_the_database_of_the_test():
    task = lottery("default")
    task()
    assert task()["skipped"] == "done"
    assert (draws("default"), completed("default")) == (1, ["lottery"])


# --- what is not completed ------------------------------------------------------------------------


@pytest.mark.parametrize("once", [None, "database"])
def test_who_waits_for_the_lock_keeps_no_connection_meanwhile(database, once):
    """Databases close those that are idle for long, and others may need them."""

    def body(): ...

    body.__name__ = f"draw_once_{next(_names)}"
    how = {"on_conflict": "wait", "wait": 0.1, "once": once}
    task = single_instance_task(key="lottery", atomic=database, **how)(body)
    connections[database].close()
    with LockTestKit().simulate_held_by_other("lottery"):
        assert task.delay().get()["skipped"] == "busy"
        assert connections[database].connection is None
        with pytest.raises(LockTimeout), distributed_lock("lottery", wait=0.1, atomic=database):
            pytest.fail("somebody else has it")
    assert connections[database].connection is None


@pytest.mark.parametrize("error", [ZeroDivisionError, Ignore])
def test_a_body_that_raises_leaves_no_row_and_runs_again(database, error):
    outcomes = [error("not yet"), "drawn"]

    def succeed_later():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    task = lottery(database, succeed_later)
    with pytest.raises(error):
        task()
    assert (draws(database), completed(database)) == (0, [])
    assert task() == "drawn"
    assert (draws(database), completed(database)) == (1, ["lottery"])


@on_sqlite
def test_a_run_that_has_published_its_own_retry_is_not_completed(database):
    def body(self):
        Entry.objects.using(database).create(fence=0)
        if not self.request.retries:
            self.retry(throw=False)
        return "drawn"

    body.__name__ = f"draw_once_{next(_names)}"
    task = single_instance_task(
        key="lottery", atomic=database, once="database", bind=True, acks_late=True
    )(body)
    # In eager mode a retry runs at once, within its first try, which holds the lock.
    task.apply(task_id="the same")
    assert completed(database) == []
    assert task.apply(task_id="the same", retries=1).get() == "drawn"
    assert completed(database) == ["lottery"]
    assert draws(database) == 2


def test_what_is_rolled_back_before_the_commit_leaves_no_row(database):
    def lose():
        lease = current_lease()
        assert held.force_release(lease.name, lease.id)
        with pytest.raises(LockLost):
            lease.ensure_held(verify=True)

    with pytest.raises(LockLost):
        lottery(database, lose).delay().get()
    assert (draws(database), completed(database)) == (0, [])


# --- found only under the lock --------------------------------------------------------------------


def test_what_was_completed_while_it_waited_for_the_lock_is_found_before_the_body(database):
    """As by the run that it has waited for. Nothing is written, and no run has been."""
    other = lottery(database)

    def complete(lease, **news):
        signals.lock_acquired.disconnect(complete)
        completed_runs.note(lease, database)
        CompletedRun.objects.using(database).update(place="web-1:7", task_id="another")

    task = lottery(database, min_hold=3600)
    signals.lock_acquired.connect(complete)
    try:
        outcome = task.delay().get()
    finally:
        signals.lock_acquired.disconnect(complete)
    assert (outcome["skipped"], outcome["by"]) == ("done", "web-1:7 another")
    assert draws(database) == 0
    assert Fence.objects.using(database).get().fence == 0
    assert not distributed_lock("lottery").locked()
    record = held.record("lottery")
    assert list(record.last) == ["skip"]
    assert record.under_way == ()
    assert other.delay().get()["skipped"] == "done"


@on_sqlite
def test_nor_does_a_renewed_lease_of_such_a_run_look_like_one_that_never_ended(database):
    def complete(lease, **news):
        signals.lock_acquired.disconnect(complete)
        lease.renew()
        completed_runs.note(lease, database)

    signals.lock_acquired.connect(complete)
    try:
        lottery(database).delay()
    finally:
        signals.lock_acquired.disconnect(complete)
    record = held.record("lottery")
    assert list(record.last) == ["skip"]


# --- what Redis forgets, the database does not ----------------------------------------------------


def test_after_flushall_it_is_not_drawn_again(database, locks):
    task = lottery(database)
    task.delay()
    locks.redis.flushall()
    assert task.delay().get()["skipped"] == "done"
    assert draws(database) == 1


@on_sqlite
def test_with_seconds_it_is_drawn_again_after_flushall(database, locks):
    def draw():
        Entry.objects.using(database).create(fence=0)

    draw.__name__ = f"draw_once_{next(_names)}"
    task = single_instance_task(key="lottery", atomic=database, once=3600, acks_late=True)(draw)
    task.delay()
    assert task.delay().get()["skipped"] == "done"
    locks.redis.flushall()
    assert task.delay().get() is None
    assert draws(database) == 2


def test_on_a_second_redis_with_empty_memory_it_is_not_drawn_again(database, locks, make_server):
    task = lottery(database)
    task.delay()
    locks.on(make_server())
    assert task.delay().get()["skipped"] == "done"
    assert draws(database) == 1


@on_sqlite
def test_that_it_is_done_needs_no_redis(database, locks):
    task = lottery(database)
    task.delay()
    locks.configure(LOCATION="redis://127.0.0.1:1/0")
    assert task.delay().get()["skipped"] == "done"


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
def test_a_run_killed_between_commit_and_release_is_not_repeated_by_its_redelivery(database, spawn):
    child = spawn(draw_and_stand_still, described(database), database, "commit")
    assert [child.read(), child.read()] == ["granted", "commit"]
    child.kill()
    assert distributed_lock("lottery").locked()  # Nobody has released it, or acknowledged the call.
    assert lottery(database).apply(task_id="commit").get()["skipped"] == "duplicate"
    assert draws(database) == 1


@pytest.mark.slow
@on_sqlite
def test_a_run_killed_before_its_commit_is_repeated(database, spawn, locks):
    child = spawn(draw_and_stand_still, described(database), database, "body")
    assert [child.read(), child.read()] == ["granted", "body"]
    child.kill()
    locks.redis.flushall()  # Not to wait for the end of its lease.
    assert lottery(database).apply(task_id="body").get() is None
    assert (draws(database), completed(database)) == (1, ["lottery"])


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
    assert (draws(database), completed(database)) == (1, ["lottery"])


LOTTERIES = 100


def draw_all(databases, database, once, seed, *, rest):
    """In a child: draw all the lotteries, in an order of our own; in the middle, maybe, rest."""
    use(**databases)

    @single_instance_task(key="lottery:{number}", atomic=database, once=once, acks_late=True)
    def draw_one_of_many(number: int) -> None:
        Entry.objects.using(database).create(fence=0, value=number)

    numbers = list(range(LOTTERIES))
    Random(seed).shuffle(numbers)
    say("ready")
    hear()
    with celery_app(**EAGER, task_eager_propagates=True):
        for index, number in enumerate(numbers):
            if rest and index == LOTTERIES / 2:
                say("half")
                hear()
            # Each of these errors means that nothing was written. Others may have drawn it, or not.
            with suppress(LockLost, StaleFence, OperationalError):
                draw_one_of_many.delay(number)
    say("done")


@pytest.fixture
def drawn(database, spawn, locks):
    """Have two processes draw all lotteries, with FLUSHALL amid them; return all draws.

    One of them rests until then, so that however slow either is, one has drawn before it what the
    other comes to after it.
    """

    def run(once):
        children = [
            spawn(draw_all, described(database), database, once, seed, rest=seed == 0)
            for seed in range(2)
        ]
        for child in children:
            assert child.read() == "ready"
        for child in children:
            child.send("go")
        assert children[0].read() == "half"
        locks.redis.flushall()
        children[0].send("go on")
        for child in children:
            assert child.read() == "done"
        return sorted(Entry.objects.using(database).values_list("value", flat=True))

    return run


@pytest.mark.slow
def test_flushall_amid_a_hundred_lotteries_each_is_drawn_once(drawn, database):
    assert drawn("database") == list(range(LOTTERIES))
    assert len(completed(database)) == LOTTERIES


@pytest.mark.slow
@on_postgres
def test_flushall_amid_a_hundred_lotteries_some_are_drawn_twice_with_seconds(drawn):
    numbers = drawn(3600)
    assert set(numbers) == set(range(LOTTERIES))
    assert len(numbers) > LOTTERIES


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'once="database" needs atomic'),
        ({"atomic": False}, 'once="database" needs atomic'),
        ({"atomic": True, "limit": 2}, "once and limit exclude each other"),
        ({"atomic": True, "on_unavailable": "run"}, 'atomic and on_unavailable="run" exclude'),
        ({"atomic": True, "once": "databse"}, "a timedelta or \"database\", not 'databse'"),
        ({"atomic": True, "once": True}, "once must be a number of seconds or a timedelta"),
        ({"atomic": True, "ttl": "database"}, "ttl must be a number of seconds or a timedelta"),
    ],
)
def test_what_cannot_work_is_refused_at_import(options, message):
    with pytest.raises(ValueError, match=message):

        @single_instance_task(**{"once": "database", "acks_late": True, **options})
        def draw() -> None: ...


def test_a_missing_table_is_said_before_the_lock_is_asked_for(make_database):
    database = make_database("effects", migrate=False)
    call_command("migrate", "django_redislock", "0002", database=database, verbosity=0)
    with pytest.raises(LockMisuse) as refused:
        lottery(database)()
    assert "has no table of completed runs" in str(refused.value)
    assert "migrate django_redislock --database=effects" in str(refused.value)
    assert draws(database) == 0
    assert held.record("lottery") is None


@on_sqlite
def test_an_error_of_the_database_is_left_as_it_is(make_database, tmp_path):
    database = make_database("effects")
    connections[database].close()
    connections[database].settings_dict["NAME"] = str(tmp_path / "no" / "such.sqlite3")
    with pytest.raises(OperationalError):
        lottery(database)()
