"""One text for blocking and asynchronous code, where they differ only in how they wait.

A text is a generator. It yields each wait, as a function that blocks or a coroutine function. It is
sent the result, and what the wait raises is raised there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")

Waits = Generator[Callable[[], Any], Any, Result]


def perform(waits: Waits[Result]) -> Result:
    """Do all waits, blocking this thread."""
    try:
        wait = next(waits)
        while True:
            try:
                found = wait()
            except BaseException as error:  # noqa: BLE001 - it is for the text
                wait = waits.throw(error)
            else:
                wait = waits.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result


async def aperform(waits: Waits[Result]) -> Result:
    """See perform(), without blocking the event loop."""
    try:
        wait = next(waits)
        while True:
            try:
                found = await wait()
            except BaseException as error:  # noqa: BLE001 - cancellation too
                wait = waits.throw(error)
            else:
                wait = waits.send(found)
    except StopIteration as end:
        result: Result = end.value
        return result
