"""Locks on the majority of independent servers: some die, hang, lose their data, or are cut off."""

import asyncio
import json
import math
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import call_command
from django.urls import reverse

from django_redislock import (
    LockLost,
    LockUnavailable,
    StaleFence,
    clock,
    distributed_lock,
    held,
    single_instance_task,
)
from django_redislock.backends.quorum.servers import (
    MOST_LEAD,
    AsyncQuorumConnection,
    QuorumConnection,
)
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.dialing import Dialer
from django_redislock.backends.registry import backends
from django_redislock.rules import scripts
from tests.effects.models import Entry, written
from tests.support.faults import lease_of
from tests.support.quorums import TTL
from tests.support.stored import NAME
from tests.support.test_servers import can_shift_clocks
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

# A server that takes long for an undo is left alone for a second.
pytestmark = pytest.mark.usefixtures("undo_in_time")


@pytest.fixture
def quorum(make_quorum):
    """Three servers."""
    return make_quorum()


def backend():
    return backends["default"]


def other(**options):
    """Acquire the lock as another thread, which tries once unless told otherwise."""
    lock = distributed_lock(NAME, **{"wait": 0, **options})

    def take():
        return lock.acquire(), lease_of(lock)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(take).result(HUNG)


def leave_residues(quorum, name, permit=1):
    """Have two servers each keep a lease of its own, as of two holders that were killed.

    To a look the lock is free, since no majority keeps it, and nobody is granted it by a majority.
    """
    residues = []
    for _ in range(2):
        lock = distributed_lock("before", renew=False)
        with lock as lease:
            wait_until(lambda lease=lease: quorum.known_by(lease) == [0, 1, 2])
            residues.append(quorum.value(0, lease.name))
        wait_until(lambda: quorum.is_free("before"))
    for server, residue in enumerate(residues):
        quorum.keep(server, residue, name, permit=permit)


# --- what a majority decides ---------------------------------------------------------------------


def test_a_lock_is_on_every_server_also_on_one_that_is_back_and_leaves_nothing(quorum, caller):
    def is_known_by_all():
        with caller.block(distributed_lock(NAME)) as lease:
            return quorum.known_by(lease) == [0, 1, 2]

    with caller.block(distributed_lock(NAME)) as lease:
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        (seen,) = held.list()
        assert seen.id == lease.id
    quorum.servers[1].kill()
    with caller.block(distributed_lock(NAME)):
        pass
    quorum.servers[1].restart()
    wait_until(is_known_by_all)
    wait_until(quorum.is_free)


