"""The lease: held until a deadline, renewed on demand, and what happens when it is lost."""

import asyncio
import copy
import gc
import logging
import pickle
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock, held, leadership, signals
from django_redislock.backends.registry import backends
from django_redislock.rules import flows
from django_redislock.rules.lease_state import Renewal
from tests.support.attempts import attempt
from tests.support.faults import slack
from tests.support.matrix import (
    MEMORY,
    UNSCRIPTED,
    everywhere,
    needs_scripts,
    on_servers,
    places,
)
from tests.support.others import held_by_other, release_of
from tests.support.servers import KIND
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways

# --- held, and for how long ----------------------------------------------------------------------


@pytest.mark.proves("P1", "R2")
@pytest.mark.waits
@both_ways
async def test_a_lease_ends_here_before_it_ends_on_the_server(way, place):
    lock = distributed_lock("lottery", ttl=2, renew=False)
    lease = await way.taken(lock)
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
        assert held.get("lottery").expires_in == pytest.approx(30, abs=10)


@both_ways
async def test_ensure_held_asks_the_server_only_to_verify(way, place):
    with pytest.raises(LockLost):  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            await way.ensure_held(lease, verify=True)
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


@contextmanager
def ended(reason, place, lease):
    """Let a lease end on the server; if it is taken, another machine has the lock in the block."""
    if reason == "forced":
        place.force_release(lease)
    else:
        place.lose_data()
    with held_by_other(lease.name) if reason == "taken" else nullcontext():
        yield


@pytest.fixture
def proxied(place, make_proxy):
    """A proxy between the locks of the test and their server."""
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    return proxy


REASONS = ("expired", "forced", "taken")


@pytest.mark.proves("P3")
@pytest.mark.as_permit
@everywhere
@both_ways
@pytest.mark.parametrize("reason", REASONS)
async def test_who_renews_or_releases_learns_of_the_loss_and_leaves_the_next_holder_alone(
    way, place, reason
):
    for renews in (True, False):
        lock = distributed_lock("lottery")
        lease = await way.taken(lock)
        with ended(reason, place, lease):
            before = held.get("lottery")
            for ask, of in [(way.renew, lease)] * renews + [(way.release, lock)]:
                with pytest.raises(LockLost) as raised:
                    await ask(of)
                assert raised.value.reason == lease.lost_reason == reason
                assert not lease.held
            after = held.get("lottery")
            assert (after and after.id) == (before and before.id)
        assert lock.lease is None


@pytest.mark.proves("P5", "R7")
@pytest.mark.waits
@both_ways
@pytest.mark.parametrize("reason", REASONS)
async def test_the_watchdog_learns_of_the_loss_and_tells(way, place, reason):
    lock = distributed_lock("lottery", ttl=6)
    told = []
    lease = await way.taken(lock)
    lease.on_lost(told.append)
    with ended(reason, place, lease):
        await way.until(lambda: told)
    assert told == [lease]
    assert lease.lost_reason == reason
    assert not lease.held


@pytest.mark.waits
@on_servers
@both_ways
async def test_a_server_out_of_reach_until_the_deadline_means_unreachable_from_the_first_moment(
    way, place, proxied
):
    lock, told = distributed_lock("lottery", ttl=4), []
    lease = await way.taken(lock)
    lease.on_lost(told.append)
    proxied.refuse()
    reasons = []

    def is_nearly_over():
        reasons.append(lease.lost_reason)
        return lease.expires_in < 0.2

    await way.until(is_nearly_over)
    while not told:
        reasons.append(lease.lost_reason)
        await way.sleep(0)
    assert set(reasons) <= {None, "unreachable"}
    assert lease.lost_reason == "unreachable"
    with pytest.raises(LockLost, match="could not be reached"):
        await way.release(lock)


@pytest.mark.proves("P5")
@both_ways
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed within", "noticed at the end"])
async def test_leaving_the_block_after_a_loss_raises_lock_lost(way, place, noticed):
    with pytest.raises(LockLost) as raised:  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            place.force_release(lease)
            if noticed:
                with pytest.raises(LockLost):
                    await way.renew(lease)
    assert (raised.value.name, raised.value.reason) == ("lottery", "forced")


