"""The two dimensions of the contract suite: the ways to call a lock and the places that keep locks.

A test is written once, as a coroutine function, and runs by every way in every place:

    pytest_plugins = ["tests.support.backends"]

    @both_ways
    async def test_the_block_holds_the_lock(way: Way, place: Place) -> None:
        async with way.entered(distributed_lock("lottery")) as lease:
            assert lease.held

By the blocking way there is no event loop: the coroutine never suspends, so running it is
calling it. What is started beside it runs in a thread; by the other way it is a task.

PYTEST_DONT_REWRITE: tests import this before pytest hears of it as a plugin.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import pytest

from django_redislock import held
from django_redislock.backends.memory.backend import InMemoryBackend
from django_redislock.conf import backends
from django_redislock.lease import Owner
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.testing import IN_MEMORY, LockTestKit
from tests.conftest import Locks, _skip_or_fail
from tests.support.servers import KINDS, Container, Endpoint, Kind, Server, missing
from tests.support.waiting import await_until, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import timedelta
    from types import TracebackType

    from pytest_django import Settings

    from django_redislock import Lease
    from django_redislock.backends.memory.backend import Server as MemoryServer
    from django_redislock.lock import Lock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# --- ways ------------------------------------------------------------------------------------


class Running(Protocol[T_co]):
    """Something that goes on beside the test."""

    async def result(self) -> T_co: ...
    def done(self) -> bool: ...


class Way(ABC):
    """How a program uses locks: blocking, or in an event loop."""

    name: str

    @abstractmethod
    def run(self, test: Coroutine[Any, Any, T]) -> T:
        """Run a test that is written for any way."""

    @abstractmethod
    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Running[T]:
        """Let *work* run beside the test, as another holder: a thread, or a task."""

    @abstractmethod
    async def until(
        self, condition: Callable[[], Any], timeout: float = 15, message: str = ""
    ) -> None:
        """Poll until *condition* is true; see tests/support/waiting.py."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None: ...
    @abstractmethod
    def function(self, body: Callable[..., T]) -> Callable[..., Any]:
        """Return *body* as the kind of function that this way of programming has."""

    @abstractmethod
    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what function() returned."""

    @abstractmethod
    def entered(self, lock: Lock) -> AbstractAsyncContextManager[Lease]:
        """Use the lock as context manager."""

    @abstractmethod
    async def acquire(self, lock: Lock) -> bool: ...
    @abstractmethod
    async def release(self, lock: Lock, success: bool = True) -> None: ...
    @abstractmethod
    async def locked(self, lock: Lock) -> bool: ...
    @abstractmethod
    async def renew(self, lease: Lease, ttl: float | timedelta | None = None) -> None: ...
    @abstractmethod
    async def ensure_held(self, lease: Lease, verify: bool = False) -> None: ...


class Sync(Way):
    """Blocking calls; others are threads."""

    name = "sync"

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        try:
            test.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        test.close()
        raise AssertionError("by the blocking way nothing may be awaited that is not there yet")

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Running[T]:
        return _Thread(lambda: self.run(work()))

    async def until(
        self, condition: Callable[[], Any], timeout: float = 15, message: str = ""
    ) -> None:
        wait_until(condition, timeout, message)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def function(self, body: Callable[..., T]) -> Callable[..., T]:
        return body

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def entered(self, lock: Lock) -> AbstractAsyncContextManager[Lease]:
        return _Entered(lock)

    async def acquire(self, lock: Lock) -> bool:
        return lock.acquire()

    async def release(self, lock: Lock, success: bool = True) -> None:
        lock.release(success)

    async def locked(self, lock: Lock) -> bool:
        return lock.locked()

    async def renew(self, lease: Lease, ttl: float | timedelta | None = None) -> None:
        lease.renew(ttl)

    async def ensure_held(self, lease: Lease, verify: bool = False) -> None:
        lease.ensure_held(verify)


class Async(Way):
    """Awaited calls in one event loop; others are tasks."""

    name = "async"

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(test)

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Running[T]:
        return _Task(work())

    async def until(
        self, condition: Callable[[], Any], timeout: float = 15, message: str = ""
    ) -> None:
        await await_until(condition, timeout, message)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def function(self, body: Callable[..., T]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(body)
        async def afunction(*args: Any, **kwargs: Any) -> T:
            return body(*args, **kwargs)

        return afunction

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    def entered(self, lock: Lock) -> AbstractAsyncContextManager[Lease]:
        return lock

    async def acquire(self, lock: Lock) -> bool:
        return await lock.aacquire()

    async def release(self, lock: Lock, success: bool = True) -> None:
        await lock.arelease(success)

    async def locked(self, lock: Lock) -> bool:
        return await lock.alocked()

    async def renew(self, lease: Lease, ttl: float | timedelta | None = None) -> None:
        await lease.arenew(ttl)

    async def ensure_held(self, lease: Lease, verify: bool = False) -> None:
        await lease.aensure_held(verify)


class _Entered:
    """A lock's blocking context manager, for `async with`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> Lease:
        return self._lock.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.__exit__(exc_type, exc, traceback)


