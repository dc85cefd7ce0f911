"""The lease: held until a deadline, renewed on demand, and what happens when it is lost."""

import asyncio
import copy
import gc
import logging
import pickle
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock, held, leadership, signals
from django_redislock.backends.registry import backends
from django_redislock.rules import flows
from django_redislock.rules.lease_state import Renewal
from tests.support.attempts import attempt
from tests.support.faults import slack
from tests.support.matrix import UNSCRIPTED, everywhere, needs_scripts, on_servers
from tests.support.others import held_by_other, release_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways

# --- held, and for how long ----------------------------------------------------------------------


@pytest.mark.proves("P1", "R2")
@pytest.mark.waits
@both_ways
async def test_a_lease_ends_here_before_it_ends_on_the_server(way, place):
    lock = distributed_lock("lottery", ttl=2, renew=False)
    assert await way.acquire(lock)
    lease = lock.lease
    assert 0 < lease.expires_in < 2
    await way.until(lambda: lease.expires_in < 0.3)
    while True:
        free = held.get("lottery") is None
        if not lease.held:
            break
        assert not free
        await way.sleep(0.002)
    assert lease.expires_in == 0.0
    assert lease.lost_reason == "expired"


@both_ways
async def test_expires_in_goes_down_and_a_renewal_brings_it_up(way, place):
    async with way.entered(distributed_lock("lottery", ttl=30, renew=False)) as lease:
        await way.until(lambda: lease.expires_in < 29.5)
        before = time.monotonic() + lease.expires_in
        await way.renew(lease)
        assert time.monotonic() + lease.expires_in > before
        seen = held.get("lottery")
        assert seen.expires_in == pytest.approx(30, abs=10)


