"""A client: it takes the lock, and increments one counter without guard and one under the fence."""

import heapq
import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import redis
from django.conf import settings
from django.db import transaction
from pottery import Redlock
from pottery.exceptions import PrimitiveError

from django_redislock import LockError, distributed_lock
from tests.effects.models import Counter, Entry
from tests.jepsen.history import Event
from tests.jepsen.network import lead_through
from tests.support.databases import use
from tests.support.waiting import wait_until

NAME = "jepsen"
TTL = 2.0  # Seconds.
PLAIN, FENCED = DATABASES = ("plain", "fenced")  # Each has a counter and the ledger of its writes.
PACE = 0.05  # Seconds between two tries, if the first one failed at once.

clock = time.monotonic  # One for all processes of a machine.


# --- the locks -----------------------------------------------------------------------------------


def ours():
    return distributed_lock(NAME)


@contextmanager
def of_redis_py():
    (client,) = _clients()
    with client.lock(NAME, timeout=TTL):
        yield


@contextmanager
def of_pottery():
    with Redlock(key=NAME, masters=set(_clients()), auto_release_time=TTL):
        yield


LOCKS = {"ours": ours, "redis-py": of_redis_py, "pottery": of_pottery}


def _clients():
    """By their default settings, but that a server which is stopped does not stop them for ever."""
    location = settings.REDISLOCK["default"]["LOCATION"]
    urls = [location] if isinstance(location, str) else location
    # Made by address, since from_url() would leave out the retries that are their default.
    addresses = [redis.connection.parse_url(url) for url in urls]
    return [redis.Redis(**address, socket_timeout=TTL / 3) for address in addresses]


# --- what a client does --------------------------------------------------------------------------


class Desk:
    """The folder by which a trial and its clients know of each other."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._over = self._folder / "over"

    def close(self):
        """Tell the clients that it is over."""
        self._over.touch()

    @property
    def closed(self):
        return self._over.exists()

    def order_pause(self, client):
        """Have a client stop the next time that it is between reading and writing."""
        self._order("pause", client).touch()

    @contextmanager
    def detained(self, client):
        """Have a client wait between reading and writing; in the block it does.

        Its other threads go on, such as the one that renews its lease.
        """
        self._order("wait", client).touch()
        waits = self._order("waits", client)
        wait_until(waits.exists, message=f"client {client} has the lock")
        try:
            yield
        finally:
            waits.unlink()

    def obey(self, client):
        """In a client, between reading and writing: do what was ordered."""
        if self._order("pause", client).exists():
            self._order("pause", client).unlink()
            os.kill(os.getpid(), signal.SIGSTOP)  # Until somebody continues this process (SIGCONT).
        if self._order("wait", client).exists():
            waits = self._order("wait", client).rename(self._order("waits", client))
            wait_until(lambda: not waits.exists(), message="the order to go on", every=PACE)

    def note(self, event):
        """Write down what happens."""
        with (self._folder / f"{event.process}.events").open("ab", buffering=0) as file:
            file.write(event.as_json().encode() + b"\n")

    def events(self):
        """All that was written down, in the order of time, which begins at zero."""
        notes = [_read(path) for path in sorted(self._folder.glob("*.events"))]
        begin = None
        for event in heapq.merge(*notes, key=lambda event: event.time):
            begin = event.time if begin is None else begin
            yield replace(event, time=event.time - begin)

    @contextmanager
    def operation(self, process, f):
        """Write down that an operation begins, and how it ends; the block may add to its value."""
        value = {}
        self.note(Event(process, "invoke", f))
        try:
            yield value
        except Exception as error:
            name = type(error).__name__
            self.note(Event(process, "fail", f, error=name))
            raise
        self.note(Event(process, "ok", f, value or None))

    def _order(self, what, client):
        return self._folder / f"{client}.{what}"


def _read(path):
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield Event(**json.loads(line))


def work(folder, databases, which, network, client):
    """In a child: increment until it is over; and then until it went well once more."""
    use(**databases)
    lead_through(network, client)
    desk = Desk(folder)
    while True:
        is_last = desk.closed
        try:
            _operate(LOCKS[which], desk, client)
        except (LockError, PrimitiveError, redis.RedisError):  # It is written down.
            time.sleep(PACE)
        else:
            if is_last:
                return


def _operate(lock, desk, client):
    with ExitStack() as held:
        with desk.operation(client, "acquire") as value:
            lease = held.enter_context(lock())
            value["fence"] = fence = lease.fence if lease else 0
        try:
            with desk.operation(client, "increment-plain") as value:
                counter = Counter.objects.using(PLAIN).get()
                desk.obey(client)
                value.update(_write(counter, PLAIN, fence))
            if lease:
                with desk.operation(client, "increment-fenced") as value, lease.atomic(FENCED):
                    value.update(_write(Counter.objects.using(FENCED).get(), FENCED, fence))
        finally:
            with desk.operation(client, "release"):
                held.close()


def _write(counter, database, fence):
    """Write one more than was read, and a line of the ledger with it."""
    counter.value += 1
    with transaction.atomic(using=database):
        Entry.objects.using(database).create(fence=fence, value=counter.value)
        counter.save()
    return {"fence": fence, "value": counter.value}
