"""One world from its seed to its end, and the shortest story of what breaks in it."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from tests.simulation.controls import CONTROLS, SHIPPED
from tests.simulation.plan import plan_of
from tests.simulation.shrinking import broken, shrunk


class Run(NamedTuple):
    """What became of a world. Processes hand it to each other, which a world is too large for."""

    seed: int
    promise: str  # That was broken, in words, or "".
    hours: float  # Virtual ones.
    steps: int  # Of its plan.
    events: int
    counts: Counter[str]
    longest: dict[str, float]
    seconds: float  # Of processor time.


def run(seed, control=None):
    """Run the world of a seed, with the rule left out that *control* names."""
    variant = CONTROLS[control] if control else SHIPPED
    began = time.process_time()
    with variant.patched():
        world = variant.world(plan_of(seed, variant.bounds))
        promise = broken(world)
    return Run(
        seed=seed,
        promise=promise,
        hours=world.timeline.now / 3600,
        steps=len(world.plan.steps),
        events=world.timeline.events,
        counts=world.counts,
        longest=world.watch.longest,
        seconds=time.process_time() - began,
    )


def story(seed, control=None):
    """The fewest steps that break a promise in the world of a seed, and how to see it again."""
    variant = CONTROLS[control] if control else SHIPPED
    with variant.patched():
        found = shrunk(plan_of(seed, variant.bounds), variant.world)
    again = f" ARGS='--control \"{control}\"'" if control else ""
    return f"\n{found}\n\nAgain: make simulate SEED={seed}{again}"
