"""A run by which the newest call wins hears at once that a newer call has replaced it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django_redislock import logs, process
from django_redislock.backends.registry import backends
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules import scripts
from django_redislock.rules.flows import answer_to, milliseconds
from django_redislock.rules.lease_state import drift, token_of
from django_redislock.rules.replies import in_seconds
from django_redislock.rules.steps import Call, Listen, Refused, Unanswered
from django_redislock.rules.stored import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.lease import Lease
    from django_redislock.rules.steps import Flow

logger = logs.logger("django_redislock.jobs")

# Seconds. A body that is shorter is not rung: it has ended before it could.
NOT_BEFORE = 0.05
LOOK_EVERY = 5.0  # It may have missed the bell, or the server may have lost its data.
# Its thread looks so often whether the body has ended. It asks the server nothing then.
STOPS_WITHIN = 0.25


@contextmanager
def told_when_replaced(lease: Lease) -> Iterator[None]:
    """Tell the run of *lease* within this block when a newer call has replaced it.

    A thread listens, as a waiter does: the run itself may look at nothing, or block its event loop.
    If the thread is missing, the lease ends all the same, by the newer call's looks.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_listen, args=(lease, over), name="redislock-replaced", daemon=True
    )
    try:
        process.start(thread)
    except RuntimeError as error:  # No more threads.
        logger.warning("Nobody tells when %r is replaced: %s", lease.name, error)
    try:
        yield
    finally:
        over.set()


def _listen(lease: Lease, over: threading.Event) -> None:
    backend, pause = backends[lease.alias], NOT_BEFORE
    while not over.wait(pause) and lease.is_active:
        try:
            if found := backend.run(_stand_by(lease, over)):
                backend.replaced(lease, *found)
            return
        except (LockUnavailable, Unanswered, Refused):
            pause = 4 * STOPS_WITHIN  # The connection was lost, most likely.


def _stand_by(lease: Lease, over: threading.Event) -> Flow[tuple[float, str] | None]:
    """Listen until the run is over or replaced. Returns when it must have ended, and by whom."""
    args = token_of(lease), lease.id, milliseconds(4 * LOOK_EVERY), "queue"
    within = lease.ttl / 3
    call = Call(scripts.STAND_BY, lease.name, args, within, listening=lease.id)
    while True:
        answer = yield from answer_to(call)
        if answer.value and answer.value[0] == b"replaced":
            _, left_ms, newer = answer.value
            # From when we asked: the server has counted the time that is left after that.
            left = in_seconds(left_ms)
            until = answer.sent + left - drift(left)
            return until, str(Owner.unpack(newer.decode(errors="replace")))
        now = answer.now
        until = now + LOOK_EVERY
        while now < until:
            if over.is_set() or not lease.is_active:
                return None
            bell = yield Listen(lease.id, min(until - now, STOPS_WITHIN))
            now = bell.now
            if bell.words:
                break
