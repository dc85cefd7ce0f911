"""Masters that die, move and are replaced, and servers that let nobody in, in each topology."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
import redis
from redis.asyncio.connection import RedisSSLContext

from django_redislock import LockUnavailable, distributed_lock
from django_redislock.backends.redis.dialing import DIALING
from django_redislock.backends.redis.pool import _Loop
from django_redislock.backends.registry import backends
from django_redislock.rules import flows
from tests.faults.conftest import PATIENT
from tests.support.backends import UNHURRIED
from tests.support.faults import in_fork, lease_of, takes
from tests.support.lockers import Lockers, line_up, served_in_turn
from tests.support.matrix import CLUSTER, QUORUM, SENTINEL, places
from tests.support.servers import free_port
from tests.support.stored import NAME, is_held_by, is_left_clean
from tests.support.topologies import SERVICE, await_copies, can_be_rung
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop, in_thread

pytestmark = pytest.mark.slow

topologies = pytest.mark.parametrize("topology", ["cluster", "sentinels"])


def name_in(servers):
    """A lock on the master that has replicas."""
    return servers.name_on(servers.master) if hasattr(servers, "name_on") else NAME


def client_of(servers):
    """A client, not ours, of the masters that there are now."""
    return servers.client() if hasattr(servers, "name_on") else servers.client(servers.master)


# --- a master is replaced ------------------------------------------------------------------------


@contextmanager
def at_work(name):
    """Six who take the lock in turn: threads, and tasks of a loop."""
    with InLoop() as tasks:
        lockers = Lockers(name, [Blocking(), tasks] * 3)
        wait_until(lambda: len(lockers.turns) > 10)
        try:
            yield lockers
        finally:
            lockers.stop()


@pytest.mark.proves("P1", "R9", "R13")
@pytest.mark.timeout(170)
@topologies
def test_locking_goes_on_when_a_master_is_killed_under_load(topology, start):
    """Each grant is on a replica when it counts."""
    replicas = {"replicas": 2} if topology == "cluster" else {}
    servers, _ = start(topology, **replicas, REPLICAS_ACK=1)
    with at_work(name_in(servers)) as lockers:
        with servers.in_a_hurry():
            servers.master.kill()
            servers.await_failover()
        failed_over = time.monotonic()
        wait_until(lambda: lockers.since(failed_over) >= 20)
    lockers.check()
    # Nobody gave up. But who had the lock in that moment may have been told that it is lost, and
    # who asked next that no replica has found its new master yet.
    told = "LockLost", "REPLICAS_ACK"
    assert not [error for error in lockers.errors if not any(one in error for one in told)]


@pytest.mark.proves("P1", "R13")
@topologies
def test_a_planned_failover_loses_nothing_without_acknowledgement(topology, start, callers):
    """One of sentinels must be coordinated, as Valkey does it from version 9 on."""
    replicas = {"replicas": 1} if topology == "cluster" else {}
    servers, locks = start(topology, **replicas, TTL=15)  # No lease is to end.
    name, (threads, _) = name_in(servers), callers
    kept = distributed_lock(f"{name} kept", ttl=60)
    assert threads.acquire(kept)
    with at_work(name) as lockers:
        asked = time.monotonic()
        try:
            if topology == "cluster":
                servers.fail_over()
            else:
                servers.ask(servers.sentinels[0], "FAILOVER", SERVICE, "COORDINATED")
        except redis.ResponseError as error:
            pytest.skip(f"these sentinels coordinate no failover: {error}")
        servers.await_failover()
        failed_over = time.monotonic()
        wait_until(lambda: lockers.since(failed_over) >= 20)
    lockers.check()
    locks.redis = client_of(servers)
    assert is_held_by(locks, lease_of(kept))
    threads.release(kept)
    # A failover takes a tenth of a second, and a hand-over is confirmed within one; unless the
    # machine stood still. Then the one lease that was on its way may be lost to the next in turn.
    slow = failed_over - asked > flows.CONFIRM_WITHIN / 2
    on_its_way = [one for one in lockers.errors if slow and "'taken'" in one]
    assert lockers.errors == on_its_way[:1]


def move_the_slot(cluster, name):
    cluster.move(name, cluster.servers[1])


def move_the_whole_slot(cluster, name):
    try:
        cluster.move_whole(name, cluster.servers[1])
    except redis.ResponseError as error:
        pytest.skip(f"this server moves no whole slots: {error}")


def kill_the_master(servers, name):
    await_copies(servers.master, servers.replicas)
    with servers.in_a_hurry():
        servers.master.kill()
        servers.await_failover()


@pytest.mark.proves("P1", "P6", "R7")
@pytest.mark.parametrize(
    ("topology", "kind", "how", "disturb"),
    [
        ("cluster", "redis", {}, move_the_slot),
        ("cluster", "valkey", {}, move_the_whole_slot),
        ("cluster", "redis", {"replicas": 1}, kill_the_master),
        ("sentinels", "redis", {}, kill_the_master),
    ],
)
def test_a_lease_goes_on_where_its_lock_is_now_and_waiters_come_back_in_order(
    topology, kind, how, disturb, start, callers
):
    servers, locks = start(topology, kind, **how)
    name, (threads, _) = name_in(servers), callers
    with threads.block(distributed_lock(name, ttl=12)) as lease:
        waiting = line_up(locks, name, callers * 2)
        renewals = lease.renewals
        disturb(servers, name)
        wait_until(lambda: lease.renewals > renewals)
        locks.redis = client_of(servers)
        assert is_held_by(locks, lease)
        keeper = servers.owner_node(name) if topology == "cluster" else servers.master
        # Woken by the end of their subscriptions, they come back to their old places.
        wait_until(lambda: can_be_rung(locks, keeper, name) == len(waiting))
    served_in_turn(waiting)
    wait_until(lambda: is_left_clean(locks, name))


# --- a server takes no new connection, but goes on to serve those that there are -----------------


def is_full(server):
    """It has as many clients as it may."""
    server.client().config_set("maxclients", 1)


def has_another_password(server):
    """Those who have logged in are served on."""
    server.client().config_set("requirepass", "rotated")


refusals = pytest.mark.parametrize("refuse", [is_full, has_another_password])


@pytest.fixture
def make_alone(make_server, locks):
    """Start a server of the test's own for its locks."""

    def make():
        server = make_server()
        locks.redis = server.client()
        locks.redis.ping()  # Its connection is there, as those of the locks.
        locks.configure(LOCATION=server.url, TTL=3.0)
        return server

    return make


