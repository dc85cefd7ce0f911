"""A client: it takes the lock, and increments one counter without guard and one under the fence."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from django.conf import settings
from django.db import transaction
from pottery import Redlock
from pottery.exceptions import PrimitiveError

from django_redislock import Lease, LockError, distributed_lock
from tests.effects.models import Counter, Entry
from tests.jepsen.checker import Operation
from tests.support.databases import use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

NAME = "jepsen"
TTL = 2.0  # Seconds.
PLAIN, FENCED = DATABASES = ("plain", "fenced")  # Each has a counter and the ledger of its writes.
PACE = 0.05  # Seconds between two tries, if the first one failed at once.

clock = time.monotonic  # One for all processes of a machine.


# --- the locks -----------------------------------------------------------------------------------


def ours() -> AbstractContextManager[Lease]:
    return distributed_lock(NAME)


@contextmanager
def of_redis_py() -> Iterator[None]:
    (client,) = _clients()
    with client.lock(NAME, timeout=TTL):
        yield


@contextmanager
def of_pottery() -> Iterator[None]:
    with Redlock(key=NAME, masters=set(_clients()), auto_release_time=TTL):
        yield


LOCKS: dict[str, Callable[[], AbstractContextManager[Lease | None]]] = {
    "ours": ours,
    "redis-py": of_redis_py,
    "pottery": of_pottery,
}


def _clients() -> list[redis.Redis]:
    """By their default settings, but that a server which is stopped does not stop them for ever."""
    location = settings.REDISLOCK["default"]["LOCATION"]
    urls = [location] if isinstance(location, str) else location
    # Made by address, since from_url() would leave out the retries that are their default.
    addresses = [redis.connection.parse_url(url) for url in urls]
    return [redis.Redis(**address, socket_timeout=TTL / 3) for address in addresses]


# --- what a client does --------------------------------------------------------------------------


class Desk:
    """The folder by which a trial and its clients know of each other."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._over = self._folder / "over"

    def close(self) -> None:
        """Tell the clients that it is over."""
        self._over.touch()

    @property
    def closed(self) -> bool:
        return self._over.exists()

    def order_pause(self, client: int) -> None:
        """Have a client stand still the next time that it is between reading and writing."""
        self._pause(client).touch()

    def pause_if_ordered(self, client: int) -> None:
        """In a client: stop, until somebody continues this process (SIGCONT)."""
        if self._pause(client).exists():
            self._pause(client).unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    def note(self, operation: Operation) -> None:
        """In a client: write down an operation."""
        line = json.dumps(asdict(operation)).encode() + b"\n"
        file = os.open(
            self._folder / f"{operation.client}.history", os.O_WRONLY | os.O_APPEND | os.O_CREAT
        )
        os.write(file, line)
        os.close(file)

    def operations(self) -> list[Operation]:
        """All that the clients have written down."""
        return [
            Operation(**json.loads(line))
            for history in self._folder.glob("*.history")
            for line in history.read_text().splitlines()
        ]

    def _pause(self, client: int) -> Path:
        return self._folder / f"{client}.pause"


def work(folder: str, databases: dict[str, Any], which: str, client: int) -> None:
    """In a child: increment until it is over; and then until it went well once more."""
    use(**databases)
    desk = Desk(folder)
    while True:
        is_last = desk.closed
        operation = _operate(LOCKS[which], desk, client)
        desk.note(operation)
        if is_last and operation.plain and not operation.error:
            return
        if operation.granted is None:
            time.sleep(PACE)


def _operate(
    lock: Callable[[], AbstractContextManager[Lease | None]], desk: Desk, client: int
) -> Operation:
    done = Operation(client=client, asked=clock())
    try:
        with lock() as lease:
            fence = lease.fence if lease else 0
            done = replace(done, granted=clock(), fence=fence)
            counter = Counter.objects.using(PLAIN).get()
            desk.pause_if_ordered(client)
            _write(counter, PLAIN, fence)
            done = replace(done, plain=True)
            if lease:
                with lease.atomic(FENCED):
                    _write(Counter.objects.using(FENCED).get(), FENCED, fence)
                done = replace(done, fenced=True)
    except (LockError, PrimitiveError, redis.RedisError) as error:
        return replace(done, error=type(error).__name__)
    return done


def _write(counter: Counter, database: str, fence: int) -> None:
    """Write one more than was read, and a line of the ledger with it."""
    counter.value += 1
    with transaction.atomic(using=database):
        Entry.objects.using(database).create(fence=fence, value=counter.value)
        counter.save()
