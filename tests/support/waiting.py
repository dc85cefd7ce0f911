"""Waiting without guessing: poll until something is so, and say what was not when time is up.

A long timeout costs nothing when the condition comes true; a short one fails on a busy machine. So
there is one for all that a test waits for, HUNG, whether it polls, joins a thread or runs a
program. A shorter one is for what would come true by itself later, as when a lease expires.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Seconds after which something hangs rather than being slow; less than pytest gives a whole test.
HUNG = 60.0


def wait_until(
    condition: Callable[[], T], timeout: float = HUNG, message: str = "", *, every: float = 0.005
) -> T:
    """Return the first true answer of *condition*; fail after *timeout* seconds without one."""
    begin = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - begin
        if waited > timeout:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        time.sleep(_pause(every, waited))
    return answer


def eventually(call: Callable[[], T], error: type[Exception]) -> T:
    """Return the first answer of *call* that is not this *error*: it has little time for each."""
    answers: list[T] = []

    def answered() -> bool:
        try:
            answers.append(call())
        except error:
            return False
        return True

    wait_until(answered)
    return answers[0]


async def await_until(
    condition: Callable[[], Any], timeout: float = HUNG, message: str = "", *, every: float = 0.005
) -> Any:
    """See wait_until(); lets the event loop run, and *condition* may be a coroutine function."""
    begin = time.monotonic()
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        waited = time.monotonic() - begin
        if waited > timeout:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        await asyncio.sleep(_pause(every, waited))


def _pause(every: float, waited: float) -> float:
    """Seconds until the next look: looks cost processor time, and are rarer in a long wait."""
    return max(every, min(waited / 20, 0.05))


def _too_late(condition: object, timeout: float, message: str, answer: object) -> str:
    what = message or getattr(condition, "__qualname__", repr(condition))
    return f"{what}: not so within {timeout:g} s, last answer {answer!r}"
