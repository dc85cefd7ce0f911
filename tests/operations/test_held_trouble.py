"""What operators look for in a list: holders in trouble, and what will never become free."""

import time
from itertools import product

import pytest

from django_redislock import LockTimeout, LockUnavailable, distributed_lock, held
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import CONFIRM_WITHIN
from django_redislock.rules.keys import index_key
from django_redislock.rules.steps import Call
from django_redislock.rules.stored import LONGEST_OWNER, Owner
from django_redislock.testing import LockTestKit
from tests.support.backends import DEFAULTS
from tests.support.matrix import (
    MEMORY,
    everywhere,
    in_turn,
    needs_scripts,
    on_servers,
    places,
    unscripted,
)
from tests.support.others import held_by_other, hold, queued
from tests.support.servers import KINDS
from tests.support.stored import NAME, keys_of, value_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways, in_thread

pytestmark = needs_scripts


def seen(name=NAME):
    """The lock, which must be held."""
    found = held.get(name)
    assert found is not None
    return found


def listed():
    """The state of all that lists show, by name."""
    return {one.name: one.state for one in held.list()}


def past():
    """Who held the lock before, and how that ended; the latest last."""
    return [(one.owner.pid, one.ended) for one in held.detail(NAME).past]


def states_until_free(name=NAME):
    """In which states a lock is seen before it becomes free."""
    states = set()
    while lock := held.get(name):
        states.add(lock.state)
        time.sleep(0.01)
    return states


@on_servers
def test_a_lock_that_was_asked_for_again_is_listed_until_it_ends(place):
    args = ("0123456789abcdef" * 2, "fedcba9876543210", 60_000, "try", "0", "", "-", "owner")
    for _ in range(2):
        assert backends["default"].run(flows.result_of(Call(scripts.ACQUIRE, NAME, args, HUNG)))
        assert listed() == {NAME: "held"}
        # Here it should have ended.
        place.locks.redis.zadd(index_key(place.locks.prefix), {keys_of(place.locks).lock: 1})
    assert listed() == {}


# --- overdue: a renewal was due and was missed ----------------------------------------------------


def test_a_holder_that_dies_before_its_first_renewal_is_overdue_and_then_expired(locks, spawn):
    child = spawn(hold, ttl=12)
    child.read()
    assert (seen().state, seen().renewals, seen().gone) == ("held", 0, False)
    child.kill()
    assert seen().gone  # Seen at once by those on the same host.
    wait_until(lambda: seen().state == "overdue")
    assert 0 < (seen().expires_in or 0) <= 4.0
    assert past() == []  # As long as it may be alive it is the present.
    locks.redis.delete(keys_of(locks).lock)  # As it will be when the ttl is over.
    assert past() == [(child.pid, "expired")]


def test_a_holder_that_dies_after_a_hand_over_is_overdue(locks, spawn):
    with distributed_lock(NAME):
        child = spawn(hold, ttl=12)
        wait_until(lambda: queued(locks) == 1)
    child.read()
    wait_until(lambda: (value_of(locks) or b"")[32:33] == b"h")  # Its confirmation has come.
    child.kill()
    assert seen().state == "held"
    wait_until(lambda: seen().state == "overdue")


def test_a_holder_that_dies_between_renewals_is_overdue(locks, spawn):
    child = spawn(hold, ttl=10)
    child.read()
    wait_until(lambda: seen().renewals >= 2)
    child.kill()
    wait_until(lambda: seen().state == "overdue")


@places(*KINDS, MEMORY)
def test_a_lease_that_ends_by_max_hold_is_never_overdue(place):
    limits = [6.0, 9.0, 9.0375, 15.0]
    locks = [distributed_lock(str(limit), ttl=9, max_hold=limit) for limit in limits]
    assert all(lock.acquire() for lock in locks)
    states = set()
    while now := listed():
        states |= {*now.items()}
        time.sleep(0.02)
    assert states == {(str(limit), "held") for limit in limits}


@in_turn
@both_ways
async def test_a_lease_that_is_not_renewed_is_never_overdue(way, place):
    lock = distributed_lock(NAME)
    assert await way.acquire(lock)
    next_one = distributed_lock(NAME, ttl=6, renew=False, wait=HUNG)

    async def take():
        await way.acquire(next_one)
        return next_one.lease

    waiter = way.start(take)
    await way.until(lambda: seen().waiters == 1)
    await way.release(lock)
    lease = await waiter.result()
    await way.renew(lease)
    assert states_until_free() == {"held"}


