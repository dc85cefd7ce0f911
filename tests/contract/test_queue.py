"""R14: the lock passes from owner to owner in turn, and the dead and the stopped are no burden."""

import threading
import time
from functools import partial

import pytest

from django_redislock import distributed_lock
from django_redislock.backends.redis.shared_bell import SharedBell
from django_redislock.backends.watchdog import Watchdog
from django_redislock.rules import scripts
from tests.support.faults import (
    block_interpreter,
    calls,
    hands_over,
    lease_of,
    runs,
    slack,
    takes,
)
from tests.support.matrix import everywhere
from tests.support.others import add_rival, against_rival, bells, hold, queued, rival
from tests.support.processes import hear, say
from tests.support.stored import NAME, is_held_by, is_left_clean, keys_of, value_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, in_thread

CLAIM = 1.0  # Seconds a lease that was handed over waits for its confirmation.
LOOK_EVERY = 2.0  # Seconds after which a waiter looks by itself.


@pytest.fixture
def locks(locks, settings):
    """The default alias waits; the rival, in the part of another process, tries once."""
    locks.configure(TTL=30, WAIT=HUNG)
    with against_rival(locks, settings):
        yield locks


@pytest.fixture
def proxied(locks, proxy, settings):
    """The default alias goes through a proxy."""
    locks.on(proxy, TTL=30, WAIT=HUNG)
    add_rival(settings, locks)
    return proxy


@pytest.fixture
def alone(locks, own_server, settings):
    """Both aliases on a server that counts nobody else's commands."""
    shared = locks.server
    locks.on(own_server, TTL=30, WAIT=HUNG)
    add_rival(settings, locks)
    yield locks
    locks.on(shared)  # The other one is gone when all is looked at again.


def pass_through(**options):
    """Hold the lock for no time; returns the fence."""
    with distributed_lock(NAME, **options) as lease:
        return lease.fence


async def pass_by(way):
    """See pass_through()."""
    async with way.entered(distributed_lock(NAME)):
        pass


