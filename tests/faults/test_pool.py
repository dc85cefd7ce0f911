"""The pool of blocking connections: never more than its limit, and nobody waits in vain."""

import gc
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event

import pytest

from django_redislock import LockUnavailable, clock, distributed_lock
from django_redislock.backends.redis import pool as pool_module
from django_redislock.backends.redis import shared_bell
from django_redislock.backends.redis.connection import Connection, packed
from django_redislock.backends.redis.dialing import Dialer
from django_redislock.backends.redis.errors import Crowded, Exhausted
from django_redislock.backends.redis.pool import ConnectionPool
from django_redislock.backends.redis.shared_bell import SharedBell, SharedBells
from django_redislock.backends.registry import backends
from tests.support.faults import loses, takes
from tests.support.matrix import SECURED
from tests.support.stored import NAME, keys_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

LIMIT = 3
SOON = 5.0  # Seconds within which whoever may go on must have gone on.


@pytest.fixture
def pool(server):
    dial = Dialer(server.url, {}).dial
    pool = ConnectionPool(dial, LIMIT, SharedBells(dial))
    yield pool
    pool.retire()


def works(connection):
    """Whether the server answers on that connection."""
    return bytes(connection.execute(packed("PING"), HUNG)) == b"PONG"


def idle_connections():
    """The connections that the locks of this test keep for later."""
    return [*backends["default"]._pool._idle]


def test_what_was_returned_last_is_lent_first(pool):
    first, second = pool.take(HUNG), pool.take(HUNG)
    pool.give(first)
    pool.give(second)
    assert pool.take(HUNG) is second
    assert pool.take(HUNG) is first
    pool.give(first)
    pool.give(second)


@pytest.mark.proves("R5")
def test_r5_a_dial_has_the_time_that_the_wait_for_its_place_has_left(pool, monkeypatch):
    given, dial = [], pool._dial

    def noted(seconds):
        given.append(seconds)
        return dial(seconds)

    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    monkeypatch.setattr(pool, "_dial", noted)
    waiting = in_thread(lambda: pool.take(HUNG))
    wait_until(lambda: pool._waiting)
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + HUNG / 2)
    pool.drop(lent.pop())
    assert works(waiting.result(HUNG))
    assert given[0] <= HUNG / 2


def test_a_ring_that_comes_before_a_reply_is_kept(pool, server):
    connection = pool.take(HUNG)
    connection.subscribe("channel", HUNG)
    server.client().publish("channel", "ring")
    assert works(connection)
    assert connection.next_ring(0) == b"ring"
    pool.give(connection)


def test_a_bell_that_is_cut_while_it_opens_opens_no_more(server):
    cut = Event()
    made = []

    def dial(seconds):
        cut.wait(HUNG)
        made.append(Dialer(server.url, {}).dial(seconds))
        return made[0]

    bell = SharedBell(dial, "channel", HUNG)
    bell.cut()
    cut.set()
    with pytest.raises(ConnectionError, match="lost"):
        bell.expect("id", HUNG)
    wait_until(lambda: made and not made[0].is_open)
    assert made[0].channels == {}


def test_a_connection_is_lent_once_also_if_its_return_is_interrupted(locks, monkeypatch):
    class Interrupt(BaseException):
        pass

    give = ConnectionPool.give

    def give_and_be_interrupted(pool, connection):
        monkeypatch.undo()
        give(pool, connection)
        raise Interrupt

    lock = distributed_lock("lottery")
    monkeypatch.setattr(ConnectionPool, "give", give_and_be_interrupted)
    with pytest.raises(Interrupt):
        lock.acquire()  # Its first connection: it is dialed, and so the longer way is taken.
    idle = idle_connections()
    assert len(idle) == len(set(idle))


@pytest.mark.proves("P5", "R6")
@pytest.mark.parametrize("min_hold", [0, 30])
@pytest.mark.parametrize("by_tls", [False, True])
def test_r6_a_release_that_a_cut_connection_could_not_send_was_not_carried_out(
    by_tls, min_hold, locks, shared_reached
):
    # So whoever has not got the lease has lost it. Connections are cut after a failover.
    if by_tls:
        secured = shared_reached(SECURED)
        locks.on(secured, OPTIONS={"ssl_ca_certs": secured.ca})
    with loses("expired"), distributed_lock(NAME, ttl=60, renew=False, min_hold=min_hold):
        server = shared_reached(SECURED).client() if by_tls else locks.redis
        assert server.delete(keys_of(locks).lock)
        for connection in idle_connections():
            connection.cut()


