"""What two versions do to each other's locks is what one version does to its own.

In each place but the memory, which is that of one process, and so of one version.

    make test ARGS='--everywhere tests/upgrades'    # In every place.
"""

import re
import shutil
import time
from itertools import pairwise, permutations

import pytest

from django_redislock.rules.stored import read_lock_value, read_renewal_count
from tests.support.databases import described, on_sqlite
from tests.support.matrix import MEMORY, PLACES, QUORUM, UNSCRIPTED, needs_scripts, places
from tests.support.others import waiters
from tests.support.servers import KIND
from tests.support.waiting import HUNG, wait_until
from tests.support.wheels import NEW, OLD
from tests.upgrades.sides import Refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.no_permit("both versions have locks and permits here"),
]


def places_but(*names):
    return places(*(name for name in PLACES if name not in {MEMORY, *names}))


with_servers = places_but()
with_records = places_but(QUORUM)  # It keeps no records of runs, nor batons.
with_queue = places_but(UNSCRIPTED, QUORUM)

NAME = "lottery"
SHORT = 2.0  # Seconds: a ttl whose end is waited for.


def both_ways(old, new):
    return permutations((old, new))


def refusal(side, act, *args, **options):
    with pytest.raises(Refused) as refused:
        side.does(act, *args, **options)
    return refused.value


def lease_in(place):
    """What the key of the lock holds, in the format that both versions write."""
    found = read_lock_value(place.read(NAME).encode())
    assert found is not None
    return found


# --- who has the lock -------------------------------------------------------------------------


def check_that_one_has_the_lock(old, new):
    """Let them take it in turn, each while the other one looks on."""
    fences = []
    for holder, other in [*both_ways(old, new)] * 2:
        fences.append(holder.take(NAME)["fence"])
        for name in (NAME, "another"):
            assert other.does("locked", name) is (name == NAME)
        refused = refusal(other, "take", NAME, wait=0)
        assert refused.kind == "LockTimeout"
        assert re.search(rf"'lottery' is busy: held by \S+:{holder.pid}[; ]", refused.text)
        assert holder.does("state", NAME) == [True, None]
        holder.free(NAME)
        assert not other.does("locked", NAME)
    assert all(earlier < later for earlier, later in pairwise(fences)), fences


@with_servers
def test_one_has_the_lock_and_the_other_is_told_who(place, old, new):
    check_that_one_has_the_lock(old, new)


@with_servers
def test_what_one_renews_the_other_waits_for(place, old, new):
    for holder, other in both_ways(old, new):
        fence = holder.take(NAME, ttl=SHORT)["fence"]
        waiting = other.begin("take", NAME, wait=HUNG)
        # That often, it was held for longer than its ttl.
        wait_until(lambda: read_renewal_count(lease_in(place).renewals) >= 4, every=0.05)
        assert not waiting.done
        assert holder.does("state", NAME) == [True, None]
        holder.free(NAME)
        assert waiting.result()["fence"] > fence
        other.free(NAME)


@with_servers
def test_permits_are_counted_together(place, old, new):
    for first, second in both_ways(old, new):
        taken = [side.take("gpu", limit=2) for side in (first, second)]
        assert {one["permit"] for one in taken} == {1, 2}
        for side in (first, second):
            refused = refusal(side, "take", "gpu", key="third", limit=2, wait=0)
            assert refused.kind == "LockTimeout"
        waiting = first.begin("take", "gpu", key="third", limit=2, wait=HUNG)
        second.free("gpu")
        assert waiting.result()["permit"] == taken[1]["permit"]
        assert waiting.result()["fence"] > max(one["fence"] for one in taken)
        first.free("gpu")
        first.free("third")


@with_servers
def test_several_locks_are_taken_as_one(place, old, new):
    for first, second in both_ways(old, new):
        before = first.take("a", "b", key="joint")["fences"]
        assert refusal(second, "take", "b", wait=0).kind == "LockTimeout"
        waiting = second.begin("take", "b", "c", key="joint", wait=HUNG)
        first.take("c")
        first.free("joint")
        assert not waiting.done
        first.free("c")
        assert waiting.result()["fences"]["b"] > before["b"]
        second.free("joint")


# --- whose turn it is -------------------------------------------------------------------------


def in_turn(place, sides):
    """Whether each waiter was handed the lock in turn."""
    keys = [f"turn {number}" for number in range(len(sides))]
    sides[0].take(NAME, key=keys[0])
    orders = []
    for side, key in zip(sides[1:], keys[1:], strict=True):
        orders.append(side.begin("take", NAME, key=key, wait=HUNG))
        wait_until(lambda: waiters(NAME) == len(orders))
    served = []
    handed_over = True
    fence, has_it = 0, 0
    while len(served) < len(orders):
        sides[has_it].free(keys[has_it])
        (has_it,) = wait_until(
            lambda: [n for n, one in enumerate(orders, 1) if n not in served and one.done]
        )
        served.append(has_it)
        lease = orders[has_it - 1].result()
        assert lease["fence"] > fence
        fence = lease["fence"]
        # That remains of a hand-over.
        handed_over = handed_over and lease_in(place).confirm_by != b"0"
    sides[has_it].free(keys[has_it])
    return handed_over and served == sorted(served)


