"""Flows that can be branched.

A generator cannot be copied, but a flow is a function of what it was told so far. The book keeps
a tree of those histories: a node is one history, and knows what the flow asks for after it. To
branch is to tell the same node two things; a new node is reached by a replay from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_redislock.rules.steps import Unanswered


class Returned(NamedTuple):
    """The flow has ended."""

    value: Any


class Raised(NamedTuple):
    """The flow has ended with an exception."""

    error: BaseException


class Sent(NamedTuple):
    """An answer, told at a time."""

    value: Hashable
    now: float


class Lost(NamedTuple):
    """There was no answer: the outcome is unknown."""

    sent: float
    now: float


class Interrupt(NamedTuple):
    """A cancellation, a signal."""

    now: float


Told = Sent | Lost | Interrupt


@dataclass(frozen=True, slots=True)
class Node:
    """A flow after a history."""

    parent: int
    told: Told | None  # None at the start.
    since: float  # When the flow asked for its step.
    step: Any  # A step, Returned or Raised.


class Book:
    """All histories of all flows, by number; 0 stands for no flow."""

    def __init__(self):
        self.nodes = [Node(0, None, 0.0, None)]
        self._numbers = {}
        self._starts = {}

    def __getitem__(self, number):
        return self.nodes[number]

    def start(self, begin, now, *args):
        """The node of a flow that was told nothing yet."""
        key = (begin, now, *args)
        number = self._numbers.get(key)
        if number is None:
            number = self._add(key, 0, None, now, next(begin(*args)))
            self._starts[number] = lambda: begin(*args)
        return number

    def tell(self, number, told):
        """The node of a flow that is told one thing more."""
        key = (number, told)
        after = self._numbers.get(key)
        if after is None:
            after = self._add(key, number, told, told.now, self._replay(number, told))
        return after

    def _add(self, key, parent, told, now, step):
        number = self._numbers[key] = len(self.nodes)
        self.nodes.append(Node(parent, told, now, step))
        return number

    def _replay(self, number, last):
        history = [last]
        while (told := self.nodes[number].told) is not None:
            history.append(told)
            number = self.nodes[number].parent
        flow = self._starts[number]()
        next(flow)
        try:
            while True:
                step = _resume(flow, history.pop())
                if not history:
                    return step
        except StopIteration as end:
            return Returned(end.value)
        except (Exception, asyncio.CancelledError) as error:
            return Raised(error)


def _resume(flow, told):
    match told:
        case Sent(value):
            return flow.send(value)
        case Lost(sent, now):
            return flow.throw(Unanswered("the reply was lost", sent, now))
        case Interrupt():
            return flow.throw(asyncio.CancelledError())
