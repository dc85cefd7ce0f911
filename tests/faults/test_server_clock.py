"""The server's clock is set back by an hour: while a lock is held, waited for, handed over."""

import pytest

from django_redislock import distributed_lock, doctor, held
from tests.support.faults import takes
from tests.support.matrix import everywhere
from tests.support.others import held_by_other, hold, queued
from tests.support.stored import NAME, keys_of
from tests.support.test_servers import can_shift_clocks
from tests.support.waiting import HUNG, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_shift_clocks(), reason="needs Linux and a C compiler"),
]

HOUR = 3600


@pytest.fixture
def server(server_kind, make_server, locks):
    """A server whose clock can be set, for the locks of this test."""
    server = make_server(server_kind, movable_clock=True)
    locks.on(server, TTL=6, WAIT=HUNG)
    return server


def seen():
    """The lock, which must be held."""
    found = held.get(NAME)
    assert found is not None
    return found


@everywhere
def test_a_lease_that_is_held_goes_on_and_its_renewal_puts_its_end_right(server, locks, caller):
    with caller.block(distributed_lock(NAME, renew=False)) as lease:
        server.shift_clock(-HOUR)
        assert (seen().ends_late, "set back" in seen().note) == (True, True)
        assert [one.name for one in held.list()] == [NAME]
        caller.renew(lease)
        assert lease.held
        assert (seen().state, seen().ends_late) == ("held", False)
        assert locks.redis.pttl(keys_of(locks).lock) <= 6000
    assert held.get(NAME) is None


@pytest.mark.proves("R9")
def test_a_waiter_has_the_lock_at_the_release_and_the_fence_grows(server, locks, caller):
    first = distributed_lock(NAME)
    assert first.acquire()
    fences = [seen().fence or 0]
    before = distributed_lock(NAME)
    waits = caller.begin_waiting(before, locks)
    server.shift_clock(-HOUR)
    # Who came before the clock was set is served before who came after.
    after = distributed_lock(NAME)
    waits_too = caller.begin_waiting(after, locks)
    with takes(at_most=1.0):
        first.release()
        assert waits.result(HUNG)
    assert not waits_too.done()
    fences.append(seen().fence or 0)
    caller.release(before)
    assert waits_too.result(HUNG)
    fences.append(seen().fence or 0)
    caller.release(after)
    assert fences == sorted(set(fences))


@pytest.mark.proves("R9")
def test_the_fence_of_a_name_grows_after_its_release_whatever_other_names_do(server, locks, caller):
    """Of the lease before, nothing but the mark of all names is left."""
    fences = {NAME: [], "report": []}
    for shift in (0, -HOUR, -2 * HOUR, HOUR, 0):
        server.shift_clock(shift)
        for name, seen_fences in fences.items():
            for _ in range(2):
                with caller.block(distributed_lock(name)) as lease:
                    seen_fences.append(lease.fence)
    assert all(seen_fences == sorted(set(seen_fences)) for seen_fences in fences.values())


@pytest.mark.proves("R9")
def test_the_fence_of_a_hand_over_is_greater_than_those_of_other_names_too(server, locks, caller):
    first, waiter = distributed_lock(NAME), distributed_lock(NAME)
    assert first.acquire()
    waits = caller.begin_waiting(waiter, locks)
    with caller.block(distributed_lock("report")) as lease:
        before = lease.fence
    server.shift_clock(-HOUR)
    first.release()
    assert waits.result(HUNG)
    fence = seen().fence or 0
    assert fence > before
    with caller.block(distributed_lock("report")) as lease:
        assert lease.fence > fence
    caller.release(waiter)


@pytest.mark.proves("N3")
@pytest.mark.no_permit("the lease of the bystander stands out too")
def test_a_dead_holders_lock_stays_longer_stands_out_and_can_be_released(
    server, locks, spawn, caller
):
    child = spawn(hold, ttl=6)
    child.read()
    child.kill()
    waiter = distributed_lock(NAME)
    waits = caller.begin_waiting(waiter, locks)
    server.shift_clock(-HOUR)
    wait_until(lambda: seen().waiters == 1)
    lock = seen()
    assert (lock.expires_in or 0) > HOUR - 10
    assert lock.ends_late
    finding = next(one for one in doctor.examine("default") if one.about == "locks")
    assert finding.level == "warn"
    assert "since the server's clock was set back: 'lottery'" in finding.says
    with takes(at_most=1.0):
        assert held.force_release(NAME, lock.id)
        assert waits.result(HUNG)
    caller.release(waiter)


def test_a_claim_is_confirmed_although_the_clock_was_set_back_meanwhile(server, locks, spawn):
    lock = distributed_lock(NAME)
    assert lock.acquire()
    child = spawn(hold, ttl=6)
    wait_until(lambda: queued(locks) == 1)
    child.stop()
    lock.release()  # It is handed over to a process that stands still.
    server.shift_clock(-HOUR)
    child.cont()
    child.read()
    wait_until(lambda: not seen().ends_late)
    assert (seen().owner.pid, seen().state) == (child.pid, "held")
    child.send(None)
    wait_until(lambda: held.get(NAME) is None)


def test_min_hold_is_not_longer_than_asked_for_if_the_clock_was_set_back_before_its_end(
    server, locks, caller
):
    with caller.block(distributed_lock(NAME, min_hold=5.0)):
        server.shift_clock(-HOUR)
    assert seen().state == "cooling"
    with takes(at_most=5.0):
        wait_until(lambda: held.get(NAME) is None)


def test_a_lock_that_was_taken_before_is_still_excluded_and_listed(server, locks, caller, settings):
    with held_by_other(NAME, ttl=60):
        server.shift_clock(-HOUR)
        assert not caller.acquire(distributed_lock(NAME, wait=0))
        assert [(one.name, one.state, one.ends_late) for one in held.list()] == [
            (NAME, "held", True)
        ]
        assert seen().held_for == 0
