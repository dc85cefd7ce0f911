"""Two loops that perform a flow: one blocks its thread, the other awaits.

Around a flow, handle.py has blocking and asynchronous code, too. Each backend has two kinds of
sessions, and both begin() and abegin().
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from inspect import GEN_SUSPENDED, getgeneratorstate
from operator import call
from queue import Empty
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django_redislock import clock, process
from django_redislock.rules.steps import Call, Calls, NotOurs, Refused, Unanswered

if TYPE_CHECKING:
    from django_redislock.process import Process
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import (
        Elsewhere,
        Flow,
        Notify,
        Pause,
        Performer,
        Step,
        Trouble,
    )


# --- A queue between threads, which signal handlers and destructors may use, too ------------------

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue into which a signal handler or a destructor may put, too, wherever it interrupts.

    queue.SimpleQueue allows that as well. But under Python 3.11 and 3.12 its get() waits for ever
    if a signal handler runs when the timeout is just over, or outlasts the timeout.
    """

    __slots__ = ("__weakref__", "_bell", "_items")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bell = threading.Lock()  # Free if there may be something.
        self._bell.acquire()

    def put(self, item: Item) -> None:
        """Leave *item*, and wake a thread that waits."""
        self._items.append(item)
        self._ring()

    def get(self, timeout: float | None = None) -> Item:
        """Take the oldest item, as soon as there is one.

        Raises:
            Empty: None came within *timeout* seconds.
        """
        until = None if timeout is None else clock.now() + timeout
        while True:
            left = -1 if until is None else max(until - clock.now(), 0)
            is_rung = bool(self._items) or self._bell.acquire(timeout=left)
            with suppress(IndexError):
                item = self._items.popleft()
                if self._items:
                    self._ring()  # For other threads that wait here.
                return item
            if not is_rung:
                raise Empty

    def empty(self) -> bool:
        """Whether nothing is left."""
        return not self._items

    def _ring(self) -> None:
        with suppress(RuntimeError):  # It is rung already.
            self._bell.release()


Result = TypeVar("Result")

FORKED = "the process was forked meanwhile, and this is the child"


def _seen_in(made_in: Process, trouble: Trouble) -> Trouble:
    """What *trouble* means to the process that meets it.

    If the process is forked during a step, the step may fail in the parent and in the child. Only
    the parent goes on with the flow, and tries again or undoes. In the child the flow ends here.
    """
    return trouble if process.this() is made_in else NotOurs(FORKED)


def run(flow: Flow[Result], by: Performer, form: Form | None = None) -> Result:
    """Perform *flow*, blocking this thread.

    Args:
        flow: What to do.
        by: Performs each step.
        form: The first step, if it may be done already.
    """
    try:
        return _perform(flow, by, form)
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
    form: Form | None = None,
    interrupt: BaseException | None = None,
) -> Result:
    made_in = process.current if form is None else form.made_in
    try:
        step = _first_step(flow, form) if interrupt is None else flow.throw(interrupt)
        while True:
            try:
                # Most steps are calls: by name, without a detour.
                answer = by.call(step) if type(step) is Call else step.perform(by)
                if type(step) is Calls:
                    _check_process(made_in)
            except BaseException as error:  # noqa: BLE001 - the flow undoes what was interrupted
                step = _step_after(flow, error, made_in)
            else:
                step = flow.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        del interrupt  # See _first_step().


async def arun(flow: Flow[Result], by: Performer, form: Form | None = None) -> Result:
    """Perform *flow* without blocking the event loop; see run()."""
    try:
        return await _aperform(flow, by, form)
    except BaseException as error:
        if getgeneratorstate(flow) != GEN_SUSPENDED:
            raise
        return await _aperform(flow, by, interrupt=error)
    finally:
        by.close()


async def _aperform(
    flow: Flow[Result],
    by: Performer,
    form: Form | None = None,
    interrupt: BaseException | None = None,
) -> Result:
    made_in = process.current if form is None else form.made_in
    put_off: asyncio.CancelledError | None = None  # Until the flow has no more to undo.
    work: asyncio.Future[Any] | None = None
    try:
        try:
            step = _first_step(flow, form) if interrupt is None else flow.throw(interrupt)
            while True:
                try:
                    if isinstance(step, Call | Calls) and step.shielded:
                        work, put_off = await to_its_end(step.perform(by), put_off)
                        answer = work.result()
                    elif put_off is None:
                        answer = await (by.call(step) if type(step) is Call else step.perform(by))
                    else:
                        raise put_off
                    if type(step) is Calls:
                        _check_process(made_in)
                except BaseException as error:  # noqa: BLE001 - cancellation too is thrown in
                    step = _step_after(flow, error, made_in)
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
        del interrupt, put_off, work  # See _first_step().