@pytest.mark.proves("P5")
@both_ways
async def test_a_loss_never_masks_what_the_body_raised(way, place, caplog):
    error = ZeroDivisionError("of the body")
    with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery")) as lease:
            place.force_release(lease)
            raise error
    assert raised.value is error
    assert "'lottery' was lost: an operator released it by force" in caplog.text


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
async def test_on_lost_is_called_once_with_the_lease_and_at_once_if_it_is_lost_already(way, place):
    lock = distributed_lock("lottery")
    told, late = [], []
    lease = await way.taken(lock)
    lease.on_lost(lambda lease: told.append(("first", lease, lease.held)))
    lease.on_lost(lambda lease: told.append(("second", lease, lease.held)))
    await lose_now(way, place, lease)
    lease.on_lost(late.append)
    assert late == [lease]
    for ask, of in ((way.renew, lease), (way.release, lock)):
        with pytest.raises(LockLost):
            await ask(of)
    await way.until(lambda: len(told) >= 2)
    assert told == [("first", lease, False), ("second", lease, False)]


@pytest.mark.waits
@both_ways
async def test_on_lost_that_blocks_does_not_delay_other_renewals(way, place):
    lock, blocking, go_on = distributed_lock("lottery", ttl=1.5), [], threading.Event()

    def block(lease):
        blocking.append(threading.current_thread().name)
        go_on.wait(HUNG)

    lease = await way.taken(lock)
    lease.on_lost(block)
    try:
        place.lose_data()
        await way.until(lambda: blocking)
        assert "watchdog" not in blocking[0]
        async with way.entered(distributed_lock("tombola", ttl=6)) as other:
            await way.until(lambda: other.renewals)
            assert other.held
    finally:
        go_on.set()


@places(KIND, MEMORY)
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_what_on_lost_raises_is_logged_and_stops_nobody(error, place, caplog):
    def fail(lease):
        raise error("of the callback")

    told = []
    lock = distributed_lock("lottery", ttl=1, renew=False)
    assert lock.acquire()
    lease = lock.lease
    lease.on_lost(fail)
    lease.on_lost(told.append)
    signals.lock_lost.connect(note := lambda **news: told.append(news["lease"]))
    try:
        wait_until(lambda: told == [lease, lease])
    finally:
        signals.lock_lost.disconnect(note)
    assert "on_lost callback of lock 'lottery' failed" in caplog.text
    assert f"{error.__name__}: of the callback" in caplog.text
    if error is ZeroDivisionError:
        lease.on_lost(fail)  # Nor when it is called at once.


@both_ways
async def test_on_lost_is_not_called_after_a_release(way, place):
    lock = distributed_lock("lottery", ttl=4)
    told = []
    (await way.taken(lock)).on_lost(told.append)
    await way.release(lock)
    place.lose_data()
    with pytest.raises(AssertionError):
        await way.until(lambda: told, 1.5)  # More than a third.


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


@places(KIND, MEMORY)
def test_many_callbacks_that_block_do_not_delay_the_next(place):
    go_on, told = threading.Event(), []
    locks = [distributed_lock(f"lottery:{number}") for number in range(8)]
    for lock in locks:
        assert lock.acquire()
        lock.lease.on_lost(lambda lease: (told.append(lease), go_on.wait(HUNG)))
    leases = [lock.lease for lock in locks]
    place.lose_data()
    try:
        for lease in leases:
            with pytest.raises(LockLost):
                lease.renew()
        wait_until(lambda: len(told) == 8)
    finally:
        go_on.set()


# --- a server that does not answer ---------------------------------------------------------------


@on_servers
@both_ways
async def test_verifying_against_a_silent_server_raises_unavailable_and_keeps_the_lease(
    way, place, proxied
):
    async with way.entered(distributed_lock("lottery", ttl=30)) as lease:
        proxied.refuse()
        with pytest.raises(LockUnavailable) as raised:
            await way.ensure_held(lease, verify=True)
        assert raised.value.__cause__ is not None
        assert lease.held
        proxied.heal()
        await way.ensure_held(lease, verify=True)


@pytest.mark.waits
@on_servers
@both_ways
async def test_release_on_a_silent_server_raises_unavailable_and_ends_the_lease(
    way, place, proxied
):
    lock = distributed_lock("lottery", ttl=4)
    lease = await way.taken(lock)
    proxied.refuse()
    with pytest.raises(LockUnavailable):
        await way.release(lock)
    assert not lease.held
    assert lock.lease is None
    proxied.heal()
    # Nothing renews it, so it ends on the server.
    await way.until(lambda: held.get("lottery") is None)


@pytest.mark.waits
@on_servers
@both_ways
async def test_leaving_a_block_on_a_silent_server_logs_and_raises_nothing(
    way, place, proxied, caplog
):
    async with way.entered(distributed_lock("lottery", ttl=4)) as lease:
        proxied.refuse()
        start = time.monotonic()
    assert time.monotonic() - start < 4 + slack()
    assert not lease.held
    (left,) = [record for record in caplog.records if "Left the block" in record.getMessage()]
    assert left.levelno == logging.ERROR
    assert "'lottery'" in left.getMessage()