@both_ways
async def test_ensure_held_passes_while_it_is_held(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        await way.ensure_held(lease)
        await way.ensure_held(lease, verify=True)


@both_ways
async def test_ensure_held_asks_the_server_only_to_verify(way, place):
    with pytest.raises(LockLost):  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            place.lose_data()
            await way.ensure_held(lease)
            with pytest.raises(LockLost) as raised:
                await way.ensure_held(lease, verify=True)
            assert (raised.value.name, raised.value.reason) == ("lottery", "expired")
            with pytest.raises(LockLost):
                await way.ensure_held(lease)


@both_ways
async def test_a_released_lease_is_neither_held_nor_lost(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        pass
    assert not lease.held
    assert lease.lost_reason is None
    for check in (way.ensure_held, way.renew):
        with pytest.raises(LockLost, match="is not held: it was released"):
            await check(lease)


# --- lost: expired, forced, taken, unreachable ---------------------------------------------------


class Losing:
    """The ways in which a lease ends before its time, by reason."""

    def __init__(self, place, proxies):
        self._place = place
        self._make_proxy = proxies
        self._stack = ExitStack()

    def close(self):
        self._stack.close()

    def prepare(self, reason):
        """Do what must be done before the lease is granted."""
        if reason == "unreachable":
            server_place = self._place
            self._proxy = self._make_proxy(server_place.locks.server)
            server_place.on(self._proxy)

    def lose(self, lease, reason):
        """Let it end on the server, or out of our reach."""
        if reason == "forced":
            self._place.force_release(lease)
        elif reason == "unreachable":
            self._proxy.refuse()
        else:
            self._place.lose_data()
        if reason == "taken":
            self._stack.enter_context(held_by_other(lease.name))


@pytest.fixture
def losing(place, make_proxy):
    """The means to lose a lease."""
    losing = Losing(place, make_proxy)
    yield losing
    losing.close()


REASONS = ("expired", "forced", "taken")


@pytest.mark.as_permit
@everywhere
@both_ways
@pytest.mark.parametrize("reason", REASONS)
async def test_a_renewal_learns_of_the_loss_and_its_reason(way, place, losing, reason):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    lease = lock.lease
    losing.lose(lease, reason)
    with pytest.raises(LockLost) as raised:
        await way.renew(lease)
    assert raised.value.reason == lease.lost_reason == reason
    assert not lease.held
    with pytest.raises(LockLost) as raised:
        await way.release(lock)
    assert raised.value.reason == reason
    assert lock.lease is None


@pytest.mark.proves("P5", "R7")
@pytest.mark.waits
@both_ways
@pytest.mark.parametrize("reason", REASONS)
async def test_the_watchdog_learns_of_the_loss_and_tells(way, place, losing, reason):
    lock = distributed_lock("lottery", ttl=6)
    told = []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(told.append)
    losing.lose(lease, reason)
    await way.until(lambda: told)
    assert told == [lease]
    assert lease.lost_reason == reason
    assert not lease.held


@pytest.mark.waits
@on_servers
@both_ways
async def test_a_server_out_of_reach_until_the_deadline_means_unreachable(way, place, losing):
    losing.prepare("unreachable")
    lock = distributed_lock("lottery", ttl=4)
    told = []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(told.append)
    losing.lose(lease, "unreachable")
    await way.until(lambda: told)
    assert lease.lost_reason == "unreachable"
    with pytest.raises(LockLost, match="could not be reached"):
        await way.release(lock)


@both_ways
@pytest.mark.parametrize("reason", REASONS)
async def test_releasing_learns_of_the_loss_too(way, place, losing, reason):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    lease = lock.lease
    losing.lose(lease, reason)
    with pytest.raises(LockLost) as raised:
        await way.release(lock)
    assert raised.value.reason == lease.lost_reason == reason
    assert (lock.lease, lease.held) == (None, False)


@pytest.mark.proves("P5")
@both_ways
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed within", "noticed at the end"])
async def test_leaving_the_block_after_a_loss_raises_lock_lost(way, place, losing, noticed):
    with pytest.raises(LockLost) as raised:  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            losing.lose(lease, "forced")
            if noticed:
                with pytest.raises(LockLost):
                    await way.renew(lease)
    assert (raised.value.name, raised.value.reason) == ("lottery", "forced")


@pytest.mark.proves("P5")
@both_ways
async def test_a_loss_never_masks_what_the_body_raised(way, place, losing, caplog):
    error = ZeroDivisionError("of the body")
    with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            losing.lose(lease, "forced")
            raise error
    assert raised.value is error
    assert "'lottery' was lost: an operator released it by force" in caplog.text


@pytest.mark.proves("P3")
@both_ways
async def test_the_lock_of_the_next_owner_survives_our_late_release(way, place, losing):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    losing.lose(lock.lease, "taken")
    before = held.get("lottery")
    with pytest.raises(LockLost):
        await way.release(lock)
    after = held.get("lottery")
    assert after.id == before.id


# --- on_lost -------------------------------------------------------------------------------------


async def lose_now(way, place, lease):
    """Lose a lease, and let its holder know."""
    place.lose_data()
    with pytest.raises(LockLost):
        await way.renew(lease)


async def warn_nobody(lease):
    """A callback that nobody would await."""


def yield_nothing(lease):
    """A callback whose body nobody would run."""
    yield


@pytest.mark.parametrize("callback", [warn_nobody, yield_nothing, partial(warn_nobody), None])
def test_a_callback_that_would_do_nothing_is_refused(callback, locks):
    leader = leadership("leader", max_silence=60)
    with distributed_lock("lottery") as one, distributed_lock("a", "b") as joint, leader as term:
        for register in (one.on_lost, joint.on_lost, term.on_lost):
            with pytest.raises(TypeError, match=r"^on_lost\(\) (takes|calls) a "):
                register(callback)
        for register in (one.on_endangered, joint.on_endangered):
            with pytest.raises(TypeError, match=r"^on_endangered\(\) (takes|calls) a "):
                register(callback)


@pytest.mark.proves("P5")
@both_ways
async def test_on_lost_is_called_once_with_the_lease(way, place):
    lock = distributed_lock("lottery")
    told = []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(lambda lease: told.append(("first", lease, lease.held)))
    lease.on_lost(lambda lease: told.append(("second", lease, lease.held)))
    await lose_now(way, place, lease)
    with pytest.raises(LockLost):
        await way.renew(lease)
    with pytest.raises(LockLost):
        await way.release(lock)
    await way.until(lambda: len(told) >= 2)
    assert told == [("first", lease, False), ("second", lease, False)]


@both_ways
async def test_on_lost_is_called_at_once_if_the_lease_is_lost_already(way, place):
    lock = distributed_lock("lottery")
    told = []
    assert await way.acquire(lock)
    lease = lock.lease
    await lose_now(way, place, lease)
    lease.on_lost(told.append)
    assert told == [lease]


@both_ways
async def test_on_lost_does_not_run_in_the_thread_that_renews(way, place):
    lock, threads = distributed_lock("lottery", ttl=1.5), []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(lambda lease: threads.append(threading.current_thread().name))
    place.lose_data()
    await way.until(lambda: threads)
    assert "watchdog" not in threads[0]


@pytest.mark.waits
@both_ways
async def test_on_lost_that_blocks_does_not_delay_other_renewals(way, place):
    lock, blocking, go_on = distributed_lock("lottery", ttl=1.5), [], threading.Event()
    assert await way.acquire(lock)
    lease = lock.lease

    def block(lease):
        blocking.append(lease)
        go_on.wait(HUNG)

    lease.on_lost(block)
    try:
        place.lose_data()
        await way.until(lambda: blocking)
        async with way.entered(distributed_lock("tombola", ttl=6)) as other:
            await way.until(lambda: other.renewals)
            assert other.held
    finally:
        go_on.set()


@both_ways
async def test_what_on_lost_raises_is_logged_and_stops_nobody(way, place, caplog):
    def fail(lease):
        raise ZeroDivisionError("of the callback")

    lock = distributed_lock("lottery")
    told = []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(fail)
    lease.on_lost(told.append)
    await lose_now(way, place, lease)
    await way.until(lambda: told)
    assert "on_lost callback of lock 'lottery' failed" in caplog.text
    assert "ZeroDivisionError: of the callback" in caplog.text
    lease.on_lost(fail)  # Nor when it is called at once.


@everywhere
def test_an_on_lost_that_calls_sys_exit_is_logged_and_stops_nobody(place, caplog):
    told = []
    lock = distributed_lock("lottery", ttl=1, renew=False)
    assert lock.acquire()
    lease = lock.lease
    lease.on_lost(lambda lease: sys.exit("of the callback"))
    lease.on_lost(told.append)
    signals.lock_lost.connect(note := lambda **news: told.append(news["lease"]))
    try:
        wait_until(lambda: told == [lease, lease])
    finally:
        signals.lock_lost.disconnect(note)
    assert "on_lost callback of lock 'lottery' failed" in caplog.text
    assert "SystemExit: of the callback" in caplog.text


@both_ways
async def test_on_lost_is_not_called_after_a_release(way, place):
    lock = distributed_lock("lottery", ttl=4)
    told = []
    assert await way.acquire(lock)
    lock.lease.on_lost(told.append)
    await way.release(lock)
    place.lose_data()
    with pytest.raises(AssertionError):
        await way.until(lambda: told, 1.5)  # More than a third.


# --- a server that does not answer ---------------------------------------------------------------


@on_servers
@both_ways
async def test_verifying_against_a_silent_server_raises_unavailable_and_keeps_the_lease(
    way, place, make_proxy
):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    async with way.entered(distributed_lock("lottery", ttl=30)) as lease:
        proxy.refuse()
        with pytest.raises(LockUnavailable) as raised:
            await way.ensure_held(lease, verify=True)
        assert raised.value.__cause__ is not None
        assert lease.held
        proxy.heal()
        await way.ensure_held(lease, verify=True)


@pytest.mark.waits
@on_servers
@both_ways
async def test_release_on_a_silent_server_raises_unavailable_and_ends_the_lease(
    way, place, make_proxy
):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    lock = distributed_lock("lottery", ttl=4)
    assert await way.acquire(lock)
    lease = lock.lease
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        await way.release(lock)
    assert not lease.held
    assert lock.lease is None
    proxy.heal()
    # Nothing renews it, so it ends on the server.
    await way.until(lambda: held.get("lottery") is None)


@pytest.mark.waits
@on_servers
@both_ways
async def test_leaving_a_block_on_a_silent_server_logs_and_raises_nothing(
    way, place, make_proxy, caplog
):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    async with way.entered(distributed_lock("lottery", ttl=4)) as lease:
        proxy.refuse()
        start = time.monotonic()
    assert time.monotonic() - start < 4 + slack()
    assert not lease.held
    left = [record for record in caplog.records if "Left the block" in record.getMessage()]
    assert [record.levelno for record in left] == [logging.ERROR]
    assert "'lottery'" in left[0].getMessage()


@on_servers
@both_ways
async def test_leaving_a_block_retries_until_the_server_is_back(way, place, make_proxy, caplog):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    healer = threading.Timer(0.3, proxy.heal)
    async with way.entered(distributed_lock("lottery", ttl=10)):
        proxy.refuse()
        healer.start()
    healer.join()
    assert "Left the block" not in caplog.text
    assert held.get("lottery") is None


# --- a lease that nobody refers to any more ------------------------------------------------------


@both_ways
async def test_a_dropped_lease_is_warned_about_by_name(way, place, caplog):
    if await way.acquire(distributed_lock("a dropped lottery", ttl=30)):
        gc.collect()  # It may find a lease of another test, too.
    said = "lock 'a dropped lottery' was dropped without a release"
    warnings = [record for record in caplog.records if said in record.getMessage()]
    assert [record.levelno for record in warnings] == [logging.WARNING]


@both_ways
@pytest.mark.parametrize("end", ["released", "lost", "expired"])
async def test_a_lease_that_is_over_is_dropped_in_silence(way, place, caplog, end):
    lock = distributed_lock("an ended lottery", ttl=2 if end == "expired" else 30, renew=False)
    assert await way.acquire(lock)
    if end == "released":
        await way.release(lock)
    elif end == "lost":
        await lose_now(way, place, lock.lease)
    else:
        while lock.lease.held:
            await way.sleep(0.01)
    del lock
    gc.collect()
    assert "lock 'an ended lottery' was dropped" not in caplog.text


@pytest.mark.proves("P2", "R7")
@both_ways
async def test_a_dropped_lease_is_not_renewed(way, place):
    assert await way.acquire(distributed_lock("lottery", ttl=1.5))
    gc.collect()
    await way.until(lambda: held.get("lottery") is None)


@pytest.mark.proves("P10")
def test_a_lease_cannot_be_pickled_and_so_not_be_sent_elsewhere(place):
    with distributed_lock("lottery") as lease, pytest.raises(TypeError, match="fence"):
        pickle.dumps(lease)


@pytest.mark.proves("P10")
@pytest.mark.parametrize("names", [["lottery"], ["lottery", "raffle"]], ids=["one", "several"])
@pytest.mark.parametrize("twin", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_handle_is_pickled_or_copied_only_without_a_lease(place, twin, names):
    lock = distributed_lock(*names)
    with lock, pytest.raises(TypeError, match=r"holds lock 'lottery.* cannot be pickled"):
        twin(lock)
    twin(lock)


def lose_with_a_callback_that_never_returns():
    """In a child."""
    lock = distributed_lock("lottery")
    assert lock.acquire()
    entered = threading.Event()

    def block(lease):
        entered.set()
        threading.Event().wait()

    lock.lease.on_lost(block)
    held.force_release("lottery", lock.lease.id)
    with pytest.raises(LockLost):
        lock.lease.renew()
    assert entered.wait(HUNG)


def test_on_lost_that_blocks_does_not_keep_the_program_from_ending(locks, spawn):
    assert spawn(lose_with_a_callback_that_never_returns).wait() == 0


def test_many_callbacks_that_block_do_not_delay_the_next(place):
    go_on, told = threading.Event(), []
    locks = [distributed_lock(f"lottery:{number}") for number in range(8)]
    leases = []
    for lock in locks:
        assert lock.acquire()
        leases.append(lock.lease)
        lock.lease.on_lost(lambda lease: (told.append(lease), go_on.wait(HUNG)))
    place.lose_data()
    try:
        for lease in leases:
            with pytest.raises(LockLost):
                lease.renew()
        wait_until(lambda: len(told) == 8)
    finally:
        go_on.set()


@pytest.mark.waits
@on_servers
@both_ways
async def test_the_reason_of_a_loss_does_not_change(way, place, losing):
    losing.prepare("unreachable")
    lock, told = distributed_lock("lottery", ttl=4), []
    assert await way.acquire(lock)
    lease = lock.lease
    lease.on_lost(told.append)
    losing.lose(lease, "unreachable")
    reasons = []

    def is_nearly_over():
        reasons.append(lease.lost_reason)
        return lease.expires_in < 0.2

    await way.until(is_nearly_over)
    while not told:
        reasons.append(lease.lost_reason)
        await way.sleep(0)
    assert set(reasons) <= {None, "unreachable"}


# --- made longer ---------------------------------------------------------------------------------


@both_ways
async def test_a_lease_can_be_made_longer(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10)) as lease:
        await way.renew(lease, ttl=timedelta(minutes=5))
        assert lease.ttl == 300
        assert lease.expires_in > 280
        seen = held.get("lottery")
        assert seen.expires_in is not None
        assert seen.expires_in > 280
        assert (seen.ttl, seen.state, seen.note) == (300, "held", "")
        await way.renew(lease)
        assert lease.expires_in > 280


@both_ways
async def test_a_renewal_that_is_late_does_not_shorten_a_lease_again(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10)) as lease:
        await way.renew(lease, ttl=300)
        late = Renewal("lottery", lease._token, 10, 1, True, permit=lease.permit_number)
        backends["default"].run(flows.answer_to_renewal(late, HUNG))
        seen = held.get("lottery")
        assert seen.expires_in is not None
        assert seen.expires_in > 280
        assert seen.ttl == 300


@on_servers
async def test_of_renewals_at_the_same_time_the_longest_counts(place):
    lock = distributed_lock("lottery", ttl=10, renew=False)
    async with lock as lease:
        await asyncio.gather(lease.arenew(ttl=300), lease.arenew(ttl=60))
        await lease.arenew()
        seen = held.get("lottery")
        assert seen.expires_in is not None
        assert 280 < lease.expires_in < seen.expires_in + 0.1
        assert lease.ttl == 300


@both_ways
async def test_several_renewals_that_are_late_do_not_shorten_a_lease_either(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10, renew=False)) as lease:
        await way.renew(lease, ttl=300)
        for count in (0, 1):  # The confirmation of a hand-over is the first.
            late = Renewal("lottery", lease._token, 10, count, True, permit=lease.permit_number)
            backends["default"].run(flows.answer_to_renewal(late, HUNG))
        seen = held.get("lottery")
        assert seen.expires_in is not None
        assert (seen.expires_in > 280, seen.renewals) == (True, 1)


