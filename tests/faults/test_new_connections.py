"""A server takes no new connection, but goes on to serve those that there are."""

import asyncio
import threading
from typing import Any

import pytest
from redis.asyncio.connection import RedisSSLContext

from django_redislock import LockUnavailable, distributed_lock
from django_redislock.backends.redis.dialing import DIALING
from django_redislock.backends.redis.pool import _Loop
from django_redislock.backends.registry import backends
from tests.support.faults import lease_of, takes
from tests.support.stored import NAME, is_held_by, is_left_clean
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop, in_thread

pytestmark = pytest.mark.slow

TTL = 3.0


def is_full(server):
    """It has as many clients as it may."""
    server.client().config_set("maxclients", 1)


def has_another_password(server):
    """Those who have logged in are served on."""
    server.client().config_set("requirepass", "rotated")


refusals = pytest.mark.parametrize("refuse", [is_full, has_another_password])
Refuse = Any  # One of them.


@pytest.fixture
def alone(make_server, locks):
    """A server of the test's own, and its locks."""
    server = make_server()
    locks.redis = server.client()
    locks.redis.ping()  # Its connection is there, as those of the locks.
    locks.configure(LOCATION=server.url, TTL=TTL)
    return server


@pytest.mark.proves("R7")
@refusals
@pytest.mark.parametrize("protocol", [2, 3])
def test_r7_a_lease_is_renewed_although_no_connection_was_dialed_for_it(
    refuse, protocol, caller, locks, alone
):
    locks.configure(OPTIONS={"protocol": protocol})
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    refuse(alone)
    lease = lease_of(lock)
    wait_until(lambda: lease.renewals >= 4 or not lease.held)
    assert is_held_by(locks, lease)
    caller.release(lock)
    assert is_left_clean(locks)


@pytest.mark.proves("R7")
@refusals
def test_r7_on_a_cluster_too(refuse, caller, make_cluster, settings, key_prefix):
    cluster = make_cluster()
    cluster.locks(settings, key_prefix, TTL=TTL, WAIT=0)
    locks = [distributed_lock(cluster.name_on(server)) for server in cluster.servers]
    for lock in locks:
        assert caller.acquire(lock)
    for server in cluster.servers:
        refuse(server)
    leases = [lease for lock in locks if (lease := lease_of(lock))]
    for lease in leases:
        wait_until(lambda lease=lease: lease.renewals >= 4 or not lease.held)
        assert lease.held
    for lock in locks:
        caller.release(lock)
        assert caller.acquire(lock)


@refusals
def test_a_node_of_a_cluster_that_refuses_a_dial_is_still_used(
    refuse, make_cluster, settings, key_prefix
):
    cluster = make_cluster()
    locks = cluster.locks(settings, key_prefix, WAIT=0, UNAVAILABLE_AFTER=0)
    name = cluster.name_on(cluster.servers[0])
    with Blocking() as threads, distributed_lock(name):
        waiting = threads.begin_waiting(distributed_lock(name, wait=3), locks)
        for server in cluster.servers:
            refuse(server)
        with pytest.raises(LockUnavailable):  # The waiter keeps the only connection.
            in_thread(distributed_lock(name, ttl=0.9).acquire).result(HUNG)
        assert waiting.result(HUNG) is False
        assert distributed_lock(name).locked()


@pytest.mark.proves("R7")
@refusals
def test_r7_on_a_quorum_too(refuse, caller, make_quorum):
    quorum = make_quorum()
    quorum.configure(TTL=TTL, socket_timeout=0.5, WAIT=0)
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    wait_until(lambda: len(quorum.known_by(lease_of(lock))) == 3)
    for server in quorum.servers:
        refuse(server)
    lease = lease_of(lock)
    wait_until(lambda: lease.renewals >= 4 or not lease.held)
    assert lease.held
    caller.release(lock)
    assert caller.acquire(lock)


@refusals
def test_a_new_event_loop_uses_a_connection_of_threads(refuse, locks, alone):
    with distributed_lock("another"):
        refuse(alone)

    async def locking():
        async with distributed_lock(NAME) as lease:
            assert is_held_by(locks, lease)

    asyncio.run(locking())
    assert is_left_clean(locks)


@pytest.mark.proves("R7")
def test_r7_an_event_loop_that_is_blocked_does_not_end_the_search_for_another(alone):
    blocked = threading.Event()
    with InLoop() as first, InLoop() as second:
        of_first, of_second = distributed_lock("first"), distributed_lock("second")
        for caller, lock in ((first, of_first), (second, of_second)):
            assert caller.acquire(lock)
        is_full(alone)
        first.loop.call_soon_threadsafe(blocked.wait, HUNG)
        try:
            for lock in (of_first, of_second):
                lease = lease_of(lock)
                wait_until(lambda lease=lease: lease.renewals >= 4 or not lease.held)
                assert lease.held
        finally:
            blocked.set()


@pytest.mark.proves("R7")
def test_r7_an_event_loop_that_closes_does_not_end_the_search_for_another(alone, monkeypatch):
    monkeypatch.setattr(_Loop, "may_be_asked", True)  # As seen just before it closes.
    with InLoop() as second:
        with InLoop() as first:
            assert first.acquire(distributed_lock("first"))
            (closed,) = [one() for one in backends["default"]._loops._loops.values()]
        assert closed.loop.is_closed()
        lock = distributed_lock("second")
        assert second.acquire(lock)
        is_full(alone)
        lease = lease_of(lock)
        wait_until(lambda: lease.renewals >= 4 or not lease.held)
        assert lease.held


@pytest.mark.proves("P6")
@refusals
@pytest.mark.parametrize("protocol", [2, 3])
def test_a_waiter_that_can_be_rung_nowhere_looks_again_and_again(
    refuse, protocol, caller, locks, alone
):
    # Of three connections, two are kept back from waiters: these are rung on a shared one.
    few = {"max_connections": 5} if protocol == 3 else {}
    locks.configure(OPTIONS={"protocol": protocol, **few})
    pool = backends["default"]._pool
    for connection in [pool.take(HUNG) for _ in range(3)]:
        pool.give(connection)
    assert caller.acquire(distributed_lock("another"))
    with distributed_lock(NAME), Blocking() as threads:
        if protocol == 3:
            threads.begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        refuse(alone)
        waiting = caller.begin(distributed_lock(NAME, wait=HUNG))
        tries = calls_of(locks)
        wait_until(lambda: calls_of(locks) > tries + 5)
    assert waiting.result(HUNG)


def test_one_thread_loads_certificates_however_many_coroutines_dial(
    make_server, locks, monkeypatch
):
    server = make_server(tls=True)
    locks.configure(LOCATION=server.url, OPTIONS={"ssl_ca_certs": server.ca}, UNAVAILABLE_AFTER=0)
    slow, load = threading.Event(), RedisSSLContext.get

    def hanging(context):
        slow.wait(HUNG)
        return load(context)

    monkeypatch.setattr(RedisSSLContext, "get", hanging)

    async def locking():
        for number in range(25):
            with takes(at_most=2), pytest.raises(LockUnavailable):
                await distributed_lock(f"{NAME} {number}", ttl=0.3, wait=0).aacquire()
        dialing = [one for one in threading.enumerate() if one.name == DIALING]
        slow.set()
        assert len(dialing) == 1
        async with distributed_lock(NAME) as lease:
            assert lease.held

    try:
        asyncio.run(locking())
    finally:
        slow.set()


def calls_of(locks):
    """How many scripts the server has run."""
    return int(locks.redis.info("commandstats")["cmdstat_evalsha"]["calls"])