@pytest.fixture
def alone(make_alone):
    return make_alone()


def await_renewals(*leases):
    for lease in leases:
        wait_until(lambda lease=lease: lease.renewals >= 4 or not lease.held)
        assert lease.held


@pytest.mark.proves("R7")
@refusals
@pytest.mark.parametrize("where", ["RESP2", "RESP3", "cluster", "quorum"])
def test_r7_a_lease_is_renewed_although_no_connection_was_dialed_for_it(
    where, refuse, caller, start, make_quorum, make_alone, locks
):
    names = [NAME]
    if where == "cluster":
        cluster, _ = start("cluster")
        servers, names = cluster.servers, [cluster.name_on(one) for one in cluster.servers]
    elif where == "quorum":
        quorum = make_quorum()
        quorum.configure(TTL=3.0, socket_timeout=0.5, WAIT=0)
        servers = quorum.servers
    else:
        servers = [make_alone()]
        locks.configure(OPTIONS={"protocol": int(where[-1])})
    handles = [distributed_lock(name, wait=0) for name in names]
    for lock in handles:
        assert caller.acquire(lock)
    if where == "quorum":
        wait_until(lambda: len(quorum.known_by(lease_of(handles[0]))) == 3)
    for server in servers:
        refuse(server)
    await_renewals(*map(lease_of, handles))
    for lock in handles:
        caller.release(lock)
        assert caller.acquire(lock)


@refusals
def test_a_node_of_a_cluster_that_refuses_a_dial_is_still_used(refuse, start):
    cluster, locks = start("cluster", WAIT=0, UNAVAILABLE_AFTER=0, TTL=10)
    name = cluster.name_on(cluster.master)
    with distributed_lock(name):
        waiting = Blocking().begin_waiting(distributed_lock(name, wait=3), locks)
        for server in cluster.servers:
            refuse(server)
        with pytest.raises(LockUnavailable):  # The waiter keeps the only connection.
            in_thread(distributed_lock(name, ttl=0.9).acquire).result(HUNG)
        assert waiting.result(HUNG) is False
        assert distributed_lock(name).locked()


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

    def calls():
        return int(locks.redis.info("commandstats")["cmdstat_evalsha"]["calls"])

    with distributed_lock(NAME):
        if protocol == 3:
            Blocking().begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        refuse(alone)
        waiting = caller.begin(distributed_lock(NAME, wait=HUNG))
        tries = calls()
        wait_until(lambda: calls() > tries + 5)
    assert waiting.result(HUNG)


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
        handles = [distributed_lock("first"), distributed_lock("second")]
        for caller, lock in zip((first, second), handles, strict=True):
            assert caller.acquire(lock)
        is_full(alone)
        first.loop.call_soon_threadsafe(blocked.wait, HUNG)
        try:
            await_renewals(*map(lease_of, handles))
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
        await_renewals(lease_of(lock))


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


