"""Visits every moment that can be reached, and checks the promises in each."""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.rules.model.promises import Violation
from tests.rules.model.world import TICK, World

MOST_FAIR_MOVES = 500


class Broken(AssertionError):
    """A promise was broken; the message tells the shortest story of how."""

    def __init__(self, promise, story):
        super().__init__("\n".join([promise, *story]))
        self.promise = promise
        self.story = story


@dataclass
class Report:
    """What was explored."""

    states: int = 0
    moves: int = 0
    longest: float = 0.0  # Seconds until everybody has ended, once all faults have stopped.
    seconds: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)  # In how many states somebody is in each.

    def __str__(self):
        return (
            f"{self.states} states and {self.moves} moves in {self.seconds:.1f} s; without faults"
            f" everybody was served or told within {self.longest:g} s"
        )


def explore(setup, *, patience=None):
    """Visit all states, breadth first.

    Args:
        setup: What may happen.
        patience: From every state, once all faults have stopped, everybody must have had the
            lock or have been told within that many seconds; None for not to try.

    Raises:
        Broken: A promise was broken.
    """
    gc.disable()  # States do not refer to each other, and there are too many to look for circles.
    try:
        return _explore(setup, patience)
    finally:
        gc.enable()


def _explore(setup, patience):
    begin = time.perf_counter()
    world, report = World(setup), Report()
    first = world.beginning()
    seen = {first: None}
    ends = {}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        report.phases.update({client.phase for client in state.clients})
        sequel = []
        try:
            world.check(state)
            if patience is not None:
                left = (_end(world, state, ends, sequel) - state.time) * TICK
                report.longest = max(report.longest, left)
                if left > patience:
                    raise Violation(f"P6: somebody waits for {left:g} s although nothing fails")
            for label, after in world.moves(state):
                report.moves += 1
                if after not in seen:
                    seen[after] = (state, label)
                    waiting.append(after)
        except Violation as violation:
            raise Broken(str(violation), _story(seen, state) + sequel) from violation
    report.states = len(seen)
    report.seconds = time.perf_counter() - begin
    return report


def _end(world, state, ends, sequel):
    """The tick at which everybody has ended if nothing fails from now on."""
    path = []
    while state not in ends:
        path.append(state)
        move = world.fair_move(state)
        if move is None:
            ends[state] = state.time
            break
        if len(path) > MOST_FAIR_MOVES:
            raise Violation("P6: it never ends")
        label, state = move
        sequel.append(_line(state, label))
        world.check(state)
    for passed in path:
        ends[passed] = ends[state]
    return ends[state]


def _story(seen, state):
    story = []
    while (came := seen[state]) is not None:
        before, label = came
        story.append(_line(state, label))
        state = before
    return story[::-1]


def _line(state, label):
    return f"{state.now:5.1f} s  {label}"
