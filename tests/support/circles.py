"""Holders who wait for each other, so that none of their waits can end.

with a_circle("a", "b"):
    assert [lock.state for lock in held.list()] == ["held", "held"]
"""

from contextlib import contextmanager
from unittest.mock import patch

from django_redislock import LockMisuse, LockTimeout, distributed_lock, held
from django_redislock.rules.circles import Circle
from django_redislock.rules.stored import Wait
from tests.support.waiting import wait_until
from tests.support.ways import Sync


def waiters_of(name):
    return len(held.detail(name).waiters)


async def outcomes_of(runs):
    """What each of them said, or the error that it ended with."""
    said = []
    for run in runs:
        try:
            said.append(await run.result())
        except (LockMisuse, LockTimeout) as error:
            said.append(str(error))
    return said


class Ring:
    """Holders who each have one lock, and then want the next one's, one after the other."""

    def __init__(self, way, *names):
        self._way = way
        self._names = names
        self._holding = set()

    def start(self):
        return [self._way.start(lambda number=number: self._run(number)) for number in self._places]

    @property
    def _places(self):
        return range(len(self._names))

    async def _run(self, number):
        way, first = self._way, self._names[number]
        second = self._names[(number + 1) % len(self._names)]
        async with way.entered(distributed_lock(first)):
            self._holding.add(first)
            await way.until(lambda: len(self._holding) == len(self._names))
            for earlier in self._names[1 : number + 1]:
                await way.until(lambda earlier=earlier: waiters_of(earlier))
            async with way.entered(distributed_lock(second)):
                return "went on"


@contextmanager
def a_circle(*names):
    """Let threads hold a lock each and wait for the next one's; during the block none gives up."""
    way = Sync()
    with patch.object(Circle, "youngest", property(lambda _: Wait("", "", "nobody", 0))):
        runs = Ring(way, *names).start()
        wait_until(lambda: [bool(lock.circle) for lock in held.list()] == [True] * len(names))
        yield
    said = way.run(outcomes_of(runs))
    assert said.count("went on") == len(names) - 1
