"""A lease that was handed over is no more fragile than one that was granted at once.

The waiter takes it up without a round trip and confirms it on the way; these tests take the
connections away meanwhile.
"""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest

from django_redislock import LockUnavailable, clock, distributed_lock
from django_redislock.backends.redis import calling
from django_redislock.backends.redis.dialing import Dialer
from django_redislock.backends.redis.server import RenewingConnection
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import CONFIRM_WITHIN
from django_redislock.rules.lease_state import drift
from django_redislock.rules.steps import Answer, Unanswered
from tests.support.backends import UNHURRIED
from tests.support.faults import loses, takes
from tests.support.others import against_rival, queued, rival
from tests.support.stored import NAME, is_held_by, is_left_clean, value_of
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import in_thread

TTL = 30.0  # Much longer than a claim, so that one is told from the other.
PAUSE = 0.005  # Seconds between two looks at a lease.
AT_ONCE = 0.005  # Seconds within which a server answers a ping that does not stand still.


@pytest.fixture
def locks(locks, proxy, settings):
    """The default alias goes through the proxy, the rival straight to the server."""
    locks.on(proxy, TTL=TTL, WAIT=HUNG)
    with against_rival(locks, settings):
        yield locks


@contextmanager
def handed_over(caller, locks, **options):
    """A block under a lock that another process has handed over to it.

    Whoever hears of it late asks the server instead, and has no claim. Then it is handed over anew.
    """
    is_handed_over = False
    while not is_handed_over:
        holder, lock = rival(ttl=60), distributed_lock(NAME, **options)
        assert holder.acquire()
        freed = in_thread(lambda holder=holder: release_when_somebody_waits(holder, locks))
        with caller.block(lock) as lease:
            freed.result(HUNG)
            # The renewal that confirms a claim may be over already.
            is_handed_over = lease.is_unconfirmed or bool(lease.renewals)
            if is_handed_over:
                yield lease


def release_when_somebody_waits(holder, locks):
    wait_until(lambda: queued(locks))
    holder.release()  # Taken by another thread: the handle has just one lease.


def renews(args):
    """Whether it is a renewal by the watchdog, and not the confirmation of the waiter."""
    confirms = {b"r00000", b"-00000"}
    return args[0].decode() == scripts.RENEW.sha and confirms.isdisjoint(args)


def with_an_idle_watchdog(locks):
    """Let the watchdog have a connection, as after any lease that lasted a while."""
    with distributed_lock("before", ttl=6) as lease:
        wait_until(lambda: lease.renewals)


def stays_held(lease, locks, seconds):
    """Check that the lease says at every moment that it is held.

    A process that had to wait for a processor may have missed its claim's second, by one long wait
    or by many short ones, and so may a server; but nothing is lost.
    """
    late, last = 0.0, time.monotonic()
    until = last + seconds
    while last < until:
        time.sleep(PAUSE)
        now = time.monotonic()
        late += now - last - PAUSE
        locks.redis.ping()
        last = time.monotonic()
        if last - now > AT_ONCE:
            late += last - now
        if late > CONFIRM_WITHIN / 8:
            wait_until(lambda: lease.held)
        assert lease.held, f"not held {until - last:.2f} s before the end, {late:.2f} s late"


# The watchdog's connection


def test_a_watchdog_whose_connection_was_closed_for_idleness_confirms_in_time(caller, locks, proxy):
    with_an_idle_watchdog(locks)
    proxy.cut()
    with handed_over(caller, locks) as lease:
        stays_held(lease, locks, CONFIRM_WITHIN + 0.3)
        assert lease.renewals
        assert is_held_by(locks, lease)
    assert is_left_clean(locks)


@pytest.mark.as_permit
@pytest.mark.proves("R14")
@pytest.mark.parametrize("action", ["hang_before", "hang_after", "cut_before", "cut_after"])
def test_a_first_confirmation_that_fails_is_tried_again_within_the_claim(
    action, caller, locks, proxy
):
    rule = proxy.rule("EVALSHA", action, match=renews)
    with handed_over(caller, locks) as lease:
        stays_held(lease, locks, CONFIRM_WITHIN + 0.3)
        assert rule.hits
        assert lease.renewals
    assert is_left_clean(locks)


def test_a_lease_is_held_without_a_pause_though_the_server_is_far_away(caller, locks, proxy):
    proxy.rule("*", "delayreply:0.1", times=None)
    with handed_over(caller, locks) as lease:
        stays_held(lease, locks, CONFIRM_WITHIN + 0.3)
        assert lease.renewals