class _Thread(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._raised = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    async def result(self) -> T:
        self._thread.join(20)
        assert self.done(), "still running after 20 s"
        if self._raised is not None:
            raise self._raised
        return self._result


class _Task(Generic[T]):
    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(work)

    def done(self) -> bool:
        return self._task.done()

    async def result(self) -> T:
        return await asyncio.wait_for(self._task, 20)


WAYS = (Sync(), Async())


def both_ways(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test, written as a coroutine function with the argument *way*, by both ways."""

    @pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
    @functools.wraps(test)
    def by(way: Way, **fixtures: Any) -> None:
        way.run(test(way=way, **fixtures))

    return by


# --- places ----------------------------------------------------------------------------------

UNSCRIPTED = "unscripted"
MEMORY = "memory"
SERVERS = (*KINDS, UNSCRIPTED)
PLACES = (*SERVERS, MEMORY)
IN_TURN = (*KINDS, MEMORY)  # Where waiters are served first come, first served.

#: To run a test only in some of the places.
on_servers = pytest.mark.parametrize("place", SERVERS, indirect=True)
in_turn = pytest.mark.parametrize("place", IN_TURN, indirect=True)

#: To leave out the place that forbids scripts: it has no tasks, lists and force releases.
needs_scripts = pytest.mark.needs_scripts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot work where scripts are forbidden."""
    for item in list(items):
        chosen: Any = getattr(item, "callspec", None)
        place = chosen and chosen.params.get("place")
        if place == UNSCRIPTED and item.get_closest_marker("needs_scripts"):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


class Place(ABC):
    """Where the locks of a test are kept: REDISLOCK is set to it."""

    name: str

    @abstractmethod
    def configure(self, **options: Any) -> None:
        """Change settings of the default alias, and keep the others."""

    @abstractmethod
    def lose_data(self) -> None:
        """Let the server lose all that it keeps."""

    @abstractmethod
    def lapse(self, name: str) -> None:
        """Let the lease of a lock end on the server before its time."""

    def force_release(self, lease: Lease) -> None:
        """Let an operator free the lock."""
        assert held.force_release(lease.name, lease.id)

    @abstractmethod
    def setting(self) -> dict[str, Any]:
        """Return the setting of the default alias."""

    def keys(self) -> list[bytes]:
        """Return the keys on the server; none where there are no keys."""
        return []


class ServerPlace(Place):
    """A backend on a real server."""

    def __init__(self, name: str, locks: Locks, options: dict[str, str]) -> None:
        self.name = name
        self.locks = locks
        self._options = options
        self.on(locks.server)

    def on(self, target: Endpoint, **options: Any) -> None:
        """Reach the server by another address, such as a proxy's."""
        self.locks.on(target, OPTIONS=self._options, **{**DEFAULTS, **options})

    def configure(self, **options: Any) -> None:
        if "OPTIONS" in options:
            options["OPTIONS"] = {**self._options, **options["OPTIONS"]}
        self.locks.configure(**options)

    def lose_data(self) -> None:
        if keys := self.locks.keys():
            self.locks.redis.delete(*keys)

    def lapse(self, name: str) -> None:
        self.locks.redis.delete(lock_keys(self.locks.prefix, name).lock)

    def force_release(self, lease: Lease) -> None:
        if self.name != UNSCRIPTED:
            return super().force_release(lease)
        # Of those who may run scripts.
        keys = scripts.FORCE_RELEASE.given(lock_keys(self.locks.prefix, lease.name))
        args = lease.id, "request".ljust(16), ""
        self.locks.redis.eval(scripts.FORCE_RELEASE.source, len(keys), *keys, *args)
        return None

    def setting(self) -> dict[str, Any]:
        return dict(self.locks._settings.REDISLOCK["default"])

    def keys(self) -> list[bytes]:
        return self.locks.keys()


class MemoryPlace(Place):
    """The in-memory backend."""

    name = MEMORY

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        settings.REDISLOCK = {"default": {**IN_MEMORY, **DEFAULTS}}

    def configure(self, **options: Any) -> None:
        self._settings.REDISLOCK = {"default": {**self.setting(), **options}}

    def lose_data(self) -> None:
        self._server().locks.clear()

    def lapse(self, name: str) -> None:
        self._server().locks[name].lease = None

    def _server(self) -> MemoryServer:
        backend = backends["default"]
        assert isinstance(backend, InMemoryBackend)
        return backend.server

    def setting(self) -> dict[str, Any]:
        return dict(self._settings.REDISLOCK["default"])


# Long enough that a busy machine is not taken for a dead server.
DEFAULTS = {"TTL": 10, "WAIT": 5}


@pytest.fixture(params=PLACES)
def place(
    request: pytest.FixtureRequest,
    settings: Settings,
    shared_servers: Callable[[Kind], Server | Container],
    key_prefix: str,
) -> Iterator[Place]:
    """Keep the locks of this test in each of the places in turn."""
    name: str = request.param
    if name == MEMORY:
        yield MemoryPlace(settings)
        return
    fit = [kind for kind in KINDS if kind == name or (name == UNSCRIPTED and not missing(kind))]
    kind = (fit or KINDS)[0]
    if reason := missing(kind):
        _skip_or_fail(reason)
    locks = Locks(settings, shared_servers(kind), key_prefix)
    yield ServerPlace(name, locks, forbid_scripting(locks) if name == UNSCRIPTED else {})
    if keys := locks.keys():
        locks.redis.delete(*keys)
    locks.redis.close()


def forbid_scripting(locks: Locks) -> dict[str, str]:
    """Make a user who may do anything but run scripts, and return the OPTIONS to be that user."""
    rules = ("on", ">unscripted", "~*", "&*", "+@all", "-@scripting")
    locks.redis.execute_command("ACL", "SETUSER", UNSCRIPTED, *rules)
    return {"username": UNSCRIPTED, "password": UNSCRIPTED}


# --- others ----------------------------------------------------------------------------------


def held_by_other(name: str, **options: Any) -> AbstractContextManager[None]:
    """Let another machine hold the lock during a block."""
    return LockTestKit().simulate_held_by_other(name, **options)


def held_by(
    name: str, host: str = "web-3", task: str = "", ttl: float = 60, permit: str = ""
) -> AbstractContextManager[None]:
    """Let a machine with that name hold the lock during a block, for that task."""
    task_id = "id-1" if task else ""
    owner = Owner(
        host=host, pid=4711, thread="MainThread", task=task, task_id=task_id, permit=permit
    )
    return held_by_other(name, ttl=ttl, owner=owner)


def waiters(name: str) -> int:
    """How many wait for the lock."""
    seen = held.get(name)
    return seen.waiters if seen else 0