def test_connections_go_to_those_who_have_waited_longest(pool):
    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    served = []

    def take_a_turn(number):
        connection = pool.take(HUNG)
        served.append(number)
        pool.give(connection)

    threads = []
    for number in range(5):
        threads.append(in_thread(partial(take_a_turn, number)))
        wait_until(lambda: len(pool._waiting) == len(threads))
    pool._idle.append(lent.pop())  # As one is that was returned a moment ago.
    assert pool.take_idle() is None, "a newcomer was served first"
    for thread in threads:  # They look for themselves after a while.
        thread.result(HUNG)
    assert served == sorted(served)


def test_an_acquire_waits_for_a_connection_as_long_as_for_the_lock(locks):
    locks.configure(OPTIONS={"max_connections": 5, "socket_timeout": 0.2}, UNAVAILABLE_AFTER=0)
    pool = backends["default"]._pool
    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    lock = distributed_lock(NAME, wait=HUNG)
    acquiring = in_thread(lock.acquire)
    begin = time.monotonic()
    wait_until(lambda: time.monotonic() > begin + 1 and pool._waiting)
    for connection in lent:
        pool.give(connection)
    assert acquiring.result(HUNG)
    lock.release()


@pytest.mark.parametrize("wait", [0, 0.3])
def test_who_gets_no_connection_is_told_so_in_time(wait, locks):
    locks.configure(OPTIONS={"max_connections": 5, "socket_timeout": 1.0})
    pool = backends["default"]._pool
    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    with (
        takes(at_least=wait, at_most=wait + 2),
        pytest.raises(
            LockUnavailable, match=r"all 5 connections are in use.*max_connections"
        ) as raised,
    ):
        distributed_lock(NAME, wait=wait).acquire()
    assert raised.value.reason == "pool"
    for connection in lent:
        pool.give(connection)


def test_in_a_forked_child_nobody_waits_for_a_connection_of_its_parent(pool):
    # As a signal handler that forks makes it: it returns into the wait.
    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    waiting = in_thread(partial(pool.take, HUNG))
    wait_until(lambda: pool._waiting)
    pool.abandon()
    with pytest.raises(Exhausted):
        waiting.result(SOON)
    for connection in lent:
        with pytest.raises(OSError, match="socket"):
            works(connection)  # Whatever is written there reaches nobody.


# At any time


def at_each_step(work, handler):
    """Call *handler* with a number before each step of the pool's code that *work* comes to.

    As a signal handler does, or a destructor that the garbage collector runs; these only now and
    then. In a thread, so that one that hangs fails the test. Returns how many steps there were.
    """
    steps = count()

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in {pool_module.__file__, shared_bell.__file__}:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            handler(next(steps))
        return trace

    def traced():
        sys._getframe().f_trace_opcodes = True  # Or Python 3.12 has settrace() leave steps out.
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)

    in_thread(traced).result(HUNG)
    return next(steps)


@pytest.mark.parametrize("end", [ConnectionPool.give, ConnectionPool.drop])
def test_a_signal_handler_may_use_the_pool_while_its_thread_does(pool, end):
    lent = []

    def work():
        end(pool, pool.take(HUNG))
        pool.bells.open("prefix:bell:1", HUNG)

    def handle(_):
        while lent and (pool._waiting or len(lent) < LIMIT):
            pool.give(lent.pop())
        if not lent:
            connection = pool.take(SOON)
            assert works(connection)
            pool.give(connection)
            assert pool.bells.open("prefix:bell:2", HUNG).closed is False

    assert at_each_step(work, handle) > 50
    lent += [pool.take(HUNG) for _ in range(LIMIT)]
    assert at_each_step(work, handle) > 50  # It waits for what the handler gives back.
    assert all(works(connection) for connection in [pool.take(HUNG) for _ in range(LIMIT)])


