"""A signal handler, or a destructor, may use locks wherever it interrupts the code that uses them.

Both run between any two bytecodes of the thread that they interrupt, so they must never wait for
what that thread has: a mutex of the package, or of a library beneath it.
"""

import faulthandler
import gc
import itertools
import random
import signal as os_signals
import threading
from contextlib import suppress

import pytest
from django.db.backends.signals import connection_created

from django_redislock import (
    LockError,
    LockUnavailable,
    distributed_lock,
    held,
    process,
    signals,
    transactions,
)
from tests.support.backends import PATIENT
from tests.support.interrupts import alarm
from tests.support.matrix import MEMORY, places
from tests.support.processes import say
from tests.support.servers import KIND
from tests.support.waiting import HUNG, wait_until

SIGNALS = 1000  # Enough to meet each mutex: one in fifty found one.


class Interrupted(Exception):
    """What a handler raises."""


class Dropped:
    """Garbage that only the collector finds, and that holds a lock until then."""

    def __init__(self, name):
        self.me = self
        self.lock = distributed_lock(name, ttl=60, wait=0)
        self.lock.acquire()

    def __del__(self):
        with suppress(LockError):
            self.lock.release()


def note(**news):
    """What is told of locks by signals of Django's."""


def use_locks_in_handlers(count):
    """In a child: a busy main thread, and a handler that uses locks each millisecond or so."""
    faulthandler.dump_traceback_later(0.8 * HUNG, exit=True)
    gc.set_threshold(30, 2, 2)
    numbers, handled = itertools.count(), 0
    raises = may_raise = False  # Whether the handler raises now and then; and whether it may now.
    names = [f"lottery:{number}" for number in range(4)]
    kept = distributed_lock("kept", ttl=60)
    assert kept.acquire()
    lease = kept.lease

    def take_any():
        with distributed_lock(random.choice(names), wait=0, ttl=random.choice([1, 60])):
            pass

    def take_another():
        lock = distributed_lock(f"tombola:{next(numbers)}", ttl=60)
        assert lock.acquire()
        lock.release()

    def nest():
        with distributed_lock("kept", reentrant=True):
            pass

    def look():
        assert lease.held
        assert kept.locked()
        assert not distributed_lock("never").locked()

    acts = [take_any, take_another, nest, look, lease.renew]

    def handle(*_):
        nonlocal handled, may_raise
        handled += 1
        try:
            with suppress(LockError):
                random.choice(acts)()
            if may_raise and handled % 10 == 0:
                may_raise = False
                raise Interrupted
        finally:
            if handled < count:
                os_signals.setitimer(os_signals.ITIMER_REAL, random.uniform(0.0002, 0.002))

    def work():
        nonlocal may_raise
        may_raise = raises
        for name in names:
            with distributed_lock(name, ttl=60), distributed_lock(name, reentrant=True):
                nest()
            Dropped(f"dropped:{next(numbers)}")
        may_raise = False

    def work_until(end):
        os_signals.setitimer(os_signals.ITIMER_REAL, 0.001)
        while handled < end:
            with suppress(Interrupted, LockError):
                work()
        os_signals.setitimer(os_signals.ITIMER_REAL, 0)

    os_signals.signal(os_signals.SIGALRM, handle)
    work_until(count // 2)
    gc.collect()
    wait_until(lambda: [lock.name for lock in held.list()] == ["kept"])
    raises = True
    signals.lock_acquired.connect(note)
    signals.lock_released.connect(note)
    work_until(count)
    assert lease.held
    kept.release()
    say(handled)


@pytest.mark.timeout(2 * HUNG)
@places(KIND, MEMORY)
def test_a_handler_that_uses_locks_never_waits_for_the_thread_that_it_interrupts(place, spawn):
    place.configure(OPTIONS={} if place.name == MEMORY else PATIENT)
    assert spawn(use_locks_in_handlers, SIGNALS).read() >= SIGNALS


class InterruptedMutex:
    """That of a signal of Django's: as soon as this thread has it, a handler uses a lock."""

    def __init__(self, mutex):
        self._mutex = mutex
        self.was_interrupted = False

    def __enter__(self):
        self._mutex.acquire()
        self.was_interrupted = True
        with distributed_lock("handler", wait=0):
            pass

    def __exit__(self, *exc):
        self._mutex.release()


@pytest.mark.timeout(HUNG)
@pytest.mark.parametrize("is_ready", [True, False], ids=["with the app", "before the app is ready"])
def test_a_handler_may_interrupt_where_new_connections_of_databases_are_listened_for(
    is_ready, locks, monkeypatch
):
    monkeypatch.setattr(transactions, "of_this_thread", transactions._ThisThread())
    monkeypatch.setattr(transactions, "_listening", is_ready)
    mutex = InterruptedMutex(connection_created.lock)
    monkeypatch.setattr(connection_created, "lock", mutex)
    if is_ready:  # So Django has the mutex, or a receiver that somebody else connects.
        with connection_created.lock:
            pass
    else:
        with distributed_lock("interrupted", wait=0):
            pass
    assert mutex.was_interrupted
    assert not distributed_lock("handler").locked()


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_time_limit_that_raises_timeout_error_ends_a_call_to_a_silent_server(
    locks, own_server, protocol
):
    locks.on(own_server, OPTIONS={"protocol": protocol, "socket_timeout": HUNG})
    lock = distributed_lock("lottery", ttl=4 * HUNG)
    lock.acquire()
    with alarm(TimeoutError) as set_alarm, own_server.paused():
        for call in (distributed_lock("other").acquire, lock.locked, lock.lease.renew, held.list):
            set_alarm(0.1)
            with pytest.raises(TimeoutError):
                call()


def test_a_server_is_unavailable_also_while_the_error_of_a_handler_is_handled(locks, own_server):
    locks.on(own_server)
    with alarm(ConnectionError) as set_alarm:
        try:
            set_alarm(0.01)
            os_signals.pause()
        except ConnectionError:
            own_server.stop()
            with pytest.raises(LockUnavailable):
                distributed_lock("lottery", wait=0).acquire()


def test_what_a_handler_raises_where_a_thread_starts_is_raised_as_it_is(monkeypatch):
    """Threading would raise a KeyError in its place: the thread is in its list no more."""
    joinable = "_start_joinable_thread"  # Since Python 3.13.
    name = joinable if hasattr(threading, joinable) else "_start_new_thread"
    start = getattr(threading, name)

    def start_interrupted(*args, **kwargs):
        result = start(*args, **kwargs)
        wait_until(lambda: thread.ident in threading._active or ran)
        os_signals.raise_signal(os_signals.SIGALRM)
        return result

    ran = []
    thread = threading.Thread(target=lambda: ran.append(True))
    monkeypatch.setattr(threading, name, start_interrupted)
    with alarm(Interrupted), pytest.raises(Interrupted):
        process.start(thread)
    wait_until(lambda: ran)
