"""A lease from a request to its task: hand_over() and take_up(), without a gap."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
from django.core.signing import Signer

from django_redislock import (
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    distributed_lock,
    held,
    signals,
    single_instance,
    take_up,
)
from django_redislock.jobs.run import current_lease
from django_redislock.rules import scripts
from tests.support.backends import UNHURRIED
from tests.support.matrix import CLUSTER, MEMORY, QUORUM, UNSCRIPTED, places
from tests.support.others import waiters
from tests.support.servers import KIND
from tests.support.waiting import HUNG, await_until
from tests.support.ways import both_ways, in_thread

pytestmark = places(KIND, MEMORY)
NAME = "order:{7}"  # No template here.


async def handed_over(way, lease, within=HUNG):
    if way.name == "async":
        return await lease.ahand_over(within=within)
    return lease.hand_over(within=within)


def baton_of(within=HUNG, **options):
    with distributed_lock(NAME, **options) as lease:
        return lease.hand_over(within=within)


# --- without a gap -------------------------------------------------------------------------------


@places(KIND, MEMORY, CLUSTER)
@both_ways
async def test_a_waiter_gets_the_lock_after_who_takes_it_up_and_not_between(way, place):
    async def wait():
        async with way.entered(distributed_lock(NAME, wait=HUNG)) as lease:
            return lease.fence

    async with way.entered(distributed_lock(NAME, ttl=5)) as given:
        waiting = way.start(wait)
        await way.until(lambda: waiters(NAME) == 1)
        baton = await handed_over(way, given)
        assert not given.held
    assert given._token not in baton
    with pytest.raises(LockTimeout):
        async with way.entered(distributed_lock(NAME, wait=0)):
            raise AssertionError
    async with way.entered(take_up(baton, ttl=9, max_hold=60)) as taken:
        assert (taken.name, taken.ttl, taken.held) == (NAME, 9, True)
        assert taken.fence > given.fence
        await way.ensure_held(taken, verify=True)
        assert not waiting.done()
        assert given.lost_reason is None
    assert await waiting.result() > taken.fence
    assert not await way.locked(distributed_lock(NAME))


@both_ways
async def test_what_nobody_takes_up_goes_to_the_next_waiter(way, place, if_rung):
    async def wait():
        async with way.entered(distributed_lock(NAME, wait=HUNG)) as lease:
            return time.monotonic() if lease.held else 0.0

    async with way.entered(distributed_lock(NAME, ttl=60)) as lease:
        waiting = way.start(wait)
        await way.until(lambda: waiters(NAME) == 1)
        before = time.monotonic()
        baton = await handed_over(way, lease, within=0.4)
    # It was told of 60 s before, and looks by itself only after that.
    assert 0.4 <= await waiting.result() - before < if_rung
    with pytest.raises(LockLost, match="not in time"):
        await way.acquire(take_up(baton))


def test_an_acquire_finds_by_itself_that_nobody_took_it_up(place):
    baton = baton_of(within=0.1)
    with distributed_lock(NAME, wait=HUNG), pytest.raises(LockLost) as lost:
        in_thread(take_up(baton).acquire).result(HUNG)
    assert lost.value.reason == "taken"


# --- once only -----------------------------------------------------------------------------------


@pytest.mark.as_permit
@places(KIND, MEMORY, CLUSTER)
@both_ways
async def test_it_is_taken_up_once(way, place):
    async with way.entered(distributed_lock(NAME)) as lease:
        baton = await handed_over(way, lease)

    async def again():
        async with way.entered(take_up(baton)):
            raise AssertionError

    async with way.entered(take_up(baton)) as lease:
        with pytest.raises(LockLost, match="was taken up before"):
            await way.start(again).result()
        assert lease.held
    with pytest.raises(LockLost, match="was taken up before"):
        await again()
    assert not await way.locked(distributed_lock(NAME))


@pytest.mark.parametrize("changed", ["x{}", "{}x", "", "a:b", 7])
def test_a_baton_that_was_changed_is_refused_before_anything_is_sent(changed, place):
    wrong = changed.format(baton_of()) if isinstance(changed, str) else changed
    with pytest.raises(ValueError, match="baton must be what hand_over"):
        take_up(wrong)
    newer = Signer(salt="django_redislock.baton").sign_object(["default", NAME, "id", 1, None, 2])
    with pytest.raises(ValueError, match="a newer one has made it"):
        take_up(newer)


def test_a_function_has_no_baton(place):
    with pytest.raises(LockMisuse, match="can be taken up once"):
        take_up(baton_of())(print)


# --- who gives it --------------------------------------------------------------------------------


@both_ways
async def test_for_the_giver_it_is_over_and_ended_well(way, place):
    released = []

    def note(success, **kwargs):
        released.append(success)

    lock = distributed_lock(NAME, min_hold=60)
    assert await way.acquire(lock)
    lease = lock.lease
    with pytest.raises(ValueError, match="within must be at least"):
        await handed_over(way, lease, within=0)
    assert lease.held
    signals.lock_released.connect(note)
    try:
        baton = await handed_over(way, lease)
    finally:
        signals.lock_released.disconnect(note)
    assert released == [True]
    with pytest.raises(LockLost, match="it was handed over"):
        await way.ensure_held(lease)
    with pytest.raises(LockLost, match="it was handed over"):
        await handed_over(way, lease)
    async with way.entered(take_up(baton)) as taken:
        await way.release(lock)  # As in a `finally`.
        await way.ensure_held(taken, verify=True)


def test_the_end_of_the_block_does_not_hide_what_its_body_raises(place):
    with suppress(ZeroDivisionError), distributed_lock(NAME) as lease:
        baton = lease.hand_over()
        raise ZeroDivisionError
    with take_up(baton) as lease:
        assert lease.held


def test_what_would_not_end_with_it_is_refused(place):
    lock = distributed_lock(NAME, reentrant=True)
    with lock as lease:
        with lock, pytest.raises(LockMisuse, match="reentrant acquire"):
            lease.hand_over()
        lease.ensure_held(verify=True)
        lease.hand_over(within=0.1)


def test_a_run_keeps_its_lease_which_notes_its_end(place):
    @single_instance("import")
    def work() -> None:
        lease = current_lease()
        with pytest.raises(LockMisuse, match="run of a job"):
            lease.hand_over()
        lease.ensure_held(verify=True)

    work()


@pytest.mark.django_db(transaction=True)
def test_a_transaction_ends_first_and_its_lock_may_be_given_on_commit(place):
    from django.db import transaction

    batons = []
    with transaction.atomic():
        with distributed_lock(NAME, release_on_commit=True) as lease:
            with pytest.raises(LockMisuse, match="transaction is open"):
                lease.hand_over()
            transaction.on_commit(lambda: batons.append(lease.hand_over()))
        assert lease.held
    with take_up(*batons) as taken:
        assert taken.fence > lease.fence


@places(QUORUM)
def test_a_quorum_hands_nothing_over(place):
    with distributed_lock(NAME) as lease:
        with pytest.raises(LockMisuse, match="none of them decides alone"):
            lease.hand_over()
        assert lease.held


@places(UNSCRIPTED)
def test_without_scripts_nothing_is_handed_over(place):
    with distributed_lock(NAME) as lease, pytest.raises(LockUnavailable, match="need EVAL"):
        lease.hand_over()
    assert not distributed_lock(NAME).locked()


# --- operators -----------------------------------------------------------------------------------


def test_operators_see_that_it_was_handed_over_and_may_end_that(place):
    baton = baton_of(within=60)
    found = held.get(NAME)
    assert (found.state, found.shown_state, found.handed_over) == ("held", "handed over", True)
    assert found.note.startswith("Handed over to whoever takes it up, until ")
    assert found.ends == "unless it is taken up"
    assert [past.ended for past in held.detail(NAME).past] == ["done"]
    held.force_release(NAME, found.id)
    with pytest.raises(LockLost) as lost:
        take_up(baton).acquire()
    assert lost.value.reason == "forced"


# --- on a bad network ----------------------------------------------------------------------------


@pytest.mark.as_permit
def test_a_lost_reply_costs_a_resend(locks, proxy):
    locks.on(proxy)
    assert not distributed_lock(NAME).locked()
    proxy.rule_for_script(scripts.HAND_OVER.sha, "cut_after")
    baton = baton_of()
    proxy.rule_for_script(scripts.TAKE_UP.sha, "cut_after")
    with take_up(baton) as lease:
        lease.ensure_held(verify=True)


@pytest.mark.proves("R4")
@pytest.mark.parametrize("action", ["hold", "delayreply:0.5"])
async def test_r4_a_hand_over_that_is_cancelled_under_way_is_undone(
    action, locks, proxy, undo_in_time
):
    locks.on(proxy, OPTIONS=UNHURRIED)
    async with take_up(await asyncio.to_thread(baton_of)):
        pass  # The server knows the scripts.
    under_way = proxy.rule_for_script(scripts.HAND_OVER.sha, action)
    async with distributed_lock(NAME, ttl=60) as lease:
        giving = asyncio.create_task(lease.ahand_over())
        await await_until(lambda: under_way.hits)
        giving.cancel()
        await asyncio.sleep(0)  # The undo is under way too, behind it.
        await asyncio.to_thread(proxy.forward_held)
        with pytest.raises(asyncio.CancelledError):
            await giving
        assert not lease.held
        assert not await distributed_lock(NAME).alocked()


async def test_a_hand_over_that_is_cancelled_while_receivers_are_told_is_undone(place):
    told = asyncio.Event()

    async def hear(**news):
        told.set()
        await asyncio.sleep(HUNG)

    async with distributed_lock(NAME, ttl=60) as lease:
        signals.lock_released.connect(hear)
        try:
            giving = asyncio.create_task(lease.ahand_over())
            await told.wait()
            giving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving
        finally:
            signals.lock_released.disconnect(hear)
        assert not lease.held
        assert not await distributed_lock(NAME).alocked()


def test_a_hand_over_without_an_answer_is_undone(locks, proxy):
    locks.on(proxy)
    with distributed_lock(NAME) as lease:
        proxy.rule_for_script(scripts.HAND_OVER.sha, "cut_after", times=None)
        with pytest.raises(LockUnavailable):
            lease.hand_over()
        assert not lease.held
        assert not distributed_lock(NAME).locked()