@pytest.mark.parametrize("size", [3, 5])
def test_locks_go_on_while_a_minority_is_dead(size, make_quorum, caller):
    quorum = make_quorum(size)
    alive = list(range(size // 2, size))
    for dead in range(size // 2):
        quorum.servers[dead].kill()
    fences = []
    for _ in range(3):
        with caller.block(distributed_lock(NAME)) as lease:
            wait_until(lambda lease=lease: quorum.known_by(lease) == alive)
            assert not other()[0]
            caller.renew(lease)
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert held.list() == []


def test_no_lock_is_granted_or_listed_while_a_majority_is_dead_and_nothing_is_left(quorum, caller):
    quorum.servers[0].kill()
    quorum.servers[2].kill()
    says = "1 of 3 servers answered, and 2 are needed"
    with pytest.raises(LockUnavailable, match=says) as raised:
        caller.acquire(distributed_lock(NAME, wait=0))
    assert all(f"127.0.0.1:{quorum.proxies[dead].port}" in str(raised.value) for dead in (0, 2))
    with pytest.raises(LockUnavailable, match="1 of 3 servers answered"):
        held.list()
    wait_until(lambda: quorum.value(1) == b"")
    # As soon as one of them is back, they are a majority.
    quorum.servers[0].restart()
    assert caller.acquire(distributed_lock(NAME))


@pytest.mark.proves("R4")
def test_what_a_minority_has_granted_is_given_back_if_the_others_are_busy_or_refuse(quorum, caller):
    with caller.block(distributed_lock(NAME)) as lease:
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        quorum.lapse(1)
        assert not other()[0]
        assert quorum.value(1) == b""
        assert quorum.known_by(lease) == [0, 2]
    wait_until(quorum.is_free)
    for server in (0, 1):
        quorum.servers[server].client().config_set("maxmemory", 1)
    with pytest.raises(LockUnavailable, match="OOM"):
        caller.acquire(distributed_lock(NAME, wait=0))
    assert quorum.value(2) == b""


@pytest.mark.parametrize("fault", ["silent", "slow"])
def test_a_silent_or_slow_minority_delays_nobody_and_keeps_nothing(fault, quorum, caller):
    with caller.block(distributed_lock(NAME)):
        pass
    if fault == "silent":
        quorum.proxies[1].blackhole()
        at_most = HUNG / 2
    else:
        quorum.proxies[1].rule("*", "delayreply:0.5", times=None)
        at_most = 20 * 0.5
    begin = time.monotonic()
    for _ in range(20):  # Of which each awaits four answers: when all, when a majority.
        with caller.block(distributed_lock(NAME)) as lease:
            caller.renew(lease)
    assert time.monotonic() - begin < at_most
    wait_until(lambda: quorum.is_free() or fault == "silent")


@pytest.mark.proves("N6")
def test_several_who_each_have_one_server_come_to_an_end(quorum):
    # Three at a time of five, so that often nobody has a majority.
    fences = []

    def work():
        for _ in range(10):
            with distributed_lock(NAME) as lease:
                fences.append(lease.fence)

    for thread in [in_thread(work) for _ in range(6)]:
        thread.result(HUNG)
    assert len(fences) == 60
    assert fences == sorted(set(fences))
    # A slow server frees it later than a majority, but long before the lease would end by itself.
    wait_until(quorum.is_free, TTL / 2)


def test_of_several_that_ask_at_the_same_moment_without_a_wait_exactly_one_gets_the_lock(quorum):
    # Often each has one server. All of them would find the lock busy.
    rounds, clients = 40, 3
    barrier = threading.Barrier(clients, timeout=HUNG)

    def work():
        granted = []
        for number in range(rounds):
            lock = distributed_lock(f"round {number}", wait=0)
            barrier.wait()
            granted.append(lock.acquire())
        return granted

    outcomes = [thread.result(HUNG) for thread in [in_thread(work) for _ in range(clients)]]
    assert [sum(granted) for granted in zip(*outcomes, strict=True)] == [1] * rounds


def test_a_lock_of_which_two_have_a_part_is_asked_for_again_without_a_wait(quorum, caller):
    leave_residues(quorum, NAME)
    assert not caller.acquire(distributed_lock(NAME, wait=0))
    assert quorum.value(2) == b""
    quorum.lapse(0, ms=30)
    assert caller.acquire(distributed_lock(NAME, wait=0))


# --- fences --------------------------------------------------------------------------------------


@pytest.mark.proves("R9")
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_fence_grows_whichever_majority_grants_it(ahead, quorum, caller):
    far = (
        int(time.time() * 1_000_000) + 3_600_000_000
    )  # As of a server whose clock is an hour ahead.
    quorum.set_mark(ahead, far)
    quorum.proxies[(ahead + 1) % 3].refuse()  # So that this one is needed.
    with caller.block(distributed_lock(NAME)) as first:
        assert first.fence > far
        # It counted only when the other one knew it, too.
        assert sum(quorum.mark(server) >= first.fence for server in range(3)) >= 2
    quorum.proxies[(ahead + 1) % 3].heal()
    quorum.servers[ahead].kill()
    with caller.block(distributed_lock(NAME)) as second:
        assert second.fence > first.fence


def test_a_fence_that_a_majority_could_not_note_is_not_given_out(quorum, caller):
    quorum.set_mark(0, int(time.time() * 1_000_000) + 3_600_000_000)
    quorum.proxies[1].refuse()
    rule = quorum.proxies[2].rule("ZADD", "cut_before", times=None)
    lock = distributed_lock(NAME, wait=0)
    with pytest.raises(LockUnavailable, match="servers"):
        caller.acquire(lock)
    rule.wait()
    quorum.proxies[2].clear_rules()
    quorum.proxies[1].heal()
    assert caller.acquire(distributed_lock(NAME))


@pytest.mark.proves("N3")
@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(not can_shift_clocks(), reason="needs Linux and a C compiler")
def test_a_clock_that_jumps_lets_a_second_holder_in_and_the_database_stops_the_first(make_quorum):
    # Martin Kleppmann's case: A, B and C grant the lock; the clock of C jumps, and its key ends
    # early; C, D and E grant it to somebody else.
    quorum = make_quorum(5, movable_clock=True)
    a, b, c, d, e = range(5)
    for unreachable in (d, e):
        quorum.proxies[unreachable].refuse()
    granted, first = other(ttl=600, renew=False)
    assert (granted, quorum.known_by(first)) == (True, [a, b, c])
    quorum.servers[c].shift_clock(3600)
    wait_until(lambda: quorum.value(c) == b"")
    for unreachable, reachable in ((a, d), (b, e)):
        quorum.proxies[unreachable].refuse()
        quorum.proxies[reachable].heal()
    granted, second = other(ttl=600, renew=False, wait=HUNG)
    assert (granted, quorum.known_by(second)) == (True, [c, d, e])
    # Two hold it, as Redlock cannot prevent. The fences tell who is late.
    assert (first.held, second.held) == (True, True)
    assert second.fence > first.fence
    with second.atomic():
        Entry.objects.create(fence=second.fence)
    with pytest.raises(StaleFence), first.atomic():
        Entry.objects.create(fence=first.fence)
    assert written("default") == [second.fence]


# --- servers that lose their data ----------------------------------------------------------------


def test_a_minority_that_is_restarted_empty_costs_no_lease(quorum, caller):
    with caller.block(distributed_lock(NAME, ttl=6)) as lease:
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        quorum.servers[0].restart()
        renewals = lease.renewals
        wait_until(lambda: lease.renewals >= renewals + 2)
        assert lease.held
        caller.ensure_held(lease)
        assert not other()[0]


@pytest.mark.proves("N2")
@pytest.mark.slow
def test_a_server_that_comes_back_empty_too_soon_lets_a_second_holder_in(quorum, caller):
    # Hence the rule of the delayed restart: it is to stay away for the longest ttl.
    quorum.servers[2].kill()
    with caller.block(distributed_lock(NAME, renew=False)) as first:
        assert quorum.known_by(first) == [0, 1]
        quorum.servers[2].restart()
        quorum.servers[1].restart()
        quorum.configure()  # As of another process.
        granted, second = other(wait=HUNG)
        assert granted
        assert (first.held, second.held) == (True, True)
        assert second.fence > first.fence


@pytest.mark.proves("R9")
def test_the_fence_grows_after_data_was_lost_also_if_servers_were_slow_to_tell_their_time(
    quorum, caller
):
    quorum.configure(socket_timeout=HUNG)
    for proxy in quorum.proxies:
        proxy.rule("TIME", "delay:2")
    with caller.block(distributed_lock(NAME)) as first:
        granted = time.monotonic()
    # A fence may be ahead of the clocks by so much.
    wait_until(lambda: time.monotonic() - granted > MOST_LEAD)
    for server in quorum.servers:
        with server.client() as client:
            client.flushall()
    quorum.configure()  # As of another process.
    with caller.block(distributed_lock(NAME)) as second:
        assert second.fence > first.fence


@pytest.mark.parametrize("lost", ["data", "servers"])
def test_a_lease_that_no_majority_knows_any_more_is_lost(lost, quorum, caller):
    # Without its data a majority is to say so while there is time; a dead one never answers.
    ttl = {"data": 9, "servers": 5}[lost]
    with pytest.raises(LockLost) as raised, caller.block(distributed_lock(NAME, ttl=ttl)) as lease:  # noqa: PT012 - by leaving the block
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        for server in (0, 2):
            quorum.servers[server].restart() if lost == "data" else quorum.servers[server].kill()
        wait_until(lambda: lease.lost_reason)
        assert not lease.held
    assert raised.value.reason == {"data": "expired", "servers": "unreachable"}[lost]


def test_a_silent_minority_delays_no_job(quorum):
    @single_instance_task(key=NAME, name="tests.silent")
    def draw() -> str:
        return "drawn"

    quorum.configure(socket_timeout=4)
    assert draw() == "drawn"
    quorum.proxies[1].blackhole()
    begin = time.monotonic()
    assert [draw() for _ in range(20)] == ["drawn"] * 20
    assert time.monotonic() - begin < 20.0  # If each one waited for it, 60.


def test_servers_that_are_no_masters_any_more_are_dialed_anew(quorum, caller):
    quorum.configure(OPTIONS={**quorum.setting()["OPTIONS"], "client_name": "ours"})
    with caller.block(distributed_lock(NAME)):
        pass
    former = [quorum.clients(server, "ours") for server in range(3)]
    for server in (0, 2):
        quorum.servers[server].client().replicaof("127.0.0.1", 1)
    with pytest.raises(LockUnavailable, match="READONLY") as raised:
        caller.acquire(distributed_lock(NAME, wait=0))
    assert raised.value.reason == "majority"
    for server in (0, 2):
        wait_until(lambda server=server: former[server].isdisjoint(quorum.clients(server, "ours")))
        quorum.servers[server].client().replicaof("NO", "ONE")
    assert quorum.clients(1, "ours") == former[1]
    with caller.block(distributed_lock(NAME)) as lease:
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])


# --- answers that are lost -----------------------------------------------------------------------


@pytest.mark.proves("R1", "R4", "R6")
@pytest.mark.parametrize("lost", ["grant", "grant and resend", "release"])
def test_a_lost_answer_is_asked_for_again_and_leaves_nothing_if_there_is_none(lost, quorum, caller):
    with caller.block(distributed_lock("another")):  # The servers know the scripts.
        pass
    script, times = scripts.ACQUIRE, 2 if lost == "grant and resend" else 1
    lock = distributed_lock(NAME, wait=0)
    if lost == "release":
        script = scripts.RELEASE
        assert caller.acquire(lock)
    for proxy in quorum.proxies[:2]:
        proxy.rule_for_script(script.sha, "cut_after", times=times)
    if lost == "grant":  # With the same token.
        assert caller.acquire(lock)
        wait_until(lambda: quorum.known_by(lease_of(lock)) == [0, 1, 2])
    if lost == "grant and resend":
        with pytest.raises(LockUnavailable):
            caller.acquire(lock)
    else:
        caller.release(lock)
    wait_until(quorum.is_free)


# --- servers that are far away, and clients that stand still --------------------------------------


def test_who_is_needed_for_a_majority_is_dialed_though_nobody_is_trusted(quorum, caller):
    for server in backend().quorum:
        server.failed(TimeoutError("as if it had not answered a moment ago"))
    with caller.block(distributed_lock(NAME, wait=0)) as lease:
        assert lease.held


def test_a_loop_that_stands_still_while_it_dials_does_no_harm(quorum):
    quorum.configure(socket_timeout=1)

    async def stand_still():
        acquiring = asyncio.create_task(distributed_lock("its own", wait=HUNG).aacquire())
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(1.2)
        assert other()[0]
        return await acquiring

    assert asyncio.run(stand_still())
    assert all(server.is_trusted for server in backend().quorum)


def test_a_connection_that_comes_late_is_there_for_the_next_try(quorum, caller):
    # Longer than it is waited for once, 0.75 s, and than a server may take for anything, 1 s.
    quorum.configure(socket_timeout=1)
    for proxy in quorum.proxies:
        proxy.rule("HELLO", "delayreply:1.1", times=None)
    with caller.block(distributed_lock(NAME, wait=0)) as lease:
        assert lease.held
    assert [len(proxy.commands("HELLO")) for proxy in quorum.proxies] == [1, 1, 1]


@pytest.mark.parametrize("fault", ["late", "hangs"])
def test_a_server_that_answers_late_for_once_keeps_its_connection_unlike_one_that_hangs(
    fault, quorum, caller
):
    quorum.configure(socket_timeout=1 if fault == "late" else 2)
    with caller.block(distributed_lock("another")):  # There is a connection to each.
        pass
    for proxy in quorum.proxies:
        if fault == "hangs":
            proxy.rule_for_script(scripts.ACQUIRE.sha, "hang_before")
        else:  # Twice 0.75 s is waited for it.
            proxy.rule_for_script(scripts.ACQUIRE.sha, "delayreply:1.8")
            proxy.rule("HELLO", "delay:3", times=None)
    with caller.block(distributed_lock(NAME, wait=0)) as lease:
        assert lease.held
        assert len(quorum.known_by(lease)) >= 2


# --- proxies -------------------------------------------------------------------------------------


def test_its_servers_may_speak_resp2_only(make_quorum, caller):
    quorum = make_quorum(kind="redis", resp2=True)
    with pytest.raises(LockUnavailable, match=r"not speak RESP3.*OPTIONS\['protocol'\] to 2"):
        caller.acquire(distributed_lock(NAME, wait=0))
    quorum.configure(OPTIONS={**quorum.setting()["OPTIONS"], "protocol": 2})
    with caller.block(distributed_lock(NAME)) as first:
        wait_until(lambda: quorum.known_by(first) == [0, 1, 2])
        caller.renew(first)
        wait_until(lambda: [one.where for one in held.list()] == ["3 of 3"])
        assert not other()[0]
    quorum.set_mark(0, first.fence + 3_600_000_000)  # A majority is to know the greatest.
    quorum.servers[2].kill()
    with caller.block(distributed_lock(NAME)) as second:
        assert second.fence > first.fence + 3_600_000_000


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("known_by", [1, 2])
def test_a_lock_is_listed_with_how_many_servers_know_it_and_released_by_force(
    known_by, quorum, caller
):
    """Also if one only knows it, as long as one that is away may know it."""
    with pytest.raises(LockLost, match="by force"), caller.block(distributed_lock(NAME)) as lease:  # noqa: PT012 - by leaving the block
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        if known_by == 1:
            quorum.lapse(1)
        quorum.servers[2].kill()
        (seen,) = held.list()
        assert (seen.id, seen.name, seen.where) == (lease.id, NAME, f"{known_by} of 3")
        assert held.force_release(NAME, lease.id) is True
        assert held.list() == []
        caller.ensure_held(lease)


def test_the_rest_of_a_lease_that_is_over_goes_away_and_was_not_released_by_force(quorum, caller):
    with caller.block(distributed_lock(NAME)) as lease:
        wait_until(lambda: quorum.known_by(lease) == [0, 1, 2])
        value = quorum.value(0)
    wait_until(quorum.is_free)
    quorum.keep(0, value)  # As if the first had not heard of the release yet.
    assert held.force_release(NAME, lease.id) is False
    assert not quorum.value(0)


@pytest.mark.django_db
def test_the_command_and_the_admin_show_how_many_servers_know_a_lock(quorum, admin_client, capsys):
    quorum.servers[0].kill()
    with distributed_lock(NAME):
        call_command("locks", "list", "--json")
        (listed,) = json.loads(capsys.readouterr().out)
        assert (listed["name"], listed["where"]) == (NAME, "2 of 3")
        page = admin_client.get(reverse("admin:django_redislock_heldlock_changelist"))
        assert '<td class="field-where">2 of 3</td>' in page.content.decode()


def test_a_listing_knows_what_any_server_knows(quorum):
    quorum.servers[0].kill()
    early = [distributed_lock(f"early {number}", ttl=60) for number in range(5)]
    assert all(lock.acquire() for lock in early)
    quorum.servers[0].restart()
    late = [distributed_lock(f"late {number}", ttl=90) for number in range(5)]

    assert all(lock.acquire() for lock in late[:-1])
    assert len(held.list(limit=20)) == 9
    first = [lock.name for lock in held.list(limit=4)]
    then = [lock.name for lock in held.list(limit=4, offset=4)]
    assert len({*first, *then}) == 8
    assert all(name.startswith("early") for name in first)


@pytest.mark.parametrize("server", [0, 2])
def test_a_listing_is_in_order_whichever_server_has_lost_its_data(quorum, server):
    ends = {f"L{number}": number * 100 for number in range(1, 8)}
    locks = {name: distributed_lock(name, ttl=ttl) for name, ttl in ends.items()}
    names = [*ends]
    assert all(locks[name].acquire() for name in names[:5])
    with quorum.servers[server].client() as client:
        client.flushall()
    assert all(locks[name].acquire() for name in names[5:])
    # A reply that was no longer needed may come later.
    wait_until(lambda: [one.where for one in held.list(limit=9)][5:] == ["3 of 3"] * 2)

    def listed(limit, offset=0, *, latest_first=False):
        found = held.list(limit=limit, offset=offset, latest_first=latest_first)
        assert found.total == len(names)
        return [one.name for one in found]

    assert listed(9) == names
    assert listed(3) + listed(3, 3) + listed(3, 6) == names
    assert listed(3, latest_first=True) == ["L7", "L6", "L5"]
    assert listed(3, 2, latest_first=True) == ["L5", "L4", "L3"]


# --- permits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", [{}, {"on_conflict": "wait", "wait": 0.5}])
def test_permits_that_a_look_finds_free_and_nobody_is_granted_count_as_taken(quorum, on_conflict):
    for permit in (1, 2):
        leave_residues(quorum, NAME, permit)

    name = f"tests.permits-{len(on_conflict)}"

    @single_instance_task(key=NAME, limit=2, name=name, **on_conflict)
    def draw() -> str:
        return "drawn"

    assert held.list() == []
    assert in_thread(draw).result(HUNG / 2)["skipped"] == "busy"
    quorum.lapse(0)
    assert in_thread(draw).result(HUNG / 2) == "drawn"


# --- processes -----------------------------------------------------------------------------------


def test_a_server_whose_answers_come_late_keeps_its_connection(server, key_prefix):
    types = QuorumConnection, AsyncQuorumConnection
    connection = Dialer(server.url, {}, types=types).dial(HUNG)
    assert isinstance(connection, QuorumConnection)
    now = clock.now()
    for sent in (now - 2 * HUNG, now):
        connection.post(packed("BLPOP", key_prefix, 0), 1, math.inf)
        connection.leave(sent)
    server.client().rpush(key_prefix, "the answer to the first question")
    wait_until(lambda: select.select([connection], [], [], 0)[0])
    connection.post(packed("PING"), 1, HUNG)  # The oldest that is not answered was sent just now.
    connection.leave(now)
    with pytest.raises(TimeoutError):
        connection.post(packed("PING"), 1, 0.0)
    connection.close()


def test_threads_share_no_connection(quorum):
    def work(number):
        def take():
            for _ in range(20):
                with distributed_lock(f"lock {number}", wait=0) as lease:
                    assert lease.held
            return number

        return take

    results = [in_thread(work(number)) for number in range(8)]
    assert [one.result(HUNG) for one in results] == list(range(8))


def test_a_process_opens_no_more_connections_than_it_may_and_says_how_many(quorum):
    limit = 5
    # Twice most of it is waited for a connection that another returns, and nobody does.
    options = quorum.setting(socket_timeout=3)["OPTIONS"]
    quorum.configure(OPTIONS={**options, "max_connections": limit, "client_name": "ours"})
    pool, lent = backend()._pool, []
    with distributed_lock(NAME, ttl=9) as lease:
        wait_until(lambda: lease.renewals)  # By the watchdog's connections.
        for _ in range(limit - 1):
            lent.append(pool.take(HUNG))
            backend()._call_many([backend().look(NAME)], lent[-1])
        with pytest.raises(LockUnavailable, match=f"all {limit} connections are in use"):
            distributed_lock("another", wait=0).acquire()
        assert [len(quorum.clients(server, "ours")) for server in range(3)] == [limit] * 3
        for ensemble in lent:
            pool.give(ensemble)
