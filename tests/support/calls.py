"""How long the way of an operation is: the calls of Python functions of the package on it."""

import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import django_redislock

PACKAGE = str(Path(django_redislock.__file__).parent) + "/"


class Calls(list[tuple[str, str]]):
    """The file and the name of each function, in the order in which they were called."""

    @property
    def files(self):
        """How many files they stand in."""
        return len({file for file, _ in self})

    @property
    def switches(self):
        """How often the next one stands in another file."""
        return sum(one[0] != following[0] for one, following in pairwise(self))

    def __str__(self):
        listed = "\n".join(f"    {file} {function}" for file, function in self)
        return f"{len(self)} calls, {self.files} files, {self.switches} switches\n{listed}"


@contextmanager
def counted_calls():
    """Note the calls that this thread makes within the block.

    What the garbage collector does there counts too, so take the fewest of several times.
    """
    calls = Calls()

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
