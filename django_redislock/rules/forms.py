"""The first step of an acquire or a release, as a form that is filled in.

A backend may do it before there is a flow. Its usual answer needs no flow; any other is told to the
flow, which begins with the same step and goes on from there. What an answer means is said by the
functions that the flow calls too.
"""

from __future__ import annotations

from os import urandom
from typing import TYPE_CHECKING, Any

from django_redislock import process
from django_redislock.rules import scripts
from django_redislock.rules.flows import Request
from django_redislock.rules.replies import AcquireArgs
from django_redislock.rules.steps import Answer
from django_redislock.rules.stored import NO_MARKERS

if TYPE_CHECKING:
    from django_redislock.rules.options import Terms
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Trouble
    from django_redislock.rules.stored import DoneMarkers, Owner


class Form:
    """What a first step is made of, and what came of it.

    Attributes:
        script: What is run.
        args: How many arguments it takes, the channel included.
        name: The lock.
        id: Stands for the token in the open.
        token: Proves ownership to the server.
        terms: How it is locked.
        made_in: The process that it belongs to.
        waits: Whether the bell must be able to ring us.
        replicas: How many replicas are asked to acknowledge it.
        reply: What the server said; None if nothing.
        sent: When it was sent.
        now: When the reply came.
        trouble: What happened in place of a reply.
        left: Seconds that it may still take, if it was refused and is to be done again.
        connection: Where it was done, kept for the flow; None if that was given back.
        server: Of several servers, the one that was asked.
        is_told: Whether the flow knows. From then on the flow undoes what is interrupted.
    """

    script: Script
    args: int
    name: str
    id = ""
    token: str
    terms: Terms
    made_in: process.Process
    waits = False
    replicas = 0
    reply: Any = None
    sent = now = 0.0
    trouble: Trouble | None = None
    left: float | None = None
    connection: Any = None
    server: Any = None
    is_told = False

    @property
    def answer(self) -> Answer:
        """The reply, for the flow."""
        return Answer(self.reply, self.sent, self.now)


class FirstTry(Form):
    """That of an acquire. The same token goes with all that is sent for it (R1)."""

    script = scripts.ACQUIRE
    args = len(AcquireArgs._fields) + 1

    def __init__(
        self,
        name: str,
        owner: Owner,
        terms: Terms,
        replicas: int = 0,
        markers: DoneMarkers = NO_MARKERS,
    ) -> None:
        digits = urandom(24).hex()  # Nobody can guess the token, and the id tells nothing about it.
        self.name = name
        self.token, self.id = digits[:32], digits[32:]
        self.owner = owner
        self.terms = terms
        self.waits = terms.wait > 0
        self.replicas = replicas
        self.markers = markers
        if markers is not NO_MARKERS:
            self.script = scripts.ACQUIRE_MARKED
        self.made_in = process.current

    def request(self) -> Request:
        """The same, for the flow."""
        terms = self.terms
        return Request(
            self.name,
            self.token,
            self.id,
            self.owner,
            terms.first_ttl,
            terms.wait,
            terms.operation_timeout,
            self.replicas,
            self.markers,
            terms.renews,
            terms.unavailable_after,
        )


class Release(Form):
    """That of a release, which is a form if nothing stays behind.

    Attributes:
        is_plain: Whether that is so, and the lease was not lost. Else its flow has more to do, and
            does all of it, since what is to be noted must not be lost if it is interrupted.
        min_hold, once, ended: What stays behind; see flows.Ending.
    """

    script = scripts.RELEASE
    args = 1

    def __init__(
        self,
        name: str,
        token: str,
        terms: Terms,
        min_hold: float,
        once: float,
        ended: str,
        lost: object,
    ) -> None:
        self.name = name
        self.token = token
        self.terms = terms
        self.min_hold = min_hold
        self.once = once
        self.ended = ended
        self.is_plain = not (min_hold or once or ended or lost)
        self.made_in = process.current
