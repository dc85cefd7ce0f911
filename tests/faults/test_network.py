"""The network cuts, hangs, delays and refuses: nothing is lost, and no answer is a guess."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
import time

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
from tests.support.stored import NAME, channels, is_held_by, is_left_clean, keys_of, value_of
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


@pytest.mark.proves("R1")
@pytest.mark.parametrize("action", ["cut_after", "cut_before", "hang_after", "hang_before"])
def test_r1_a_start_whose_answer_is_lost_is_asked_for_once_more_and_counts_once(
    action, caller, locks, proxy
):
    rate = Rate(NAME, "2/h", burst=2)
    proxy.rule_for_script(scripts.TAKE_START.sha, action)
    assert caller.acquire(distributed_lock(limits=[rate]))
    (row,) = held.list()
    assert row.starts_left == 1
    assert caller.acquire(distributed_lock(limits=[rate]))
    assert not caller.acquire(distributed_lock(limits=[rate]))


@pytest.mark.proves("R4")
def test_r4_a_start_that_nobody_answers_for_is_given_back(caller, locks, proxy):
    proxy.rule_for_script(scripts.TAKE_START.sha, "cut_after", times=2)
    with pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(limits=[Rate(NAME, "1/h")]))
    assert caller.acquire(distributed_lock(limits=[Rate(NAME, "1/h")]))


@pytest.mark.as_permit
@pytest.mark.proves("P4", "R1")
@pytest.mark.parametrize("wait", [0, 5])
@pytest.mark.parametrize("action", ["cut_after", "cut_before", "hang_after", "hang_before"])
def test_r1_an_acquire_that_is_not_answered_is_sent_again_with_the_same_token(
    action, wait, caller, locks, proxy
):
    proxy.rule_for_script(scripts.ACQUIRE.sha, action)
    lock = distributed_lock(NAME, wait=wait)

    assert caller.acquire(lock)

    first, resend = runs(proxy, scripts.ACQUIRE)
    assert first.token == resend.token
    assert is_held_by(locks, lease_of(lock))
    caller.release(lock)
    assert is_left_clean(locks)


@pytest.mark.proves("P4", "R1")
def test_r1_an_answer_that_is_lost_when_the_lock_is_busy_is_not_a_grant(caller, locks, proxy):
    with rival():
        proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
        assert caller.acquire(distributed_lock(NAME)) is False


@pytest.mark.proves("R2")
def test_r2_the_deadline_counts_from_when_the_acquire_was_sent(caller, locks, proxy):
    proxy.rule_for_script(scripts.ACQUIRE.sha, "delayreply:0.25")
    with caller.block(distributed_lock(NAME, renew=False)) as lease:
        assert lease.expires_in <= TTL - 0.25


@pytest.mark.proves("R2")
def test_r2_the_deadline_counts_from_when_the_renewal_was_sent(locks, proxy):
    with distributed_lock(NAME, renew=False) as lease:
        wait_until(lambda: lease.expires_in < TTL - 0.5)
        before = time.monotonic() + lease.expires_in
        proxy.rule_for_script(scripts.RENEW.sha, "delayreply:0.25")
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


@pytest.mark.proves("R3")
@pytest.mark.usefixtures("undo_in_time")
def test_r3_a_server_whose_every_grant_is_late_is_unavailable_and_keeps_no_lease(
    caller, locks, proxy
):
    locks.configure(OPTIONS={"socket_timeout": 12})
    proxy.rule_for_script(scripts.ACQUIRE.sha, "delayreply:0.3", times=None)
    with pytest.raises(LockUnavailable, match="later than the ttl"):
        caller.acquire(distributed_lock(NAME, ttl=0.2))
    assert is_left_clean(locks)


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
@pytest.mark.parametrize("action", ["cut_after", "cut_before", "hang_after", "hang_before"])
def test_r6_a_release_that_is_not_answered_is_sent_again_and_is_a_success(
    action, caller, locks, proxy
):
    lock = distributed_lock(NAME)
    caller.acquire(lock)
    proxy.rule_for_script(scripts.RELEASE.sha, action)
    caller.release(lock)
    assert is_left_clean(locks)


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
def test_r6_a_lost_answer_does_not_hide_that_the_lease_was_released_by_force(caller, locks, proxy):
    lock = distributed_lock(NAME)
    caller.acquire(lock)
    assert held.force_release(NAME, lease_of(lock).id, using=RIVAL)
    proxy.rule_for_script(scripts.RELEASE.sha, "cut_after")
    with pytest.raises(LockLost, match="by force"):
        caller.release(lock)


@pytest.mark.proves("R6")
def test_r6_a_run_whose_end_was_not_noted_before_its_lease_was_over_says_so(locks, proxy, caplog):
    locks.configure(OPTIONS=UNHURRIED)

    @single_instance_task(key=NAME, name="tests.not-noted", ttl=4, renew=False, once=60)
    def draw() -> str:
        proxy.rule_for_script(scripts.CONCLUDE.sha, "cut_before")
        proxy.rule_for_script(scripts.CONCLUDE.sha, "delay:4.5")
        return "drawn"

    assert draw() == "drawn"
    assert len(runs(proxy, scripts.CONCLUDE)) == 2
    assert caplog.text.count(f"Left the block of lock {NAME!r}: Lock {NAME!r} is unavailable") == 1
    noted = task_runs.record(NAME)
    assert noted.last_success is None


@pytest.mark.proves("R6")
def test_r6_a_run_whose_noted_end_is_told_after_its_lease_was_over_is_a_success(
    locks, proxy, settings, caplog
):
    locks.configure(OPTIONS=UNHURRIED)
    add_rival(settings, locks)
    next_lock = rival(wait=HUNG)
    waiting = []

    @single_instance_task(key=NAME, name="tests.noted", ttl=4, renew=False, once=60)
    def draw() -> str:
        waiting.append(Blocking().begin_waiting(next_lock, locks))
        proxy.rule_for_script(scripts.CONCLUDE.sha, "cut_after")
        proxy.rule_for_script(scripts.CONCLUDE.sha, "delay:4.5")
        return "drawn"

    assert draw() == "drawn"
    assert len(runs(proxy, scripts.CONCLUDE)) == 2
    assert waiting[0].result(HUNG)
    assert "Left the block" not in caplog.text
    noted = task_runs.record(NAME)
    assert noted.last_success is not None


def test_release_says_so_if_the_server_never_answers(caller, locks, proxy):
    locks.configure(OPTIONS={})
    lock = distributed_lock(NAME)
    caller.acquire(lock)
    lease = lease_of(lock)
    proxy.blackhole()
    with takes(at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
        caller.release(lock)
    assert not lease.held


@pytest.mark.parametrize("raised", [None, RuntimeError("of the body")])
def test_leaving_a_block_tries_until_the_deadline_then_logs_and_does_not_raise(
    raised, caller, locks, proxy, caplog
):
    # To come in, it has all the time of the world.
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=HUNG)

    def body():
        with caller.block(distributed_lock(NAME, ttl=3, wait=HUNG)):
            proxy.blackhole()
            if raised:
                raise raised

    with takes(at_least=2.5, at_most=3):
        if raised:
            with pytest.raises(RuntimeError, match="of the body"):
                body()
        else:
            body()
    assert caplog.text.count(f"Left the block of lock {NAME!r}") == 1


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
        case "blackhole":
            proxy.blackhole()
        case "refuse":
            proxy.refuse()
        case "hang":
            proxy.rule("*", "hang_after", times=None)
        case "slow":  # Each single answer comes in time; they add up.
            proxy.rule("*", f"delayreply:{0.6 * PATIENCE}", times=None)
    lock = distributed_lock(NAME, wait=wait)
    with takes(at_most=wait + 2 * PATIENCE):
        try:
            assert caller.acquire(lock)
        except LockUnavailable as unavailable:
            assert NAME in str(unavailable)  # noqa: PT017
        else:
            assert fault == "slow"


@pytest.mark.proves("R5")
@pytest.mark.parametrize("fault", ["hang_before:GETRANGE", "hang_after:EXEC", "slow"])
def test_r5_so_does_one_without_scripts_though_it_takes_many_commands(fault, caller, locks, proxy):
    locks.configure(OPTIONS=forbid_scripting(locks))
    assert caller.acquire(distributed_lock("another"))
    if fault == "slow":  # Each single answer comes in time; they add up.
        proxy.rule("*", f"delayreply:{0.5 * PATIENCE}", times=None)
    else:
        action, _, command = fault.partition(":")
        proxy.rule(command, action, times=None)
    with takes(at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME))


LATE = 0.8 * ONE_TRY * PATIENCE  # Seconds of a look-up that leave a try little time.


@pytest.fixture
def slow_lookup(monkeypatch):
    """From its call on, a look-up of the name "localhost" is late."""

    def look_up(host, *args, **kwargs):
        if host == "localhost":
            never.wait(LATE)
        return getaddrinfo(host, *args, **kwargs)

    getaddrinfo, never = socket.getaddrinfo, threading.Event()
    return lambda: monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.fixture
def by_name(locks, proxy):
    """They reach the server by its name. It has the scripts."""
    with distributed_lock(NAME):
        pass
    url = f"redis://localhost:{proxy.port}/0"
    return locks.configure(LOCATION=url, TTL=60, OPTIONS={"socket_timeout": PATIENCE})


@pytest.mark.proves("R4")
def test_r4_a_connection_that_comes_late_serves_the_next_try_with_all_its_time(
    by_name, proxy, slow_lookup
):
    """With hardly any time, the try would be sent again at once, and might overtake itself."""
    rule = proxy.rule_for_script(scripts.ACQUIRE.sha, f"delayreply:{LATE / 2}", times=None)
    slow_lookup()
    lock = distributed_lock(NAME, wait=0)
    assert lock.acquire()
    assert rule.hits == 1
    lock.release()


@pytest.mark.proves("R4")
def test_r4_so_does_that_of_a_waiter_that_has_lost_its_own(by_name, proxy, slow_lookup, settings):
    add_rival(settings, by_name)
    with rival(ttl=60):
        waiting = in_thread(distributed_lock(NAME, wait=HUNG).acquire)
        wait_until(lambda: queued(by_name))
        slow_lookup()
        rule = proxy.rule_for_script(scripts.ACQUIRE.sha, f"delayreply:{LATE / 2}", times=None)
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


def test_a_slow_lookup_of_the_servers_name_counts_too(caller, locks, monkeypatch):
    def look_up(host, *args, **kwargs):
        if host == "localhost":
            answers.wait(HUNG)
        return getaddrinfo(host, *args, **kwargs)

    getaddrinfo, answers = socket.getaddrinfo, threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    locks.configure(
        LOCATION=locks.server.url.replace("127.0.0.1", "localhost"),
        OPTIONS={"client_name": locks.prefix},
    )

    def connections():
        return sum(one["name"] == locks.prefix for one in locks.redis.client_list())

    try:
        with takes(at_most=2 * PATIENCE + MANY):
            futures = [caller.begin(distributed_lock(f"{NAME}-{n}")) for n in range(20)]
            for future in futures:
                with pytest.raises(LockUnavailable):
                    future.result(HUNG)
        dials = [one for one in threading.enumerate() if one.name == "redislock-dial"]
        assert len(dials) <= DIALS_APART
    finally:
        answers.set()
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    caller.release(lock)
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "redislock-dial"])
    backends.reset()  # Closes what pool and watchdog have; a loop keeps one until it ends.
    wait_until(lambda: connections() <= 1, message="no late dial has left a connection")


@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
def test_an_acquire_gives_up_a_server_that_does_not_answer_whatever_its_wait(
    fault, caller, locks, proxy
):
    locks.configure(OPTIONS={})
    getattr(proxy, fault)()
    with takes(at_least=PATIENCE, at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME, wait=10))


def test_a_waiter_gives_up_a_server_that_does_not_answer_any_more(caller, locks, proxy, settings):
    locks.configure(OPTIONS={})
    add_rival(settings, locks)
    with rival():
        future = caller.begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        proxy.refuse()
        with takes(at_most=2 * PATIENCE), pytest.raises(LockUnavailable):
            future.result(HUNG)


@pytest.mark.parametrize("unavailable_after", [20, math.inf])
def test_a_wait_outlasts_an_outage_shorter_than_unavailable_after(
    unavailable_after, caller, locks, proxy
):
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=unavailable_after)
    proxy.refuse()
    future = caller.begin(distributed_lock(NAME, wait=HUNG))
    threading.Timer(2 * PATIENCE, proxy.heal).start()
    assert future.result(HUNG)


def test_a_waiter_whose_server_comes_back_in_time_waits_on(caller, locks, proxy, settings):
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=20)
    add_rival(settings, locks)
    with rival(ttl=60):
        future = caller.begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        asked = len(runs(proxy, scripts.ACQUIRE))
        proxy.refuse()
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
def test_r7_renewal_outlives_connections_that_are_cut(locks, proxy):
    with distributed_lock(NAME) as lease:
        for renewals in range(4):  # A third of the ttl each.
            proxy.cut()
            wait_until(lambda done=renewals: lease.renewals > done or not lease.held)
        assert lease.held
        assert is_held_by(locks, lease)


@pytest.mark.proves("R7")
@pytest.mark.parametrize("action", ["cut_after", "cut_before", "hang_after", "hang_before"])
def test_r7_renewal_outlives_a_lost_command(action, locks, proxy):
    with distributed_lock(NAME, ttl=2 * TTL) as lease:
        rule = proxy.rule_for_script(scripts.RENEW.sha, action)
        rule.wait()
        renewed = lease.renewals
        wait_until(lambda: lease.renewals > renewed)
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
def test_r7_a_lost_lease_does_not_come_back_with_the_network(locks, proxy):
    lock = distributed_lock(NAME, ttl=2)
    lock.acquire()
    lease = lease_of(lock)
    proxy.blackhole()
    wait_until(lambda: lease.lost_reason)
    wait_until(lambda: value_of(locks) is None)
    proxy.heal(deliver=True)
    with distributed_lock("another") as other:  # Its renewal shares the connection.
        wait_until(lambda: other.renewals)
    assert not lease.held
    assert value_of(locks) is None


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


@pytest.mark.proves("P4")
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
@pytest.mark.parametrize("verify", [True, False], ids=["ensure_held", "renew"])
def test_asking_the_server_never_guesses(verify, fault, caller, locks, proxy):
    locks.configure(OPTIONS={"socket_timeout": 1}, UNAVAILABLE_AFTER=HUNG)
    with caller.block(distributed_lock(NAME, ttl=60, wait=HUNG)) as lease:
        getattr(proxy, fault)()
        with takes(at_most=2), pytest.raises(LockUnavailable):
            caller.ensure_held(lease) if verify else caller.renew(lease)
        assert lease.held  # Nothing is known, but its time is not over.
        proxy.heal()


def test_a_connection_lost_by_one_thread_is_not_lent_to_the_next(locks, proxy):
    names = [f"{NAME}-{number}" for number in range(4)]
    for name in names:
        in_thread(distributed_lock(name).acquire).result(HUNG)
    proxy.cut()
    for name in names:
        assert distributed_lock(f"{name}-again").acquire()
