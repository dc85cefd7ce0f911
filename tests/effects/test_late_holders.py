"""Processes that are stopped beyond their lease, or killed: what they leave in real databases."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import pytest
from django.db import connections, transaction

from django_redislock import LockLost, StaleFence, distributed_lock
from django_redislock.rules import flows
from tests.effects.models import Counter, Entry, written
from tests.support.backends import UNHURRIED
from tests.support.databases import await_blocked, described, on_servers, use
from tests.support.processes import hear, say
from tests.support.waiting import HUNG

pytestmark = pytest.mark.slow

TTL = 5.0  # Long enough to come to the place where the holder stands still.


@pytest.fixture
def locks(locks):
    """A server that stands still with the machine is not given up."""
    return locks.configure(OPTIONS=UNHURRIED, UNAVAILABLE_AFTER=HUNG)


def draw(database):
    """Take the lock, when it is free, and write under its fence, which is returned."""
    with distributed_lock("lottery", wait=HUNG) as lease, lease.atomic(database):
        Entry.objects.using(database).create(fence=lease.fence)
    return lease.fence


# --- stopped between the check and the write -----------------------------------------------------


def draw_late(databases, database, *, fenced):
    """In a child: check the lease, and stand still before the first write after that."""
    use(**databases)
    stood_still = False

    def stand_still(execute, sql, *args):
        nonlocal stood_still
        if not stood_still and sql.startswith(("UPDATE", "INSERT")):
            stood_still = True
            say("checked")
            hear()
        return execute(sql, *args)

    with distributed_lock("lottery", ttl=TTL) as lease:
        lease.ensure_held()
        try:
            with (
                connections[database].execute_wrapper(stand_still),
                lease.atomic(database) if fenced else transaction.atomic(using=database),
            ):
                Entry.objects.using(database).create(fence=lease.fence)
        except StaleFence as stale:
            say(["stale", stale.fence, stale.newer])
        else:
            say(["written", lease.fence])


@pytest.fixture
def late(locks, database, spawn):
    """Stop a holder between its check and its write, until another one has taken over and written.

    Returns what came of the late one, and the fence of the other.
    """

    def run(*, fenced):
        child = spawn(draw_late, described(database), database, fenced=fenced)
        assert child.read() == "checked"
        child.stop()
        newer = draw(database)
        child.cont()
        child.send("go on")
        return child.read(), newer

    return run


@pytest.mark.proves("N1")
def test_a_holder_stopped_between_check_and_write_gets_stale_fence(late, database):
    (outcome, fence, claimed), newer = late(fenced=True)
    assert outcome == "stale"
    assert claimed == newer > fence
    assert written(database) == [newer]


def test_also_if_the_lock_has_been_claimed_before(late, database):
    first = draw(database)
    (outcome, fence, claimed), newer = late(fenced=True)
    assert outcome == "stale"
    assert claimed == newer > fence > first
    assert written(database) == [first, newer]


@pytest.mark.proves("N1")
def test_without_the_fence_it_writes_after_the_other(late, database):
    (outcome, fence), newer = late(fenced=False)
    assert outcome == "written"
    assert written(database) == [newer, fence]


# --- stopped or killed within the transaction ----------------------------------------------------


def stand_still_within(databases, database):
    """In a child: write, and stand still before the commit."""
    use(**databases)
    try:
        with distributed_lock("lottery", ttl=TTL) as lease, lease.atomic(database):
            Entry.objects.using(database).create(fence=lease.fence)
            say("written")
            hear()
    except LockLost:
        say("lost")


@on_servers
def test_a_holder_stopped_before_its_commit_rolls_back_and_the_next_one_goes_on(
    locks, database, spawn, in_threads
):
    child = spawn(stand_still_within, described(database), database)
    assert child.read() == "written"
    child.stop()
    with ThreadPoolExecutor(1) as thread:
        next_one = thread.submit(in_threads(draw), database)
        await_blocked(database)  # The lock is its own by now; the row is not yet.
        child.cont()
        child.send("go on")
        assert child.read() == "lost"
        fence = next_one.result(HUNG)
    assert written(database) == [fence]


def test_a_holder_killed_within_the_transaction_leaves_nothing(locks, database, spawn):
    child = spawn(stand_still_within, described(database), database)
    assert child.read() == "written"
    child.kill()
    fence = draw(database)
    assert written(database) == [fence]


# --- many, for a while ---------------------------------------------------------------------------

PROCESSES = 8
# With the fence, and as many without. For as many as it takes to believe it:
# TESTS_INCREMENTS=10000 make test JOBS=0 ARGS="--timeout 3600 -k pauses_beyond"
INCREMENTS = int(os.environ.get("TESTS_INCREMENTS", "24"))
EACH = INCREMENTS // PROCESSES
SHORT = 0.3  # Seconds that a lease lasts; a pause is longer.
PAUSED = min(0.2, 60 / INCREMENTS)  # The share of all, at each place where there may be a pause.


def increment_often(databases, database, seed):
    """In a child: read a number and write one more, with pauses; say how often that was too late.

    Who is refused tries again, until all have been written.
    """
    use(**databases)
    flows.UNDO_WITHIN = HUNG  # A grant that comes too late is given back, be it slowly.
    # Each has its own, so that as many of "plain" are paused whatever becomes of the others.
    chances = {name: Random(seed) for name in ("fenced", "plain")}
    late = 0

    def pause(name):
        if chances[name].random() < PAUSED:
            time.sleep(2 * SHORT)

    def increment(name):
        counter = Counter.objects.using(database).get(name=name)
        pause(name)
        counter.value += 1
        counter.save()

    def pause_before_the_claim(execute, sql, *rest):
        if sql.startswith("UPDATE") and "django_redislock_fence" in sql:
            pause("fenced")
        return execute(sql, *rest)

    def with_fence():
        with distributed_lock("fenced", ttl=SHORT, renew=False, wait=HUNG, atomic=database):
            increment("fenced")

    def without_fence():
        with distributed_lock("plain", ttl=SHORT, renew=False, wait=HUNG):
            increment("plain")

    def is_written():
        nonlocal late
        try:
            with connections[database].execute_wrapper(pause_before_the_claim):
                with_fence()
        except (LockLost, StaleFence):
            late += 1
            return False
        return True

    say("ready")
    hear()
    for _ in range(EACH):
        with suppress(LockLost):  # It has been written, although too late.
            without_fence()
    for _ in range(EACH):
        while not is_written():
            pass
    say(late)


def test_pauses_beyond_the_ttl_lose_updates_without_the_fence_and_none_with_it(
    locks, database, spawn
):
    for name in ("fenced", "plain"):
        Counter.objects.using(database).create(name=name)
    children = [
        spawn(increment_often, described(database), database, seed) for seed in range(PROCESSES)
    ]
    for child in children:
        assert child.read(timeout=2 * HUNG) == "ready"  # All of them start at once.
    for child in children:
        child.send("go")
    late = sum(child.read(timeout=HUNG + INCREMENTS) for child in children)
    values = dict(Counter.objects.using(database).values_list("name", "value"))
    lost = {name: EACH * PROCESSES - value for name, value in values.items()}
    print(f"{EACH * PROCESSES} increments by {PROCESSES} processes: {late} too late, lost: {lost}")
    assert late > 0, "nobody was late, so nothing is proven"
    assert lost["fenced"] == 0
    assert lost["plain"] > 0
