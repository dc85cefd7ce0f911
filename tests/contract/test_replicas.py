"""REPLICAS_ACK: a grant counts once so many replicas have it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from django_redislock import LockUnavailable, distributed_lock, held
from tests.conftest import Locks
from tests.support.backends import forbid_scripting
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Way, both_ways

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.conftest import MakeServer
    from tests.support.servers import Server


class Replicated:
    """A server and its replica."""

    def __init__(self, locks: Locks, replica: Server) -> None:
        self.locks = locks
        self.replica = replica


@pytest.fixture
def replicated(make_server: MakeServer, settings: Settings, key_prefix: str) -> Replicated:
    """Locks that need the acknowledgement of one replica, which is there."""
    server = make_server(repl_diskless_sync_delay=0)
    replica = make_server(server.kind, replicaof=f"{server.host} {server.port}")
    locks = Locks(settings, server, key_prefix).configure(REPLICAS_ACK=1, TTL=12)
    wait_until(lambda: replica.client().info("replication")["master_link_status"] == "up")
    # The server calls a replica online, and counts it, up to a second before it sends it anything.
    locks.redis.set(f"{key_prefix}:written", 1, ex=60)
    wait_until(lambda: locks.redis.wait(1, 100) == 1)
    return Replicated(locks, replica)


@pytest.mark.proves("R11")
@both_ways
async def test_a_grant_is_on_the_replica_when_it_counts(way: Way, replicated: Replicated) -> None:
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.held
        keys = replicated.replica.client().keys(f"{replicated.locks.prefix}*:lock")
        assert len(keys) == 1


async def refusal(way: Way) -> str:
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
async def test_too_few_acknowledgements_release_and_fail_the_grant(
    way: Way, replicated: Replicated
) -> None:
    with replicated.replica.paused():
        says = await refusal(way)
        assert re.search(r"'lottery'.*0 of the 1 replicas.*REPLICAS_ACK", says)
        assert held.get("lottery") is None
    async with way.entered(distributed_lock("lottery", wait=HUNG)) as lease:
        assert lease.held


@pytest.mark.proves("R11")
@pytest.mark.waits
@both_ways
async def test_a_waiter_asks_for_acknowledgement_too(way: Way, replicated: Replicated) -> None:
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    waiting = way.start(lambda: way.acquire(distributed_lock("lottery", wait=5)))
    await way.until(lambda: waiters("lottery") == 1)
    with replicated.replica.paused():
        await way.release(lock)
        with pytest.raises(LockUnavailable):
            await waiting.result()
        assert held.get("lottery") is None


@pytest.mark.waits
@both_ways
async def test_acknowledgement_needs_no_scripting(way: Way, replicated: Replicated) -> None:
    replicated.locks.configure(OPTIONS=forbid_scripting(replicated.locks))
    async with way.entered(distributed_lock("lottery", wait=0)) as lease:
        assert lease.held
    with replicated.replica.paused():
        assert "REPLICAS_ACK" in await refusal(way)
    assert held.get("lottery") is None
