"""Waiting without guessing: poll until something is so, and say what was not when time is up.

A long timeout costs nothing when the condition comes true; a short one fails on a busy machine.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout: float = 15, message: str = "", *, every: float = 0.005
) -> T:
    """Return the first true answer of *condition*; fail after *timeout* seconds without one."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        time.sleep(every)
    return answer


async def await_until(
    condition: Callable[[], Any], timeout: float = 15, message: str = "", *, every: float = 0.005
) -> Any:
    """See wait_until(); lets the event loop run, and *condition* may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        await asyncio.sleep(every)


def _too_late(condition: object, timeout: float, message: str, answer: object) -> str:
    what = message or getattr(condition, "__qualname__", repr(condition))
    return f"{what}: not so within {timeout:g} s, last answer {answer!r}"
