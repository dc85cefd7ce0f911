"""limit=N: a run needs one permit of N, and each permit is a lock of its own.

The permits of the name "report" are the locks "report#1", "report#2" and so on. Each has its own
lease, expiry, renewal and fence, is a row of its own for operators, and can be released by force
alone; no counter can drift. This costs a look at all of them before and after a grant, and runs
that wait have no order.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock.activity import Activity, busy_with
from django_redislock.backends.registry import backends
from django_redislock.backends.sync_and_async import aperform, perform
from django_redislock.lease import Lease
from django_redislock.lock import Lock
from django_redislock.process import cached_property
from django_redislock.rules import scripts
from django_redislock.rules.flows import Busy, Finished
from django_redislock.rules.names import check_name, permit_name, split_permit
from django_redislock.rules.replies import in_seconds
from django_redislock.rules.steps import Call, Notify
from django_redislock.signals import lock_timed_out

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AsyncExitStack, ExitStack
    from typing import TypeAlias

    from django_redislock.backends.base import Backend
    from django_redislock.jobs.options import JobOptions
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.steps import Flow

    # What take() does, see waits.py.
    Taking: TypeAlias = "Generator[Steps, Any, Outcome]"

LONGEST_IN_ONE_QUEUE = 1.0  # Seconds that a run waits for one permit before it looks at all.


class _Look(NamedTuple):
    """Ask the server all of this at once."""

    calls: list[Call]


class _Try(NamedTuple):
    """Ask for one permit. The end of the run releases it, if it is granted."""

    lock: Lock
    activity: Activity
    since: float


class _GiveBack(NamedTuple):
    """Release a permit that was granted in vain."""

    lock: Lock


Steps = _Look | _Try | _GiveBack | Notify
Outcome = Lease | Busy | Finished


@dataclass(frozen=True)
class Permits:
    """The permits of one name, of which a run takes one."""

    name: str
    options: JobOptions
    marker: RunMarker  # By which duplicates of the run are recognised after its success.
    activity: Activity  # The job and its id, as operators will see them.
    is_own: Callable[[Busy], bool]  # Whether an earlier delivery of the run has this permit.

    @cached_property
    def names(self) -> list[str]:
        """The locks that are the permits."""
        return [permit_name(self.name, number) for number in range(1, self.options.limit + 1)]

    @cached_property
    def backend(self) -> Backend:
        """Where they are."""
        return backends[self.options.using]

    def take(
        self, locks: ExitStack, wait: float | None = None, since: float | None = None
    ) -> Outcome:
        """Take one of the permits; the end of *locks* releases it.

        Receivers of signals are told of one wait, for the name.

        Args:
            locks: See there.
            wait: Seconds to wait; None: as on_conflict says.
            since: When the wait began of which this is a part. The caller tells if it runs out.

        Raises:
            InvalidLockName: The name is too long to be that of a permit.
            LockUnavailable: The server did not or could not answer.
        """
        return perform(self._taking(wait, since), partial(self._do, locks=locks))

    async def atake(self, locks: AsyncExitStack) -> Outcome:
        """See take()."""
        return await aperform(self._taking(None, None), partial(self._ado, locks=locks))

    def _do(self, step: Steps, locks: ExitStack) -> Any:
        match step:
            case _Look(calls):
                return self.backend.results_of(calls)
            case _Try(lock, activity, since):
                locks.pop_all()  # The permit that was asked for before was not granted.
                locks.push(lock)  # Before the grant, see JobRun._ask_for_lock().
                with busy_with(activity):
                    return lock.attempt(since=since)
            case _GiveBack(lock):
                return lock.release(success=False)
            case _:
                return self.backend.run(_alone(step))

    async def _ado(self, step: Steps, locks: AsyncExitStack) -> Any:
        match step:
            case _Look(calls):
                return await asyncio.to_thread(self.backend.results_of, calls)
            case _Try(lock, activity, since):
                locks.pop_all()
                locks.push_async_exit(lock)
                with busy_with(activity):
                    return await lock.aattempt(since=since)
            case _GiveBack(lock):
                return await lock.arelease(success=False)
            case _:
                return await self.backend.arun(_alone(step))

    def _taking(self, wait: float | None, since: float | None) -> Taking:
        """What take() does, step by step."""
        check_name(self.names[-1])
        began = self.backend.clock()
        options = self.options.lock_options
        give_up = began + (self.backend.terms(options).wait if wait is None else wait)
        outcome = yield from self._permit(began if since is None else since, give_up)
        if isinstance(outcome, Busy) and since is None:
            news = {
                "sender": Lock,
                "name": self.name,
                "using": self.backend.alias,
                "holder": outcome.holder,
                "waited": self.backend.clock() - began,
            }
            yield Notify(lock_timed_out, news)
        return outcome

    def _permit(self, began: float, give_up: float) -> Taking:
        # Permits that looked free and were not granted. They count as taken for a while: on a
        # quorum, a permit that only a minority keeps looks free, and would be asked for again and
        # again.
        refused: dict[str, Busy] = {}
        while True:
            left = max(give_up - self.backend.clock(), 0.0)
            seen = yield from self._look(self.names)
            if not isinstance(seen, dict):
                return seen
            taken = seen | refused
            if asked_for := [name for name in self.names if name not in taken]:
                # In a random order: if all runs began with the first, most would find it taken.
                random.shuffle(asked_for)
                wait = 0.0
            else:
                first = min(taken, key=lambda name: taken[name].expires_in)
                # If none of them ever ends, an acquire of one is to raise that as an error.
                if not left and taken[first].expires_in < math.inf:
                    return taken[first]
                asked_for, wait = [first], min(left, LONGEST_IN_ONE_QUEUE)
                refused.clear()
            for name in asked_for:
                lock = Lock(name, self.options.lock_options._replace(wait=wait))
                outcome = yield _Try(lock, self._activity_of(name), began)
                assert isinstance(outcome, Lease | Busy)  # A permit has no done markers.
                if isinstance(outcome, Lease):
                    return (yield from self._unless_in_the_way(lock, outcome))
                if self.is_own(outcome):
                    return outcome
                if not wait:
                    refused[name] = outcome

    def _activity_of(self, name: str) -> Activity:
        """Tells operators which permit of how many it is."""
        permit = f"{split_permit(name)[1]}/{self.options.limit}"
        return self.activity._replace(permit=permit)

    def _unless_in_the_way(self, lock: Lock, lease: Lease) -> Taking:
        """Give the permit back if a duplicate of the run has one too, or has finished meanwhile.

        Each looks after its own grant, so at least one of two duplicates sees the other.
        """
        if not self.marker.id:
            return lease
        try:
            others = yield from self._look(name for name in self.names if name != lock.name)
        except GeneratorExit:
            raise
        except BaseException:
            yield _GiveBack(lock)
            raise
        if isinstance(others, dict):
            return lease
        yield _GiveBack(lock)
        return others

    def _look(
        self, names: Iterable[str]
    ) -> Generator[Steps, Any, dict[str, Busy] | Busy | Finished]:
        """Return which of these permits are taken, and by whom, in one round trip.

        Or why the run must not take one: it has finished, or another delivery of it has a permit.
        """
        names = list(names)
        calls = [self.backend.look(name) for name in names]
        if self.marker.id:
            args = (self.marker.id,)
            calls.append(Call(scripts.FINISHED, self.name, args, self.backend.within))
        answers = yield _Look(calls)
        if self.marker.id and (ago := int(answers.pop())) >= 0:
            return Finished(in_seconds(ago))
        looks = map(self.backend.seen, names, answers)
        taken = {
            name: Busy(
                holding,
                math.inf if look.expires_in is None else look.expires_in,
                look.server_time,
                name,
            )
            for name, look in zip(names, looks, strict=True)
            if (holding := look.holding) is not None
        }
        for busy in taken.values():
            if self.is_own(busy):
                return busy
        return taken


def _alone(step: Notify) -> Flow[None]:
    """A flow of one step."""
    yield step
