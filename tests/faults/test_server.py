"""The server stalls, forgets, refuses and runs out of things: loud, bounded, never wrong."""

import math
import re
import threading
import time
from contextlib import suppress

import pytest
import redis

from django_redislock import LockLost, LockUnavailable, distributed_lock, doctor, held
from django_redislock.backends.registry import backends
from tests.support.backends import PATIENT
from tests.support.faults import calls, hands_over, lease_of, loses, takes
from tests.support.matrix import everywhere
from tests.support.others import add_rival, rival
from tests.support.servers import free_port
from tests.support.stored import (
    NAME,
    immortal,
    is_held_by,
    is_left_clean,
    keys_of,
    load_scripts,
    value_of,
)
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, in_thread

TTL = 6.0  # Long enough that a machine which stands still for a second loses no lease.
PATIENCE = TTL / 3  # The operation timeout that follows from it, without one of its own.


@pytest.fixture
def own_server(make_server):
    """A server that may be broken in any way."""
    return make_server(enable_debug_command="yes")


@pytest.fixture
def locks(locks, own_server, settings):
    """Both aliases on a server of the test's own."""
    locks.on(own_server, TTL=TTL, WAIT=0, OPTIONS=PATIENT)
    add_rival(settings, locks)
    yield locks
    with suppress(redis.RedisError):  # It may have been left broken.
        assert immortal(locks) == []


# The server stalls


def freeze(server, seconds):
    server.pause()
    threading.Timer(seconds, server.resume).start()


def debug_sleep(server, seconds):
    # The server answers nothing that is sent after this before it has slept.
    server.client().connection_pool.get_connection().send_command("DEBUG", "SLEEP", str(seconds))


def pause_writes(server, seconds):
    server.client().client_pause(int(seconds * 1000), all=False)


stalls = pytest.mark.parametrize("stall", [freeze, debug_sleep, pause_writes])


@stalls
def test_a_stall_shorter_than_the_ttl_costs_the_holder_nothing(stall, locks, own_server):
    with distributed_lock(NAME, ttl=9) as lease:
        stall(own_server, 4)  # Its first renewal falls in here.
        end, renewals = time.monotonic() + 4, lease.renewals
        wait_until(lambda: time.monotonic() > end and lease.renewals > renewals)
        assert lease.held
        assert is_held_by(locks, lease)


@stalls
def test_a_stall_shorter_than_unavailable_after_only_delays_an_acquire(
    stall, caller, locks, own_server
):
    locks.configure(OPTIONS={}, UNAVAILABLE_AFTER=20)
    stall(own_server, 2)
    assert caller.acquire(distributed_lock(NAME, ttl=TTL / 2, wait=HUNG))


@pytest.mark.proves("P5", "R7")
@stalls
def test_r7_in_a_longer_stall_the_holder_knows_at_the_deadline(stall, caller, locks, own_server):
    with loses("unreachable"), caller.block(distributed_lock(NAME)) as lease:
        stall(own_server, 2 * TTL)
        with takes(at_most=TTL):
            wait_until(lambda: not lease.held)
        wait_until(lambda: lease.lost_reason == "unreachable")


@pytest.mark.proves("P2", "R4")
@stalls
def test_r4_an_acquire_that_gave_up_during_a_stall_leaves_one_ttl_at_most(
    stall, caller, locks, own_server, settings
):
    locks.configure(OPTIONS={})
    add_rival(settings, locks)
    assert caller.acquire(distributed_lock("another"))  # So that there is a connection.
    ttl, patience = TTL / 2, PATIENCE / 2
    stalled = 8 * patience
    ends_at = time.monotonic() + stalled
    stall(own_server, stalled)
    with takes(at_most=2 * patience), pytest.raises(LockUnavailable):
        caller.acquire(distributed_lock(NAME, ttl=ttl))
    with takes(at_most=ends_at + ttl - time.monotonic()):
        assert rival(wait=HUNG).acquire()


# The server forgets


def flushdb(locks, server):
    locks.redis.flushdb()


def delete_by_hand(locks, server):
    locks.redis.delete(keys_of(locks).lock)


def restart(locks, server):
    server.restart(keep_data=False)


