"""The holder of a lock: a thread or an asyncio task; for humans, an owner."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from inspect import currentframe, isasyncgen, iscoroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

from asgiref import sync
from asgiref.sync import SyncToAsync

from django_redislock import process
from django_redislock.rules.stored import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType


# --- what the running code works on, such as a request or a job; shown as part of a lock's owner
#


class Activity(NamedTuple):
    """The work of the current thread or asyncio task."""

    path: str = ""  # Of the HTTP request being served.
    command: str = ""  # Of a shell, if the work is done by one; or else what runs this process.
    task: str = ""  # The full name of the job: of a task, a function or a command.
    task_id: str = ""
    deferred: str = ""  # See Owner.deferred.
    around: Activity | None = None  # The one in which it began; see begin().


_IDLE = Activity()

current_activity: ContextVar[Activity] = ContextVar("redislock_activity", default=_IDLE)


def within(activity: Activity) -> Activity:
    """The activity as a part of the current one: it has the path and the task id of that one."""
    around = current_activity.get()
    task_id = activity.task_id or around.task_id
    if (around.path, task_id) == (activity.path, activity.task_id):
        return activity
    return activity._replace(path=around.path, task_id=task_id)


def begin(activity: Activity) -> None:
    """Name *activity* as the reason of all locks that are asked for from now on; see end()."""
    current_activity.set(within(activity)._replace(around=current_activity.get()))


def end(task_id: str) -> None:
    """Go back to what was before the begin() of this task; do nothing if it is not current."""
    activity = current_activity.get()
    if activity.around is not None and activity.task_id == task_id:
        current_activity.set(activity.around)


@contextmanager
def busy_with(activity: Activity) -> Iterator[None]:
    """Name *activity* as the reason of all locks that are asked for within the block."""
    reset = current_activity.set(activity)
    try:
        yield
    finally:
        current_activity.reset(reset)


# Returns None without a loop. get_running_loop() would raise, ten times as slow.
running_loop = asyncio._get_running_loop


def must_not_block() -> bool:
    """Whether blocking code is refused here, since it would stop the event loop of this thread.

    Django's ORM refuses it in the same case, with the same way out.
    """
    return running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


# gevent and eventlet replace it. Greenlets would share what was made of this one before, as they
# would share each mutex.
LOCAL = threading.local


class Thread:
    """A thread as a holder. Its ident would not do: idents are used again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.holder = Thread()


_this_thread = _ThisThread()


def this_thread() -> Thread:
    """The calling thread, also beneath a running event loop."""
    return _this_thread.holder


def current_holder() -> asyncio.Task[Any] | Thread:
    """The running asyncio task, or else the thread."""
    loop = running_loop()
    return (loop and asyncio.current_task(loop)) or _this_thread.holder


def new_holder(*, for_block: bool) -> tuple[ReferenceType[object], Caller | None]:
    """The holder of a lease granted here; if it is a thread, also the caller that it serves.

    Args:
        for_block: Whether the end of a block releases the lease.
    """
    loop = running_loop()
    if loop is not None and (task := asyncio.current_task(loop)):
        return ref(task), None
    caller = NOBODY
    if hasattr(SyncToAsync.threadlocal, "main_event_loop") and (serving := _serving()):
        caller = Caller(_call_in(serving))
        if not for_block:  # A block ends within its call; a search looks at all tasks of the loop.
            caller.find_task(serving.f_locals["loop"])
    return ref(_this_thread.holder), caller


# --- for humans ---------------------------------------------------------------------------------


class _LastOwner(threading.local):
    """The last owner of a thread, valid until the thread's activity or process changes."""

    process: object = None
    activity: Activity | None = None
    traceparent = ""
    owner: Owner
    # The same with what options of its last lock say of it, and what they say.
    of_lock: tuple[Mapping[str, Any], Owner]


_last = _LastOwner()

# Returns the traceparent of the caller's span, "" outside of one. See trace_owners().
_traceparent: Callable[[], str] | None = None


def trace_owners(traceparent: Callable[[], str] | None) -> None:
    """Have each owner name the span in which it asks; None ends that."""
    global _traceparent, _last
    _traceparent, _last = traceparent, _LastOwner()