def test_a_lease_whose_renewal_is_slow_once_is_not_overdue(locks, make_proxy):
    proxy = make_proxy(locks.server)
    # The try that hangs is given up long before the lease is overdue, which it is after 10 seconds.
    locks.on(proxy, TTL=15, OPTIONS={"socket_timeout": 0.5})
    # Looks go past the proxy.
    proxy.rule_for_script(scripts.RENEW.sha, "hang_before")
    lock = distributed_lock(NAME)
    with lock as lease:
        locks.on(locks.server, TTL=15)
        states = set()
        while lease.renewals < 2:
            states.add(seen().state)
            time.sleep(0.01)
        assert states == {"held"}


# --- who held it before ---------------------------------------------------------------------------


def test_a_dead_holder_that_somebody_waited_for_is_in_the_past_as_expired(locks, spawn):
    child = spawn(hold, ttl=9)
    child.read()
    child.kill()
    with distributed_lock(NAME, wait=HUNG) as lease:
        assert past() == [(child.pid, "expired")]
        assert lease.held


@on_servers
def test_a_lease_is_in_the_past_once_however_often_it_was_seen(place):
    for success in (True, False):
        lock = distributed_lock(NAME, ttl=30)
        assert lock.acquire()
        wait_until(lambda: (seen().held_for or 0) > 1.6)
        for _ in range(3):
            assert distributed_lock(NAME).locked()
        lock.lease.renew()
        lock.release(success)
    client = place.locks.redis
    assert [ended for _, ended in past()] == ["done", "failed"]
    assert client.llen(keys_of(place.locks).past) == 2


# --- right after a hand-over ----------------------------------------------------------------------


def claim_seen_twice(locks, spawn):
    """Let a child have a claim that it cannot confirm: its pid, and what two others see of it.

    None if the claim may have been over by then, as the server counts.
    """
    lock = distributed_lock(NAME)
    assert lock.acquire()
    child = spawn(hold, ttl=30, wait=60)
    wait_until(lambda: queued(locks) == 1)
    child.stop()
    before = server_time(locks)
    lock.release()
    claimed, busy = held.get(NAME), None
    try:
        with distributed_lock(NAME, wait=0):
            pass
    except LockTimeout as error:
        busy = error
    return (child.pid, claimed, busy) if server_time(locks) - before < CONFIRM_WITHIN else None


def server_time(locks):
    seconds, microseconds = locks.redis.time()
    return float(seconds + microseconds / 1_000_000)


def test_a_lease_that_is_not_confirmed_yet_shows_the_time_it_will_have(locks, spawn):
    pid, claimed, busy = wait_until(lambda: claim_seen_twice(locks, spawn))
    assert (claimed.state, claimed.owner.pid) == ("held", pid)
    assert claimed.expires_in == pytest.approx(30, abs=1)
    assert busy.expires_in == pytest.approx(30, abs=1)
    wait_until(lambda: held.get(NAME) is None)  # Nobody confirmed it; acquire says so, too.
    next_one = distributed_lock(NAME, wait=0)
    assert next_one.acquire()
    next_one.release()
    assert past()[-1] == (pid, "expired")


# --- what will never become free ------------------------------------------------------------------


STRANGE = {
    "string": lambda client, key: client.set(key, b"\xff by hand"),
    "empty string": lambda client, key: client.set(key, b""),
    "nearly ours": lambda client, key: client.set(key, b"x" * 55 + b"|1|1|1|1||{}"),
    "list": lambda client, key: client.rpush(key, "a", "b", "c"),
    "set": lambda client, key: client.sadd(key, "a"),
    "zset": lambda client, key: client.zadd(key, {"a": 1}),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "stream": lambda client, key: client.xadd(key, {"a": "b"}),
}