@both_ways
async def test_an_acquire_that_is_late_does_not_shorten_a_lease(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10, renew=False)) as lease:
        await way.renew(lease, ttl=300)
        late = attempt(
            *("lottery", lease._token, lease.id, lease.owner),
            ttl=10,
            operation_timeout=HUNG,
            permit=lease.permit_number,
        )
        granted = backends["default"].run(flows.acquire(late, 0))
        assert isinstance(granted, flows.Granted)
        seen = held.get("lottery")
        assert seen.expires_in is not None
        assert seen.expires_in > 280


@pytest.mark.waits
@on_servers
@both_ways
@pytest.mark.parametrize("how", ["renew", "ensure_held"])
async def test_a_renewal_that_is_answered_after_the_loss_says_so(how, way, place, make_proxy):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    place.configure(OPTIONS={"socket_timeout": 10})  # Longer than the answer takes.
    lock = distributed_lock("lottery", ttl=3, renew=False)
    assert await way.acquire(lock)
    lease = lock.lease
    command = "EXEC" if place.name == UNSCRIPTED else "EVAL*"
    proxy.rule(command, "delayreply:3.2")
    with pytest.raises(LockLost) as caught:
        await (way.renew(lease) if how == "renew" else way.ensure_held(lease, verify=True))
    assert caught.value.reason == "expired"
    assert not lease.held