@with_queue
def test_waiters_are_handed_the_lock_in_turn(place, old, new):
    # One that is not on its feet within a second is passed over, which a busy machine may bring
    # about.
    for first, second in both_ways(old, new):
        turns = [first, second, first, first, second, second, first]
        assert any(in_turn(place, turns) for _ in range(3))


@with_servers
def test_a_killed_holder_or_waiter_keeps_the_lock_from_nobody(place, packages, start):
    for one, other in permutations((OLD, NEW)):
        holder, lost, waiter = start(packages[one]), start(packages[one]), start(packages[other])
        fence = holder.take(NAME, ttl=SHORT)["fence"]
        lost.begin("take", NAME, wait=HUNG)
        if place.name not in {UNSCRIPTED, QUORUM}:
            wait_until(lambda: waiters(NAME) == 1)
        waiting = waiter.begin("take", NAME, wait=HUNG)
        lost.child.kill()
        holder.child.kill()
        assert waiting.result()["fence"] > fence
        waiter.free(NAME)


@with_servers
def test_a_stopped_holder_has_lost_the_lock_to_the_other(place, old, new):
    for holder, other in both_ways(old, new):
        fence = holder.take(NAME, ttl=SHORT)["fence"]
        holder.child.stop()
        assert other.take(NAME, wait=HUNG)["fence"] > fence
        holder.child.cont()
        held, why = holder.does("state", NAME)
        assert not held
        assert refusal(holder, "free", NAME).kind == "LockLost", why
        assert other.does("state", NAME) == [True, None]
        other.free(NAME)


@with_queue
def test_a_stopped_waiter_is_passed_over_by_the_other(place, packages, start):
    for one, another in permutations((OLD, NEW)):
        holder, stopped, waiter = (start(packages[side]) for side in (another, one, another))
        holder.take(NAME)
        late = stopped.begin("take", NAME, wait=HUNG)
        wait_until(lambda: waiters(NAME) == 1)
        waiting = waiter.begin("take", NAME, wait=HUNG)
        wait_until(lambda: waiters(NAME) == 2)
        stopped.child.stop()
        holder.free(NAME)
        fence = waiting.result()["fence"]
        stopped.child.cont()
        assert not late.done
        assert waiter.does("state", NAME) == [True, None]
        waiter.free(NAME)
        assert late.result()["fence"] > fence
        stopped.free(NAME)


# --- operators --------------------------------------------------------------------------------


@needs_scripts
@with_servers
def test_operators_see_and_end_the_leases_of_the_other(place, old, new):
    for holder, other in both_ways(old, new):
        lease = holder.take(NAME)
        gpu = [side.take("gpu", limit=2) for side in (holder, other)]
        rows = sorted(other.does("rows"), key=lambda row: row["fence"])
        assert rows == sorted(holder.does("rows"), key=lambda row: row["fence"])
        permits = ["", *(f"{one['permit']}/2" for one in gpu)]
        assert [row["permit"] for row in rows] == permits
        assert [row["pid"] for row in rows] == [holder.pid, holder.pid, other.pid]
        assert {row["state"] for row in rows} == {"held"}
        assert (rows[0]["name"], rows[0]["id"]) == (NAME, lease["id"])
        if place.name != QUORUM:  # There each server has a fence of its own.
            assert rows[0]["fence"] == lease["fence"]
        assert not other.does("force_release", NAME, "0" * 16)
        assert other.does("force_release", NAME, lease["id"])
        lost = refusal(holder, "free", NAME)
        assert (lost.kind, "operator" in lost.text) == ("LockLost", True)
        for side in (holder, other):
            side.free("gpu")


def await_waiter(side, name, waiter):
    """Return once that side sees that the waiter stands in the queue."""
    wait_until(lambda: side.does("seen", name)["waiters"] == [waiter.pid], every=0.05)


@needs_scripts
@with_servers
def test_operators_see_the_waiters_and_the_past_of_the_other(place, old, new):
    for holder, other in both_ways(old, new):
        name = f"past of {holder.pid}"
        lease = holder.take(name)
        waiting = None
        if place.name != QUORUM:
            waiting = other.begin("take", name, wait=HUNG)
            for side in (holder, other):
                await_waiter(side, name, other)
        assert other.does("force_release", name, lease["id"])
        assert refusal(holder, "free", name).kind == "LockLost"
        for side in (holder, other):
            assert [holder.pid, "forced"] in side.does("seen", name)["past"]
        if waiting:
            waiting.result()
            other.free(name)


@needs_scripts
@with_servers
def test_one_keeps_the_lock_from_both_and_the_other_gives_it_back(place, old, new):
    for keeper, other in both_ways(old, new):
        assert keeper.does("keep", NAME, HUNG)
        for side in (keeper, other):
            refused = refusal(side, "take", NAME, wait=0)
            assert (refused.kind, "ann" in refused.text) == ("LockTimeout", True)
        waiting = other.begin("take", NAME, wait=HUNG)
        assert other.does("give_back", NAME)
        assert waiting.result()["permit"] is None
        other.free(NAME)