def evict_first(locks, server):
    """The policies "volatile-*" choose among keys with a TTL: among locks."""
    _evict(locks, "volatile-ttl")


def evict_any(locks, server):
    _evict(locks, "allkeys-random")


def _evict(locks, policy):
    client = locks.redis
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 100_000)
    number = 0
    while value_of(locks):
        with suppress(redis.exceptions.OutOfMemoryError):
            client.set(f"cache:{number}", "x" * 1000)
        number += 1
        assert number < 100_000
    client.config_set("maxmemory", 0)


data_losses = pytest.mark.parametrize(
    "lose", [flushdb, delete_by_hand, restart, evict_first, evict_any]
)


@pytest.mark.proves("P5", "R7")
@data_losses
def test_r7_a_lock_that_vanished_is_lost_and_never_silently_made_again(
    lose, caller, locks, own_server
):
    with loses("expired"), caller.block(distributed_lock(NAME, ttl=1.5 * TTL)) as lease:
        deadline = time.monotonic() + lease.expires_in
        lose(locks, own_server)
        wait_until(lambda: not lease.held)
        assert time.monotonic() < deadline  # It was told by its next renewal.
        assert lease.lost_reason == "expired"
        assert value_of(locks) is None


@pytest.mark.proves("R9")
@data_losses
def test_r9_the_fence_grows_though_the_server_lost_its_record(lose, locks, own_server):
    fences = []
    for _ in range(2):
        with suppress(LockLost), distributed_lock(NAME) as lease:
            fences.append(lease.fence)
            lose(locks, own_server)
    with distributed_lock(NAME) as lease:
        assert fences < [*fences, lease.fence] == sorted({*fences, lease.fence})


def test_asking_the_server_tells_at_once_that_the_lock_vanished(caller, locks):
    with loses("expired"), caller.block(distributed_lock(NAME, renew=False)) as lease:
        locks.redis.flushdb()
        assert lease.held  # By our own clock.
        with pytest.raises(LockLost):
            caller.ensure_held(lease)
        assert not lease.held


@pytest.mark.proves("P3")
@pytest.mark.no_permit("the bystander vanishes too")
def test_a_release_after_the_lock_vanished_leaves_the_next_holder_alone(caller, locks):
    lock, later = distributed_lock(NAME, renew=False), rival()
    caller.acquire(lock)
    locks.redis.flushdb()
    assert later.acquire()
    with pytest.raises(LockLost, match="another owner"):
        caller.release(lock)
    assert is_held_by(locks, lease_of(later))


def test_a_waiter_whose_queue_vanished_gets_the_lock_within_2_s(caller, locks):
    with suppress(LockLost), rival(ttl=30):
        waiter = caller.begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        locks.redis.flushdb()
        with takes(at_most=2):
            assert waiter.result(HUNG)


@pytest.mark.proves("R12")
@everywhere
def test_r12_a_flushed_script_is_sent_again_without_script_load(caller, locks):
    load_scripts(locks)
    locks.redis.config_resetstat()
    lock, next_lock = distributed_lock(NAME), rival(wait=HUNG)

    locks.redis.script_flush()
    assert caller.acquire(lock)
    lease = lease_of(lock)
    locks.redis.script_flush()
    renewals = lease.renewals
    wait_until(lambda: lease.renewals > renewals)
    waiter = Blocking().begin_waiting(next_lock, locks)
    locks.redis.script_flush()
    with hands_over(locks, waiter, next_lock):
        caller.release(lock)
    next_lock.release()

    assert is_left_clean(locks)
    assert "script|load" not in calls(locks.redis.info("commandstats"))


# R13: which errors are worth another try, and which are not

Commands = list[tuple[str | int, ...]]


def script_that_never_ends(server):
    client = server.client(socket_timeout=30)
    in_thread(lambda: client.eval("while true do end", 0))
    probe = server.client()

    def is_busy():
        try:
            return not probe.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)

    wait_until(is_busy)
    return [("SCRIPT", "KILL")]


def send(*commands, heal):
    def trouble(server):
        client = server.client()
        for command in commands:
            client.execute_command(*command)
        client.close()
        return heal

    return trouble


def config(name, value, healed):
    return send(("CONFIG", "SET", name, str(value)), heal=[("CONFIG", "SET", name, str(healed))])


