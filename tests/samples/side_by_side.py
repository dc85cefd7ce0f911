"""Two processes with two versions of the same code: are both in the block at the same time?

The code of a version is ``shop/<version>.py``, with a function ``sell()``. What it protects is
STOCK, a body that lasts until the test says so.
"""

import importlib
import itertools
import sys

from django.test import override_settings

from tests.support.processes import hear, say

STOCK = {
    "shop/stock.py": """
        from tests.support.processes import hear, say

        def count_down(pk):
            say("in the block")
            hear()
        """
}

# What a version says that does not enter: by its error, or, of a task that is skipped, at once.
REFUSALS = {"LockError", "NotAcquired", "QuorumNotAchieved", "LockTimeout", "done"}


def sell(folder, **settings):
    """In a child: call sell() of the versions that it is told, and say what becomes of it."""
    sys.path.insert(0, folder)
    with override_settings(**settings):
        while version := hear():
            sample = importlib.import_module(f"shop.{version}")
            try:
                sample.sell(7)
            except Exception as error:
                say(type(error).__name__)
            else:
                say("done")


def enters(child, version):
    """Whether a child is in the block with that version of the code; else it is refused."""
    child.send(version)
    answer = child.read()
    assert answer in {"in the block", *REFUSALS}
    return bool(answer == "in the block")


def leave(child):
    """End the body of a child."""
    child.send("leave")
    assert child.read() == "done"


def pairs_together(versions, begin):
    """Of which two versions two processes are in the block at the same time."""
    found = set()
    ones, others = ({version: begin() for version in versions} for _ in range(2))
    for first, second in itertools.product(versions, repeat=2):
        assert enters(ones[first], first)
        if enters(others[second], second):
            found.add((first, second))
            leave(others[second])
        leave(ones[first])
    return found
