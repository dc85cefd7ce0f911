"""Holders that are stopped beyond their lease, killed, or forgotten by the lock's server.

What they leave in real databases.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from random import Random

import pytest
from django.db import connections, transaction

from django_redislock import LockError, LockLost, StaleFence, distributed_lock, held
from django_redislock.models import Fence
from django_redislock.rules import flows
from tests.effects.conftest import refusal
from tests.effects.models import Counter, Entry, written
from tests.support.backends import UNHURRIED
from tests.support.databases import await_blocked, described, on_servers, on_sqlite, use
from tests.support.processes import hear, say
from tests.support.test_servers import can_shift_clocks
from tests.support.waiting import HUNG

pytestmark = pytest.mark.slow

TTL = 5.0  # Long enough to come to the place where the holder stands still.
HOUR = 3600


@pytest.fixture
def locks(locks):
    """A server that stands still with the machine is not given up."""
    return locks.configure(OPTIONS=UNHURRIED, UNAVAILABLE_AFTER=HUNG)


def draw(database):
    """Take the lock, when it is free, and write under its fence, which is returned."""
    with distributed_lock("lottery", wait=HUNG, atomic=database) as lease:
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


@pytest.mark.proves("N1")
@pytest.mark.parametrize(
    ("outcome", "is_claimed"),
    [("stale", False), ("stale", True), ("written", False)],
    ids=["first claim", "claimed before", "without the fence"],
)
def test_a_holder_stopped_between_check_and_write_is_refused_and_without_the_fence_writes_late(
    locks, database, spawn, outcome, is_claimed
):
    first = [draw(database)] if is_claimed else []
    child = spawn(draw_late, described(database), database, fenced=outcome == "stale")
    assert child.read() == "checked"
    child.stop()
    newer = draw(database)
    child.cont()
    child.send("go on")
    became, fence, *claimed = child.read()
    assert became == outcome
    assert [*first, fence, newer] == sorted({*first, fence, newer})
    if outcome == "stale":
        assert claimed == [newer]
        assert written(database) == [*first, newer]
    else:
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


# --- killed between any two statements ------------------------------------------------------------


def draw_in_two_writes(database, number):
    """Draw a lottery if nobody has, in two writes; return the fence under which that was decided.

    Each has a lock of its own, so that each time the row of the lock is made, too.
    """
    with distributed_lock(f"lottery:{number}", atomic=database) as lease:
        counter = Counter.objects.using(database).get(name=number)
        if counter.value == 0:
            Entry.objects.using(database).create(fence=lease.fence, value=number)
            counter.value += 1
            counter.save()
    return lease.fence


def drawn(database, number):
    """How often each of the two writes was made."""
    entries = Entry.objects.using(database).filter(value=number).count()
    return entries, Counter.objects.using(database).get(name=number).value


class Killer:
    """Kills its own process at a place: before a statement, or before or after a commit."""

    def __init__(self, database, place):
        self._left = place
        connection = connections[database]
        connection.execute_wrappers.append(self._execute)
        self._commit = connection.commit
        connection.commit = self._kill_around_commit

    def _execute(self, execute, sql, *rest):
        self._may_kill(f"before {sql.split(maxsplit=1)[0]}")
        return execute(sql, *rest)

    def _kill_around_commit(self):
        self._may_kill("before COMMIT")
        self._commit()
        self._may_kill("after COMMIT")

    def _may_kill(self, place):
        if self._left == 0:
            say(place)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def draw_and_be_killed(databases, database):
    """In a child: let a process draw and be killed, at each place that the test names."""
    use(**databases)
    while True:
        number = hear()
        process = os.fork()  # Nothing is connected yet.
        if not process:
            Killer(database, number)
            draw_in_two_writes(database, number)
            say("done")
            os._exit(0)
        os.waitpid(process, 0)
        say("gone")


@pytest.mark.proves("N4")
def test_a_kill_between_any_two_statements_leaves_all_or_nothing_and_the_next_one_does_the_rest(
    locks, database, spawn
):
    child = spawn(draw_and_be_killed, described(database), database)
    states = []
    were_held = 0
    for number in count():
        Counter.objects.using(database).create(name=number)
        child.send(number)
        place = child.read()
        assert child.read() == "gone"
        states.append((place, drawn(database, number)))
        if place == "done":
            break
        name = f"lottery:{number}"
        if lock := held.get(name):  # MariaDB is asked for its storage engine before there is one.
            assert held.force_release(name, lock.id)
            were_held += 1
        fence = draw_in_two_writes(database, number)
        assert drawn(database, number) == (1, 1), f"after a kill {place}"
        entry = Entry.objects.using(database).get(value=number)
        was_drawn = states[-1][1] == (1, 1)
        assert (entry.fence < fence) if was_drawn else (entry.fence == fence)
        assert Fence.objects.using(database).get(name=name).fence == fence
    places = [place for place, _ in states]
    assert were_held >= 10
    # The claim finds no row, which is made outside of the transaction; and then there is one.
    assert places[:-7].count("before INSERT") == 1
    last_statements = ["UPDATE", "SELECT", "INSERT", "UPDATE", "COMMIT"]
    assert places[-7:] == [*(f"before {one}" for one in last_statements), "after COMMIT", "done"]
    assert [state for _, state in states] == [(0, 0)] * (len(states) - 2) + [(1, 1)] * 2


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


# --- a failover ----------------------------------------------------------------------------------


def test_of_two_holders_after_a_failover_the_later_one_writes_and_the_earlier_one_is_refused(
    locks, server_kind, make_server, database, in_threads
):
    master = make_server(server_kind, repl_diskless_sync_delay=0)
    replica = make_server(server_kind, replicaof=f"{master.host} {master.port}")
    locks.on(master, TTL=60)
    before = draw(database)  # The replica is told of this one.
    client = master.client()
    client.set("written", 1)
    assert client.wait(1, int(HUNG * 1000)) == 1
    replica.client().replicaof("NO", "ONE")  # And not of the next.
    lock = distributed_lock("lottery", wait=0)
    assert lock.acquire()
    early = lock.lease
    try:
        locks.on(replica, TTL=60)
        with ThreadPoolExecutor(1) as thread:
            newer = thread.submit(in_threads(draw), database).result(HUNG)
        early.ensure_held()  # By all that it knows.
        stale = refusal(early.atomic(database), StaleFence)
        assert (stale.fence, stale.newer) == (early.fence, newer)
        assert written(database) == [before, newer]
    finally:
        with suppress(LockError):
            lock.release()


# --- a clock that was set back -------------------------------------------------------------------

needs_movable_clock = pytest.mark.skipif(
    not can_shift_clocks(), reason="needs Linux and a C compiler"
)


@pytest.fixture
def moved(locks, server_kind, make_server):
    """A server whose clock can be set, for the locks of this test."""
    server = make_server(server_kind, movable_clock=True)
    locks.on(server)
    return server


@needs_movable_clock
@on_sqlite
def test_a_clock_that_is_set_back_alone_leaves_fences_growing(moved, database):
    fences = []
    for shift in (0, -HOUR, -2 * HOUR, 0):
        moved.shift_clock(shift)
        fences += [draw(database), draw(database)]
    assert fences == sorted(set(fences)) == written(database)


@needs_movable_clock
@pytest.mark.parametrize("cure", ["the clock is set right", "its row is deleted"])
def test_after_a_loss_of_data_with_the_clock_behind_nobody_writes_until_it_is_cured(
    moved, locks, database, cure
):
    newer = draw(database)
    moved.shift_clock(-HOUR)
    locks.redis.flushall()
    for _ in range(2):
        with pytest.raises(StaleFence) as stale:
            draw(database)
        assert stale.value.newer == newer
        assert newer - stale.value.fence > HOUR / 2 * 1e6
        assert not distributed_lock("lottery").locked(), "whoever failed left it free"
    assert written(database) == [newer]

    if cure == "the clock is set right":
        moved.shift_clock(0)
    else:
        Fence.objects.using(database).all().delete()
    assert [newer, draw(database), draw(database)] == written(database)
