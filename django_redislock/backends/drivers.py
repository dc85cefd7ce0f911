"""Two loops that perform a flow: the only difference between sync and async."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, TypeVar

from django_redislock import process
from django_redislock.rules.steps import Call, NotOurs, Unanswered

if TYPE_CHECKING:
    from django_redislock.process import Process
    from django_redislock.rules.steps import Flow, Notify, Performer, Step

logger = logging.getLogger("django_redislock")

Result = TypeVar("Result")


def run(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow*, blocking this thread."""
    try:
        return _perform(flow, by)
    except BaseException as error:
        if getgeneratorstate(flow) == GEN_CLOSED:
            raise  # The flow has ended, with this error or before it.
        # A signal handler raised between two steps: the flow undoes what it has done so far.
        return _perform(flow, by, error)
    finally:
        by.close()


def _perform(flow: Flow[Result], by: Performer, interrupt: BaseException | None = None) -> Result:
    began_in = process.current
    try:
        step = next(flow) if interrupt is None else flow.throw(interrupt)
        while True:
            try:
                # Most steps are calls: by name, without a detour.
                answer = by.call(step) if type(step) is Call else step.perform(by)
            except BaseException as error:  # noqa: BLE001 - the flow undoes what was interrupted
                step = _step_after(flow, error, began_in)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


async def arun(flow: Flow[Result], by: Performer) -> Result:
    """Perform *flow* without blocking the event loop; see run()."""
    try:
        return await _aperform(flow, by)
    except BaseException as error:
        if getgeneratorstate(flow) == GEN_CLOSED:
            raise
        return await _aperform(flow, by, error)
    finally:
        by.close()


async def _aperform(
    flow: Flow[Result], by: Performer, interrupt: BaseException | None = None
) -> Result:
    began_in = process.current
    try:
        step = next(flow) if interrupt is None else flow.throw(interrupt)
        while True:
            try:
                answer = await (by.call(step) if type(step) is Call else step.perform(by))
            except BaseException as error:  # noqa: BLE001 - cancellation too is thrown in
                step = _step_after(flow, error, began_in)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


def _step_after(flow: Flow[Result], error: BaseException, began_in: Process) -> Step:
    """What the flow wants done after a step has failed: most often to undo what it has begun.

    A step may begin in one process and fail in two: in the one that began it, and in a child that
    was forked meanwhile. To try again or to undo is the parent's business, which goes on with the
    flow; in the child the flow ends here.
    """
    if process.current is began_in:
        return flow.throw(error)
    if isinstance(error, Unanswered):
        return flow.throw(NotOurs("the process was forked meanwhile, and this is the child"))
    flow.close()
    raise error


class Blocking(ABC):
    """Of a performer that blocks its thread: what does not depend on where the locks are kept."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what the flow has used; it may go on and use more."""

    def notify(self, step: Notify) -> None:
        """Send a signal."""
        self.close()  # A receiver may want a connection, or take its time.
        try:
            step.signal.send_robust(**step.news)
        except RuntimeError:
            # Not a receiver's, which are logged by Django: it cannot call asynchronous receivers
            # from blocking code in an event loop's thread.
            logger.exception("Could not send a signal about a lock")


class Awaiting(ABC):
    """The same of a performer that awaits."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what the flow has used; it may go on and use more."""

    async def notify(self, step: Notify) -> None:
        """Send a signal."""
        self.close()
        await step.signal.asend_robust(**step.news)
