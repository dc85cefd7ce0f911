"""The client is stopped, killed, interrupted, blocked: it never lies, and nothing stays behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import logging
import select
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import redis
from celery import current_app
from django.db.transaction import atomic

import django_redislock
from django_redislock import (
    LockLost,
    LockMisuse,
    distributed_lock,
    handle,
    held,
    single_instance_task,
)
from django_redislock.backends.redis.dialing import DIALS_APART, Dialer
from django_redislock.rules import flows, scripts
from django_redislock.signals import lock_acquired, lock_released
from tests.support.backends import PATIENT, UNHURRIED, forbid_scripting
from tests.support.faults import block_interpreter, hands_over, lease_of, loses, takes
from tests.support.interrupts import alarm, announce, drops_errors
from tests.support.orders import SHOP, OnPurpose
from tests.support.others import against_rival, held_by_other, hold, queued, rival
from tests.support.processes import hear, say
from tests.support.stored import NAME, is_held_by, is_left_clean, keys_of
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import Blocking, in_thread

TTL = 6.0  # Long enough that a machine which stands still for a second loses no lease.
# A task may wait for an answer that its loop has lost as it was interrupted.
UNHURRIED_TASK = PATIENT
OURS = (str(Path(django_redislock.__file__).parent), str(Path(redis.__file__).parent))


@pytest.fixture
def locks(locks, proxy, settings, undo_in_time):
    """The default alias goes through a proxy, the rival straight to the server.

    What ends a call here is an interrupt, and never a server or a machine that stands still.
    """
    locks.on(proxy, TTL=TTL, WAIT=0, OPTIONS=UNHURRIED)
    with against_rival(locks, settings):
        yield locks


# Stopped


WRITE_IF_NEWEST = """
if tonumber(redis.call('GET', KEYS[1]) or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', 60)
return 1
"""


def write(url, fence):
    """Write to something that the lock protects, and that heeds fences."""
    with redis.Redis.from_url(url) as resource:
        return bool(resource.eval(WRITE_IF_NEWEST, 1, "resource", fence))


def hold_look_and_write(url):
    """In a child: hold the lock; when told, look at the lease, write, and leave the block."""
    try:
        with distributed_lock(NAME) as lease:
            say(lease.fence)
            hear()
            say([lease.held, lease.lost_reason, lease.expires_in, write(url, lease.fence)])
    except LockLost as lost:
        say(lost.reason)


@pytest.mark.as_permit
@pytest.mark.proves("P1", "P3")
def test_a_holder_stopped_beyond_its_lease_knows_it_and_harms_nobody(locks, spawn):
    url = locks.server.url
    child = spawn(hold_look_and_write, url)
    fence = child.read()
    child.stop()
    with rival(wait=HUNG) as lease:
        assert lease.fence > fence
        assert write(url, lease.fence)
        child.cont()
        child.send("go on")
        # It knows at the first look, and the fence keeps it from writing.
        assert child.read() == [False, "expired", 0, False]
        assert child.read() in {"expired", "taken"}
        assert is_held_by(locks, lease)


@pytest.mark.as_permit
@pytest.mark.proves("P2")
def test_a_killed_holder_costs_one_ttl_and_is_shown_meanwhile(locks, spawn):
    child = spawn(hold, NAME, ttl=4)
    child.read()
    child.kill()
    shown = held.get(NAME)
    assert (shown.owner.host, shown.owner.pid) == (socket.gethostname(), child.pid)
    with takes(at_most=4):
        assert rival(wait=HUNG).acquire()


# Exceptions


@pytest.mark.proves("P5")
@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
def test_whatever_the_body_raises_goes_through_and_the_lock_is_released(error, caller, locks):
    def body():
        with caller.block(distributed_lock(NAME)):
            raise error("of the body")

    with pytest.raises(error, match="of the body"):
        body()
    assert is_left_clean(locks)


# R4: interrupted


class Interrupt(BaseException):
    """What a signal handler raises."""


class InterruptAt:
    """Raise Interrupt at the n-th place in our code or redis-py's where Python runs handlers.

    If it has a name, only places of that name count.

    These are not all lines: it runs handlers of signals where a function begins, where a loop
    begins anew, and after a call of C code. This one lets its signal arrive once more, so it is
    called at each of these places in turn. It waits for the end of a destructor: Python drops what
    that raises.

    Attributes:
        place: Where it was: in this method or function; "" if there are fewer places.
    """

    class _Arrival(int):
        """A signal number; reading ``again`` lets that signal arrive, and its handler run later.

        An attribute, since Python would run the handler right after a call.
        """

        again = property(ctypes.pythonapi.PyErr_SetInterruptEx)

    def __init__(self, step, name=""):
        self.place = ""
        self._left = step
        self._name = name
        self._signal = self._Arrival(signal.SIGUSR1)
        self._going_on = True

    def __enter__(self):
        announce()
        self._before = signal.signal(self._signal, self._handle)
        _ = self._signal.again
        return self

    def __exit__(self, exc_type, *exc_info):
        self._going_on = False
        signal.signal(self._signal, self._before)
        return exc_type is Interrupt

    def _handle(self, number, frame):
        code = frame.f_code
        if self._going_on and code.co_filename.startswith(OURS):
            begins = frame.f_lineno == code.co_firstlineno
            place = code.co_qualname + " begins" * begins
            self._left -= self._name in {"", place}
            if self._left < 0 and not drops_errors(frame):
                self.place = place
                self._going_on = False
                raise Interrupt
        if self._going_on:
            _ = self._signal.again


def steps(named):
    """Which steps are interrupted, and in which function; "" for any.

    If the number of steps to a place differs from run to run, the place may be passed over. So one
    that must be reached is *named*, and fails the test if it is not.
    """
    return [*((0, name) for name in sorted(named)), *((step, "") for step in range(2000))]


def interrupted(use, named=()):
    """Interrupt *use* at each place in turn, and tell where it was; the last time it is let be.

    See steps() for *named*.
    """
    for step, only in steps(named):
        with InterruptAt(step, only) as interruption:
            use()
        if not interruption.place:
            assert step, only
            return
        yield interruption.place
    pytest.fail("the end was never reached")


class Drops(logging.Handler):
    """Hears that a lease was dropped without a release, while it is entered."""

    def __enter__(self):
        self.said = []
        logging.getLogger("django_redislock").addHandler(self)

    def __exit__(self, *exc_info):
        logging.getLogger("django_redislock").removeHandler(self)

    def emit(self, record):
        if "dropped without a release" in record.getMessage():
            self.said.append(record.getMessage())


def sweep(use, locks, prepare, names=(NAME,), permit=1, named=()):
    """Interrupt *use* at each place in turn. Returns all, and those that left the lock taken.

    Each time in a context of its own: who is interrupted while it resets a context variable leaves
    it set for whatever this thread does next. See steps() for *named*.
    """
    places, orphaned = set[str](), set[str]()
    # Twice: a confirmation is sent in full at first, and by its SHA from then on. What is cached is
    # in no one's way later: all runs are as long.
    for _ in range(2):
        prepare()
        use()
    drops = Drops()
    for step, only in steps(named):
        if step % 10 == 0:
            gc.collect()  # What an interrupt has made us lose gives its place among a few back.
        prepare()
        with drops, InterruptAt(step, only) as interruption:
            copy_context().run(use)
        left = [name for name in names if not is_left_clean(locks, name, permit)]
        assert left or not drops.said, f"a false alarm, at {interruption.place}"
        for name in left:
            orphaned.add(interruption.place)
            locks.redis.delete(*keys_of(locks, name).of_permit(permit))
            gc.collect()  # Of the lease, which the exception may still refer to.
        if not interruption.place:
            assert step > 50, only
            return places, orphaned
        places.add(interruption.place)
    pytest.fail("the end was never reached")


# Where Python has called what ends the lease, but not begun with it, nothing can be done: it is so
# with each context manager and each `finally` that is written in Python. One ttl is lost.
TOO_EARLY = {"Lock.__exit__ begins", "Lock.__aexit__ begins"}
OF_RELEASE = {"Lock.release begins", "Handle._end begins"}
AFTER_A_TRANSACTION = {*TOO_EARLY, "Handle._end_deferred begins", "Handle._end begins"}

ALWAYS = {"Handle._take_over", "the watchdog"}
BY_FLOW = {"_acquire", "_first_step", "Handle._ask", "Handle._release"}
TOGETHER = {"together", "JointHandle._take_all", "JointHandle._let_go"}
DEFERRED = {
    "Handle._defer",
    "LeaseState.hold_for_transactions begins",
    "at_end",
    "_Mark.__init__ begins",
}


@contextmanager
def told():
    """Somebody listens to what happens to locks."""

    def receive(**kwargs): ...

    for news in (lock_acquired, lock_released):
        news.connect(receive)
    try:
        yield
    finally:
        for news in (lock_acquired, lock_released):
            news.disconnect(receive)


@contextmanager
def by_flows():
    """Each acquire and release has its flow, as if its first answer were not the plain one."""
    with told(), mock.patch.multiple(handle, granted_by=lambda *_: None, RELEASED="never"):
        yield


def enter():
    with distributed_lock(NAME, wait=10):
        pass


def enter_twice():
    with distributed_lock(NAME, reentrant=True), distributed_lock(NAME, reentrant=True):
        pass


def acquire_and_release():
    lock = distributed_lock(NAME, wait=10)
    if lock.acquire():
        lock.release()


async def aenter():
    async with asyncio.timeout(10), distributed_lock(NAME, wait=5):
        pass


PAIR = "account:1", "account:2"


def enter_both(limit=None):
    with distributed_lock(*PAIR, limit=limit, wait=10):
        pass


async def aenter_both():
    async with distributed_lock(*PAIR, wait=10):
        pass


@pytest.mark.proves("R4")
def test_r4_an_interrupt_while_one_of_several_locks_is_awaited_leaves_none_taken(locks):
    async def use_for(seconds):
        async with asyncio.timeout(seconds), distributed_lock("a", "b", "c", wait=10):
            pytest.fail("the block ran")

    locks.on(locks.server, TTL=30, OPTIONS=UNHURRIED_TASK)
    with alarm(Interrupt) as set_alarm, held_by_other("b", ttl=60):
        for step in range(1, 11):
            with pytest.raises(Interrupt):  # noqa: PT012 - it may come at once
                set_alarm(step / 200)
                distributed_lock("a", "b", "c", wait=10).acquire()
            assert is_left_clean(locks, "a")
            assert is_left_clean(locks, "c")
            with pytest.raises(TimeoutError):
                asyncio.run(use_for(step / 200))
            assert is_left_clean(locks, "a")
            assert is_left_clean(locks, "c")


def keep_until_the_commit():
    with atomic(using=SHOP), distributed_lock(NAME, wait=10, release_on_commit=True):
        pass


def keep_until_the_rollback():
    with suppress(OnPurpose), atomic(using=SHOP):
        keep_until_the_commit()
        raise OnPurpose


def run_a_task(limit=1):
    """Run a task. If there is a limit, the first permit is the lock itself."""
    name = f"tests.draw-{limit}"
    if name not in current_app.tasks:

        @single_instance_task(key=NAME, limit=limit, name=name)
        def body() -> None: ...

    current_app.tasks[name]()


AT_ONCE = {"FirstSteps.begin", "Connection.execute", *ALWAYS}
DIALING = {"Pool._take", "Session.call", *ALWAYS}
IN_A_TASK = {"AsyncConnection.buffer_updated", "FirstSteps.abegin", *ALWAYS}
IN_A_RUN = {"JobRun.attempt", "JobRun.run_body", "Handle._take_over"}


class Sweep(NamedTuple):
    """What is done, through which places it leads, and where an interrupt comes too early."""

    work: Any
    places: set[str]
    too_early: set[str] = TOO_EARLY
    names: tuple[str, ...] = (NAME,)
    limit: int = 1  # Others have all permits but one.
    context: Any = nullcontext
    dials: str = ""  # Each time anew, to this host.


SWEEPS = {
    "block": Sweep(enter, AT_ONCE, context=told),
    "reentrant": Sweep(enter_twice, AT_ONCE, context=told),
    "acquire": Sweep(acquire_and_release, AT_ONCE, OF_RELEASE, context=told),
    "block by flows": Sweep(enter, AT_ONCE | BY_FLOW, context=by_flows),
    "acquire by flows": Sweep(acquire_and_release, AT_ONCE | BY_FLOW, OF_RELEASE, context=by_flows),
    "first use": Sweep(enter, DIALING | {"Dialer._dial"}, dials="127.0.0.1"),
    "first use by name": Sweep(enter, DIALING | {"Dialer.dial"}, dials="localhost"),
    "commit": Sweep(keep_until_the_commit, DEFERRED, AFTER_A_TRANSACTION),
    "rollback": Sweep(keep_until_the_rollback, DEFERRED, AFTER_A_TRANSACTION),
    "run of a task": Sweep(run_a_task, IN_A_RUN),
    "run of a task with a limit": Sweep(partial(run_a_task, 2), IN_A_RUN),
    "async": Sweep(aenter, IN_A_TASK),
    "several": Sweep(enter_both, TOGETHER, names=PAIR),
    "several, async": Sweep(aenter_both, TOGETHER, names=PAIR),
    "several with a limit": Sweep(partial(enter_both, 2), TOGETHER, names=PAIR, limit=2),
}


@pytest.mark.proves("R4")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # redis-py's, while it connects
@pytest.mark.parametrize("one", SWEEPS.values(), ids=SWEEPS)
def test_r4_an_interrupt_anywhere_leaves_no_orphan(one, locks, databases):
    is_async = inspect.iscoroutinefunction(one.work)
    options = UNHURRIED_TASK if is_async else {**UNHURRIED, "max_connections": 5}
    url = locks.server.url.replace("127.0.0.1", one.dials or "127.0.0.1")
    locks.on(locks.server, TTL=30, LOCATION=url, OPTIONS=options)
    with asyncio.Runner() as runner, ExitStack() as stack:
        if one.limit > 1:
            for name in one.names:
                stack.enter_context(held_by_other(name, ttl=600, limit=one.limit))
        stack.enter_context(one.context())
        use = (lambda: runner.run(one.work())) if is_async else one.work
        # By a connection: one that was interrupted is given up.
        prepare = partial(locks.configure, TTL=30) if one.dials else use
        named = one.places - {"the watchdog"}
        places, orphaned = sweep(use, locks, prepare, one.names, one.limit, named)
        if "the watchdog" in one.places:  # A run that is longer may pass over one of its methods.
            assert any(place.startswith("Watchdog.") for place in places)
        assert orphaned <= one.too_early
        use()  # No connection was lost on the way.


def test_an_interrupt_anywhere_in_a_nested_acquire_leaves_the_outer_one_alone(locks):
    locks.on(locks.server, TTL=30, OPTIONS=UNHURRIED)
    inner = None

    def nest():
        nonlocal inner
        inner = distributed_lock(NAME, reentrant=True)
        inner.acquire()

    with distributed_lock(NAME, reentrant=True) as lease:
        for place in interrupted(nest, {"Handle._nest", "LeaseState.nest begins"}):
            assert (lease.held, lease.times_held) == (True, 1), place
        inner.release()
        assert lease.held


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # redis-py's
def test_an_interrupt_anywhere_in_a_dial_by_name_leaves_room_for_as_many_others(locks):
    dialer = Dialer(locks.server.url.replace("127.0.0.1", "localhost"), {})
    for _ in interrupted(lambda: dialer.dial(HUNG).close(), {"Dialer.dial", "start_in_thread"}):
        pass
    wait_until(lambda: len(dialer._places._items) == DIALS_APART)


def test_an_interrupt_while_the_watchdog_starts_leaves_no_more_than_one(locks, monkeypatch):
    def watchdogs():
        return {one for one in threading.enumerate() if one.name.startswith("redislock-watchdog")}

    def start_and_be_interrupted(thread):
        start(thread)
        if thread.name.startswith("redislock-watchdog"):
            raise Interrupt

    start, before = threading.Thread.start, watchdogs()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_be_interrupted)
        with pytest.raises(Interrupt):
            distributed_lock(NAME).acquire()
    assert is_left_clean(locks)
    with distributed_lock(NAME) as lease:
        wait_until(lambda: lease.renewals > 1)
        assert len(watchdogs() - before) == 1


def hold_until_somebody_waits():
    """In a child: hold the lock when told, until somebody waits for it or the test says enough."""
    while True:
        hear()
        with distributed_lock(NAME, wait=10):
            say("held")
            while not (seen := held.get(NAME)) or not seen.waiters:
                if select.select([sys.stdin], [], [], 0.001)[0]:
                    break
        hear()
        say("released")


@pytest.mark.proves("R4")
@pytest.mark.slow
# With four connections a waiter has none of its own.
@pytest.mark.parametrize(("limit", "is_async"), [(4, False), (5, False), (5, True)])
def test_r4_an_interrupt_anywhere_on_the_way_from_the_queue_leaves_no_orphan(
    limit, is_async, locks, spawn
):
    unhurried = UNHURRIED_TASK if is_async else UNHURRIED
    locks.on(locks.server, TTL=30, OPTIONS={**unhurried, "max_connections": limit})
    child = spawn(hold_until_somebody_waits)

    with asyncio.Runner() as runner:

        def enter_once():
            if is_async:
                runner.run(aenter())
            else:
                enter()

        def prepare():
            enter_once()  # By a connection: one that was interrupted is given up.
            child.send("hold it")
            assert child.read() == "held"

        def use():
            try:
                enter_once()
            finally:
                child.send("enough")
                assert child.read() == "released"

        rung = "_await_bell" if limit == 4 else "Attempt.heard begins"
        named = (rung, "Handle._take_over")  # How many steps lead to the bell differs.
        _, orphaned = sweep(use, locks, prepare, named=named)
        assert orphaned <= TOO_EARLY
    enter()


@contextmanager
def signal_when(condition):
    """Once it is so, let a signal handler raise Interrupt in the main thread, and expect that."""

    def handler(number, frame):
        raise Interrupt

    announce()
    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None

    def send():
        wait_until(condition)
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = in_thread(send)
    try:
        with pytest.raises(Interrupt):
            yield
    finally:
        sender.result(HUNG)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.as_permit
@pytest.mark.proves("R4")
@pytest.mark.parametrize("wait", [0, 10])
@pytest.mark.parametrize("action", ["delayreply:30", "hang_after", "hang_before"])
def test_r4_a_signal_while_an_acquire_awaits_its_answer_leaves_no_orphan(
    action, wait, locks, proxy
):
    rule = proxy.rule_for_script(scripts.ACQUIRE.sha, action)
    with signal_when(lambda: rule.hits):
        distributed_lock(NAME, wait=wait, ttl=60).acquire()
    assert is_left_clean(locks)


@pytest.mark.proves("R4")
def test_r4_a_signal_while_it_waits_in_the_queue_leaves_the_queue(locks):
    holder, next_lock = rival(ttl=60), rival(wait=HUNG)
    assert holder.acquire()
    with signal_when(lambda: queued(locks)):
        distributed_lock(NAME, wait=HUNG).acquire()
    assert queued(locks) == 0
    waiter = Blocking().begin_waiting(next_lock, locks)
    with hands_over(locks, waiter, next_lock):
        holder.release()


@pytest.mark.proves("R4")
@pytest.mark.parametrize(
    ("min_hold", "action"), [(0, "delayreply:30"), (60, "delayreply:30"), (60, "hold")]
)
def test_r4_a_signal_while_a_release_awaits_its_answer_ends_the_lease_and_loses_nothing_that_stays(
    min_hold, action, locks, proxy
):
    lock = distributed_lock(NAME, ttl=60, min_hold=min_hold)
    lock.acquire()
    script = scripts.CONCLUDE if min_hold else scripts.RELEASE
    rule = proxy.rule_for_script(script.sha, action)
    with signal_when(lambda: rule.hits):
        lock.release()
    if min_hold:
        assert held.get(NAME).state == "cooling"
    else:
        assert is_left_clean(locks)


# R4: cancelled


@pytest.mark.proves("R4")
async def test_r4_a_task_cancelled_while_a_receiver_is_told_leaves_no_orphan(locks):
    told = asyncio.Event()

    async def receive(**news):
        told.set()
        await asyncio.sleep(60)

    lock = distributed_lock(NAME, ttl=10)
    lock_acquired.connect(receive)
    try:
        task = asyncio.create_task(lock.aacquire())
        await told.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        lock_acquired.disconnect(receive)
    assert lease_of(lock) is None
    assert is_left_clean(locks)


@pytest.mark.proves("R4")
@pytest.mark.parametrize("wait", [0, 10])
@pytest.mark.parametrize("action", ["delayreply:0.5", "hang_after", "hang_before"])
async def test_r4_a_task_cancelled_while_it_awaits_the_answer_leaves_no_orphan(
    action, wait, locks, proxy, monkeypatch
):
    monkeypatch.setattr(flows, "UNDO_WITHIN", 2.5)  # Its first try is on a connection that hangs.
    rule = proxy.rule_for_script(scripts.ACQUIRE.sha, action)
    task = asyncio.create_task(distributed_lock(NAME, wait=wait, ttl=60).aacquire())
    await await_until(lambda: rule.hits)
    task.cancel()
    with pytest.raises(asyncio.CancelledError), takes(at_most=2.5):
        await task
    await await_until(lambda: is_left_clean(locks), 30)  # Before its ttl ends it.


@pytest.mark.proves("R4")
async def test_r4_so_does_one_without_scripts(locks, proxy):
    locks.configure(OPTIONS={**UNHURRIED, **forbid_scripting(locks)})
    rule = proxy.rule("EXEC", "hold")
    task = asyncio.create_task(distributed_lock(NAME, ttl=60).aacquire())
    await await_until(lambda: rule.hits)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    # An undo that did not wait for the transaction would be over by then.
    assert await asyncio.wait([task], timeout=0.5) == (set(), {task})
    await asyncio.to_thread(proxy.forward_held)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_left_clean(locks)


@pytest.mark.as_permit
@pytest.mark.proves("R4")
@pytest.mark.slow
async def test_r4_a_task_cancelled_at_any_of_its_steps_leaves_no_orphan(locks):
    async def enter():
        nonlocal entered
        async with distributed_lock(NAME, ttl=10):
            entered = True

    entered, steps = False, 0
    while not entered:
        task = asyncio.create_task(enter())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert is_left_clean(locks), f"after {steps} steps"
        steps += 1 + steps // 20
    assert steps > 3


@pytest.mark.proves("R4")
async def test_r4_the_other_tasks_of_the_loop_do_not_notice_a_cancellation(locks, proxy):
    proxy.rule("EVALSHA", "delayreply:0.1", match="cancelled")
    doomed = asyncio.create_task(distributed_lock("cancelled").aacquire())
    await asyncio.sleep(0)
    others = [distributed_lock(f"other-{number}") for number in range(5)]
    tasks = [asyncio.create_task(lock.aacquire()) for lock in others]
    await await_until(lambda: proxy.commands("EVALSHA"))
    doomed.cancel()
    assert all(await asyncio.gather(*tasks))
    for lock in others:
        assert is_held_by(locks, lease_of(lock))
        await lock.arelease()


# Resent


@pytest.mark.parametrize("action", ["hang_before", "hang_after"])
def test_min_hold_counts_from_the_grant_though_the_release_is_sent_twice(
    action, caller, locks, proxy
):
    locks.configure(OPTIONS={"socket_timeout": 4})  # Of which a try has three quarters.
    min_hold = 7
    lock = distributed_lock(NAME, renew=False, min_hold=min_hold)
    asked = time.monotonic()
    assert caller.acquire(lock)
    granted = time.monotonic()
    rule = proxy.rule("EVALSHA", action)
    caller.release(lock)
    assert rule.hits
    begin = time.monotonic()
    seen = held.get(NAME)
    assert seen.state == "cooling"
    # From the second release it would be more. The server counts whole milliseconds.
    assert seen.expires_in < min_hold - (begin - granted) + 0.01
    wait_until(lambda: held.get(NAME) is None)
    assert time.monotonic() - asked > min_hold - 0.01


# Blocked


@pytest.mark.proves("P1", "P5", "N5")
def test_after_c_code_that_kept_the_gil_beyond_the_lease_the_holder_knows_it(caller, locks):
    ttl = 2
    with loses("expired"), caller.block(distributed_lock(NAME, ttl=ttl)) as lease:
        block_interpreter(ttl + 0.4)
        assert not lease.held  # At the first look: not because somebody renewed in vain.
        assert rival().acquire()


async def test_a_blocked_event_loop_does_not_cost_the_lease(locks):
    async with distributed_lock(NAME) as lease:
        time.sleep(1.2 * TTL)
        assert lease.held
        assert is_held_by(locks, lease)


# Forgotten and shared


@pytest.mark.proves("P3")
def test_a_late_release_of_a_lost_lease_leaves_a_later_one_of_the_process_alone(caller, locks):
    lost, later = distributed_lock(NAME, ttl=2, renew=False), distributed_lock(NAME, wait=HUNG)
    assert caller.acquire(lost)
    first = lease_of(lost)
    wait_until(lambda: not first.held)
    assert later.acquire()
    lease = later.lease
    with pytest.raises(LockLost):
        caller.release(lost)
    assert lease.held
    with pytest.raises(LockMisuse):  # It is still known as held by this process.
        later.acquire()
    renewals = lease.renewals
    wait_until(lambda: lease.renewals > renewals)
    later.release()
