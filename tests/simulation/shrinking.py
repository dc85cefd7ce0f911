"""The fewest steps of a plan that still break the same promise: delta debugging.

Hypothesis would shrink, too, but it decides itself what is drawn; here a seed alone says what
happens, and a plan is a list of steps that may be left out.
"""

import time

from tests.simulation.commands import Violation

LONGEST = 60.0  # Seconds of processor time.


class Shrunk:
    """What is left of a plan, and how it goes."""

    def __init__(self, plan, promise, story):
        self.plan = plan
        self.promise = promise  # That is broken, in words.
        self.story = story

    def __str__(self):
        return "\n".join([self.promise, "", *self.story])


def broken(world):
    """Run a world to its end; returns which promise it breaks, in words, or ""."""
    try:
        world.run()
    except Violation as violation:
        return str(violation)
    return ""


def shrunk(plan, make, *, longest=LONGEST):
    """Leave out all steps that the violation does not need.

    Args:
        plan: It breaks a promise, and must go on to break the same one.
        make: Makes a world of a plan.
        longest: Seconds of processor time after which what is left is good enough.
    """
    world, until = make(plan), time.process_time() + longest
    name = broken(world).partition(":")[0]
    # What was to come after that.
    over = world.timeline.now
    early = tuple(step for step in plan.steps if step.when <= over)
    plan = plan._replace(steps=early, setup=plan.setup._replace(seconds=over + 60.0))

    def still_breaks(steps):
        told = broken(make(plan._replace(steps=tuple(steps))))
        return told.partition(":")[0] == name

    steps = list(plan.steps)
    parts = 2
    while len(steps) > 1 and time.process_time() < until:
        size = -(-len(steps) // parts)
        for start in range(0, len(steps), size):
            fewer = steps[:start] + steps[start + size :]
            if still_breaks(fewer):
                steps, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(steps))
    plan = plan._replace(steps=tuple(steps))
    story = []
    return Shrunk(plan, broken(make(plan, tell=story.append)), story)
