"""A waiter that holds leases checks whether its wait can ever end; see rules/circles.py."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, misuse, process
from django_redislock.backends.registry import backends
from django_redislock.holder import current_holder
from django_redislock.rules import circles, scripts
from django_redislock.rules.flows import CIRCLE_AFTER, LOOK_EVERY
from django_redislock.rules.replies import WaitReply
from django_redislock.rules.steps import Call, Elsewhere, NotOurs, Refused, Unanswered
from django_redislock.rules.stored import Wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.base import Backend
    from django_redislock.lease import Lease
    from django_redislock.rules.circles import Circle
    from django_redislock.rules.forms import Attempt
    from django_redislock.rules.steps import Flow

Result = TypeVar("Result")

MOST_NOTED = 100  # Leases of one holder.
LOOK_AGAIN = 0.5  # Seconds after the first look; after any other it is LOOK_EVERY.
# Seconds: meanwhile nobody hears the bell, and a handed-over lease waits for its confirmation.
LOOK_WITHIN = 0.25


class Lookout:
    """Looks now and then whether one wait of this thread or asyncio task can ever end.

    It costs nothing before a wait has lasted a second, and then nothing unless its holder has
    leases. A look that a server does not answer at once is given up: the next one comes soon.
    """

    def __init__(self, backend: Backend, form: Attempt, started: float) -> None:
        # When to look next; math.inf if never, as nobody holds a rate.
        self.due = started + CIRCLE_AFTER if form.look_every < math.inf else math.inf
        self._backend = backend
        self._form = form
        self._noted: dict[str, tuple[Backend, Lease]] = {}  # By the id of the lease.

    def over(self, waiting: Flow[Result]) -> Flow[Result]:
        """Perform the flow that waits, and note when it is over."""
        waiting_here = self._backend.waiting
        try:
            if self._form.waits:
                waiting_here.add(self._form.id)
            return (yield from waiting)
        except GeneratorExit:
            self._noted.clear()  # Nothing can be asked any more. The notes expire by themselves.
            raise
        finally:
            waiting_here.discard(self._form.id)
            yield from self._note("", clock.now() + LOOK_WITHIN)

    def look(self, ticket: bytes, now: float) -> Flow[float]:
        """Look whether the wait is in a circle, and return the time afterwards.

        Args:
            ticket: The place of the waiter in the queue.
            now: The time before.

        Raises:
            LockMisuse: The wait would never end.
        """
        until = clock.now() + LOOK_WITHIN
        me = current_holder()
        # A wait that began at the same time may not have been noted before the first look.
        pause = LOOK_EVERY if self._noted else LOOK_AGAIN
        mine = islice(self._leases_of(me), MOST_NOTED)
        self._noted |= {lease.id: (backend, lease) for backend, lease in mine}
        self.due = now + pause if self._noted else math.inf
        if self._noted:
            form = self._form
            wait = Wait(self._backend.alias, form.name, form.id, int(ticket), form.limit)
            yield from self._note(wait.packed, until)
            circle = yield from _find(wait, until, ring=False)
            # If this wait is the one to give up, look once more.
            if circle and circle.youngest.id == wait.id:
                again = yield from _find(wait, until, ring=True)
                # In a forked child it is the wait of its parent.
                if circle == again and process.this() is form.made_in:
                    known = self._backend.has_limit
                    raise misuse.waits_in_a_circle(form.name, circle, me, known)
        return self._backend.clock()

    def _leases_of(self, me: object) -> Iterator[tuple[Backend, Lease]]:
        """The leases of this holder, wherever they are."""
        for backend in dict.fromkeys([self._backend, *backends.values()]):
            if not backend.supports_queues:
                continue
            now = backend.clock()
            for name in list(backend.leases):
                for lease in backend.leases.of(name):
                    if (
                        lease.holder() is me
                        and lease.may_be_held(now)
                        and (lease.caller is None or lease.caller.is_served())
                    ):
                        yield backend, lease

    def _note(self, wait: str, until: float) -> Flow[None]:
        """Note the wait at the leases of its holder; "" notes that it is over."""
        for backend, lease in self._noted.values():
            args, permit = (lease.id, self._form.id, wait), lease.permit_number
            call = Call(scripts.NOTE_WAIT, lease.name, args, 0.0, permit=permit)
            yield from _ask(backend, call, until)


def circle_of(wait: Wait, within: float) -> Flow[Circle | None]:
    """The circle that a wait is in, if it is found *within* so many seconds."""
    return _find(wait, clock.now() + within, ring=True)


def _find(wait: Wait, until: float, *, ring: bool) -> Flow[Circle | None]:
    """Look for a circle until *until*. With *ring*, no process that was killed is in it."""
    search = circles.search(wait)
    try:
        read = next(search)
        while True:
            asked = read.wait
            try:
                backend = backends[asked.alias]
            except ImproperlyConfigured:
                return None  # The alias is another program's.
            args, permit = (asked.id, asked.ticket, int(ring)), read.permit
            call = Call(scripts.FOLLOW_WAIT, asked.name, args, 0.0, permit=permit)
            reply = yield from _ask(backend, call, until)
            if reply is None:
                return None
            read = search.send(WaitReply(*reply))
    except StopIteration as end:
        found: Circle | None = end.value
        return found


def _ask(backend: Backend, call: Call, until: float) -> Flow[Any]:
    """The answer of a script; None if there is none until *until*."""
    left = until - clock.now()
    if left <= 0:
        return None
    try:
        return (yield Elsewhere(backend, _answer_to(call._replace(within=left))))
    except NotOurs:
        raise
    except (Unanswered, Refused):
        return None


def _answer_to(call: Call) -> Flow[Any]:
    answer = yield call
    return answer.value