def test_a_signal_handler_that_outlasts_a_wait_does_not_prolong_it(pool):
    def handle(number, frame):
        time.sleep(0.3)

    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    # So that the test comes to an end also if nothing else ends the wait.
    late = threading.Timer(SOON, lambda: pool.give(lent.pop()))
    late.start()
    try:
        with pytest.raises(Exhausted):
            pool.take(0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        late.cancel()


@pytest.mark.parametrize("idle", [0, LIMIT])
def test_waiters_that_come_at_the_same_time_do_not_have_the_last_two_either(pool, idle):
    def wait():
        with suppress(Crowded):
            kept.append(pool.take(HUNG, to_wait=True))

    steps, last = 0, 1
    while steps < last:
        for connection in [pool.take(HUNG) for _ in range(idle)]:
            pool.give(connection)
        kept = []
        last = at_each_step(wait, lambda step, at=steps: wait() if step == at else None)
        assert len(kept) == LIMIT - ConnectionPool.KEPT_BACK, f"at step {steps}"
        (pool.give if idle else pool.drop)(kept.pop())
        steps += 1
    assert steps > 20


@pytest.mark.parametrize("end", [ConnectionPool.give, ConnectionPool.drop])
def test_a_connection_that_comes_free_wakes_who_waits_for_one(pool, end):
    lent = [pool.take(HUNG) for _ in range(LIMIT)]
    others = [in_thread(partial(pool.take, HUNG)) for _ in range(LIMIT)]
    wait_until(lambda: len(pool._waiting) == LIMIT)
    for connection in lent:
        end(pool, connection)
    assert all(works(other.result(SOON)) for other in others)


def test_a_drop_closes_the_idle_ones_too_and_wakes_who_waits(pool):
    broken, idle = pool.take(HUNG), pool.take(HUNG)
    pool.give(idle)
    pool.drop(broken)
    assert all(works(connection) for connection in [pool.take(HUNG) for _ in range(LIMIT)])
    with pytest.raises(OSError, match=r"closed|descriptor"):
        works(idle)


def test_a_dial_that_fails_or_a_connection_that_was_lost_gives_its_place_back(server):
    dial = Dialer(server.url, {}).dial
    failures = [ConnectionRefusedError()] * LIMIT * 2

    def faulty(seconds):
        if failures:
            raise failures.pop()
        return dial(seconds)

    pool = ConnectionPool(faulty, LIMIT, SharedBells(faulty))
    while failures:
        with pytest.raises(ConnectionRefusedError):
            pool.take(HUNG)
    # As a signal handler's exception does between the pool's return and the caller's assignment.
    for _ in range(LIMIT * 2):
        pool.take(HUNG)
    assert all(works(connection) for connection in [pool.take(HUNG) for _ in range(LIMIT)])


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_is_collected_as_garbage_closes_its_socket_first(tls, make_server):
    server = make_server(tls=tls)
    connection = Dialer(server.url, {"ssl_ca_certs": server.ca} if tls else {}).dial(HUNG)
    circle = [connection]
    circle.append(circle)
    # A collection while a thread reads from the socket: the next one comes to the socket first.
    sock = connection._socket
    del connection
    gc.collect()
    del sock, circle
    gc.collect()  # A warning that a socket is open would be an error here.


def test_a_retired_pool_keeps_no_connection(pool, server):
    lent = pool.take(HUNG)
    pool.retire()
    pool.give(lent)
    with pytest.raises(OSError, match=r"closed|descriptor"):
        works(lent)


def test_a_shared_bell_hands_each_ring_to_the_waiter_it_is_for(pool, server):
    bell = pool.bells.open("two-waiters", HUNG)
    for id in "ab":  # noqa: A001
        bell.expect(id, HUNG)
    for ring in ("granted b 7 0", "look a 300", "look c 0"):
        server.client().publish("two-waiters", ring)
    assert bell.next_ring("a", HUNG) == b"look a 300"
    assert bell.next_ring("b", HUNG) == b"granted b 7 0"
    assert bell.next_ring("a", 0) is None
    bell.cut()


def test_a_shared_bell_has_closed_its_connection_before_another_is_opened(
    pool, server, monkeypatch
):
    monkeypatch.setattr(SharedBell, "CHECK_EVERY", 0.1)
    close, seen = Connection.close, []

    def close_and_look(connection):
        # Another pool's, of a test before, may be closed meanwhile.
        if any(connection is bell._connection for bell in pool.bells._bells.values()):
            seen.append(pool.bells.open("another", HUNG))
        close(connection)

    monkeypatch.setattr(Connection, "close", close_and_look)
    bell = pool.bells.open("nobody", HUNG)
    wait_until(lambda: bell.closed)  # Nobody listens to it.
    assert seen == [bell]
