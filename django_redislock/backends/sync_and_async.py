"""One text for blocking and asynchronous code that differ only in how a step is done.

A text is a generator. It yields each step, and is sent the result. If a step raises, the exception
is raised at the yield. In most texts a step is a wait: a function that blocks, or a coroutine
function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from operator import call
from typing import Any, TypeVar

Result = TypeVar("Result")

Waits = Generator[Callable[[], Any], Any, Result]


def perform(text: Generator[Any, Any, Result], do: Callable[[Any], Any] = call) -> Result:
    """Do all steps, blocking this thread."""
    try:
        step = next(text)
        while True:
            try:
                found = do(step)
            except BaseException as error:  # noqa: BLE001 - it is for the text
                step = text.throw(error)
            else:
                step = text.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result


async def aperform(
    text: Generator[Any, Any, Result], do: Callable[[Any], Awaitable[Any]] = call
) -> Result:
    """See perform(), without blocking the event loop."""
    try:
        step = next(text)
        while True:
            try:
                found = await do(step)
            except BaseException as error:  # noqa: BLE001 - cancellation too
                step = text.throw(error)
            else:
                step = text.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result
