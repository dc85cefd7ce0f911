"""What the fault tests share: both styles of calling, a rival, and a look at what a lock sent.

caller = pytest.fixture(callers, params=[Blocking, Async])    # in a test module

def test_a_lost_reply(caller, locks, proxy):
    proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
    assert caller.acquire(distributed_lock("lottery"))
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import pytest

from django_redislock import LockLost, distributed_lock
from django_redislock.rules import scripts
from django_redislock.rules.keys import index_key, lock_keys, ran_index_key
from django_redislock.rules.scripts import Script
from tests.support.processes import hear, say
from tests.support.servers import KINDS, binary
from tests.support.waiting import HUNG, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from pytest_django import Settings

    from django_redislock.exceptions import LostReason
    from django_redislock.lease import Lease
    from django_redislock.lock import Lock
    from django_redislock.rules.keys import Keys
    from tests.conftest import Locks
    from tests.support.proxy import Proxy

T = TypeVar("T")

NAME = "lottery"
RIVAL = "rival"

# For what only the client has a part in: one kind of server is proof enough.
one_kind = pytest.mark.parametrize(
    "server_kind", [next(filter(binary, KINDS), KINDS[0])], indirect=True, scope="session"
)

only_redis = pytest.mark.parametrize("server_kind", ["redis"], indirect=True, scope="session")


# Two styles of calling


class Caller(ABC):
    """Uses locks in one style, so that a test can be written once for both."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027 - threads need no end
        """End what was begun."""

    @abstractmethod
    def acquire(self, lock: Lock) -> bool: ...

    @abstractmethod
    def release(self, lock: Lock) -> None: ...

    @abstractmethod
    def renew(self, lease: Lease) -> None: ...

    @abstractmethod
    def ensure_held(self, lease: Lease) -> None:
        """Ask the server."""

    @abstractmethod
    def block(self, lock: Lock) -> Any:
        """The context manager around a block under *lock*."""

    @abstractmethod
    def begin(self, lock: Lock) -> Future[bool]:
        """Start to acquire *lock* in another thread or task."""

    def begin_waiting(self, lock: Lock, locks: Locks) -> Future[bool]:
        """begin(), and return once it stands in the queue."""
        place = waiting(locks, lock.name) + 1
        future = self.begin(lock)
        wait_until(lambda: future.done() or waiting(locks, lock.name) == place)
        return future


class Blocking(Caller):
    """``with`` and ``acquire()``; what is begun has a thread of its own."""

    def acquire(self, lock: Lock) -> bool:
        return lock.acquire()

    def release(self, lock: Lock) -> None:
        lock.release()

    def renew(self, lease: Lease) -> None:
        lease.renew()

    def ensure_held(self, lease: Lease) -> None:
        lease.ensure_held(verify=True)

    def block(self, lock: Lock) -> Any:
        return lock

    def begin(self, lock: Lock) -> Future[bool]:
        return in_thread(lock.acquire)


class Async(Caller):
    """``async with`` and ``aacquire()``, each in a task of one loop, which runs in a thread."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HUNG)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HUNG)

    def acquire(self, lock: Lock) -> bool:
        return self.run(lock.aacquire())

    def release(self, lock: Lock) -> None:
        self.run(lock.arelease())

    def renew(self, lease: Lease) -> None:
        self.run(lease.arenew())

    def ensure_held(self, lease: Lease) -> None:
        self.run(lease.aensure_held(verify=True))

    @contextmanager
    def block(self, lock: Lock) -> Iterator[Lease]:
        lease = self.run(lock.__aenter__())
        try:
            yield lease
        except BaseException as error:
            self.run(lock.__aexit__(type(error), error, None))
            raise
        else:
            self.run(lock.__aexit__(None, None, None))

    def begin(self, lock: Lock) -> Future[bool]:
        return asyncio.run_coroutine_threadsafe(lock.aacquire(), self._loop)

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def callers(request: pytest.FixtureRequest) -> Iterator[Caller]:
    """The body of a fixture whose params are callers."""
    with request.param() as caller:
        yield caller


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call *function* in a new thread: a pool's would be the same owner twice."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


# Others who want the lock


def add_rival(settings: Settings, locks: Locks, **options: Any) -> None:
    """Add an alias for the same locks straight on the server, as another process would use it."""
    default = settings.REDISLOCK["default"]
    # It does not give up while a test has the server stand still.
    patient = {"UNAVAILABLE_AFTER": math.inf}
    rival = {**default, **patient, "LOCATION": locks.server.url, **options}
    settings.REDISLOCK = {"default": default, RIVAL: rival}


@contextmanager
def against_rival(locks: Locks, settings: Settings) -> Iterator[None]:
    """Let another process want the same locks during the block; no key may then stay for ever."""
    add_rival(settings, locks)
    load_scripts(locks)
    yield
    assert immortal(locks) == []


def rival(name: str = NAME, **options: Any) -> Lock:
    """A handle of the rival, who tries once unless told otherwise."""
    return distributed_lock(name, using=RIVAL, **{"wait": 0, **options})


def hold(name: str = NAME, **options: Any) -> None:
    """In a child: wait for the lock, tell the fence, and hold the lock until told otherwise."""
    with distributed_lock(name, **options) as lease:
        say(lease.fence)
        hear()


def lease_of(lock: Lock) -> Lease | None:
    """The lease that somebody has by this handle; lock.lease tells a caller its own only."""
    return next((hold.lease for hold in reversed(lock._holds) if not hold.over), None)


# What is on the server


def keys_of(locks: Locks, name: str = NAME) -> Keys:
    """The names of a lock's keys."""
    return lock_keys(locks.prefix, name)


