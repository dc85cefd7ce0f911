"""The first steps of an acquire or a release, as a form that is filled in.

A backend may do them before there is a flow. The usual answers need no flow: the lock is granted,
at once or by the bell, or it is released. The flow is told any other answer: it begins with the
same steps, and goes on from there. Forms and flows call the same functions to read an answer.

The flow of an acquire is in flows.py, that of a release here: it reads only its form.
"""

from __future__ import annotations

import math
from contextlib import suppress
from os import urandom
from typing import TYPE_CHECKING, Any

from django_redislock import process
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules import scripts
from django_redislock.rules.arguments import LONGEST
from django_redislock.rules.flows import (
    CIRCLE_AFTER,
    LOOK_EVERY,
    UNDO_WITHIN,
    answer_to,
    confirmation,
    leaving,
    listens_until,
    milliseconds,
    take_up,
    undo_within,
)
from django_redislock.rules.lease_state import lost_because, token_of
from django_redislock.rules.replies import (
    FORCED,
    RELEASED,
    AcquireArgs,
    GrantedRing,
    QueuedReply,
    TakeStartArgs,
    read_ring,
    read_try,
)
from django_redislock.rules.steps import Answer, Bell, Call, Refused, Tell, Unanswered
from django_redislock.rules.stored import NO_MARKERS, renews_flag

if TYPE_CHECKING:
    from django_redislock.exceptions import LostReason
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.lease_state import Granted, LeaseState
    from django_redislock.rules.options import Terms
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Flow, Trouble
    from django_redislock.rules.stored import DoneMarkers, Owner


class Form:
    """What the first steps are made of, and what came of them.

    Attributes:
        script: The script of the first step.
        args: How many arguments it takes, the channel included.
        name: The lock.
        id: The lease id, which is public.
        token: Proves ownership to the server.
        permit: The permit of the lock whose keys the script is given.
        terms: Options and settings, combined.
        made_in: The process that it belongs to.
        waits: Whether the bell must be able to ring us.
        replicas: How many replicas are asked to acknowledge it.
        reply: What the server said; None if nothing.
        sent: When the script was sent.
        now: When the reply came.
        bell: What the bell said after that; None if nobody listened.
        granted: The lease that the bell has handed over, if any. It was confirmed.
        trouble: What happened in place of the next answer.
        left: Seconds for one more try, if the server did nothing at the first; else None.
        connection: The connection of these steps, kept for the flow; None if it was given back.
        server: Of several servers, the one that was asked.
        is_plain: Whether it is one command, which a backend may send before there is a flow.
        is_told: Whether the flow has the answers. From then on the flow undoes what is interrupted.
    """

    script: Script
    args: int
    name: str
    id = ""
    token: str
    permit = 1
    terms: Terms
    made_in: process.Process
    waits = False
    replicas = 0
    reply: Any = None
    sent = now = 0.0
    bell: Bell | None = None
    granted: Granted | None = None
    trouble: Trouble | None = None
    left: float | None = None
    connection: Any = None
    server: Any = None
    is_told = False
    is_plain = False

    @property
    def answers(self) -> list[Any]:
        """The answers to the steps so far, for the flow."""
        answers: list[Any] = []
        if self.reply is not None:
            answers.append(Answer(self.reply, self.sent, self.now))
        if self.bell is not None:
            answers.append(self.bell)
        if self.granted is not None:
            answers.append(None)  # Nobody awaits the answer to a confirmation.
        return answers


