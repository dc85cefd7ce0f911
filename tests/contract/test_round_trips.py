"""R15: what an uncontended lock costs, whatever features are on: one command to get it, one to end.

A command that is not sent cannot be slow. Every other test passes too if there is one more.
"""

import time
from datetime import timedelta

import pytest

from django_redislock import distributed_lock
from django_redislock.rules import scripts
from tests.support.matrix import places
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

pytestmark = pytest.mark.no_permit("a permit costs another script, which a row below names")

FEATURES = {
    "plain": {},
    "tries once": {"wait": 0},
    "waits": {"wait": 60},
    "not renewed": {"renew": False},
    "max_hold": {"max_hold": timedelta(hours=1)},
    "min_hold": {"min_hold": 0.001},
    "reentrant": {"reentrant": True},
    "a limit of one": {"limit": 1},
    "a permit": {"limit": 10},
}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A lease that was held for some time is noted at its end, by another script."""
    monkeypatch.setattr("django_redislock.handle.NOTED_FROM", HUNG)


@pytest.mark.proves("R15")
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@both_ways
async def test_an_uncontended_cycle_is_two_round_trips(way, locks, proxy, options):
    locks.on(proxy)
    async with way.entered(distributed_lock("warm-up", **options)):
        pass  # It brings the connection and the scripts.
    before = len(proxy.log)
    async with way.entered(distributed_lock("lottery", **options)) as lease:
        assert lease.held
    sent = [(command.name, command.args[0].decode()) for command in proxy.log[before:]]
    asking = scripts.ACQUIRE_PERMIT if options.get("limit") == 10 else scripts.ACQUIRE
    ending = scripts.CONCLUDE if "min_hold" in options else scripts.RELEASE
    assert sent == [("EVALSHA", asking.sha), ("EVALSHA", ending.sha)]


@pytest.mark.proves("R11", "R15")
@pytest.mark.waits
def test_the_question_for_acknowledgement_does_not_wait_for_the_answer_to_the_acquire(locks, proxy):
    # The server looks for replicas in vain, but less long than the answer may take.
    locks.on(proxy, REPLICAS_ACK=1, TTL=24)
    proxy.rewrite("WAIT", lambda reply: b":1\r\n")
    with distributed_lock("warm-up"):
        pass
    before, delay = len(proxy.log), 2
    proxy.rule_for_script(scripts.ACQUIRE.sha, f"delayreply:{delay}")
    with distributed_lock("lottery"):
        acquire, wait = proxy.log[before:]
    assert (acquire.name, wait.name) == ("EVALSHA", "WAIT")
    assert wait.time - acquire.time < delay


@pytest.mark.proves("R15")
@both_ways
async def test_several_locks_are_taken_in_one_packet_and_released_in_one(way, locks, proxy):
    locks.on(proxy)
    names = "account:1", "account:2", "account:3"
    async with way.entered(distributed_lock(*names)):
        pass  # It brings the connection and the scripts.
    before, delay = len(proxy.log), 1
    for script in (scripts.ACQUIRE, scripts.RELEASE):
        proxy.rule_for_script(script.sha, f"delayreply:{delay}")
    async with way.entered(distributed_lock(*names)) as lease:
        assert lease.held
    acquires, releases = proxy.log[before : before + 3], proxy.log[before + 3 :]
    assert [one.args[0].decode() for one in acquires] == [scripts.ACQUIRE.sha] * 3
    assert [one.args[0].decode() for one in releases] == [scripts.RELEASE.sha] * 3
    for first, *_, last in (acquires, releases):
        assert last.time - first.time < delay  # It did not wait for the first reply.


@pytest.mark.proves("R15")
@places("redis", "sentinel", "cluster", "quorum")
@both_ways
async def test_several_locks_cost_each_server_as_many_packets_as_one(way, place, shared_cluster):
    of_place = getattr(place, "locks", [])
    servers = [one.redis for one in (of_place if isinstance(of_place, list) else [of_place])]
    if place.name == "cluster":
        servers = [server.client() for server in shared_cluster().servers]

    def packets():
        # A server reads a small packet at once. The question is one too.
        return [int(server.info("stats")["total_reads_processed"]) for server in servers]

    async def cost(*names, wanted=2, **options):
        """Of the server that costs most. Watchdogs and replicas send something now and then, and
        a busy machine may read a packet in two: so the fewest for each server, in as many tries as
        it takes.
        """
        fewest = [9] * len(servers)
        until = time.monotonic() + HUNG
        while max(fewest) > wanted and time.monotonic() < until:
            before = packets()
            async with way.entered(distributed_lock(*names, ttl=60, **options)) as lease:
                assert lease.held
            found = [now - then - 1 for now, then in zip(packets(), before, strict=True)]
            fewest = list(map(min, fewest, found))
        return max(fewest)

    names = [f"account:{number}" for number in range(4)]
    permit_names = [f"export:{number}" for number in range(4)]
    # At most: a server that is behind reads two packets at once.
    assert await cost("account") <= 2
    assert await cost(*names) <= 2
    # On a quorum the votes for permits take a look at them first.
    wanted = 2 + (place.name == "quorum")
    assert await cost(*permit_names, limit=3, wanted=wanted) <= wanted