def current_owner(**said: Any) -> Owner:
    """The owner of a lease granted now.

    Args:
        said: Fields that options of the lock say.
    """
    activity = current_activity.get()
    if (
        _last.activity is not activity
        or _last.process is not process.current
        or (_traceparent is not None and _last.traceparent != _traceparent())
    ):
        traceparent = "" if _traceparent is None else _traceparent()
        _last.owner = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            thread=threading.current_thread().name,
            command=activity.command or _command(),
            path=activity.path[:200],
            task=activity.task,
            task_id=activity.task_id,
            deferred=activity.deferred,
            traceparent=traceparent,
            birth=process.current.birth,
        )
        _last.of_lock = {}, _last.owner
        _last.activity, _last.process = activity, process.current
        _last.traceparent = traceparent
    if not said:
        return _last.owner
    if _last.of_lock[0] != said:
        _last.of_lock = said, replace(_last.owner, **said)
    return _last.of_lock[1]


@cache
def _command() -> str:
    # The program and, of manage.py, the subcommand. Arguments may carry secrets.
    path = Path(sys.argv[0] if sys.argv else "")
    # Of "python -m celery", it is the path of celery/__main__.py.
    program = (path.parent if path.name == "__main__.py" else path).name or "python"
    if program in {"manage.py", "django-admin"} and len(sys.argv) > 1:
        return f"{program} {sys.argv[1]}"[:100]
    return program[:100]


# --- threads that sync_to_async lends to many asyncio tasks ---------------------------------------

# asgiref does not tell such a thread which task it serves. But for each call it makes a list,
# `task_context`, which stands in a frame of the thread and in one of the task.
_ASGIREF = vars(sync)
LONGEST_STEP = 1.0  # Seconds that a task may take to suspend itself after it has made a call.


class Caller:
    """The caller that a thread serves: a task, by a call of sync_to_async; or nobody.

    Args:
        call: asgiref's list for that call.
    """

    __slots__ = ("_call", "_task")

    def __init__(self, call: list[Any] | None) -> None:
        self._call = call
        self._task: ReferenceType[asyncio.Task[Any]] | None = None  # Once it is found.

    def find_task(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the event loop find the task, so that its later calls are recognised.

        The loop does so before it hears of the end of this call, so the task still waits for the
        call.
        """
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(self._find_task, loop)

    def _find_task(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = (one for one in asyncio.all_tasks(loop) if _awaits(one.get_coro(), self._call))
        if task := next(waiting, None):
            self._task = ref(task)

    def is_served(self) -> bool:
        """Whether the running thread serves this caller now."""
        serving = _serving()
        call = _call_in(serving) if serving is not None else None
        if call is self._call:
            return True
        task = self._task() if self._task is not None else None
        return call is not None and task is not None and _calls(task.get_coro(), call)


NOBODY = Caller(None)


def _serving() -> FrameType | None:
    """The frame of the call that the running thread serves; None if it serves nobody.

    A served function may await a coroutine by async_to_sync. If the coroutine calls by
    sync_to_async again, that is part of the function's own call. A task that is begun there makes
    calls of its own.
    """
    serving: FrameType | None = None
    frame = currentframe()
    while frame is not None:
        if serving is None and _runs(frame, "SyncToAsync.thread_handler"):
            serving = frame
        elif (
            serving is not None
            and _runs(frame, "AsyncToSync.__call__")
            and _calls(frame.f_locals["awaitable"], _call_in(serving))
        ):
            serving = None
        frame = frame.f_back
    return serving


def _runs(frame: FrameType, method: str) -> bool:
    return frame.f_globals is _ASGIREF and frame.f_code.co_qualname == method


def _call_in(frame: FrameType) -> list[Any]:
    call: list[Any] = frame.f_locals["task_context"]
    return call


def _calls(coroutine: Any, call: list[Any]) -> bool:
    """Whether a coroutine of another thread has made the call that this thread serves."""
    give_up = time.monotonic() + LONGEST_STEP
    while getattr(coroutine, "cr_running", False) and time.monotonic() < give_up:
        time.sleep(0.0005)
    return _awaits(coroutine, call)


def _awaits(coroutine: Any, call: list[Any] | None) -> bool:
    """Whether a suspended coroutine waits for this call to end, itself or by an awaitable."""
    awaited = coroutine
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame and _runs(frame, "SyncToAsync.__call__") and _call_in(frame) is call:
            return True
        awaited = _awaited_by(awaited)
    return False


def _awaited_by(one: Any) -> Any:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(one, name):
            return getattr(one, name)
    # One step of an async generator, say: it does not name the generator, but refers to it.
    inner = (it for it in gc.get_referents(one) if isasyncgen(it) or iscoroutine(it))
    return next(inner, None)
