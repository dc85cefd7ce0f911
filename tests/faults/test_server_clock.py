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
    return held.get(NAME)


@everywhere
def test_a_lease_that_is_held_goes_on_and_its_renewal_puts_its_end_right(server, locks, caller):
    with caller.block(distributed_lock(NAME, renew=False)) as lease, held_by_other("other", ttl=60):
        server.shift_clock(-HOUR)
        assert (seen().ends_late, "set back" in seen().note) == (True, True)
        assert seen().held_for == 0
        assert {one.name for one in held.list()} == {NAME, "other"}
        assert not caller.acquire(distributed_lock("other", wait=0))
        caller.renew(lease)
        assert lease.held
        assert (seen().state, seen().ends_late) == ("held", False)
        assert locks.redis.pttl(keys_of(locks).lock) <= 6000
    assert held.get(NAME) is None


@pytest.mark.proves("R9")
def test_a_waiter_has_the_lock_at_the_release_and_the_fence_grows(server, locks, caller):
    """It is greater than those of other names, too."""
    first, before, after = (distributed_lock(NAME) for _ in range(3))
    assert first.acquire()
    fences = [seen().fence]
    waits = caller.begin_waiting(before, locks)
    with caller.block(distributed_lock("report")) as lease:
        fences.append(lease.fence)
    server.shift_clock(-HOUR)
    # Who came before the clock was set is served before who came after.
    waits_too = caller.begin_waiting(after, locks)
    with takes(at_most=1.0):
        first.release()
        assert waits.result(HUNG)
    assert not waits_too.done()
    fences.append(seen().fence)
    caller.release(before)
    assert waits_too.result(HUNG)
    fences.append(seen().fence)
    with caller.block(distributed_lock("report")) as lease:
        fences.append(lease.fence)
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
