"""single_instance_task(atomic=...): what a run writes is committed before its lock is released."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import count

import pytest
from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry
from django.db import connections, transaction

from django_redislock import (
    InvalidLockName,
    LockLost,
    LockMisuse,
    StaleFence,
    distributed_lock,
    held,
    signals,
    single_instance_task,
)
from django_redislock.celery import current_lease
from django_redislock.models import Fence
from django_redislock.testing import LockTestKit
from tests.effects.models import Entry, written

pytestmark = pytest.mark.usefixtures("locks", "eager_app")

_names = count(1)


@pytest.fixture
def make(database):
    """Make a task that writes one line, and then does *more*."""

    def make(more=lambda: None, **options):
        def body():
            lease = current_lease()
            Entry.objects.using(database).create(fence=lease.fence)
            return more()

        body.__name__ = f"draw_{next(_names)}"
        return single_instance_task(atomic=database, **options)(body)

    return make


def test_the_body_is_committed_before_the_release(make, database):
    seen = []

    def look(**news):
        seen.append((len(written(database)), connections[database].in_atomic_block))

    signals.lock_released.connect(look)
    try:
        task = make(lambda: connections[database].in_atomic_block, key="lottery")
        assert task.delay().get() is True
        assert task() is True  # A direct call.
    finally:
        signals.lock_released.disconnect(look)
    assert seen == [(1, False), (2, False)]
    row = Fence.objects.using(database).get()
    assert (row.name, row.fence) == ("lottery", written(database)[-1])


@pytest.mark.parametrize("error", [ZeroDivisionError, Ignore, Reject, Retry])
def test_what_the_body_raises_rolls_it_back(make, database, error, caplog):
    def fail():
        raise error

    caplog.set_level("INFO")
    with pytest.raises(error):
        make(fail)()
    assert written(database) == []
    # To Celery it is no error, so the log must say so.
    said = f"ends by {error.__name__}, so what it wrote to database {database!r} is rolled back"
    assert (said in caplog.text) is (error is not ZeroDivisionError)


@pytest.mark.parametrize("how", ["eager", "direct"])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_body_that_replaces_itself_is_committed_before_what_takes_its_place(
    make, database, how, swallowed
):
    seen = []

    @shared_task(name=f"next-{next(_names)}")
    def go_on() -> str:
        in_transaction = connections[database].in_atomic_block
        seen.append((len(written(database)), in_transaction, distributed_lock("lottery").locked()))
        return "went on"

    def replace():
        with suppress(Ignore) if swallowed else nullcontext():
            raise task.replace(go_on.si())

    task = make(replace, key="lottery", min_hold=60)
    if how == "eager":
        assert task.apply().get() == "went on"
    else:
        with pytest.raises(Ignore):
            task()
    assert seen == [(1, False, False)]


def test_what_replaces_a_body_that_fails_is_not_published(make, database):
    seen = []

    @shared_task(name=f"next-{next(_names)}")
    def go_on() -> None:
        seen.append(1)

    def replace_and_fail():
        with suppress(Ignore):
            task.replace(go_on.si())
        raise ZeroDivisionError

    task = make(replace_and_fail)
    with pytest.raises(ZeroDivisionError):
        task.delay().get()
    assert (seen, written(database)) == ([], [])


def test_a_skip_begins_no_transaction(make, database):
    task = make(key="lottery")
    connections[database].close()
    with LockTestKit().simulate_held_by_other("lottery"):
        assert task.delay().get()["skipped"] == "busy"
    assert connections[database].connection is None
    assert written(database) == []


def test_an_open_transaction_is_refused_before_the_lock_is_asked_for(make, database):
    task = make(key="lottery", on_conflict="wait", wait=60)
    with (
        LockTestKit().simulate_held_by_other("lottery"),
        transaction.atomic(using=database),
        pytest.raises(LockMisuse) as refused,
    ):
        task.delay().get()
    assert "delay_on_commit()" in str(refused.value)
    assert "distributed_lock(" not in str(refused.value)
    assert held.record("lottery") is None


def test_a_lock_that_is_named_after_its_task_is_judged_before_the_body(database):
    @single_instance_task(name=f"{next(_names):0201}", atomic=database)
    def draw() -> None:
        Entry.objects.using(database).create(fence=0)

    with pytest.raises(InvalidLockName, match="201 bytes"):
        draw.delay().get()
    assert written(database) == []


def test_a_later_lease_in_the_database_fails_the_run_before_its_body(make, database):
    task = make(key="lottery")
    task()
    Fence.objects.using(database).update(fence=2**62, lease_id="of another")
    with pytest.raises(StaleFence):
        task.delay().get()
    assert len(written(database)) == 1
    assert not distributed_lock("lottery").locked()


def test_a_loss_before_the_commit_fails_the_run_and_rolls_back(make, database):
    def lose():
        lease = current_lease()
        assert held.force_release(lease.name, lease.id)
        with pytest.raises(LockLost):
            lease.ensure_held(verify=True)

    with pytest.raises(LockLost):
        make(lose).delay().get()
    assert written(database) == []


def test_a_loss_after_the_commit_fails_no_run_that_would_be_retried(make, database):
    def lose_later():
        lease = current_lease()
        name, id_ = lease.name, lease.id
        transaction.on_commit(lambda: held.force_release(name, id_) or None, using=database)
        return "drawn"

    assert make(lose_later, autoretry_for=(LockLost,)).delay().get() == "drawn"
    assert len(written(database)) == 1


def test_within_a_transaction_it_says_the_right_order(make, database):
    task = make()
    with transaction.atomic(using=database), pytest.raises(LockMisuse, match="is open already"):
        task()
    assert written(database) == []


def test_each_permit_has_a_fence_of_its_own(make, database):
    task = make(key="lottery", limit=2)
    with distributed_lock("lottery", limit=2) as first:
        task()
        with first.atomic(database):  # No later lease of this permit has written.
            pass
    rows = Fence.objects.using(database).order_by("fence").values_list("name", flat=True)
    assert list(rows) == ["lottery", "lottery#2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atomic": "defualt"}, "atomic must be the alias of a database, not 'defualt'"),
        ({"atomic": 1}, "atomic must be True or the alias of a database, not 1"),
        ({"atomic": True, "on_unavailable": "run"}, 'atomic and on_unavailable="run" exclude'),
    ],
)
def test_what_cannot_work_is_refused_at_import(options, message):
    with pytest.raises(ValueError, match=message):

        @single_instance_task(**options)
        def draw() -> None: ...


def test_in_a_project_without_a_database_it_is_refused_at_import(monkeypatch):
    monkeypatch.setitem(connections.settings, "default", {"ENGINE": "django.db.backends.dummy"})
    with pytest.raises(ValueError, match=r"not 'default'\. DATABASES has none"):

        @single_instance_task(atomic=True)
        def draw() -> None: ...


def test_false_is_as_if_it_was_not_given(database):
    def body():
        return connections[database].in_atomic_block

    body.__name__ = f"draw_{next(_names)}"
    draw = single_instance_task(atomic=False, on_unavailable="run")(body)
    assert draw() is False