class Attempt(Form):
    """One acquire of one lock. Everything that is sent for it carries the same token (R1).

    Attributes:
        owner: Who wants it.
        template: The name as it was written.
        markers: The done markers that would make it pointless.
        limit: How many permits the lock has; any of them will do.
        has_limit: Whether the lock has a limit, which may be one.
        is_of_run: Whether the run of a job wants it.
        blocked_by: The owner who had the lock when the wait began; None before that.
        queues: Whether it stands in the queue if it waits.
        is_pause: Whether it is an operator's: queued before all waiters, unattended.
        look_every: Seconds after which a waiter looks by itself.
        is_again: Whether its run may have been delivered before.
    """

    script = scripts.ACQUIRE
    args = len(AcquireArgs._fields) + 1
    queues = True
    is_pause = False
    is_again = False
    look_every = LOOK_EVERY
    blocked_by: bytes | None = None
    _queued: QueuedReply

    def __init__(
        self,
        name: str,
        owner: Owner,
        terms: Terms,
        replicas: int = 0,
        markers: DoneMarkers = NO_MARKERS,
        template: str = "",
        *,
        has_limit: bool = False,
        is_of_run: bool = False,
    ) -> None:
        digits = urandom(24).hex()  # Nobody can guess the token; the id tells nothing about it.
        self.name = name
        self.token, self.id = digits[:32], digits[32:]
        self.owner = owner
        self.terms = terms
        self.waits = terms.wait > 0
        self.limit = terms.limit
        self.has_limit = has_limit
        self.is_of_run = is_of_run
        self.template = template
        self.replicas = replicas
        self.is_plain = not replicas
        self.markers = markers
        if terms.limit > 1:
            self.args = Attempt.args + 1
            self.script = scripts.ACQUIRE_PERMIT
        if terms.replace_within is not None:
            self.script, self.is_plain = scripts.ACQUIRE_REPLACING, False
        elif markers is not NO_MARKERS:
            self.script = (
                scripts.ACQUIRE_MARKED if terms.limit == 1 else scripts.ACQUIRE_PERMIT_MARKED
            )
        self.made_in = process.current

    @property
    def mode(self) -> str:
        """How the first try asks: an acquire that may wait joins the queue at once."""
        if self.is_pause:
            return "pause"
        return "queue" if self.waits and self.queues else "try"

    def call(self, mode: str, ticket: bytes, patience: float, within: float) -> Call:
        """The step that tries once.

        Args:
            mode: See AcquireArgs.
            ticket: The place in the queue; b"0" without one.
            patience: Seconds that it may wait for a connection.
            within: Seconds after which the answer is no longer awaited.
        """
        args = AcquireArgs(
            token=self.token,
            id=self.id,
            ttl=milliseconds(self.terms.first_ttl),
            mode=mode,
            ticket=ticket,
            markers=self.markers.packed,
            renews=renews_flag(self.terms.renews),
            owner=self.owner.packed,
        )
        more: tuple[str | int, ...] = (self.limit,) if self.limit > 1 else ()
        if self.script is scripts.ACQUIRE_REPLACING:
            grace = self.terms.replace_within or 0.0
            more = milliseconds(grace), self.owner.called if self.is_again else ""
        return Call(
            self.script,
            self.name,
            (*args, *more),
            within,
            listening=self.id if mode == "queue" else "",
            replicas=self.replicas,
            patience=patience,
            permit=self.permit,
        )

    def confirmation(self, permit: int) -> Tell:
        """The step that confirms the hand-over of a permit of the lock."""
        terms = self.terms
        return confirmation(self.name, self.token, terms.first_ttl, terms.renews, permit)

    def leaving(self, fence: bytes = b"") -> Call:
        """The step that undoes it, or only the grant with this *fence*."""
        timeout = self.terms.operation_timeout
        return leaving(self.name, self.token, timeout, self.permit, self.limit, fence)

    def take_up(self, lease_id: str, permit: int = 1) -> None:
        """Ask only for the handed-over lease with this id."""
        self.id, self.script, self.args = lease_id, scripts.TAKE_UP, Attempt.args
        self.limit, self.permit = 1, permit

    def seconds_to_listen(self) -> float:
        """Seconds to listen for the bell after the answer; 0 if the flow is to do so.

        With done markers the flow does: the bell does not say whether one is there.
        """
        queued = read_try(self.reply)
        if queued.__class__ is not QueuedReply or self.markers is not NO_MARKERS:
            return 0.0
        self._queued, self.blocked_by = queued, queued.owner
        # The flow takes over a longer wait, and checks whether it can ever end.
        until = self.sent + min(self.terms.wait, CIRCLE_AFTER)
        return listens_until(self.now, queued.left_ms, until) - self.now

    def heard(self, ring: bytes | None, now: float) -> Granted | None:
        """Note the ring that has come by *now*, if any. Returns the lease to confirm, if any."""
        words = ring.decode(errors="replace").split() if ring else []
        if words[1:2] != [self.id]:  # The ring was for a former waiter, say: look instead.
            words = []
        self.bell = Bell(words, now)
        handed_over = read_ring(words)
        if handed_over.__class__ is not GrantedRing:
            return None
        return take_up(handed_over, self._queued, self.sent, now, self.terms.first_ttl)