@pytest.mark.proves("P9")
@on_servers
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.no_permit("the permit of the bystander ends, so it is no error")
def test_what_is_not_ours_is_listed_once_an_acquire_met_it_and_released_if_it_is_as_it_was_shown(
    place, kind
):
    client, key = place.locks.redis, keys_of(place.locks).lock
    STRANGE[kind](client, key)
    assert listed() == {}
    for wait in (0, 1):
        with pytest.raises(LockUnavailable):
            distributed_lock(NAME, wait=wait).acquire()
    assert listed() == {NAME: "foreign"}
    lock = seen()
    assert (lock.expires_in, lock.fence, lock.held_for) == (None, None, None)
    assert str(lock.owner) == "unknown"
    assert kind.rsplit(maxsplit=1)[-1].replace("ours", "string") in lock.strange
    assert lock.strange in lock.note
    assert [one.name for one in held.list(only=held.Selection(state="no-expiry"))] == [NAME]
    if kind.endswith(("string", "ours")):
        client.append(key, "!")
    else:
        client.delete(key)
        STRANGE["set" if kind == "list" else "list"](client, key)
    assert not held.force_release(NAME, lock.id)
    assert client.exists(key)
    assert held.force_release(NAME, seen().id)
    assert listed() == {}
    assert not client.exists(key)
    with distributed_lock(NAME, wait=0):
        assert listed() == {NAME: "held"}


@on_servers
@pytest.mark.no_permit("the permit of the bystander ends, so it is no error")
def test_a_lock_of_ours_without_expiry_stays_listed_once_an_acquire_met_it(place):
    client, keys = place.locks.redis, keys_of(place.locks)
    with held_by_other(NAME):
        client.persist(keys.lock)
        client.zadd(keys.held, {keys.lock: 1})  # It was there until its expiry, long ago.
        assert listed() == {}
        with pytest.raises(LockUnavailable, match="no expiry"):
            distributed_lock(NAME, wait=0).acquire()
        assert listed() == {NAME: "no-expiry"}
        assert "never become free" in seen().note
        assert held.force_release(NAME, seen().id)
        assert listed() == {}


@on_servers
@pytest.mark.no_permit("the permit of the bystander ends, so it is no error")
def test_what_never_ended_leaves_the_index_once_it_is_seen_to_have_gone(place):
    client, keys = place.locks.redis, keys_of(place.locks)
    client.set(keys.lock, "by hand")
    with pytest.raises(LockUnavailable):
        distributed_lock(NAME, wait=0).acquire()
    client.delete(keys.lock)
    assert (client.zcard(keys.held), listed(), client.zcard(keys.held)) == (1, {}, 0)


@on_servers
def test_a_foreign_value_that_will_expire_is_listed_until_then(place):
    client, keys = place.locks.redis, keys_of(place.locks)
    client.set(keys.lock, "by hand", px=60_000)
    assert not distributed_lock(NAME, wait=0).acquire()
    assert listed() == {NAME: "foreign"}
    assert 50 < (seen().expires_in or 0) <= 60
    client.delete(keys.lock)
    assert distributed_lock(NAME, wait=0).acquire()


# --- how much is read -----------------------------------------------------------------------------

HUGE = 30_000_000
MUCH = 100_000


@pytest.fixture
def sent(place):
    """How many bytes the server has sent since the last question."""
    client = place.locks.redis
    before = 0

    def since():
        nonlocal before
        total = int(client.info("stats")["total_net_output_bytes"])
        now, before = total - before, total
        return now

    return since


@unscripted
@pytest.mark.no_permit("MGET knows no bounds")
def test_without_scripts_an_acquire_reads_of_a_huge_value_only_the_beginning(place, sent):
    place.locks.redis.set(keys_of(place.locks).lock, b"\xff" * HUGE, px=60_000)
    sent()
    assert not distributed_lock(NAME, wait=0).acquire()
    assert sent() < MUCH


@everywhere
@on_servers
@pytest.mark.no_permit("a bystander does not ask where a stranger waits")
def test_listings_and_acquires_read_of_huge_values_only_the_beginning(place, sent):
    client, keys = place.locks.redis, keys_of(place.locks)
    client.set(keys.lock, b"\xff" * HUGE, px=60_000)
    client.zadd(keys.held, {keys.lock: 9e15})
    client.rpush(keys.past, "x" * HUGE)
    client.hset(keys.runs, "skip", "x" * HUGE)
    client.zadd(keys.ran, {keys.lock: 9e15})
    token = "t" * 32
    record = f"{token}|{10**13}|bell|30000|r|{'1' * 16}|" + "x" * HUGE
    client.zadd(keys.queue, {token: 1, record: 1})
    sent()
    assert not distributed_lock(NAME, wait=0).acquire()
    assert listed() == {NAME: "foreign"}
    held.detail(NAME)
    held.records()
    lock = seen()
    assert lock.strange == f"a string of {HUGE} bytes"
    assert held.force_release(NAME, lock.id)
    assert sent() < MUCH


