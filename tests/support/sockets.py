"""A socket tells in its repr where it was made.

The garbage collector may find one that a test has left open long after that test, and names it in
the warning that fails another one.
"""

import os
import socket
import sys

_DEPTH = 20
_made = {}  # By id; weak references are gone when the collector warns.
_init, _repr = socket.socket.__init__, socket.socket.__repr__


def pytest_configure(config):
    socket.socket.__init__ = _noting
    socket.socket.__repr__ = _telling


def pytest_unconfigure(config):
    socket.socket.__init__ = _init
    socket.socket.__repr__ = _repr


def _noting(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    places, frame = [os.environ.get("PYTEST_CURRENT_TEST", "")], sys._getframe(1)
    while frame is not None and len(places) <= _DEPTH:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    _made[id(self)] = " < ".join(places)


def _telling(self):
    return f"{_repr(self)}, made by {_made.get(id(self), 'C code')}"
