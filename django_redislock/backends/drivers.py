"""Two loops that perform a flow: the only difference between sync and async."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, TypeVar

from django_redislock import clock, process
from django_redislock.rules.steps import Call, NotOurs, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from django_redislock.process import Process
    from django_redislock.rules.steps import Answer, Flow, Notify, Outcome, Pause, Performer, Step

logger = logging.getLogger("django_redislock")

Result = TypeVar("Result")

FORKED = "the process was forked meanwhile, and this is the child"


class Begun:
    """The first step of a flow, done before there is a flow.

    Most often its answer is all there is to do, and whoever sees that needs no flow. Every other
    outcome is for the flow to judge, which goes on from there.

    Attributes:
        step: The step.
        outcome: What came of it; None when the flow has been told. From then on the flow
            undoes what is interrupted.
        by: The performer that did it, with its connection; None if that was given back.
        began_in: The process that did it.
    """

    __slots__ = ("began_in", "by", "outcome", "step")

    def __init__(
        self, began_in: Process, step: Call, outcome: Outcome, by: Performer | None = None
    ) -> None:
        self.began_in = began_in
        self.step = step
        self.outcome: Outcome | None = outcome
        self.by = by

    @property
    def is_ours(self) -> bool:
        """Whether this process did it, and not the one that it was forked from meanwhile."""
        return process.current is self.began_in

    def tell(self, flow: Flow[Result], step: Step) -> Step:
        """Tell *flow* what came of the *step* that it asks for; returns the next one."""
        if step != self.step:
            return step  # The flow was interrupted at its first step, and this one undoes that.
        outcome, self.outcome = self.outcome, None
        if not self.is_ours:
            outcome = NotOurs(FORKED)
        try:
            return flow.throw(outcome) if isinstance(outcome, Exception) else flow.send(outcome)
        finally:
            del outcome  # See ask().


def ask(step: Call, by: Performer, left: float | None = None) -> Begun:
    """Do the first step of a flow, within so many seconds if some are gone of those it has."""
    began_in = process.current
    try:
        return _begun(began_in, step, by.call(_within(step, left)), by)
    except (Unanswered, Refused) as error:
        # Not by a variable of this frame, which the error refers to: that would be a cycle, and
        # keep a connection that came too late.
        return Begun(began_in, step, error, by)
    except BaseException:
        by.close()
        raise


async def aask(step: Call, by: Performer, left: float | None = None) -> Begun:
    """See ask()."""
    began_in = process.current
    try:
        return _begun(began_in, step, await by.call(_within(step, left)), by)
    except (Unanswered, Refused) as error:
        return Begun(began_in, step, error, by)
    except BaseException:
        by.close()
        raise


def _within(step: Call, left: float | None) -> Call:
    return step if left is None else step._replace(within=left)


def _begun(began_in: Process, step: Call, answer: Answer, by: Performer) -> Begun:
    if answer.value.__class__ is not bytes:
        return Begun(began_in, step, answer, by)
    by.close()  # Nothing will come on its connection.
    return Begun(began_in, step, answer)


def _seen_in(began_in: Process, trouble: Unanswered | Refused) -> Unanswered | Refused:
    """What trouble means to the process that it is seen in.

    A step may begin in one process and fail in two: in the one that began it, and in a child that
    was forked meanwhile. To try again or to undo is the parent's business, which goes on with the
    flow; in the child the flow ends here.
    """
    return trouble if process.this() is began_in else NotOurs(FORKED)


def run(flow: Flow[Result], by: Performer, begun: Begun | None = None) -> Result:
    """Perform *flow*, blocking this thread; what was *begun* of it is not done again."""
    try:
        return _perform(flow, by, begun)
    except BaseException as error:
        if getgeneratorstate(flow) != GEN_SUSPENDED:
            raise  # The flow has ended, with this error or before it; or it has not begun.
        # A signal handler raised between two steps: the flow undoes what it has done so far.
        return _perform(flow, by, interrupt=error)
    finally:
        by.close()


def _perform(
    flow: Flow[Result],
    by: Performer,
    begun: Begun | None = None,
    interrupt: BaseException | None = None,
) -> Result:
    began_in = process.current if begun is None else begun.began_in
    try:
        step = next(flow) if interrupt is None else flow.throw(interrupt)
        if begun is not None:
            step = begun.tell(flow, step)
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


async def arun(flow: Flow[Result], by: Performer, begun: Begun | None = None) -> Result:
    """Perform *flow* without blocking the event loop; see run()."""
    try:
        return await _aperform(flow, by, begun)
    except BaseException as error:
        if getgeneratorstate(flow) != GEN_SUSPENDED:
            raise
        return await _aperform(flow, by, interrupt=error)
    finally:
        by.close()


async def _aperform(
    flow: Flow[Result],
    by: Performer,
    begun: Begun | None = None,
    interrupt: BaseException | None = None,
) -> Result:
    began_in = process.current if begun is None else begun.began_in
    put_off: asyncio.CancelledError | None = None  # Until the flow wants no more undone.
    try:
        try:
            step = next(flow) if interrupt is None else flow.throw(interrupt)
            if begun is not None:
                step = begun.tell(flow, step)
            while True:
                try:
                    if type(step) is Call and step.shielded:
                        undone, put_off = await to_its_end(by.call(step), put_off)
                        answer = undone.result()
                    elif put_off is None:
                        answer = await (by.call(step) if type(step) is Call else step.perform(by))
                    else:
                        raise put_off
                except BaseException as error:  # noqa: BLE001 - cancellation too is thrown in
                    step = _step_after(flow, error, began_in)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: Result = end.value
        except (Exception, asyncio.CancelledError):
            if put_off is not None:
                raise put_off  # noqa: B904 - it is no consequence of the other
            raise
        if put_off is not None:
            raise put_off
        return result
    finally:
        del put_off  # See ask().


async def to_its_end(
    work: Awaitable[Result], put_off: asyncio.CancelledError | None = None
) -> tuple[asyncio.Future[Result], asyncio.CancelledError | None]:
    """Await *work*, which is bounded, to its end, however often this task is cancelled meanwhile.

    Returns:
        The work, which is done; and the cancellation that is to be raised now, the last one, or
        else *put_off*. To raise one is enough: asyncio has counted all of them, and each time limit
        takes back its own. To cancel the task anew would be one too many.
    """
    future = asyncio.ensure_future(work)
    try:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                put_off = error
        return future, put_off
    finally:
        del future, put_off  # See ask().


def _step_after(flow: Flow[Result], error: BaseException, began_in: Process) -> Step:
    """What the flow wants done after a step has failed: most often to undo what it has begun."""
    if isinstance(error, Unanswered | Refused):
        return flow.throw(_seen_in(began_in, error))
    if process.this() is began_in:
        return flow.throw(error)
    flow.close()
    raise error


class Blocking(ABC):
    """Of a performer that blocks its thread: what does not depend on where the locks are kept."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what the flow has used; it may go on and use more."""

    def pause(self, step: Pause) -> float:
        """Sleep."""
        self.close()  # Others may need the connection meanwhile.
        time.sleep(step.seconds)
        return clock.now()

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

    async def pause(self, step: Pause) -> float:
        """Sleep."""
        await asyncio.sleep(step.seconds)
        return clock.now()

    async def notify(self, step: Notify) -> None:
        """Send a signal."""
        self.close()
        await step.signal.asend_robust(**step.news)