@on_servers
@both_ways
async def test_leaving_a_block_retries_until_the_server_is_back(way, place, proxied, caplog):
    healer = threading.Timer(0.3, proxied.heal)
    async with way.entered(distributed_lock("lottery", ttl=10)):
        proxied.refuse()
        healer.start()
    healer.join()
    assert "Left the block" not in caplog.text
    assert held.get("lottery") is None


# --- a lease that nobody refers to any more ------------------------------------------------------


@pytest.mark.proves("P2", "R7")
@both_ways
async def test_a_dropped_lease_is_warned_about_by_name_and_not_renewed(way, place, caplog):
    assert await way.acquire(distributed_lock("a dropped lottery", ttl=1.5))
    gc.collect()  # It may find a lease of another test, too.
    await way.until(lambda: held.get("a dropped lottery") is None)
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


@pytest.mark.proves("P10")
@places(MEMORY)
@pytest.mark.parametrize("names", [["lottery"], ["lottery", "raffle"]], ids=["one", "several"])
@pytest.mark.parametrize("twin", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_handle_is_pickled_or_copied_only_without_a_lease(place, twin, names):
    lock = distributed_lock(*names)
    with lock as lease:
        with pytest.raises(TypeError, match=r"holds lock 'lottery.* cannot be pickled"):
            twin(lock)
        if len(names) == 1:
            with pytest.raises(TypeError, match="fence"):
                pickle.dumps(lease)
    twin(lock)


# --- made longer ---------------------------------------------------------------------------------


@both_ways
async def test_a_lease_can_be_made_longer_and_not_shorter(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10)) as lease:
        with pytest.raises(ValueError, match=r"^ttl must be at least that of the lease, 10 s"):
            await way.renew(lease, ttl=5)
        with pytest.raises(ValueError, match=r"^ttl must be"):
            await way.renew(lease, ttl="long")
        assert lease.ttl == 10
        await way.renew(lease, ttl=timedelta(minutes=5))
        assert lease.ttl == 300
        assert lease.expires_in > 280
        seen = held.get("lottery")
        assert seen.expires_in > 280
        assert (seen.ttl, seen.state, seen.note) == (300, "held", "")
        await way.renew(lease)
        assert lease.expires_in > 280


@both_ways
async def test_what_is_late_does_not_shorten_a_lease_again(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10, renew=False)) as lease:
        await way.renew(lease, ttl=300)
        run, permit = backends["default"].run, lease.permit_number
        for count in (1, 0, 1):  # The confirmation of a hand-over is the first.
            late = Renewal("lottery", lease._token, 10, count, True, permit=permit)
            run(flows.answer_to_renewal(late, HUNG))
            seen = held.get("lottery")
            assert (seen.expires_in > 280, seen.ttl, seen.renewals) == (True, 300, 1)
        of = "lottery", lease._token, lease.id, lease.owner
        late = attempt(*of, ttl=10, operation_timeout=HUNG, permit=permit)
        assert isinstance(run(flows.acquire(late, 0)), flows.Granted)
        assert held.get("lottery").expires_in > 280


@on_servers
async def test_of_renewals_at_the_same_time_the_longest_counts(place):
    async with distributed_lock("lottery", ttl=10, renew=False) as lease:
        await asyncio.gather(lease.arenew(ttl=300), lease.arenew(ttl=60))
        await lease.arenew()
        assert 280 < lease.expires_in < held.get("lottery").expires_in + 0.1
        assert lease.ttl == 300


@pytest.mark.waits
@on_servers
@both_ways
@pytest.mark.parametrize("how", ["renew", "ensure_held"])
async def test_a_renewal_that_is_answered_after_the_loss_says_so(how, way, place, proxied):
    place.configure(OPTIONS={"socket_timeout": 10})  # Longer than the answer takes.
    lock = distributed_lock("lottery", ttl=3, renew=False)
    lease = await way.taken(lock)
    command = "EXEC" if place.name == UNSCRIPTED else "EVAL*"
    proxied.rule(command, "delayreply:3.2")
    with pytest.raises(LockLost) as caught:
        await (way.renew(lease) if how == "renew" else way.ensure_held(lease, verify=True))
    assert caught.value.reason == "expired"
    assert not lease.held


@both_ways
async def test_max_hold_bounds_a_lease_that_is_made_longer(way, place):
    async with way.entered(distributed_lock("lottery", ttl=10, max_hold=20)) as lease:
        await way.renew(lease, ttl=300)
        assert lease.expires_in <= 20
        assert held.get("lottery").expires_in <= 20


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
