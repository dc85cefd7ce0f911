"""REPLICAS_ACK: a grant counts once so many replicas have it."""

import re

import pytest
import redis

from django_redislock import LockUnavailable, distributed_lock, held
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from tests.conftest import Locks
from tests.support.backends import forbid_scripting
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways


@pytest.fixture
def replica(make_server, settings, key_prefix):
    """Locks need its acknowledgement, and it is there."""
    server = make_server(repl_diskless_sync_delay=0)
    replica = make_server(server.kind, replicaof=f"{server.host} {server.port}")
    replica.locks = Locks(settings, server, key_prefix).configure(REPLICAS_ACK=1, TTL=12)
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
    # The server calls a replica online, and counts it, up to a second before it sends it anything.
    replica.locks.redis.set(f"{key_prefix}:written", 1, ex=60)
    wait_until(lambda: replica.locks.redis.wait(1, 100) == 1)
    return replica


@pytest.mark.proves("R11")
@both_ways
async def test_a_grant_is_on_the_replica_when_it_counts(way, replica):
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.held
        keys = replica.client().keys(f"{replica.locks.prefix}*:lock")
        assert len(keys) == 1


async def refusal(way):
    """Acquire until it is refused for want of replicas, and return what that says.

    The server asks them for nearly as long as it may take itself: a busy machine may exceed that.
    """
    while True:
        with pytest.raises(LockUnavailable) as raised:
            await way.acquire(distributed_lock("lottery", wait=0))
        if "replicas" in str(raised.value):
            return str(raised.value)


@pytest.mark.proves("R11")
@pytest.mark.waits
@both_ways
async def test_too_few_acknowledgements_release_and_fail_the_grant(way, replica):
    with replica.paused():
        says = await refusal(way)
        assert re.search(r"'lottery'.*0 of the 1 replicas.*REPLICAS_ACK", says)
        assert held.get("lottery") is None
    async with way.entered(distributed_lock("lottery", wait=HUNG)) as lease:
        assert lease.held


@pytest.mark.proves("R11")
@pytest.mark.waits
@both_ways
async def test_a_waiter_asks_for_acknowledgement_too(way, replica):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    waiting = way.start(lambda: way.acquire(distributed_lock("lottery", wait=5)))
    await way.until(lambda: waiters("lottery") == 1)
    with replica.paused():
        await way.release(lock)
        with pytest.raises(LockUnavailable):
            await waiting.result()
        assert held.get("lottery") is None


@pytest.mark.waits
@both_ways
async def test_acknowledgement_needs_no_scripting(way, replica):
    replica.locks.configure(OPTIONS=forbid_scripting(replica.locks))
    async with way.entered(distributed_lock("lottery", wait=0)) as lease:
        assert lease.held
    with replica.paused():
        assert "REPLICAS_ACK" in await refusal(way)
    assert held.get("lottery") is None


def run(locks, script, *args):
    """Run a script as it is, for what no lock asks for at the right moment."""
    keys = script.given(lock_keys(locks.prefix, "lottery"))
    return locks.redis.eval(script.source, len(keys), *keys, *args)


def acquire(locks, who, mode, channel=""):
    return run(locks, scripts.ACQUIRE, who * 32, who * 16, 60_000, mode, 0, "", "r", "{}", channel)


@pytest.mark.no_permit("it runs the scripts of a lock without a limit")
def test_a_ring_does_not_reach_the_replica_and_the_grant_behind_it_does(replica):
    locks, client = replica.locks, replica.client()
    channel = f"{locks.prefix}:bell"
    with locks.redis.pubsub() as waiter, client.pubsub() as heard:
        waiter.subscribe(channel)
        heard.psubscribe("*")
        for subscribed in (waiter, heard):
            assert subscribed.get_message(timeout=HUNG)
        acquire(locks, "a", "try")
        assert acquire(locks, "b", "queue", channel)[0] == b"queued"
        assert run(locks, scripts.RELEASE, "a" * 32) == b"released"
        assert waiter.get_message(timeout=HUNG)["data"].startswith(b"granted")
        locks.redis.publish("the", "end")  # Replicas are told of this.
        assert heard.get_message(timeout=HUNG)["channel"] == b"the"
    assert client.get(lock_keys(locks.prefix, "lottery").lock).startswith(b"b" * 32)


def test_only_who_accepts_writes_says_that_a_lease_is_gone_or_another_has_it(
    make_server, settings, key_prefix
):
    locks, us = Locks(settings, make_server(), key_prefix), "b" * 32
    acquire(locks, "a", "try")
    locks.redis.config_set("min-replicas-to-write", 1)  # As a master that has lost its replica.
    for script, *args in (
        (scripts.LEAVE, us),
        (scripts.RENEW, us, 1000, "r00001"),
        (scripts.RELEASE, us),
        (scripts.TAKE_UP, us, us[:16], 1000, "try", 0, "", "r", "{}", ""),
    ):
        with pytest.raises(redis.ResponseError, match="NOREPLICAS"):
            run(locks, script, *args)
    with pytest.raises(redis.ResponseError, match="NOREPLICAS"):
        acquire(locks, "b", "try")