# --- jobs -------------------------------------------------------------------------------------


@needs_scripts
@with_records
def test_what_one_has_done_the_other_skips(place, old, new):
    for doer, other in both_ways(old, new):
        for options, why in (({"once": HUNG}, "done"), ({"min_hold": HUNG}, "cooling")):
            name = f"{why} by {doer.pid}"
            assert doer.does("job", name, **options) == "done"
            skipped = other.does("job", name, **options)
            assert skipped["skipped"] == why
            assert skipped["lock"] == name


@needs_scripts
@with_records
def test_each_reads_the_records_that_the_other_has_added_to(place, old, new):
    for one, other in both_ways(old, new):
        name = f"records of {one.pid}"
        assert one.does("job", name) == "done"
        assert refusal(other, "job", name, fails=True).kind == "ValueError"
        one.take(name)
        assert other.does("job", name)["skipped"] == "busy"
        assert one.does("job", name, on_conflict="skip")["skipped"] == "busy"
        one.free(name)
        for side in (one, other):
            assert side.does("record", name) == {
                "success": one.pid,
                "failure": other.pid,
                "skip": one.pid,
                "skips": 2,
            }
        assert other.does("job", name) == "done"
        for side in (one, other):
            assert side.does("record", name)["success"] == other.pid
            assert side.does("record", name)["skips"] == 0


@needs_scripts
@with_records
def test_one_takes_up_what_the_other_has_handed_over(place, old, new):
    for giver, taker in both_ways(old, new):
        for name, options in ((NAME, {}), ("gpu", {"limit": 2})):
            given = giver.take(name, key="given", **options)
            baton = giver.does("hand_over", "given")
            giver.free("given")
            assert taker.does("locked", name)
            taken = taker.does("take_over", baton, "taken")
            assert taken["fence"] > given["fence"]
            assert taken["permit"] == given["permit"]
            assert refusal(giver, "take_over", baton, "again").kind == "LockLost"
            taker.free("taken")


@places(KIND)
@on_sqlite
def test_one_does_not_do_again_what_the_other_has_committed(place, database, old, new):
    """Old code does with the tables that the migrations of the new one have made."""
    for doer, other in both_ways(old, new):
        name = f"draw of {doer.pid}"
        assert doer.does("database_job", described(database), name) == "done"
        skipped = other.does("database_job", described(database), name)
        assert (skipped["skipped"], skipped["lock"]) == ("done", name)


# --- what would be found ----------------------------------------------------------------------


@pytest.fixture
def doctored(packages, start, tmp_path):
    """Start a process with a version in which a text of one file was replaced."""

    def doctor(version, file, text, by):
        changed = tmp_path / "changed"
        shutil.copytree(packages[version], changed)
        path = changed / "django_redislock" / file
        before = path.read_text()
        assert before.count(text) == 1
        path.write_text(before.replace(text, by))
        return start(str(changed), forked=False)

    return doctor


@places(KIND, QUORUM)
def test_a_former_version_with_another_format_would_be_found(place, doctored, new):
    fields = "'|' .. fence .. '|' .. ms", "'|' .. ms .. ';' .. fence"
    other = doctored(OLD, "lua/_grant.lua", *fields)
    with pytest.raises(AssertionError):
        check_that_one_has_the_lock(other, new)
    # It is not ours, and so it is kept.
    stands = place.read(NAME)
    assert refusal(new, "take", NAME, wait=0).kind == "LockTimeout"
    if place.name != QUORUM:  # On which nobody sees three values that differ as one.
        (row,) = new.does("rows")
        assert (row["name"], row["state"], row["pid"]) == (NAME, "foreign", None)
    assert place.read(NAME) == stands


@places(KIND)
def test_a_former_version_with_other_keys_would_be_found(place, doctored, new):
    other = doctored(OLD, "rules/keys.py", 'lock=base + "lock"', 'lock=base + "l:lock"')
    with pytest.raises(AssertionError):
        check_that_one_has_the_lock(other, new)
    assert new.take(NAME)
    assert other.does("state", NAME) == [True, None]


@places(KIND)
def test_a_later_version_whose_format_says_so_is_waited_for(place, doctored, new):
    later = doctored(NEW, "lua/_grant.lua", "token .. state ..", "token .. '2' ..")
    begin = time.monotonic()
    lease = later.take(NAME, ttl=SHORT)
    refused = refusal(new, "take", NAME, wait=0)
    assert refused.kind == "LockTimeout"
    newer = "which runs a newer version of django_redislock"
    assert re.search(rf"held by \S+:{later.pid}\b.*, {newer}", refused.text)
    (row,) = new.does("rows")
    assert (row["name"], row["state"], row["pid"]) == (NAME, "held", later.pid)
    assert row["id"] == lease["id"]
    new.take(NAME, wait=HUNG)
    assert time.monotonic() - begin > SHORT * 0.9  # Until it had ended, and no sooner.