NO_MASTER = ("REPLICAOF", "127.0.0.1", 1)
NO_STALE_DATA = ("CONFIG", "SET", "replica-serve-stale-data", "no")

TRANSIENT = {
    "READONLY": send(NO_MASTER, heal=[("REPLICAOF", "NO", "ONE")]),
    "MASTERDOWN": send(NO_MASTER, NO_STALE_DATA, heal=[("REPLICAOF", "NO", "ONE")]),
    "NOREPLICAS": config("min-replicas-to-write", 1, 0),
    "max number of clients": config("maxclients", 1, 1000),
    "BUSY": script_that_never_ends,
}


def wrong_type(server, locks):
    locks.redis.rpush(keys_of(locks).lock, "by hand")
    locks.redis.expire(keys_of(locks).lock, 60)


def out_of_memory(server, locks):
    locks.redis.config_set("maxmemory", 1)


def password_wanted(server, locks):
    locks.redis.config_set("requirepass", "secret")


def no_rights(server, locks):
    locks.redis.execute_command("ACL", "SETUSER", "default", "-get")


REFUSALS = {
    "WRONGTYPE": wrong_type,
    "OOM": out_of_memory,
    "NOAUTH": password_wanted,
    "ACL|can't run": no_rights,
}

transient = pytest.mark.parametrize(
    ("text", "trouble"), TRANSIENT.items(), ids=[text.split()[0] for text in TRANSIENT]
)
refusals = pytest.mark.parametrize(
    ("text", "trouble"), REFUSALS.items(), ids=[break_.__name__ for break_ in REFUSALS.values()]
)


def heal(server, locks, commands):
    for command in commands:
        locks.redis.execute_command(*command)


@pytest.mark.proves("P4", "R13")
@everywhere
@transient
def test_r13_a_transient_error_is_unavailable_in_the_end_and_never_busy(
    text, trouble, caller, locks, own_server
):
    locks.redis.config_set("busy-reply-threshold", 50)
    healing = trouble(own_server)
    with takes(at_most=PATIENCE), pytest.raises(LockUnavailable, match=text):
        caller.acquire(distributed_lock(NAME, ttl=TTL / 2))
    heal(own_server, locks, healing)


def await_the_end_of(trouble, caller, locks, own_server):
    """Acquire a lock while the server is in trouble, and is healed meanwhile."""
    locks.redis.config_set("busy-reply-threshold", 50)
    healing = trouble(own_server)
    future = caller.begin(distributed_lock(NAME, wait=HUNG))
    with pytest.raises(TimeoutError):
        future.result(0.3)
    heal(own_server, locks, healing)
    assert future.result(HUNG)


@pytest.mark.proves("R13")
@transient
def test_r13_a_transient_error_is_tried_again_as_long_as_the_settings_say(
    text, trouble, caller, locks, own_server
):
    locks.configure(UNAVAILABLE_AFTER=math.inf)
    await_the_end_of(trouble, caller, locks, own_server)


@pytest.mark.proves("R13")
def test_r13_a_busy_server_is_tried_again_by_a_connection_that_selects_a_database_too(
    caller, locks, own_server
):
    locks.configure(LOCATION=f"{own_server.url.removesuffix('0')}1", UNAVAILABLE_AFTER=math.inf)
    await_the_end_of(script_that_never_ends, caller, locks, own_server)


@pytest.mark.proves("R7")
@transient
def test_r7_renewal_outlives_a_transient_error(text, trouble, locks, own_server):
    locks.redis.config_set("busy-reply-threshold", 50)
    with distributed_lock(NAME, ttl=9) as lease:
        wait_until(lambda: lease.renewals)
        healing = trouble(own_server)
        time.sleep(4)  # Its next renewal falls in here.
        heal(own_server, locks, healing)
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
        assert lease.held
        assert is_held_by(locks, lease)


@pytest.mark.proves("R7")
def test_r7_a_lease_on_a_server_that_became_read_only_is_lost_at_its_deadline(locks, own_server):
    healing = []
    with loses("unreachable"), distributed_lock(NAME) as lease:
        healing = TRANSIENT["READONLY"](own_server)
        wait_until(lambda: lease.lost_reason)
    heal(own_server, locks, healing)


