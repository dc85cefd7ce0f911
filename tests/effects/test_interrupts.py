"""Ctrl-C, time limits and cancellations: no lock stays taken, and no transaction open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.db import connections

from django_redislock import distributed_lock
from tests.faults.test_process import NAME, TOO_EARLY, sweep
from tests.support.backends import one_kind
from tests.support.databases import on_sqlite

if TYPE_CHECKING:
    from tests.conftest import Locks


@pytest.mark.slow
@pytest.mark.proves("R4")
@one_kind
@on_sqlite
def test_r4_an_interrupt_anywhere_around_a_transaction_leaves_neither(
    locks: Locks, database: str
) -> None:
    locks.on(locks.server, TTL=30)
    left_open = 0

    def enter() -> None:
        with distributed_lock(NAME, wait=10, atomic=database):
            pass

    def prepare() -> None:
        nonlocal left_open
        if connections[database].in_atomic_block:
            left_open += 1
            connections[database].close()
            del connections[database]
        enter()

    places, orphaned = sweep(enter, locks, prepare)
    assert {"Lock._enter_atomic begins", "atomic", "_claim", "Lock._end_transaction"} <= places
    # Where Python has called what ends them, but not begun with it; see TOO_EARLY.
    too_early = {"Lock._end_transaction begins", "Lock.__exit__ begins"}
    assert left_open <= len(too_early)
    assert orphaned <= TOO_EARLY