# --- forks ---------------------------------------------------------------------------------------


@pytest.mark.proves("P10", "R8")
@places(SENTINEL, CLUSTER, QUORUM)
def test_a_forked_child_has_connections_of_its_own(place):
    place.configure(OPTIONS=UNHURRIED)
    names = [f"lottery {number}" for number in range(12)]  # On each node of a cluster.

    def child():
        for name in names:
            with distributed_lock(name):
                pass
        with distributed_lock("of the child", ttl=9) as own:
            wait_until(lambda: own.renewals)
            return [own.held, distributed_lock("of the parent").locked(), lease.held]

    with distributed_lock("of the parent", ttl=9) as lease:
        for name in names:
            with distributed_lock(name):
                pass
        assert in_fork(child) == [True, True, False]
        wait_until(lambda: lease.renewals)
        lease.ensure_held(verify=True)
    with distributed_lock("of the child", wait=0):
        pass


# --- addresses -----------------------------------------------------------------------------------


def plain(servers):
    return [f"redis://{one.host}:{one.port}" for one in servers]


@pytest.fixture
def address(request, server, make_server, settings, key_prefix):
    """Have REDISLOCK name a place where no lock can be kept."""
    use = request.getfixturevalue
    match request.param:
        case "server":
            location, backend = plain([server])[0], "ClusterBackend"
        case "node":
            location, backend = use("cluster").servers[0].url, "RedisBackend"
        case "lone node":
            node = make_server(cluster_enabled="yes", cluster_port=free_port())
            client = node.client()
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
            location, backend = node.url, "RedisBackend"
        case "two clusters":
            others = use("make_cluster")(masters=1).servers
            location = plain([use("cluster").servers[0], others[0]])
            backend = "ClusterBackend"
        case "no sentinel":
            location, backend = plain(use("watched").servers), "SentinelBackend"
    setting = {"BACKEND": f"django_redislock.backends.{backend}", "LOCATION": location}
    service = {"service_name": SERVICE} if backend == "SentinelBackend" else {}
    options = {**UNHURRIED, **service}
    settings.REDISLOCK = {"default": {**setting, "KEY_PREFIX": key_prefix, "OPTIONS": options}}


@pytest.mark.proves("R13")
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("server", "this is no node of a cluster; for a server of its own use RedisBackend"),
        ("node", "CROSSSLOT.*a node of a cluster, which ClusterBackend is for"),
        ("lone node", "CROSSSLOT"),
        ("two clusters", "are of different clusters; name nodes of one in LOCATION"),
        ("no sentinel", "this is no sentinel; LOCATION"),
    ],
    indirect=["address"],
)
def test_r13_an_address_of_something_else_is_refused_at_once(address, says, caller):
    with takes(at_most=1), pytest.raises(LockUnavailable, match=says):
        caller.acquire(distributed_lock(NAME, wait=20))


@pytest.mark.proves("R13")
@pytest.mark.parametrize(
    ("topology", "options", "says"),
    [
        ("cluster", {"db": 1}, "(leave|correct) the number of the database"),  # Redis, and Valkey.
        ("watched", {"db": 99}, "DB index is out of range"),
        (
            "watched",
            {"service_name": "nobody"},
            r"knows no 'nobody'; check OPTIONS\['service_name'\]",
        ),
    ],
)
def test_r13_so_is_what_its_servers_do_not_know(
    topology, options, says, caller, request, settings, key_prefix
):
    servers = request.getfixturevalue(topology)
    servers.locks(settings, key_prefix).configure(**servers.setting(**UNHURRIED, **options))
    with takes(at_most=1), pytest.raises(LockUnavailable, match=says) as caught:
        caller.acquire(distributed_lock(NAME, wait=20))
    assert caught.value.reason == "refused"


@pytest.mark.parametrize("topology", ["cluster", "watched"])
def test_one_wrong_address_among_others_does_no_harm(
    topology, caller, request, settings, key_prefix, server
):
    servers = request.getfixturevalue(topology)
    wrong, right = server.url.removesuffix("/0"), servers.setting()["LOCATION"][0]
    servers.locks(settings, key_prefix, **PATIENT).configure(LOCATION=[wrong, right])
    with caller.block(distributed_lock(NAME)) as lease:
        assert lease.held