@pytest.mark.proves("R13")
@everywhere
@refusals
def test_r13_a_refusal_is_raised_at_once_whatever_the_wait(
    text, trouble, caller, locks, own_server
):
    trouble(own_server, locks)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=text) as caught:
        caller.acquire(distributed_lock(NAME, wait=HUNG))
    assert isinstance(caught.value.__cause__, redis.RedisError)


@pytest.mark.proves("R13")
def test_r13_a_node_of_a_cluster_is_named_as_the_problem(locks, make_server):
    node = make_server(cluster_enabled="yes", cluster_port=free_port())
    client = node.client()
    client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    locks.on(node, WAIT=HUNG)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match="CROSSSLOT"):
        distributed_lock(NAME).acquire()


@pytest.mark.proves("R13")
@everywhere
def test_r13_loading_is_transient_and_a_lease_outlives_the_restart(caller, locks, make_server):
    slowly = {"key_load_delay": 5000, "loading_process_events_interval_bytes": 1024}
    server = make_server(rdbcompression="no", **slowly)
    locks.on(server, TTL=15, WAIT=0, UNAVAILABLE_AFTER=HUNG)
    locks.redis.mset({f"filler:{number}": "x" * 200 for number in range(3000)})
    with caller.block(distributed_lock(NAME)) as lease:
        server.restart(keep_data=True, ready=False)
        wait_until(lambda: _is_loading(server))
        with pytest.raises(LockUnavailable, match="LOADING") as raised:
            caller.acquire(distributed_lock("another"))
        assert raised.value.reason == "not_ready"
        locks.redis.config_set("key-load-delay", 0)
        assert caller.acquire(distributed_lock("another", wait=HUNG))
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
        assert is_held_by(locks, lease)


def _is_loading(server):
    try:
        server.client().ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass
    return False


@everywhere
def test_a_held_lease_is_renewed_while_no_new_client_may_connect(locks, own_server):
    with distributed_lock(NAME, ttl=2 * TTL) as lease:
        wait_until(lambda: lease.renewals)
        locks.redis.config_set("maxclients", 1)
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals + 1)
        assert lease.held
        locks.redis.config_set("maxclients", 1000)


# Out of memory, with noeviction


@everywhere
def test_out_of_memory_holders_renew_and_release(caller, locks):
    with caller.block(distributed_lock(NAME)) as lease:
        locks.redis.config_set("maxmemory", 1)
        with pytest.raises(LockUnavailable, match="OOM"):
            caller.acquire(distributed_lock("another"))
        wait_until(lambda: lease.renewals)
        assert is_held_by(locks, lease)
    assert is_left_clean(locks)


@everywhere
def test_out_of_memory_a_release_hands_the_lock_on(caller, locks):
    lock, next_lock = distributed_lock(NAME), rival(wait=HUNG)
    caller.acquire(lock)
    waiter = Blocking().begin_waiting(next_lock, locks)
    locks.redis.config_set("maxmemory", 1)
    with hands_over(locks, waiter, next_lock):
        caller.release(lock)
    lease_of(next_lock).ensure_held(verify=True)
    next_lock.release()
    assert is_left_clean(locks)


@everywhere
def test_out_of_memory_a_release_starts_the_cooling(caller, locks):
    lock = distributed_lock(NAME, min_hold=60)
    caller.acquire(lock)
    locks.redis.config_set("maxmemory", 1)
    caller.release(lock)
    assert 30_000 < locks.redis.pttl(keys_of(locks).lock) <= 60_000


@everywhere
def test_out_of_memory_an_operator_can_release_by_force(locks):
    with loses("forced"), distributed_lock(NAME) as lease:
        locks.redis.config_set("maxmemory", 1)
        assert held.force_release(NAME, lease.id)
        wait_until(lambda: lease.lost_reason)


# The server accepts no writes