@everywhere
@on_servers
def test_huge_members_of_an_index_are_not_read(place, sent):
    client, index = place.locks.redis, index_key(place.locks.prefix)
    client.zadd(index, {"x" * HUGE: 9e15})
    client.zadd(keys_of(place.locks).ran, {"x" * HUGE: 9e15})
    with distributed_lock(NAME):
        sent()
        assert listed() == {NAME: "held"}
        assert held.records() == []
        assert sent() < MUCH


@places(*KINDS, MEMORY)
def test_an_owner_with_endless_names_is_cut_and_stays_readable(place):
    long = "\U0001f512" * 1000
    owner = Owner(host="web-3", pid=7, thread=long, command=long, path=long, task=long)
    assert len(owner.packed) <= LONGEST_OWNER
    with LockTestKit().simulate_held_by_other(NAME, owner=owner):
        lock = seen()
        assert (lock.state, lock.owner.host, lock.owner.pid) == ("held", "web-3", 7)
        assert long.startswith(lock.owner.task)


@pytest.mark.parametrize("length", [36, 200, 201, 5000])
def test_a_run_is_known_by_its_id_however_long_that_and_its_owner_are(length):
    for letter, others in product(("x", "\U0001f512"), ("", "\U0001f512" * 1000)):
        task_id = letter * length
        names = dict.fromkeys(("host", "thread", "command", "path", "task"), others)
        packed = Owner(pid=4_194_304, task_id=task_id, **names).packed
        assert len(packed) <= LONGEST_OWNER
        found = Owner.unpack(packed.decode())
        assert found.is_task(task_id)
        assert not found.is_task(task_id + letter)


# --- a force release whose answer is lost ---------------------------------------------------------


@on_servers
@pytest.mark.parametrize("successor", [False, True])
def test_a_force_release_whose_answer_is_lost_was_done(place, make_proxy, caplog, successor):
    lock, waiter = distributed_lock(NAME), distributed_lock(NAME, wait=HUNG)
    assert lock.acquire()
    waits = in_thread(lambda: waiter.acquire() and waiter.lease) if successor else None
    wait_until(lambda: queued(place.locks) == successor or place.name == "unscripted")
    shown = seen()
    proxy = make_proxy(place.locks.server)
    server = place.locks.server
    place.on(proxy)
    if place.name == "unscripted":
        proxy.rule("EXEC", "cut_after")
    else:
        proxy.rule_for_script(scripts.FORCE_RELEASE.sha, "cut_after")
    assert held.force_release(NAME, shown.id, by="ann")
    assert "released by 'ann'" in caplog.text
    place.on(server, **DEFAULTS)
    if waits is not None:
        lease = waits.result(HUNG)
        assert lease
        lease.ensure_held(verify=True)  # The resend has not touched it.
        waiter.release()
    # Another request for the same lease is answered as ever.
    assert not held.force_release(NAME, shown.id)


def test_a_force_release_that_is_never_answered_is_audited_as_unknown(locks, make_proxy, caplog):
    with distributed_lock("other"):
        proxy = make_proxy(locks.server)
        locks.on(proxy, TTL=1)
        proxy.refuse()
        with pytest.raises(LockUnavailable):
            held.force_release(NAME, "1" * 16, by="ann")
    assert "unknown, by 'ann'" in caplog.text


@pytest.mark.proves("R9")
@pytest.mark.no_permit("the bystander takes a fence")
def test_the_fence_grows_also_over_what_is_not_ours(locks):
    keys, ahead = keys_of(locks), 9 * 10**15  # As after a server whose clock was set back.
    locks.redis.zadd(keys.fence, {"last": ahead})
    locks.redis.set(keys.lock, "not ours", ex=60)

    def fence():
        with distributed_lock(NAME, wait=HUNG) as lease:
            return lease.fence

    waiter = in_thread(fence)
    wait_until(lambda: queued(locks) == 1)
    assert held.force_release(NAME, seen().id)
    assert waiter.result(HUNG) == ahead + 1
