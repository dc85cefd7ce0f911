"""limit=N: a run needs one permit of N, and each permit is a lock of its own.

The permits of the name "report" are the locks "report#1", "report#2" and so on. So each has its
own lease, expiry, renewal and fence, is a row of its own for operators, and can be released by
force alone; no counter can drift. What it costs: a look at all of them before and after a grant,
and no order among those who wait.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from django_redislock.activity import busy_with, current_activity
from django_redislock.backends.registry import backends
from django_redislock.lease import Lease
from django_redislock.lock import Lock
from django_redislock.rules import scripts
from django_redislock.rules.flows import Busy, Finished
from django_redislock.rules.names import check_name
from django_redislock.rules.steps import Call
from django_redislock.signals import lock_timed_out

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import ExitStack

    from django_redislock.backends.base import Backend
    from django_redislock.rules.flows import Done, Run
    from django_redislock.rules.options import Options

LOOK_EVERY = 1.0  # Seconds; one who waits stands in the queue of one permit at a time.


def take(
    name: str, limit: int, options: Options, run: Run, held: ExitStack
) -> Lease | Busy | Done | Finished:
    """Take one of the permits of *name* for *run*; *held* leaves what was taken.

    To receivers of signals it is one wait, for *name*, however many permits are asked for.

    Raises:
        InvalidLockName: The name is too long to be that of a permit.
        LockUnavailable: The server did not or could not answer.
    """
    check_name(f"{name}#{limit}")
    backend = backends[options.using]
    began = backend.clock()
    outcome = _take(backend, name, limit, options, run, held, began)
    if isinstance(outcome, Busy):
        lock_timed_out.send_robust(
            sender=Lock,
            name=name,
            using=backend.alias,
            holder=outcome.holder,
            waited=backend.clock() - began,
        )
    return outcome


def _take(
    backend: Backend,
    name: str,
    limit: int,
    options: Options,
    run: Run,
    held: ExitStack,
    began: float,
) -> Lease | Busy | Done | Finished:
    names = [f"{name}#{number}" for number in range(1, limit + 1)]
    wait = backend.conf.wait if options.wait is None else options.wait
    give_up = began + wait
    while True:
        left = max(give_up - backend.clock(), 0.0)
        taken = _look(backend, name, names, run)
        if isinstance(taken, Finished):
            return taken
        if duplicate := _held_by_us(taken.values()):
            return duplicate
        free = [one for one in names if one not in taken]
        # All start with another one, or all but the first would find it taken.
        random.shuffle(free)
        wanted, patient = free, options._replace(wait=0.0)
        if not free:
            first = min(taken, key=lambda one: taken[one].expires_in)
            # That all of them never end is an error, which asking for one of them tells.
            if not left and taken[first].expires_in < math.inf:
                return taken[first]
            wanted, patient = [first], options._replace(wait=min(left, LOOK_EVERY))
        for one in wanted:
            lock = Lock(one, patient)
            outcome = _ask(lock, limit, held, began)
            if isinstance(outcome, Lease):
                return _checked(backend, name, names, lock, outcome, run)


def _ask(lock: Lock, limit: int, held: ExitStack, began: float) -> Lease | Busy | Done | Finished:
    """Ask for one permit, and tell operators which one of how many it is."""
    held.pop_all()  # The one before was not granted.
    held.push(lock)  # Before it is: a soft time limit may hit right after the grant.
    number = lock.name.rpartition("#")[2]
    with busy_with(current_activity.get()._replace(permit=f"{number}/{limit}")):
        return lock.attempt(since=began)


def _checked(
    backend: Backend, name: str, names: list[str], lock: Lock, lease: Lease, run: Run
) -> Lease | Busy | Finished:
    """Give the permit back if the same run has got another one, or is finished, meanwhile.

    Each looks after its grant, so of two duplicates at least one sees the other; both may.
    """
    if not run.id:
        return lease
    try:
        taken = _look(backend, name, [one for one in names if one != lock.name], run)
    except BaseException:
        lock.release(success=False)
        raise
    in_the_way = taken if isinstance(taken, Finished) else _held_by_us(taken.values())
    if in_the_way is None:
        return lease
    lock.release(success=False)
    return in_the_way


def _look(backend: Backend, name: str, names: list[str], run: Run) -> dict[str, Busy] | Finished:
    """Which of the permits are taken, by whom; or that the run is finished. One round trip."""
    calls = [backend.look(one) for one in names]
    if run.id:
        calls.append(Call(scripts.FINISHED, name, (run.id,), backend.within))
    answers = backend.ask_many(calls)
    if run.id and (ago := int(answers.pop())) >= 0:
        return Finished(ago / 1000)
    seen = [backend.seen(one, answer) for one, answer in zip(names, answers, strict=True)]
    return {
        one.name: Busy(one.holding, math.inf if one.expires_in is None else one.expires_in)
        for one in seen
        if one.holding is not None
    }


def _held_by_us(taken: Iterable[Busy]) -> Busy | None:
    """A permit that another delivery or try of this task holds."""
    if not (task_id := current_activity.get().task_id):
        return None
    return next((one for one in taken if one.holding.owner.task_id == task_id), None)