def value_of(locks: Locks, name: str = NAME) -> bytes | None:
    """What the lock key holds."""
    return locks.redis.get(keys_of(locks, name).lock)  # type: ignore[return-value] # bytes


def is_held_by(locks: Locks, lease: Lease | None) -> bool:
    """Whether the server says that the lock is this lease's."""
    assert lease is not None
    value = value_of(locks, lease.name)
    return value is not None and lease.id.encode() in value.split(b"|")[0]


def waiting(locks: Locks, name: str = NAME) -> int:
    """How many stand in the queue."""
    return int(locks.redis.zcard(keys_of(locks, name).queue))


def bells(locks: Locks) -> int:
    """How many listen to be told that the lock is theirs."""
    return len(locks.redis.pubsub_channels(f"{locks.prefix}:bell:*"))


def is_left_clean(locks: Locks, name: str = NAME) -> bool:
    """Whether nobody holds the lock or waits for it; the fence stays."""
    keys = keys_of(locks, name)
    return not locks.redis.exists(keys.lock, keys.queue, keys.waiters)


def immortal(locks: Locks) -> list[bytes]:
    """The keys that would stay for ever; the indexes may, they are trimmed as they are used."""
    indexes = {index_key(locks.prefix), ran_index_key(locks.prefix)}
    return [key for key in locks.without_ttl() if key.decode() not in indexes]


@contextmanager
def hands_over(locks: Locks, waiter: Future[bool], lock: Lock) -> Iterator[None]:
    """Check that the block gives NAME to *waiter*, who asked by *lock*, in the step that frees it.

    How long the waiter takes to hear of it says less, and more about the machine.
    """
    yield
    value = value_of(locks)
    assert waiter.result(HUNG)
    lease = lease_of(lock)
    assert lease is not None
    assert value is not None
    assert lease.id.encode() in value.split(b"|")[0]


# What was sent


class Run(NamedTuple):
    """One run of a script that went through a proxy."""

    token: str
    link: int
    time: float


_SCRIPTS = [script for script in vars(scripts).values() if isinstance(script, Script)]


def load_scripts(locks: Locks) -> None:
    """Let the server know the scripts, so that the first run of one is no other than the rest."""
    for script in _SCRIPTS:
        locks.redis.script_load(script.source)


def runs(proxy: Proxy, script: Script) -> list[Run]:
    """The runs of *script* that were asked for, once the server knows it."""
    return [
        Run(command.args[2 + int(command.args[1])].decode(), command.link, command.time)
        for command in proxy.commands("EVALSHA")
        if command.args[0].decode() == script.sha
    ]


def calls(stats: dict[str, Any]) -> dict[str, int]:
    """INFO commandstats as numbers of calls."""
    return {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}


# What is to be seen


@contextmanager
def loses(reason: LostReason) -> Iterator[None]:
    """Check that leaving the block under a lock raises LockLost, and why."""
    with pytest.raises(LockLost) as caught:
        yield
    assert caught.value.reason == reason


SLACK = 1.0  # Seconds that a busy machine may add.


@contextmanager
def takes(*, at_least: float = 0, at_most: float) -> Iterator[None]:
    """Check how many seconds a block takes, however it ends; SLACK is not counted."""
    begin = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - begin
        assert at_least <= took <= at_most + SLACK, (
            f"took {took:.3f} s, not {at_least} to {at_most}"
        )


def block_interpreter(seconds: float) -> None:
    """Sleep in C code that keeps the GIL: no other thread runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


# Forks


def in_fork(function: Callable[[], Any], timeout: float = HUNG) -> Any:
    """Call *function* in a forked child of this process, and return its answer, as of JSON."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            os.write(writing, json.dumps(function()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writing)
    try:
        return json.loads(_read_all(reading, pid, timeout) or "null")
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def _read_all(reading: int, pid: int, timeout: float) -> bytes:
    import select
    import signal

    deadline, data = time.monotonic() + timeout, b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reading, 65536)
        if not chunk:
            return data
        data += chunk
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"the forked child did not end within {timeout:g} s")
