"""Two loops that perform a flow: the only difference between sync and async."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from django_redislock.flows import Call

if TYPE_CHECKING:
    from django_redislock.flows import Flow, Performer

Result = TypeVar("Result")


def run(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow*, blocking this thread."""
    try:
        step = next(flow)
        while True:
            try:
                # Most steps are calls: by name, without a detour.
                answer = by.call(step) if type(step) is Call else step.perform(by)
            except BaseException as error:  # noqa: BLE001 - the flow undoes what was interrupted
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        by.close()


async def arun(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow* without blocking the event loop; see run()."""
    try:
        step = next(flow)
        while True:
            try:
                answer = await (by.call(step) if type(step) is Call else step.perform(by))
            except BaseException as error:  # noqa: BLE001 - cancellation too is thrown in
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        by.close()