@both_ways
async def test_a_lease_cannot_be_made_shorter(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10)) as lease:
        with pytest.raises(ValueError, match=r"^ttl must be at least that of the lease, 10 s"):
            await way.renew(lease, ttl=5)
        with pytest.raises(ValueError, match=r"^ttl must be"):
            await way.renew(lease, ttl="long")
        assert lease.ttl == 10


@both_ways
async def test_max_hold_bounds_a_lease_that_is_made_longer(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10, max_hold=20)) as lease:
        await way.renew(lease, ttl=300)
        assert lease.expires_in <= 20
        seen = held.get("lottery")
        assert seen.expires_in <= 20


# --- released ------------------------------------------------------------------------------------


@pytest.mark.proves("R6")
@everywhere
@needs_scripts
def test_r6_a_release_that_is_sent_again_tells_whether_it_was_carried_out(place):
    lock = distributed_lock("lottery", ttl=60, renew=False)
    assert lock.acquire()
    lease = lock.lease
    form = release_of(lease, ended="done")

    def answer():
        return backends["default"].run(flows.result_of(form.call()))

    assert answer() == b"released"
    assert answer() == b"released"
    with held_by_other("lottery"):
        assert answer() == b"released"
        # Of another lease, and of one that was not noted so, it is not known.
        form.id = "0" * 16
        assert answer() == b"taken"
        form.id, form.ended = lease.id, "failed"
        assert answer() == b"taken"
    with pytest.raises(LockLost):
        lock.release()
