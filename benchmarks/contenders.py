"""The locks compared, each as its own documentation uses it: `with contender.lock(name): ...`."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock
import redis_lock  # type: ignore[import-untyped]

from benchmarks.ready_bytes import ReadyBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

TTL = 30  # Seconds; the same for everybody.
WAIT = 60  # Longer than any measurement: nobody may give up.

PLAIN = "plain redis-py"
REDIS_PY = "redis-py Lock"
PYTHON_REDIS_LOCK = "python-redis-lock"
PYTHON_REDIS_LOCK_RENEWING = "python-redis-lock, renewing"
READY_BYTES = "our scripts as ready bytes"
OURS = "django-redislock"

# For tasks.
BARE = "bare task"
CELERY_SINGLETON = "celery-singleton"
CELERY_HEIMDALL = "celery-heimdall"
CELERY_ONCE = "celery-once"
OURS_QUEUED_ONCE = "django-redislock, queued once"


class Contender(Protocol):
    """One way to lock a name."""

    def lock(self, name: str) -> AbstractContextManager[Any]:
        """Hold the name while the block runs."""
        ...


class AsyncContender(Protocol):
    """The same in asyncio, for those who have it."""

    def alock(self, name: str) -> AbstractAsyncContextManager[Any]:
        """Hold the name while the block runs."""
        ...


RELEASE = """
if redis.call("GET", KEYS[1]) == ARGV[1] then
  return redis.call("DEL", KEYS[1])
end
return 0
"""


class PlainLock:
    """The two commands that any lock needs; it cannot wait."""

    def __init__(self, contender: Plain, name: str) -> None:
        self._contender = contender
        self._name = name
        self._token = os.urandom(16).hex()

    def __enter__(self) -> None:
        if not self._contender.client.set(self._name, self._token, nx=True, px=TTL * 1000):
            raise RuntimeError(f"{self._name} is busy.")

    def __exit__(self, *_: object) -> None:
        self._contender.client.evalsha(self._contender.release, 1, self._name, self._token)

    async def __aenter__(self) -> None:
        if not await self._contender.aclient.set(self._name, self._token, nx=True, px=TTL * 1000):
            raise RuntimeError(f"{self._name} is busy.")

    async def __aexit__(self, *_: object) -> None:
        await self._contender.aclient.evalsha(self._contender.release, 1, self._name, self._token)


class Plain:
    """SET NX PX, then compare-and-delete by EVALSHA."""

    def __init__(self, port: int) -> None:
        self.client = redis.Redis(port=port)
        self.aclient = redis.asyncio.Redis(port=port)
        self.release = self.client.script_load(RELEASE)

    def lock(self, name: str) -> PlainLock:
        """See Contender."""
        return PlainLock(self, name)

    alock = lock


class RedisPy:
    """The lock that comes with redis-py; its waiters poll every 100 ms."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)
        self._aclient = redis.asyncio.Redis(port=port)

    def lock(self, name: str) -> redis.lock.Lock:
        """See Contender."""
        return redis.lock.Lock(self._client, name, timeout=TTL)

    def alock(self, name: str) -> redis.asyncio.lock.Lock:
        """See AsyncContender."""
        return redis.asyncio.lock.Lock(self._aclient, name, timeout=TTL)


class PythonRedisLock:
    """python-redis-lock; its waiters block on a list that a release pushes to. No asyncio."""

    def __init__(self, port: int, *, auto_renewal: bool = False) -> None:
        # Its BLPOP lasts a whole ttl, longer than redis-py's default socket timeout.
        self._client = redis.Redis(port=port, socket_timeout=None)
        self._auto_renewal = auto_renewal

    def lock(self, name: str) -> redis_lock.Lock:
        """See Contender."""
        return redis_lock.Lock(self._client, name, expire=TTL, auto_renewal=self._auto_renewal)


class Ours:
    """`distributed_lock` as it comes: renewal, fence, index, queue and signals are on."""

    def __init__(self, port: int) -> None:
        import django
        from django.conf import settings

        settings.configure(
            INSTALLED_APPS=["django_redislock"],
            REDISLOCK={
                "default": {"LOCATION": f"redis://127.0.0.1:{port}/0", "TTL": TTL, "WAIT": WAIT}
            },
        )
        django.setup()
        from django_redislock import distributed_lock
        from django_redislock.holder import Activity, current_activity

        self.lock = self.alock = distributed_lock
        # As a request to this path does: what is locked from now on has another owner.
        self.become = lambda path: current_activity.set(Activity(path=path))


def _ready_bytes(port: int) -> ReadyBytes:
    return ReadyBytes(port, contender(OURS, port).lock)


CONTENDERS: Mapping[str, Callable[[int], object]] = {
    PLAIN: Plain,
    REDIS_PY: RedisPy,
    PYTHON_REDIS_LOCK: PythonRedisLock,
    PYTHON_REDIS_LOCK_RENEWING: functools.partial(PythonRedisLock, auto_renewal=True),
    READY_BYTES: _ready_bytes,
    OURS: Ours,
}
WAITING = (REDIS_PY, PYTHON_REDIS_LOCK, OURS)  # Those who can wait for a lock.
ASYNC = (PLAIN, REDIS_PY, READY_BYTES, OURS)
TASKS = (BARE, CELERY_SINGLETON, CELERY_HEIMDALL, CELERY_ONCE, OURS_QUEUED_ONCE, OURS)


_made: dict[str, object] = {}
_making = threading.RLock()  # One contender may be made of another.


def contender(name: str, port: int) -> Any:
    """The contender of this process, made at its first use."""
    with _making:  # Threads may ask at the same time.
        if name not in _made:
            _made[name] = CONTENDERS[name](port)
        return _made[name]