@pytest.mark.proves("P1")
@everywhere
def test_a_server_that_refuses_to_write_hands_nothing_over(caller, locks, if_rung):
    holder, lock = rival(ttl=60), distributed_lock(NAME, ttl=60, wait=HUNG)
    assert holder.acquire()
    waiter = caller.begin_waiting(lock, locks)
    with locks.redis.pubsub() as heard:
        heard.psubscribe("*")
        assert heard.get_message(timeout=HUNG)["type"] == "psubscribe"
        locks.redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(LockUnavailable, match="NOREPLICAS"):
            holder.release()
        locks.redis.publish("the", "end")
        assert heard.get_message(timeout=HUNG)["channel"] == b"the"
    locks.redis.config_set("min-replicas-to-write", 0)
    assert not waiter.done()
    assert held.force_release(NAME, held.list()[0].id)
    assert waiter.result(if_rung)


def test_a_reply_that_sends_us_to_another_server_is_no_answer(locks):
    server = backends["default"]
    locks.redis.config_set("min-replicas-to-write", 1)
    with pytest.raises(LockUnavailable, match="NOREPLICAS"):
        server.commands(("PING",), ("DEL", NAME))
    locks.redis.config_set("min-replicas-to-write", 0)
    assert server.commands(("PING",), ("DEL", NAME)) == [b"PONG", 0]


@pytest.mark.proves("R1", "R4", "R13")
def test_r4_a_reply_that_is_none_is_no_refusal_and_leaves_no_lease(
    caller, locks, own_server, make_proxy
):
    """The command may have been carried out, as when a proxy fails amid its reply."""
    proxy = make_proxy(own_server)
    locks.on(proxy, TTL=20, OPTIONS=PATIENT)
    with caller.block(distributed_lock("before")):
        pass
    replies = []

    def spoil_the_first(reply):
        replies.append(reply)
        return reply if replies[1:] else b"HTTP/1.1 502 Bad Gateway\r\n"

    proxy.rewrite("EVALSHA", spoil_the_first)
    lock = distributed_lock(NAME, wait=0)
    assert caller.acquire(lock)
    assert replies[1:]
    assert is_held_by(locks, lease_of(lock))
    caller.release(lock)
    assert is_left_clean(locks)


# R11: replicas


@pytest.mark.proves("R11")
@everywhere
@pytest.mark.usefixtures("undo_in_time")
def test_r11_a_grant_that_no_replica_acknowledged_fails_and_leaves_nothing(caller, locks):
    # Of what a try has, three quarters, a quarter is for the way there and back.
    locks.configure(REPLICAS_ACK=1, TTL=30, OPTIONS={"socket_timeout": 6})
    with pytest.raises(LockUnavailable, match=r"0 of the 1 replicas .* lower it") as raised:
        caller.acquire(distributed_lock(NAME))
    assert raised.value.reason == "replicas"
    assert is_left_clean(locks)


# The server is too old


def aged(reply):
    """The answer of a server to HELLO as Redis 6.2 gives it."""
    reply = re.sub(rb"\$\d+\r\n(redis|valkey)\r\n", b"$5\r\nredis\r\n", reply, count=1)
    return re.sub(rb"(\$7\r\nversion\r\n)\$\d+\r\n[^\r]+", rb"\1$6\r\n6.2.14", reply)


def without_hello(reply):
    """The same of Redis 5."""
    return b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n"


@everywhere
@pytest.mark.parametrize(
    ("answer", "version", "protocol"),
    [(aged, "Redis 6.2.14", 3), (without_hello, "older than Redis 6", 3), (aged, "6.2.14", 2)],
)
def test_an_old_server_is_refused_at_once_by_its_own_greeting(
    answer, version, protocol, locks, make_proxy, caller
):
    proxy = make_proxy(locks.server)
    locks.on(proxy, TTL=30, WAIT=30, OPTIONS={"protocol": protocol})
    proxy.rewrite("HELLO", answer)
    begin = time.monotonic()
    with pytest.raises(LockUnavailable, match=rf"{version}.*Redis 7.0 or newer, or Valkey"):
        caller.acquire(distributed_lock(NAME))
    assert time.monotonic() - begin < 5
    assert {command.name for command in proxy.log} == {"HELLO"}  # It costs no round trip.


@everywhere
def test_the_doctor_says_that_a_server_is_too_old(locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    proxy.rewrite("HELLO", aged)
    (finding,) = doctor.examine("default")
    assert (finding.about, finding.level) == ("version", "fail")
    assert "6.2.14" in finding.says
    assert finding.advice
