"""The network cuts, hangs, delays and refuses: nothing is lost, and no answer is a guess."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
import time
from contextlib import nullcontext

import pytest

from django_redislock import (
    LockLost,
    LockUnavailable,
    Rate,
    clock,
    distributed_lock,
    held,
    single_instance_task,
    task_runs,
)
from django_redislock.backends.redis import calling
from django_redislock.backends.redis.dialing import DIALS_APART, Dialer
from django_redislock.backends.redis.server import RenewingConnection
from django_redislock.backends.registry import backends
from django_redislock.rules import scripts
from django_redislock.rules.options import ONE_TRY
from django_redislock.rules.steps import Answer, Call, Unanswered
from django_redislock.rules.stored import renewal_count
from tests.support.backends import PATIENT, UNHURRIED, forbid_scripting
from tests.support.faults import hands_over, lease_of, loses, runs, takes
from tests.support.matrix import everywhere
from tests.support.others import RIVAL, add_rival, against_rival, queued, rival
from tests.support.stored import NAME, channels, is_held_by, is_left_clean, keys_of
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import Blocking, in_thread

TTL = 6.0  # Long enough that a machine which stands still for a second loses no lease.
PATIENCE = TTL / 3  # The operation timeout that follows from it, without one of its own.
MANY = 1.0  # Seconds that a busy machine may add to the work of many threads.


@pytest.fixture
def locks(locks, proxy, settings):
    """The default alias goes through the proxy, the rival straight to the server."""
    locks.on(proxy, TTL=TTL, WAIT=0, OPTIONS=PATIENT)
    with against_rival(locks, settings):
        yield locks


# One command


LOST = ["cut_after", "cut_before", "hang_after", "hang_before"]
lost = pytest.mark.parametrize("action", LOST)


@pytest.mark.proves("R1", "R4")
@pytest.mark.parametrize(("action", "times"), [*((one, 1) for one in LOST), ("cut_after", 2)])
def test_r1_a_start_whose_answer_is_lost_counts_once_and_not_at_all_if_nobody_answers(
    action, times, caller, locks, proxy
):
    def start():
        return caller.acquire(distributed_lock(limits=[Rate(NAME, "2/h", burst=2)]))

    proxy.rule_for_script(scripts.TAKE_START.sha, action, times=times)
    if times == 1:  # It is asked for once more.
        assert start()
        (row,) = held.list()
        assert row.starts_left == 1
    else:
        with pytest.raises(LockUnavailable):
            start()
        assert start()
    assert start()
    assert not start()


@pytest.mark.as_permit
@pytest.mark.proves("P4", "R1")
@pytest.mark.parametrize("wait", [0, 5])
@lost
def test_r1_an_acquire_that_is_not_answered_is_sent_again_with_the_same_token(
    action, wait, caller, locks, proxy
):
    proxy.rule_for_script(scripts.ACQUIRE.sha, action)
    lock = distributed_lock(NAME, wait=wait)
    assert caller.acquire(lock)
    first, resend = runs(proxy, scripts.ACQUIRE)
    assert first.token == resend.token
    assert is_held_by(locks, lease_of(lock))
    proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
    assert caller.begin(distributed_lock(NAME)).result(HUNG) is False  # Busy, and no grant.
    caller.release(lock)
    assert is_left_clean(locks)


@pytest.mark.proves("R2")
def test_r2_the_deadline_counts_from_when_an_acquire_or_a_renewal_was_sent(locks, proxy):
    for script in (scripts.ACQUIRE, scripts.RENEW):
        proxy.rule_for_script(script.sha, "delayreply:0.25")
    with distributed_lock(NAME, renew=False) as lease:
        assert lease.expires_in <= TTL - 0.25
        wait_until(lambda: lease.expires_in < TTL - 0.5)
        before = time.monotonic() + lease.expires_in
        lease.renew()
        assert lease.expires_in <= TTL - 0.25
        # Not from the grant. Asked in this order, a busy machine makes it later, never earlier.
        assert lease.expires_in + time.monotonic() > before + 0.25


@pytest.mark.proves("R3")
@pytest.mark.usefixtures("undo_in_time")
def test_r3_a_grant_that_comes_after_its_deadline_is_given_back_and_asked_for_again(
    caller, locks, proxy
):
    locks.configure(OPTIONS={"socket_timeout": 12})
    proxy.rule_for_script(scripts.ACQUIRE.sha, "delayreply:3.1")
    lock = distributed_lock(NAME, ttl=3)

    assert caller.acquire(lock)

    assert lease_of(lock).held
    assert is_held_by(locks, lease_of(lock))
    assert len(runs(proxy, scripts.LEAVE)) == 1
    caller.release(lock)


@pytest.mark.proves("R5")
@pytest.mark.usefixtures("undo_in_time")
def test_r5_nothing_is_sent_more_often_than_we_decided(caller, locks, proxy):
    proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after", times=None)
    with pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME))
    assert len(runs(proxy, scripts.ACQUIRE)) == 2
    # Its second try is for a first one without an answer, as a busy machine has it.
    assert len(runs(proxy, scripts.LEAVE)) in {1, 2}


@pytest.mark.proves("R6")
@lost
def test_r6_a_release_that_is_not_answered_is_sent_again_and_is_a_success(
    action, caller, locks, proxy
):
    lock = distributed_lock(NAME)
    caller.acquire(lock)
    proxy.rule_for_script(scripts.RELEASE.sha, action)
    caller.release(lock)
    assert is_left_clean(locks)
    # But no lost answer hides that the lease was released by force.
    caller.acquire(lock)
    assert held.force_release(NAME, lease_of(lock).id, using=RIVAL)
    proxy.rule_for_script(scripts.RELEASE.sha, action)
    with pytest.raises(LockLost, match="by force"):
        caller.release(lock)


@pytest.mark.as_permit
@pytest.mark.proves("R6")
def test_r6_a_release_whose_answer_is_lost_is_a_success_though_the_lock_was_handed_on(
    caller, locks, proxy
):
    lock, next_lock = distributed_lock(NAME), rival(wait=HUNG)
    caller.acquire(lock)
    waiter = Blocking().begin_waiting(next_lock, locks)
    proxy.rule_for_script(scripts.RELEASE.sha, "cut_after")

    caller.release(lock)

    assert waiter.result(HUNG)
    assert is_held_by(locks, lease_of(next_lock))


@pytest.mark.proves("R6")
@pytest.mark.parametrize("is_noted", [False, True])
def test_r6_a_run_whose_end_is_told_after_its_lease_was_over_is_a_success_if_it_was_noted(
    is_noted, locks, proxy, settings, caplog
):
    locks.configure(OPTIONS=UNHURRIED)
    add_rival(settings, locks)
    waiting = []

    @single_instance_task(key=NAME, name=f"tests.noted-{is_noted}", ttl=4, renew=False, once=60)
    def draw() -> str:
        if is_noted:
            waiting.append(Blocking().begin_waiting(rival(wait=HUNG), locks))
        proxy.rule_for_script(scripts.CONCLUDE.sha, "cut_after" if is_noted else "cut_before")
        proxy.rule_for_script(scripts.CONCLUDE.sha, "delay:4.5")
        return "drawn"

    assert draw() == "drawn"
    assert len(runs(proxy, scripts.CONCLUDE)) == 2
    assert all(one.result(HUNG) for one in waiting)
    said = f"Left the block of lock {NAME!r}: Lock {NAME!r} is unavailable"
    assert caplog.text.count(said) == (0 if is_noted else 1)
    assert (task_runs.record(NAME).last_success is not None) is is_noted


def test_leaving_a_block_succeeds_once_the_network_is_back(caller, locks, proxy):
    with caller.block(distributed_lock(NAME)):
        proxy.refuse()
        threading.Timer(0.3, proxy.heal).start()
    assert is_left_clean(locks)


# The whole connection


@everywhere
def test_killed_connections_cost_nothing_between_commands(caller, locks):
    lock = distributed_lock(NAME)
    for _ in range(2):
        assert caller.acquire(lock)
        locks.redis.client_kill_filter(_type="normal", skipme=True)
        locks.redis.client_kill_filter(_type="pubsub")
        caller.release(lock)
        locks.redis.client_kill_filter(_type="normal", skipme=True)
    assert is_left_clean(locks)


def test_a_waiter_whose_connection_is_cut_keeps_its_place(caller, locks, proxy):
    first, second = distributed_lock(NAME, wait=HUNG), rival(wait=HUNG)
    with rival():
        front = caller.begin_waiting(first, locks)
        behind = Blocking().begin_waiting(second, locks)
        rung = channels(locks)
        proxy.cut()
        wait_until(lambda: {*channels(locks)}.difference(rung))  # It is known where it listens now.
    assert front.result(HUNG)
    assert is_held_by(locks, lease_of(first))
    caller.release(first)
    assert behind.result(HUNG)


@pytest.mark.proves("R5")
@pytest.mark.parametrize("wait", [0, 0.5])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "new"])
@pytest.mark.parametrize("fault", ["blackhole", "refuse", "hang", "slow"])
def test_r5_an_acquire_ends_within_its_wait_and_two_operation_timeouts(
    fault, connected, wait, caller, locks, proxy
):
    locks.configure(OPTIONS={})
    if connected:
        assert caller.acquire(distributed_lock("another"))
    match fault:
        case "hang":
            proxy.rule("*", "hang_after", times=None)
        case "slow":  # Each single answer comes in time; they add up.
            proxy.rule("*", f"delayreply:{0.6 * PATIENCE}", times=None)
        case _:
            getattr(proxy, fault)()
    with takes(at_most=wait + 2 * PATIENCE):
        try:
            assert caller.acquire(distributed_lock(NAME, wait=wait))
        except LockUnavailable as unavailable:
            assert NAME in str(unavailable)  # noqa: PT017
        else:
            assert fault == "slow"


@pytest.mark.proves("R5")
@pytest.mark.parametrize("fault", ["hang_before:GETRANGE", "hang_after:EXEC", "slow"])
def test_r5_so_does_one_without_scripts_though_it_takes_many_commands(fault, caller, locks, proxy):
    locks.configure(OPTIONS=forbid_scripting(locks))
    assert caller.acquire(distributed_lock("another"))
    action, _, command = fault.partition(":")
    slow = f"delayreply:{0.5 * PATIENCE}"  # Each single answer comes in time; they add up.
    proxy.rule(command or "*", action if command else slow, times=None)
    with takes(at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME))


LATE = 0.8 * ONE_TRY * PATIENCE  # Seconds of a look-up that leave a try little time.


@pytest.fixture
def look_ups(monkeypatch):
    """Have look-ups of the name "localhost" wait until told otherwise, or so many seconds."""

    def hold(seconds=HUNG):
        def look_up(host, *args, **kwargs):
            if host == "localhost":
                go_on.wait(seconds)
            return getaddrinfo(host, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        return go_on

    getaddrinfo, go_on = socket.getaddrinfo, threading.Event()
    yield hold
    go_on.set()


@pytest.fixture
def by_name(locks, proxy):
    """They reach the server by its name. It has the scripts."""
    with distributed_lock(NAME):
        pass
    url = f"redis://localhost:{proxy.port}/0"
    return locks.configure(LOCATION=url, TTL=60, OPTIONS={"socket_timeout": PATIENCE})


@pytest.mark.proves("R4")
@pytest.mark.parametrize("waits", [False, True])
def test_r4_a_connection_that_comes_late_serves_the_next_try_with_all_its_time(
    waits, by_name, proxy, look_ups, settings
):
    """With hardly any time, the try would be sent again at once, and might overtake itself."""
    late = f"delayreply:{LATE / 2}"
    add_rival(settings, by_name)
    if not waits:
        rule = proxy.rule_for_script(scripts.ACQUIRE.sha, late, times=None)
        look_ups(LATE)
        lock = distributed_lock(NAME, wait=0)
        assert lock.acquire()
        assert rule.hits == 1
        lock.release()
        return
    with rival(ttl=60):  # So does that of a waiter that has lost its own.
        waiting = in_thread(distributed_lock(NAME, wait=HUNG).acquire)
        wait_until(lambda: queued(by_name))
        look_ups(LATE)
        rule = proxy.rule_for_script(scripts.ACQUIRE.sha, late, times=None)
        dials = len(proxy.commands("HELLO"))
        proxy.cut()
        wait_until(lambda: rule.hits)
    assert waiting.result(HUNG)
    assert len(proxy.commands("HELLO")) == dials + 1


@pytest.mark.proves("R5")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "new"])
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
def test_r5_many_callers_of_a_silent_server_wait_at_the_same_time(
    fault, connected, caller, locks, proxy
):
    locks.configure(OPTIONS={})
    names = [f"{NAME}-{number}" for number in range(30)]
    if connected:
        for future in [caller.begin(distributed_lock(name, ttl=30)) for name in names]:
            assert future.result(HUNG)
    getattr(proxy, fault)()
    with takes(at_most=2 * PATIENCE + MANY):
        futures = [caller.begin(distributed_lock(f"{name}-again")) for name in names]
        for future in futures:
            with pytest.raises(LockUnavailable):
                future.result(HUNG)


def test_all_tasks_await_one_dial_each_within_its_own_time(locks, proxy, caplog):
    locks.configure(OPTIONS={})
    held_back = proxy.rule("HELLO", "hold")

    async def main():
        patient = asyncio.create_task(distributed_lock(NAME, ttl=15).aacquire())
        cancelled = asyncio.create_task(distributed_lock(f"{NAME}-2", ttl=15).aacquire())
        await await_until(lambda: held_back.hits)
        with takes(at_most=2 * PATIENCE / 10), pytest.raises(LockUnavailable):
            await distributed_lock(f"{NAME}-3", ttl=TTL / 10).aacquire()
        cancelled.cancel()
        with takes(at_most=1.0), pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.to_thread(proxy.forward_held)
        assert await patient
        assert len(proxy.commands("HELLO")) == 1

    asyncio.run(main())
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_dial_that_nobody_awaits_any_more_ends(locks, proxy, caplog):
    locks.configure(OPTIONS={})

    async def main():
        futures = [distributed_lock(f"{NAME}-{number}").aacquire() for number in range(5)]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(answer, LockUnavailable) for answer in answers)
        await await_until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    for fault in (proxy.blackhole, proxy.refuse):
        fault()
        asyncio.run(main())
        proxy.heal()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_slow_lookup_of_the_servers_name_counts_too(caller, locks, look_ups):
    go_on = look_ups()
    locks.configure(
        LOCATION=locks.server.url.replace("127.0.0.1", "localhost"),
        OPTIONS={"client_name": locks.prefix},
    )

    def dialing():
        return [one for one in threading.enumerate() if one.name == "redislock-dial"]

    with takes(at_most=2 * PATIENCE + MANY):
        futures = [caller.begin(distributed_lock(f"{NAME}-{n}")) for n in range(20)]
        for future in futures:
            with pytest.raises(LockUnavailable):
                future.result(HUNG)
    assert len(dialing()) <= DIALS_APART
    go_on.set()
    with caller.block(distributed_lock(NAME)):
        pass
    wait_until(lambda: not dialing())
    backends.reset()  # Closes what pool and watchdog have; a loop keeps one until it ends.
    wait_until(lambda: locks.connections() <= 1, message="no late dial has left a connection")


@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_does_not_answer_is_given_up_whatever_the_wait(
    waits, fault, caller, locks, proxy, settings
):
    locks.configure(OPTIONS={})
    add_rival(settings, locks)
    lock = distributed_lock(NAME, wait=HUNG)
    with rival() if waits else nullcontext():
        future = caller.begin_waiting(lock, locks) if waits else None
        getattr(proxy, fault)()
        begin = time.monotonic()
        with takes(at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
            (future or caller.begin(lock)).result(HUNG)
        assert waits or time.monotonic() - begin >= PATIENCE


@pytest.mark.parametrize("unavailable_after", [20, math.inf])
@pytest.mark.parametrize("waits", [False, True])
def test_a_wait_outlasts_an_outage_shorter_than_unavailable_after(
    waits, unavailable_after, caller, locks, proxy, settings
):
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=unavailable_after)
    add_rival(settings, locks)
    lock = distributed_lock(NAME, wait=HUNG)
    with rival(ttl=60) if waits else nullcontext():
        future = caller.begin_waiting(lock, locks) if waits else None
        asked = len(runs(proxy, scripts.ACQUIRE))
        proxy.refuse()
        future = future or caller.begin(lock)
        with pytest.raises(TimeoutError):
            future.result(2 * PATIENCE)
        proxy.heal()
        wait_until(lambda: len(runs(proxy, scripts.ACQUIRE)) > asked)
    assert future.result(HUNG)


# Commands that arrive when nobody waits for them any more


@pytest.mark.proves("P2")
def test_a_zombie_acquire_holds_the_lock_for_one_ttl_at_most(caller, locks, proxy, settings):
    locks.configure(OPTIONS={"socket_timeout": PATIENCE})
    add_rival(settings, locks)
    proxy.rule_for_script(scripts.ACQUIRE.sha, "hold", times=2)
    with pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME, ttl=3))
    assert is_left_clean(locks)
    assert proxy.forward_held() > 0
    with takes(at_most=3):
        assert rival(wait=HUNG).acquire()


@pytest.mark.proves("P3")
def test_a_zombie_acquire_or_release_does_no_harm_to_a_later_lease(caller, locks, proxy):
    proxy.rule_for_script(scripts.ACQUIRE.sha, "hold", times=1)
    proxy.rule_for_script(scripts.RELEASE.sha, "hold", times=1)
    lock, later = distributed_lock(NAME), rival()
    assert caller.acquire(lock)
    caller.release(lock)
    assert later.acquire()

    assert proxy.forward_held() == 2

    assert is_held_by(locks, lease_of(later))
    later.release()
    assert is_left_clean(locks)


@pytest.mark.proves("P6")
def test_a_zombie_place_in_the_queue_does_not_stop_the_others(caller, locks, proxy, settings):
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=0.1)
    add_rival(settings, locks)
    holder, next_lock = rival(ttl=60), rival(wait=HUNG)
    assert holder.acquire()
    proxy.rule_for_script(scripts.ACQUIRE.sha, "hold", times=2)
    with pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME, wait=HUNG))
    proxy.forward_held()
    assert queued(locks) == 1
    waiter = Blocking().begin_waiting(next_lock, locks)

    with hands_over(locks, waiter, next_lock):
        holder.release()


# The watchdog


@pytest.mark.proves("R7")
@pytest.mark.parametrize("action", [*LOST, "all cut"])
def test_r7_renewal_outlives_a_lost_command_and_connections_that_are_cut(action, locks, proxy):
    with distributed_lock(NAME, ttl=2 * TTL) as lease:
        for _ in range(2):
            if action == "all cut":
                proxy.cut()
            else:
                proxy.rule_for_script(scripts.RENEW.sha, action).wait()
            renewed = lease.renewals
            wait_until(lambda before=renewed: lease.renewals > before)
        assert is_held_by(locks, lease)


@pytest.mark.proves("R7")
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
def test_r7_a_lease_that_cannot_be_renewed_is_lost_at_its_deadline(fault, caller, locks, proxy):
    told = []
    ttl = 8
    with loses("unreachable"), caller.block(distributed_lock(NAME, ttl=ttl)) as lease:
        lease.on_lost(lambda lost: told.append(lost.lost_reason))
        getattr(proxy, fault)()
        with takes(at_least=1, at_most=ttl):
            wait_until(lambda: not lease.held)
        wait_until(lambda: told)
    assert told == ["unreachable"]
    assert lease.lost_reason == "unreachable"


@pytest.mark.proves("R7")
def test_r7_one_lease_in_trouble_does_not_cost_another_its_renewal(locks):
    with distributed_lock("healthy") as healthy:
        with loses("expired"), distributed_lock(NAME) as lease:
            locks.redis.delete(keys_of(locks).lock)
            wait_until(lambda: lease.lost_reason)
        renewals = healthy.renewals
        wait_until(lambda: healthy.renewals > renewals)


@pytest.mark.proves("R2", "R7")
def test_r7_a_renewal_that_is_answered_late_is_not_sent_again(proxy):
    caller = calling.Caller("default", "redislock", "process")
    renewing = RenewingConnection(Dialer(proxy.url, {}), caller, lambda _: None)
    call = Call(scripts.RENEW, NAME, ("token", 1000, renewal_count(True, 1)), HUNG)
    assert isinstance(renewing.call([call])[0], Answer)  # The server knows the script from now on.
    held_up = proxy.rule_for_script(scripts.RENEW.sha, "hold")
    new = proxy.rule("HELLO", "hang_before", times=None)  # It would take the old one's place.
    (trouble,) = renewing.call([call._replace(within=0.1)])
    assert isinstance(trouble, Unanswered)
    held_up.wait()
    new.wait()
    sent = len(proxy.commands("EVALSHA"))
    assert proxy.forward_held()
    now = clock.now()
    (answer,) = renewing.call([call])
    assert isinstance(answer, Answer)
    assert answer.sent < now
    assert len(proxy.commands("EVALSHA")) == sent
    renewing.close()


@pytest.mark.proves("R7")
def test_r7_a_renewal_that_hangs_goes_another_way_if_no_connection_can_be_dialed(proxy):
    caller, ways = calling.Caller("default", "redislock", "process"), []

    def otherwise(calls):
        ways.append(calls)
        return [Answer(b"", 0.0, 0.0)]

    renewing = RenewingConnection(Dialer(proxy.url, {}), caller, otherwise)
    call = Call(scripts.RENEW, NAME, ("token", 1000, renewal_count(True, 1)), HUNG)
    assert isinstance(renewing.call([call])[0], Answer)
    assert not ways
    proxy.rule_for_script(scripts.RENEW.sha, "hang_before", times=None)
    proxy.rule("HELLO", "cut_before", times=None)
    short = call._replace(within=0.1)
    wait_until(lambda: isinstance(renewing.call([short])[0], Answer))
    assert ways
    renewing.close()


# Being asked about it
