"""Ctrl-C, time limits and cancellations: no lock stays taken, and no transaction open."""

import pytest
from django.db import connections

from django_redislock import completed_runs, distributed_lock, signals
from django_redislock.models import CompletedRun
from tests.effects.models import Entry
from tests.effects.test_tasks import lottery
from tests.faults.test_process import NAME, TOO_EARLY, sweep
from tests.support.backends import UNHURRIED
from tests.support.databases import on_sqlite


@pytest.fixture
def locks(locks, undo_in_time):
    """No call ends because the server or the machine stands still."""
    return locks.on(locks.server, TTL=30, OPTIONS=UNHURRIED)


@pytest.mark.slow
@pytest.mark.proves("R4")
@on_sqlite
def test_r4_an_interrupt_anywhere_around_a_transaction_leaves_neither(locks, database):
    left_open = 0

    def enter():
        with distributed_lock(NAME, wait=10, atomic=database):
            pass

    def prepare():
        nonlocal left_open
        if connections[database].in_atomic_block:
            left_open += 1
            connections[database].close()
            del connections[database]
        enter()

    named = {"Lock._enter_atomic begins", "atomic", "_claim", "Entry.end_transaction"}
    _, orphaned = sweep(enter, locks, prepare, named=named)
    # Where Python has called what ends them, but not begun with it; see TOO_EARLY.
    too_early = {"Entry.end_transaction begins", "Lock.__exit__ begins"}
    assert left_open <= len(too_early)
    assert orphaned <= TOO_EARLY


@pytest.mark.slow
@pytest.mark.proves("R4")
@pytest.mark.usefixtures("eager_app")
@pytest.mark.parametrize("is_found", [False, True])
@on_sqlite
def test_r4_an_interrupt_anywhere_in_a_run_that_is_done_once_leaves_no_lock_and_no_half(
    locks, database, is_found
):
    """Also if the run is found done only after its lock was granted, and so is given back."""
    task = lottery(database, key=NAME)
    halves = []

    def complete(lease, **news):
        completed_runs.note(lease, database)

    def prepare():
        connections[database].close()
        del connections[database]
        rows, runs = (one.objects.using(database) for one in (Entry, CompletedRun))
        if not is_found and rows.count() != runs.count():
            halves.append((rows.count(), runs.count()))
        rows.all().delete()
        runs.all().delete()

    named = set()
    if is_found:
        signals.lock_acquired.connect(complete)
        named = {"Handle.undo begins"}
    try:
        places, orphaned = sweep(task, locks, prepare, named=named)
    finally:
        signals.lock_acquired.disconnect(complete)
    assert ("Handle.undo begins" in places) == is_found
    assert halves == []
    assert orphaned <= TOO_EARLY