class StartAttempt(Attempt):
    """One acquire of a start under a rate. Nothing is held, so it is not renewed or released.

    Attributes:
        every: us between two starts.
        burst: How many may be made at once.
        claimed: The token by which an earlier acquire has reserved a start; "" for none.
        reserves: Whether a start that is not due is reserved, for an acquire to come.
    """

    script = scripts.TAKE_START
    look_every = math.inf  # The bell only says that a start is due earlier.
    every: int
    burst: int
    claimed = ""
    reserves = False

    @property
    def mode(self) -> str:
        return "reserve" if self.reserves and not self.waits else super().mode

    def call(self, mode: str, ticket: bytes, patience: float, within: float) -> Call:
        args = TakeStartArgs(
            token=self.token,
            id=self.id,
            claimed=self.claimed,
            mode=mode,
            patience=milliseconds(min(patience, LONGEST)),
            every=self.every,
            burst=self.burst,
            owner=self.owner.packed,
        )
        listening = self.id if mode == "queue" else ""
        return Call(self.script, self.name, args, within, listening=listening, patience=patience)

    def leaving(self, fence: bytes = b"") -> Call:
        return giving_back(self.name, self.token, self.every, self.terms)


def giving_back(name: str, token: str, every: int, terms: Terms) -> Call:
    """The step that gives back a start under a rate."""
    within = undo_within(terms.operation_timeout)
    return Call(scripts.GIVE_BACK_START, name, (token, every), within, shielded=True)


class Release(Form):
    """The release of a lease.

    Attributes:
        lease: The lease.
        insist: Whether to try until the lease ends, as leaving a block does.
        min_hold: Seconds since the grant for which the lock stays taken.
        once: Seconds for which the name counts as done.
        ended: "done", "failed" or "replaced", if the lease is to be in the timeline.
        run: The run that ends with the lease, if any.
        retention: How the records of runs and leases are kept, see stored.retention_of().
        notes: Whether the server is to note anything of these.
    """

    script = scripts.RELEASE
    args = 1
    notes = False

    def __init__(
        self,
        lease: LeaseState,
        terms: Terms,
        *,
        insist: bool,
        ended: str = "",
        once: float = 0.0,
        run: RunMarker | None = None,
        retention: str = "",
    ) -> None:
        self.name, self.id, self.owner = lease.name, lease.id, lease.owner
        self.lease, self.token, self.permit = lease, token_of(lease), lease.permit_number
        self.terms = terms
        self.insist = insist
        self.min_hold = lease.min_hold
        self.once = once
        self.ended = ended
        self.run = run
        self.retention = retention
        if ended or once or lease.min_hold:
            self.notes = True
            self.script = scripts.CONCLUDE
            self.args = 9
        self.is_plain = not lease.lost
        self.made_in = process.current

    @property
    def is_promise(self) -> bool:
        """Whether the server is to note more than what is only for listings."""
        return bool(self.min_hold or self.once or self.run)

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """What its script takes, see lua/release.lua and lua/conclude.lua."""
        if not self.notes:
            return (self.token,)
        return (
            self.token,
            self.id,
            milliseconds(self.min_hold) if self.min_hold else 0,
            milliseconds(self.once) if self.once else 0,
            self.owner.packed,
            self.ended,
            self.run.id if self.run else "",
            milliseconds(self.run.recognised_for) if self.run else 0,
            self.retention,
        )

    def call(self) -> Call:
        """Its first step."""
        within = self.terms.one_try
        return Call(self.script, self.name, self.arguments, within, permit=self.permit)


def release(form: Release) -> Flow[LostReason | None]:
    """End a lease. Returns None, or why it was lost before.

    Raises:
        LockUnavailable: The server refused, or did not answer.
    """
    try:
        answer = yield from answer_to(form.call(), form.lease.ends if form.insist else -math.inf)
    except (GeneratorExit, LockUnavailable):
        raise
    except BaseException:
        yield from release_again(form)
        raise
    if answer.value == RELEASED:
        return None
    # The first try may have worked, if it was sent while the lease was ours (R6).
    in_time = answer.unanswered_since < form.lease.deadline
    if not in_time or answer.value in {FORCED, b"replaced"}:
        return lost_because(answer.value.decode())
    if form.is_promise and answer.now >= form.lease.deadline:
        # Perhaps the lease ended by itself, before any try was carried out.
        raise LockUnavailable(
            form.name,
            "the server did not answer its release before the lease must have ended, and may not"
            " have noted what was to stay behind",
        )
    return None


def release_again(form: Release) -> Flow[None]:
    """After an interrupt: the server may not have got the release."""
    with suppress(Unanswered, Refused):
        call = form.call()
        yield call._replace(within=min(UNDO_WITHIN, call.within), shielded=True)
