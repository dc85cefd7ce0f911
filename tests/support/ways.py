"""The two ways to call a lock, blocking or in an event loop; a test is written once for both.

A test of what a lock does is a coroutine function, and runs by both ways:

    @both_ways
    async def test_the_block_holds_the_lock(way, place):
        async with way.entered(distributed_lock("lottery")) as lease:
            assert lease.held

By the blocking way there is no event loop: the coroutine never suspends, so running it is
calling it. What is started beside it runs in a thread; by the other way it is a task.

A test that must go on while a call stands still is a plain function with a caller:

    def test_a_lost_reply(caller, locks, proxy):
        proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
        assert caller.acquire(distributed_lock("lottery"))
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from django_redislock.backends.quorum import voting
from django_redislock.rules import flows
from tests.support.others import queued
from tests.support.waiting import HUNG, await_until, wait_until


class Way:
    """How a program uses locks: blocking, or in an event loop.

    run() runs a test that is written for any way. start() lets work run beside the test, as another
    holder: a thread, or a task. function() returns a body as the kind of function that this way of
    programming has, and call() calls that. entered() uses a lock as context manager.
    """

    async def acquire(self, lock):
        return await self._does(lock, "acquire")

    async def release(self, lock, success=True):
        await self._does(lock, "release", success)

    async def locked(self, lock):
        return await self._does(lock, "locked")

    async def renew(self, lease, ttl=None):
        await self._does(lease, "renew", ttl)

    async def ensure_held(self, lease, verify=False):
        await self._does(lease, "ensure_held", verify)

    async def taken(self, lock):
        """Acquire a lock that is free, and return the lease."""
        assert await self.acquire(lock)
        return lock.lease


class Sync(Way):
    """Blocking calls; others are threads."""

    name = "sync"

    def run(self, test):
        try:
            test.send(None)
        except StopIteration as end:
            return end.value
        test.close()
        raise AssertionError("by the blocking way nothing may be awaited that is not there yet")

    def start(self, work):
        return _Thread(lambda: self.run(work()))

    async def until(self, condition, timeout=HUNG, message=""):
        wait_until(condition, timeout, message)

    async def sleep(self, seconds):
        time.sleep(seconds)

    def function(self, body):
        return body

    async def call(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    def entered(self, lock):
        return _Entered(lock)

    async def _does(self, of, name, *args):
        return getattr(of, name)(*args)


class Async(Way):
    """Awaited calls in one event loop; others are tasks."""

    name = "async"

    def run(self, test):
        return asyncio.run(test)

    def start(self, work):
        return _Task(work())

    async def until(self, condition, timeout=HUNG, message=""):
        await await_until(condition, timeout, message)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    def function(self, body):
        @functools.wraps(body)
        async def afunction(*args, **kwargs):
            return body(*args, **kwargs)

        return afunction

    async def call(self, function, *args, **kwargs):
        return await function(*args, **kwargs)

    def entered(self, lock):
        return lock

    async def _does(self, of, name, *args):
        return await getattr(of, f"a{name}")(*args)


class _Entered:
    """A lock's blocking context manager, for `async with`."""

    def __init__(self, lock):
        self._lock = lock

    async def __aenter__(self):
        return self._lock.__enter__()

    async def __aexit__(self, *exc_info):
        self._lock.__exit__(*exc_info)


class _Thread:
    def __init__(self, work):
        self._future = in_thread(work)
        self.done = self._future.done

    async def result(self):
        return self._future.result(HUNG)


class _Task:
    def __init__(self, work):
        self._task = asyncio.create_task(work)
        self.done = self._task.done

    async def result(self):
        return await asyncio.wait_for(self._task, HUNG)


WAYS = (Sync(), Async())


def both_ways(test):
    """Run a test, written as a coroutine function with the argument *way*, by both ways."""

    @pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
    @functools.wraps(test)
    def by(way, **fixtures):
        way.run(test(way=way, **fixtures))

    return by


# --- from a plain function -----------------------------------------------------------------------


class Caller:
    """Calls locks by one of the ways for a test that is a plain function.

    Such a test goes on while a call stands still: it breaks the network, stops the server, sends a
    signal, and then looks at what became of the call. run() returns what a call by the way returns;
    start() lets it go on beside the test, as another holder: a thread, or a task.
    """

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        """End what was begun."""

    def acquire(self, lock):
        return self.run(self.way.acquire(lock))

    def release(self, lock):
        self.run(self.way.release(lock))

    def renew(self, lease):
        self.run(self.way.renew(lease))

    def ensure_held(self, lease):
        self.run(self.way.ensure_held(lease, verify=True))

    @contextmanager
    def block(self, lock):
        block = self.way.entered(lock)
        lease = self.run(_awaited(block.__aenter__()))
        error = None, None, None
        try:
            yield lease
        except BaseException as raised:
            error = type(raised), raised, raised.__traceback__
            raise
        finally:
            self.run(_awaited(block.__aexit__(*error)))

    def begin(self, lock):
        """Start to acquire *lock* in another thread or task."""
        return self.start(self.way.acquire(lock))

    def begin_waiting(self, lock, locks):
        """begin(), and return once it stands in the queue."""
        place = queued(locks, lock.name) + 1
        future = self.begin(lock)
        wait_until(lambda: future.done() or queued(locks, lock.name) == place)
        return future


class Blocking(Caller):
    """By the blocking way; what is begun has a thread of its own."""

    way = Sync()

    def run(self, call):
        return self.way.run(call)

    def start(self, call):
        return in_thread(lambda: self.way.run(call))


class InLoop(Caller):
    """By the other way; each call is a task of one event loop, which runs in a thread."""

    way = Async()

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HUNG)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, call):
        return self.start(call).result(HUNG)

    def start(self, call):
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    async def _end_tasks(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=[Blocking, InLoop], ids=lambda caller: caller.way.name)
def caller(request):
    """Run the test once by each way."""
    with request.param() as caller:
        yield caller


@pytest.fixture
def callers():
    """One of each way, for a test in which both take part: ``threads, tasks = callers``."""
    with InLoop() as tasks:
        yield Blocking(), tasks


@pytest.fixture
def if_rung(monkeypatch):
    """Seconds within which a waiter is served if it is rung: it hardly ever looks by itself.

    Usually it looks every 2 s, and on a busy machine that may be before the bell rings.
    """
    monkeypatch.setattr(flows, "LOOK_EVERY", 40.0)
    return 20.0


@pytest.fixture
def undo_in_time(monkeypatch):
    """Let nobody give up the undoing of an acquire while the machine stands still."""
    monkeypatch.setattr(flows, "UNDO_WITHIN", HUNG)
    monkeypatch.setattr(voting, "UNDO_WITHIN", HUNG)


async def _awaited(call):
    return await call


def in_thread(function):
    """Call *function* in a new thread: a pool's would be the same owner twice."""
    future = Future()

    def work():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    _begun.append(thread)
    thread.start()
    return future


_begun = []  # Beside the test that runs.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Let no thread work on into the next test, whose connections and log it would mix up."""
    _begun.clear()
    result = yield
    for thread in _begun:
        thread.join(HUNG)
        assert not thread.is_alive(), "the test has left a thread behind"
    return result


# Whether a job is a coroutine function.
blocking_or_not = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
