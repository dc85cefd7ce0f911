"""Two loops that perform a flow: the only difference between sync and async."""

from __future__ import annotations

from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, TypeVar

from django_redislock import lease
from django_redislock.rules.flows import Call, NotOurs, Unanswered

if TYPE_CHECKING:
    from django_redislock.lease import Process
    from django_redislock.rules.flows import Flow, Performer, Step

Result = TypeVar("Result")


def run(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow*, blocking this thread."""
    try:
        return _go_on(flow, next(flow), by)
    except BaseException as error:
        if getgeneratorstate(flow) == GEN_CLOSED:
            raise  # The flow has ended, with this error or before it.
        # A signal handler raised between two steps: the flow undoes what it has done so far.
        return _go_on(flow, flow.throw(error), by)
    finally:
        by.close()


def _go_on(flow: Flow[Result], step: Step, by: Performer) -> Result:
    process = lease.process
    try:
        while True:
            try:
                # Most steps are calls: by name, without a detour.
                answer = by.call(step) if type(step) is Call else step.perform(by)
            except BaseException as error:  # noqa: BLE001 - the flow undoes what was interrupted
                step = _step_after(error, flow, process)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


async def arun(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow* without blocking the event loop; see run()."""
    try:
        return await _ago_on(flow, next(flow), by)
    except BaseException as error:
        if getgeneratorstate(flow) == GEN_CLOSED:
            raise
        return await _ago_on(flow, flow.throw(error), by)
    finally:
        by.close()


async def _ago_on(flow: Flow[Result], step: Step, by: Performer) -> Result:
    process = lease.process
    try:
        while True:
            try:
                answer = await (by.call(step) if type(step) is Call else step.perform(by))
            except BaseException as error:  # noqa: BLE001 - cancellation too is thrown in
                step = _step_after(error, flow, process)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


def _step_after(error: BaseException, flow: Flow[Result], begun_by: Process) -> Step:
    """Tell a flow that a step has failed, and return the step that it wants next."""
    if lease.process is begun_by:
        return flow.throw(error)
    # This process was forked while the step was under way, and is the child. Its parent has the
    # same flow and goes on with it, so the child must neither send the step again nor undo it.
    if isinstance(error, Unanswered):
        return flow.throw(NotOurs("the process was forked meanwhile, and this is the child"))
    flow.close()
    raise error
