"""The server stalls, forgets, refuses and runs out of things: loud, bounded, never wrong."""

import math
import re
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import redis

from django_redislock import LockLost, LockUnavailable, distributed_lock, doctor, held
from django_redislock.backends.registry import backends
from tests.support.backends import PATIENT
from tests.support.faults import calls, hands_over, lease_of, loses, takes
from tests.support.matrix import everywhere
from tests.support.others import add_rival, rival
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
    return make_server()


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


def pause_writes(server, seconds):
    server.client().client_pause(int(seconds * 1000), all=False)


stalls = pytest.mark.parametrize("stall", [freeze, pause_writes])


@stalls
def test_a_stall_shorter_than_the_ttl_costs_the_holder_nothing(stall, locks, own_server):
    with distributed_lock(NAME, ttl=9) as lease:
        stall(own_server, 4)  # Its first renewal falls in here.
        end, renewals = time.monotonic() + 4, lease.renewals
        wait_until(lambda: time.monotonic() > end and lease.renewals > renewals)
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


def flushdb(locks):
    locks.redis.flushdb()


def delete_by_hand(locks):
    locks.redis.delete(keys_of(locks).lock)


def restart(locks):
    locks.server.restart(keep_data=False)


def evict(locks):
    """The policies "volatile-*" choose among keys with a TTL: among locks."""
    client = locks.redis
    client.config_set("maxmemory-policy", "volatile-ttl")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 100_000)
    number = 0
    while value_of(locks):
        with suppress(redis.exceptions.OutOfMemoryError):
            client.set(f"cache:{number}", "x" * 1000)
        number += 1
        assert number < 100_000
    client.config_set("maxmemory", 0)


data_losses = pytest.mark.parametrize("lose", [flushdb, delete_by_hand, restart, evict])


@pytest.mark.proves("P5", "R7")
@data_losses
def test_r7_a_lock_that_vanished_is_lost_and_never_silently_made_again(lose, caller, locks):
    with loses("expired"), caller.block(distributed_lock(NAME, ttl=1.5 * TTL)) as lease:
        deadline = time.monotonic() + lease.expires_in
        lose(locks)
        wait_until(lambda: not lease.held)
        assert time.monotonic() < deadline  # It was told by its next renewal.
        assert lease.lost_reason == "expired"
        assert value_of(locks) is None


@pytest.mark.proves("R9")
@data_losses
def test_r9_the_fence_grows_though_the_server_lost_its_record(lose, locks):
    fences = []
    for _ in range(2):
        with suppress(LockLost), distributed_lock(NAME) as lease:
            fences.append(lease.fence)
            lose(locks)
    with distributed_lock(NAME) as lease:
        assert fences < [*fences, lease.fence] == sorted({*fences, lease.fence})


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


def script_that_never_ends(server):
    client, probe = server.client(socket_timeout=30), server.client()
    in_thread(lambda: client.eval("while true do end", 0))

    def is_busy():
        try:
            return not probe.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)

    wait_until(is_busy)


def option(name, value):
    return "CONFIG", "SET", name, value


BE_NO_MASTER, BE_MASTER = ("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")

TRANSIENT = {  # What the server is told, and what heals it.
    "READONLY": ([BE_NO_MASTER], BE_MASTER),
    "MASTERDOWN": ([BE_NO_MASTER, option("replica-serve-stale-data", "no")], BE_MASTER),
    "NOREPLICAS": ([option("min-replicas-to-write", 1)], option("min-replicas-to-write", 0)),
    "max number of clients": ([option("maxclients", 1)], option("maxclients", 1000)),
    "BUSY": ([], ("SCRIPT", "KILL")),
}
transient = pytest.mark.parametrize("error", TRANSIENT)


@contextmanager
def in_trouble(error, locks):
    """A block in which the server answers with this error."""
    locks.redis.config_set("busy-reply-threshold", 50)
    commands, healing = TRANSIENT[error]
    if error == "BUSY":
        script_that_never_ends(locks.server)
    with locks.server.client() as client:
        for command in commands:
            client.execute_command(*command)
    yield
    locks.redis.execute_command(*healing)


@pytest.mark.proves("P4", "R13")
@everywhere
@transient
def test_r13_a_transient_error_is_unavailable_in_the_end_and_never_busy(error, caller, locks):
    with (
        in_trouble(error, locks),
        takes(at_most=PATIENCE),
        pytest.raises(LockUnavailable, match=error),
    ):
        caller.acquire(distributed_lock(NAME, ttl=TTL / 2))


@pytest.mark.proves("R13")
@pytest.mark.parametrize(("error", "database"), [*((one, 0) for one in TRANSIENT), ("BUSY", 1)])
def test_r13_a_transient_error_is_tried_again_as_long_as_the_settings_say(
    error, database, caller, locks
):
    """Also by a connection that has to select a database."""
    location = f"{locks.server.url.removesuffix('0')}{database}"
    locks.configure(LOCATION=location, UNAVAILABLE_AFTER=math.inf)
    with in_trouble(error, locks):
        future = caller.begin(distributed_lock(NAME, wait=HUNG))
        with pytest.raises(TimeoutError):
            future.result(0.3)
    assert future.result(HUNG)


@pytest.mark.proves("R7")
@transient
def test_r7_renewal_outlives_a_transient_error(error, locks):
    with distributed_lock(NAME, ttl=9) as lease:
        wait_until(lambda: lease.renewals)
        with in_trouble(error, locks):
            time.sleep(4)  # Its next renewal falls in here.
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
        assert is_held_by(locks, lease)


@pytest.mark.proves("R7")
def test_r7_a_lease_on_a_server_that_became_read_only_is_lost_at_its_deadline(locks):
    with loses("unreachable"), distributed_lock(NAME) as lease, in_trouble("READONLY", locks):
        wait_until(lambda: lease.lost_reason)


def refuse(error, locks):
    client, key = locks.redis, keys_of(locks).lock
    match error:
        case "WRONGTYPE":
            client.rpush(key, "by hand")
            client.expire(key, 60)
        case "OOM":
            client.config_set("maxmemory", 1)
        case "NOAUTH":
            client.config_set("requirepass", "secret")
        case _:
            client.execute_command("ACL", "SETUSER", "default", "-get")


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize("error", ["WRONGTYPE", "OOM", "NOAUTH", "ACL|can't run"])
def test_r13_a_refusal_is_raised_at_once_whatever_the_wait(error, caller, locks):
    refuse(error, locks)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=error) as caught:
        caller.acquire(distributed_lock(NAME, wait=HUNG))
    assert isinstance(caught.value.__cause__, redis.RedisError)


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
def test_out_of_memory_holders_renew_release_and_cool_and_operators_release_by_force(caller, locks):
    cooling = distributed_lock("cooling", min_hold=60)
    caller.acquire(cooling)
    with loses("forced"), distributed_lock("forced") as forced:
        with caller.block(distributed_lock(NAME)) as lease:
            locks.redis.config_set("maxmemory", 1)
            with pytest.raises(LockUnavailable, match="OOM"):
                caller.acquire(distributed_lock("another"))
            wait_until(lambda: lease.renewals)
            assert is_held_by(locks, lease)
        assert is_left_clean(locks)
        assert held.force_release("forced", forced.id)
        wait_until(lambda: forced.lost_reason)
    caller.release(cooling)
    assert 30_000 < locks.redis.pttl(keys_of(locks, "cooling").lock) <= 60_000


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
    (finding,) = doctor.examine("default")
    assert (finding.about, finding.level) == ("version", "fail")
    assert version in finding.says
    assert finding.advice