def wait_in_threads(name, count):
    """In a child: wait for the lock in many threads, tell of each grant, and hold it shortly."""

    def wait_once():
        with distributed_lock(name, wait=60) as lease:
            said.append(lease.fence)
            say(lease.fence)

    said = []
    threads = [threading.Thread(target=wait_once) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hear()


def spawn_waiter(spawn, locks, name=NAME, **options):
    """A child that stands in the queue."""
    place = queued(locks, name) + 1
    child = spawn(hold, name, **options)
    wait_until(lambda: queued(locks, name) == place)
    return child


# Served in turn, woken by the server


@pytest.mark.proves("P6", "R14")
@pytest.mark.slow
def test_an_idle_waiter_sends_at_most_one_command_per_second(caller, alone):
    locks, waiters = alone, 4
    with rival(ttl=60):
        futures = [caller.start(pass_by(caller.way)) for _ in range(waiters)]
        wait_until(lambda: queued(locks) == waiters)
        locks.redis.config_resetstat()
        begin = time.monotonic()
        time.sleep(2.5)
        # Each looks every two seconds, if not just now.
        looks = {"evalsha", "get"}
        wait_until(lambda: looks & {*calls(locks.redis.info("commandstats"))})
        # A command that a script runs is not one that was sent.
        sent = calls(locks.redis.info("commandstats"))
        seconds = time.monotonic() - begin
    assert sum(sent.get(name, 0) for name in ("evalsha", "eval", "subscribe")) <= waiters * seconds
    for future in futures:
        future.result(HUNG)


@pytest.mark.proves("P6", "R14")
@pytest.mark.parametrize("waiters", [1, 32])
def test_a_hand_over_costs_the_same_however_many_wait(waiters, alone):
    locks = alone
    with rival(ttl=60):
        futures = []
        for place in range(waiters):
            futures.append(in_thread(pass_through))
            wait_until(lambda place=place: queued(locks) > place)
        locks.redis.config_resetstat()
    for future in futures:
        future.result(HUNG)
    wait_until(lambda: is_left_clean(locks), 20)  # Before its ttl ends the last lease.
    done = calls(locks.redis.info("commandstats"))
    for look in ("config|resetstat", "info", "zcard", "exists"):
        done.pop(look, None)  # Ours.
    requests = sum(done.pop(name, 0) for name in ("evalsha", "eval", "subscribe"))
    hand_overs = waiters + 1  # The last release hands the lock to nobody.
    assert requests / hand_overs <= 5
    assert sum(done.values()) / hand_overs <= 24


# The dead, the stopped and the late


@pytest.mark.proves("P6", "R14")
def test_a_killed_waiter_is_passed_over_at_once_and_leaves_keys_that_expire(caller, locks, spawn):
    holder, lock = rival(ttl=60), distributed_lock(NAME)
    assert holder.acquire()
    child = spawn_waiter(spawn, locks)
    waiter = caller.begin_waiting(lock, locks)
    listening = bells(locks)
    child.kill()
    wait_until(lambda: bells(locks) < listening)
    assert 0 < locks.redis.pttl(keys_of(locks).queue) <= 6000
    with hands_over(locks, waiter, lock):
        holder.release()


@pytest.mark.proves("P6")
@pytest.mark.slow
def test_p6_a_stopped_process_delays_the_others_once_however_many_waiters_it_has(
    caller, locks, spawn
):
    lock, waiters = distributed_lock(NAME), 8
    with rival(ttl=60):
        child = spawn(wait_in_threads, NAME, waiters)
        wait_until(lambda: queued(locks) == waiters)
        waiter = caller.begin_waiting(lock, locks)
        child.stop()
    with takes(at_most=2):
        assert waiter.result(HUNG)
    # Back again, they wait for their turn and then have it, each once.
    child.cont()
    wait_until(lambda: queued(locks) == waiters)
    assert is_held_by(locks, lease_of(lock))
    caller.release(lock)
    fences = [child.read() for _ in range(waiters)]
    assert fences == sorted(set(fences))


@pytest.mark.proves("P1", "R14")
def test_a_process_that_stops_when_it_is_served_never_believes_to_hold_the_lock(locks, spawn):
    holder, lock = rival(ttl=60), rival(wait=HUNG)
    assert holder.acquire()
    before = lease_of(holder)
    child = spawn_waiter(spawn, locks)
    child.stop()
    with takes(at_least=CLAIM - 0.05, at_most=CLAIM + 1.5):  # Until then it is claimed.
        holder.release()
        assert lock.acquire()
    assert lease_of(lock) is not None
    child.cont()
    wait_until(lambda: queued(locks) == 1)
    assert is_held_by(locks, lease_of(lock))
    fence = lease_of(lock).fence
    lock.release()
    assert before.fence < fence < child.read()


@pytest.mark.proves("P6")
def test_a_late_waiter_keeps_its_place_once(locks, spawn):
    holder, second, third = (distributed_lock(NAME) for _ in range(3))
    assert holder.acquire()
    late = spawn_waiter(spawn, locks)
    second_waiter = Blocking().begin_waiting(second, locks)
    late.stop()
    holder.release()
    assert second_waiter.result(HUNG)

    third_waiter = Blocking().begin_waiting(third, locks)
    late.cont()
    wait_until(lambda: queued(locks) == 2)
    late.stop()  # It came first, so it is served before the third, and is late again.
    with takes(at_least=CLAIM - 0.05, at_most=LOOK_EVERY):  # So long it may claim the lock.
        second.release()
        assert third_waiter.result(HUNG)

    last = in_thread(pass_through)
    wait_until(lambda: queued(locks) == 1)
    late.cont()
    wait_until(lambda: queued(locks) == 2)
    third.release()  # This time it has to stand behind those who came meanwhile.
    assert last.result(HUNG) < late.read()


@pytest.mark.proves("P6", "R14")
@pytest.mark.waits
def test_a_lost_bell_costs_at_most_two_seconds(caller, locks, proxied):
    lock = distributed_lock(NAME)
    with rival(ttl=60):
        waiter = caller.begin_waiting(lock, locks)
        proxied.drop_pushes(1)
    with takes(at_most=LOOK_EVERY):
        assert waiter.result(HUNG)
    assert proxied.pushes_dropped == 1
    assert is_held_by(locks, lease_of(lock))


def test_a_wait_that_runs_out_while_it_is_served_is_served(caller, locks, proxied):
    lock = distributed_lock(NAME, wait=0.5)
    last_look = proxied.rule("EVALSHA", "hold", match="last")
    with rival(ttl=60):
        waiter = caller.begin_waiting(lock, locks)
        last_look.wait()  # Its wait has run out.
        proxied.drop_pushes(1)
    proxied.forward_held()
    assert waiter.result(HUNG)  # Its last look finds that the lock is its own.
    assert is_held_by(locks, lease_of(lock))


def test_after_a_crash_the_waiter_has_the_lock_when_the_lease_ends_and_no_newcomer_has(
    caller, locks, spawn
):
    ttl = 3
    holder = spawn(hold, NAME, ttl=ttl)
    holder.read()
    lock = distributed_lock(NAME)
    waiter = caller.begin_waiting(lock, locks)
    holder.kill()
    killed = time.monotonic()
    while not waiter.done():
        assert rival().acquire() is False
        assert time.monotonic() - killed < ttl + CLAIM + slack()
    assert waiter.result()
    assert is_held_by(locks, lease_of(lock))


# Confirming what was handed over


def test_a_lease_that_was_handed_over_survives_a_holder_that_is_blocked_at_once(caller, locks):
    way = caller.way
    block = {"sync": block_interpreter, "async": time.sleep}[way.name]

    async def hold_blocked():
        async with way.entered(distributed_lock(NAME, ttl=20)) as lease:
            block(CLAIM + 0.3)
            await way.ensure_held(lease)  # It is in doubt until its confirmation's answer is read.
            return lease.held, is_held_by(locks, lease)

    with rival(ttl=60):
        blocked = caller.start(hold_blocked())
        wait_until(lambda: queued(locks))
    assert blocked.result(HUNG) == (True, True)


@pytest.mark.proves("R14")
def test_a_hand_over_whose_confirmation_is_lost_is_confirmed_by_the_watchdog(
    caller, locks, proxied
):
    lock = distributed_lock(NAME)
    with rival(ttl=60):
        waiter = caller.begin_waiting(lock, locks)
        asked = len(runs(proxied, scripts.RENEW))
        confirmation = proxied.rule_for_script(scripts.RENEW.sha, "cut_before")
    assert waiter.result(HUNG)
    confirmation.wait()
    wait_until(lambda: len(runs(proxied, scripts.RENEW)) > asked + 1)
    wait_until(lambda: (value_of(locks) or b"")[32:33] == b"h")
    wait_until(lambda: lease_of(lock).held)


@everywhere
def test_a_hand_over_is_confirmed_at_once_also_by_a_server_that_has_just_been_restarted(
    caller, locks, monkeypatch
):
    # The watchdog would confirm it later.
    monkeypatch.setattr(Watchdog, "watch", lambda watchdog, lease, *at: None)
    with rival(ttl=60):
        waiter = caller.begin_waiting(distributed_lock(NAME), locks)
        locks.redis.script_flush()
    assert waiter.result(HUNG)
    wait_until(lambda: (value_of(locks) or b"")[32:33] == b"h")


# Few connections


def limit_connections(limit, locks, settings, target=None):
    """Let the default alias have so few; the rival has as many as it likes."""
    locks.on(target or locks.server, TTL=30, WAIT=HUNG, OPTIONS={"max_connections": limit})
    add_rival(settings, locks)


@pytest.mark.parametrize(
    ("limit", "threads", "names"), [(4, 48, 1), (8, 48, 1), (16, 64, 64)], ids=str
)
def test_more_threads_than_connections_share_them_safely_and_starve_nobody(
    limit, threads, names, locks
):
    locks.configure(OPTIONS={"max_connections": limit, "client_name": locks.prefix})

    def work(name):
        for _ in range(10 if names > 1 else 1):
            with distributed_lock(name) as lease:
                assert is_held_by(locks, lease)

    with distributed_lock(f"{NAME}-0"):  # Else all may have ended before they are seen.
        works = [in_thread(partial(work, f"{NAME}-{number % names}")) for number in range(threads)]
        most = wait_until(lambda: (seen := locks.connections()) > 1 and seen)
    while not all(one.done() for one in works):
        most = max(most, locks.connections())
        time.sleep(0.005)
    for one in works:
        one.result(0)
    assert 1 < most <= limit


def queue_up(count, served, locks):
    """Let threads queue for the lock one after the other; each notes when it is served."""

    def wait(number):
        with distributed_lock(NAME):
            served.append(number)

    threads = []
    for number in range(count):
        threads.append(in_thread(partial(wait, number)))
        wait_until(lambda: queued(locks) == len(threads))
    return threads


@pytest.mark.proves("P6", "R14")
def test_p6_more_waiting_threads_than_connections_are_served_in_turn_and_hold_up_no_free_lock(
    locks, settings, if_rung
):
    limit_connections(6, locks, settings)
    served = []
    with rival(ttl=60):
        threads = queue_up(12, served, locks)
        newcomer = distributed_lock(NAME, wait=0)
        assert not newcomer.acquire()
        with takes(at_most=2):  # All together: a wait for the next look would take as long each.
            for number in range(20):
                with distributed_lock(f"{NAME}-{number}"):
                    pass
        begin = time.monotonic()
    for thread in threads:
        thread.result(HUNG)
    assert served == list(range(12))
    assert time.monotonic() - begin < if_rung  # As all were.


def test_waiters_whose_shared_connection_is_lost_look_by_themselves_and_keep_their_place(
    locks, settings, proxy
):
    limit_connections(4, locks, settings, proxy)
    served = []
    with rival(ttl=60):
        threads = queue_up(5, served, locks)
        looks = len(runs(proxy, scripts.ACQUIRE))
        proxy.cut()
        with takes(at_most=2 * LOOK_EVERY):
            wait_until(lambda: len(runs(proxy, scripts.ACQUIRE)) >= looks + len(threads))
    for thread in threads:
        thread.result(HUNG)
    assert served == list(range(5))


@pytest.mark.waits
def test_waiters_whose_shared_connection_is_half_open_notice_it(
    locks, settings, proxy, monkeypatch, if_rung
):
    monkeypatch.setattr(SharedBell, "CHECK_EVERY", 1.0)
    limit_connections(4, locks, settings, proxy)
    with rival(ttl=60):
        lock = distributed_lock(NAME)
        thread = in_thread(lock.acquire)
        wait_until(lambda: queued(locks))
        proxy.rule("SUBSCRIBE", "hang_before")  # By which it is tested.
        wait_until(lambda: len(proxy.commands("SUBSCRIBE")) > 2)
        asked = proxy.commands("SUBSCRIBE")[2].time
        wait_until(lambda: runs(proxy, scripts.ACQUIRE)[-1].time > asked)
        begin = time.monotonic()
    assert thread.result(HUNG)
    assert time.monotonic() - begin < if_rung


def test_the_shared_connection_is_closed_when_nobody_needs_it_any_more(
    locks, settings, monkeypatch
):
    monkeypatch.setattr(SharedBell, "CHECK_EVERY", 0.2)
    limit_connections(4, locks, settings)
    before = set(threading.enumerate())

    def listening():
        return [one.name for one in set(threading.enumerate()) - before if "bell" in one.name]

    for _ in range(2):
        with rival(ttl=60):
            threads = [in_thread(pass_through) for _ in range(5)]
            wait_until(lambda: queued(locks) == 5)
        for thread in threads:
            thread.result(HUNG)
        wait_until(lambda: not locks.redis.pubsub_channels(f"{locks.prefix}*"))
        wait_until(lambda: not listening())