async def to_its_end(
    work: Awaitable[Result], put_off: asyncio.CancelledError | None = None
) -> tuple[asyncio.Future[Result], asyncio.CancelledError | None]:
    """Await *work*, which is bounded, to its end, however often this task is cancelled meanwhile.

    Returns:
        The work, which is done; and the cancellation to raise now: the last one, or else *put_off*.
        One is enough: asyncio has counted all of them, and each time limit takes back its own. To
        cancel the task anew would be one too many.
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
        del future, put_off  # See _first_step().


def start_in_thread(
    work: Callable[[], Result], name: str, outcome: Future[Result] | None = None
) -> Future[Result]:
    """The outcome of *work*, which a thread of its own does.

    It is a daemon: if it hangs, it does not keep the process from its end. An event loop's executor
    may have no thread free, and none at all while the interpreter ends. If there are no more
    threads, this one does the work now.

    Args:
        work: What is to be done.
        name: That of the thread.
        outcome: The future of the outcome, if others have it already.
    """
    outcome = Future() if outcome is None else outcome
    try:
        process.start(threading.Thread(target=_do, args=(work, outcome), name=name, daemon=True))
    except RuntimeError:  # No more threads, or the interpreter is shutting down.
        _do(work, outcome)
    return outcome


def _do(work: Callable[[], Result], outcome: Future[Result]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
        outcome.set_exception(error)
    finally:
        del outcome  # See _first_step().


def _check_process(made_in: Process) -> None:
    """Refuse the outcomes of several calls in a child that was forked meanwhile; see _seen_in()."""
    if process.this() is not made_in:
        raise NotOurs(FORKED)


def _first_step(flow: Flow[Result], form: Form | None) -> Step:
    """The first step of a flow that is still to be done."""
    step = next(flow)
    if form is None:
        return step
    form.is_told = True
    if not isinstance(step, Call) or step.shielded:
        return step  # The flow was interrupted at its first step, and this step undoes that one.
    if process.current is not form.made_in:
        return flow.throw(NotOurs(FORKED))
    for answer in form.answers:
        step = flow.send(answer)
    trouble, form.trouble = form.trouble, None
    try:
        if trouble is not None:
            return flow.throw(trouble)
    finally:
        # An error refers to the frames that it has passed. A frame that refers to the error would
        # close a cycle, which would keep a connection that came too late.
        del trouble
    if form.left is not None and isinstance(step, Call):
        return step._replace(within=form.left)
    return step


def _step_after(flow: Flow[Result], error: BaseException, made_in: Process) -> Step:
    """The next step after one has failed: most often the flow undoes what it has begun."""
    try:
        if isinstance(error, Unanswered | Refused):
            return flow.throw(_seen_in(made_in, error))
        if process.this() is made_in:
            return flow.throw(error)
        flow.close()
        raise error
    finally:
        del error  # See _first_step().


class Blocking(ABC):
    """The part of a blocking performer that is the same wherever the locks are kept."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what the flow has used; the flow may go on and use more."""

    def pause(self, step: Pause) -> float:
        """Sleep."""
        self.close()  # Others may need the connection meanwhile.
        time.sleep(step.seconds)
        return clock.now()

    def notify(self, step: Notify) -> None:
        """Send a signal."""
        self.close()  # A receiver may want a connection, or take its time.
        step.signal.send_robust(**step.news)

    def elsewhere(self, step: Elsewhere) -> Any:
        """Perform another flow, which uses a connection of its own."""
        return step.backend.run(step.flow)


class Awaiting(ABC):
    """The same part of an awaiting performer."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give back what the flow has used; the flow may go on and use more."""

    async def pause(self, step: Pause) -> float:
        """Sleep."""
        await asyncio.sleep(step.seconds)
        return clock.now()

    async def notify(self, step: Notify) -> None:
        """Send a signal."""
        self.close()
        await step.signal.asend_robust(**step.news)

    async def elsewhere(self, step: Elsewhere) -> Any:
        """Perform another flow, which may use the same connection."""
        return await step.backend.arun(step.flow)


# --- one text for blocking and asynchronous code that differ only in how a step is done -----------

# A text is a generator. It yields each step, and is sent the result. If a step raises, the
# exception is raised at the yield. In most texts a step is a wait: a function that blocks, or a
# coroutine function.


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