@pytest.mark.parametrize("dial_fails", [False, True])
def test_renewals_go_on_by_a_new_connection_if_the_old_one_is_dead(dial_fails, locks, proxy):
    with distributed_lock(NAME, renew=False) as lease:
        asking = calling.Caller("default", locks.prefix, "ours")
        connection = RenewingConnection(Dialer(proxy.url, {}), asking, lambda _: None)
        call = flows.renewal_call(lease.renewal(clock.now()), HUNG)._replace(within=0.2)
        wait_until(lambda: isinstance(connection.call([call])[0], Answer))
        proxy.rule_for_script(scripts.RENEW.sha, "hang_before")
        failed = proxy.rule("HELLO", "cut_before") if dial_fails else None
        assert isinstance(connection.call([call])[0], Unanswered)
        if failed:
            failed.wait()
        wait_until(lambda: isinstance(connection.call([call])[0], Answer))
        connection.close()


# In doubt: the claim's second is over, and nobody knows whether the confirmation has arrived


@contextmanager
def in_doubt(caller, locks, proxy):
    """A block under a lease whose confirmation has arrived, but every answer was lost."""
    proxy.rule("EVALSHA", "hang_before", match=renews, times=None)
    with handed_over(caller, locks) as lease:
        wait_until(lambda: (value_of(locks) or b"")[32:33] == b"h")  # The confirmation.
        wait_until(lambda: not lease.held)
        yield lease


@pytest.mark.proves("P1", "R14")
def test_a_lease_in_doubt_is_not_held_and_not_lost_either(caller, locks, proxy):
    with in_doubt(caller, locks, proxy) as lease:
        assert lease.lost_reason is None
        assert lease.expires_in == 0.0
        with pytest.raises(LockUnavailable), takes(at_most=10):
            caller.ensure_held(lease)
        proxy.clear_rules()
        wait_until(lambda: lease.held)
        assert lease.expires_in > TTL / 2
        assert is_held_by(locks, lease)
    assert is_left_clean(locks)


@pytest.mark.parametrize("asks", [True, False])
def test_to_ask_about_a_lease_in_doubt_or_to_leave_its_block_settles_it(asks, caller, locks, proxy):
    with in_doubt(caller, locks, proxy) as lease:
        proxy.clear_rules()
        if asks:
            caller.run(caller.way.ensure_held(lease))
            assert lease.held
    assert is_left_clean(locks)


async def test_the_event_loop_never_waits_for_a_lease_in_doubt(locks, proxy, settings):
    async def tick():
        nonlocal longest
        while True:
            last = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - last)

    settings.REDISLOCK["default"]["OPTIONS"] = UNHURRIED
    holder, longest = rival(ttl=60), 0.0
    assert await holder.aacquire()
    proxy.rule("EVALSHA", "hang_before", match=renews, times=None)
    lock = distributed_lock(NAME)
    waiter = asyncio.create_task(lock.__aenter__())
    await await_until(lambda: queued(locks))
    await holder.arelease()
    lease = await waiter
    await await_until(lambda: not lease.held)
    ticking = asyncio.create_task(tick())
    proxy.blackhole()
    assert (lease.held, lease.expires_in, lease.lost_reason) == (False, 0.0, None)
    assert "of 'lottery'" in repr(lease)
    with pytest.raises(LockUnavailable, match="aensure_held"):
        lease.ensure_held()  # It would have to wait.
    leaving = asyncio.create_task(lock.__aexit__(None, None, None))
    await asyncio.sleep(0.5)
    proxy.clear_rules()
    proxy.heal()
    await leaving
    ticking.cancel()
    assert longest < HUNG / 4  # An answer would be awaited three times as long.
    assert is_left_clean(locks)


# At the end


def test_a_short_block_leaves_nothing_behind_when_the_server_is_away_at_its_end(
    caller, locks, proxy
):
    with handed_over(caller, locks, ttl=10.0):
        proxy.blackhole()
        healing = threading.Timer(2 * CONFIRM_WITHIN, proxy.heal)
        healing.start()
    healing.join()
    assert is_left_clean(locks)


def test_what_is_left_of_an_unreachable_lease_is_freed_when_its_block_ends(caller, locks, proxy):
    """Its renewals were carried out, so the key would outlast the lease."""
    ttl = 6
    with loses("unreachable"), caller.block(distributed_lock(NAME, ttl=ttl)) as lease:
        proxy.rule("EVALSHA", "cut_after", match=renews, times=None)
        wait_until(lambda: lease.lost_reason)
        assert is_held_by(locks, lease)
    assert is_left_clean(locks)


def test_expires_in_tells_of_the_lease_and_not_of_the_claim(caller, locks):
    with handed_over(caller, locks) as lease:
        assert TTL / 2 < lease.expires_in <= TTL - drift(TTL)


def test_a_handed_over_lease_that_is_not_renewed_is_confirmed_all_the_same(caller, locks, proxy):
    with handed_over(caller, locks, renew=False) as lease:
        wait_until(lambda: not lease.is_unconfirmed)
        stays_held(lease, locks, CONFIRM_WITHIN)
