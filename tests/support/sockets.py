"""A socket tells in its repr where it was made.

The garbage collector may find one that a test has left open long after that test, and names it in
the warning that fails another one.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_DEPTH = 20
_made: dict[int, str] = {}  # By id; weak references are gone when the collector warns.
_init, _repr = socket.socket.__init__, socket.socket.__repr__


def pytest_configure(config: pytest.Config) -> None:
    """From now on."""
    socket.socket.__init__ = _noting  # type: ignore[method-assign]
    socket.socket.__repr__ = _telling  # type: ignore[method-assign]


def pytest_unconfigure(config: pytest.Config) -> None:
    """As it was."""
    socket.socket.__init__ = _init  # type: ignore[method-assign]
    socket.socket.__repr__ = _repr  # type: ignore[method-assign]


def _noting(self: socket.socket, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    places, frame = [os.environ.get("PYTEST_CURRENT_TEST", "")], sys._getframe(1)
    while frame is not None and len(places) <= _DEPTH:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    _made[id(self)] = " < ".join(places)


def _telling(self: socket.socket) -> str:
    return f"{_repr(self)}, made by {_made.get(id(self), 'C code')}"
