"""Threads and event loops of one process at one lock; of use on a Python without the GIL.

    PYTHON_GIL=0 python3.13t -m tests.interleavings.free_threads --seconds 15

It needs django, redis, hiredis and a redis-server, and nothing else of the test suite.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from dataclasses import dataclass, field

NAME = "one"


@dataclass
class Book:
    """What happened at the lock; only its holder writes here."""

    inside: int = 0
    most: int = 0  # Holders at the same time.
    fences: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def begins(self, fence):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.fences.append(fence)

    def ends(self):
        self.inside -= 1

    @property
    def wrong(self):
        """What must not be."""
        found = [repr(error) for error in self.errors]
        if self.most > 1:
            found.append(f"{self.most} held the lock at once")
        if self.fences != sorted(set(self.fences)):
            found.append("a fence did not grow")
        return found


def use_for(seconds):
    """Let nine threads and two event loops use the lock, with Django set up."""
    from django_redislock import distributed_lock

    book, until = Book(), time.monotonic() + seconds
    shared = distributed_lock("shared")  # One handle in several threads.

    def block():
        mine = f"of {threading.get_ident()}"
        while time.monotonic() < until:
            with distributed_lock(NAME) as lease:
                book.begins(lease.fence)
                time.sleep(0.0005)
                book.ends()
            with shared, distributed_lock(mine) as lease:
                lease.ensure_held()

    async def wait():
        while time.monotonic() < until:
            async with distributed_lock(NAME) as lease:
                book.begins(lease.fence)
                await asyncio.sleep(0)
                book.ends()

    async def loop():
        await asyncio.gather(*(wait() for _ in range(4)))

    def run(number):
        try:
            block() if number < 9 else asyncio.run(loop())
        except BaseException as error:
            book.errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return book


def main():
    """Start a server, use the lock, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings.free_threads")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()

    import django
    from django.conf import settings

    from tests.support.servers import KIND, Server

    with Server(KIND) as server:
        alias = {"LOCATION": server.url, "WAIT": 60}
        settings.configure(INSTALLED_APPS=["django_redislock"], REDISLOCK={"default": alias})
        django.setup()
        book = use_for(options.seconds)
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"GIL {'on' if has_gil else 'off'}: {len(book.fences)} leases", *book.wrong, sep="; ")
    return int(bool(book.wrong))


if __name__ == "__main__":
    sys.exit(main())
