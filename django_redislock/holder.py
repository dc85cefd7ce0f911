"""Who holds a lock within this process: a thread, or an asyncio task."""

from __future__ import annotations

import asyncio
import os
import threading
from contextvars import ContextVar
from typing import Any
from weakref import ReferenceType, ref

from asgiref.sync import SyncToAsync

# None without a loop, where get_running_loop() would raise, ten times as slow.
running_loop = asyncio._get_running_loop


def must_not_block() -> bool:
    """Whether blocking code is refused here, since it would stop the event loop of this thread.

    As Django's ORM refuses it, and with the same way out.
    """
    return running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


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
    """What a lease granted here belongs to: the running asyncio task, or else the thread."""
    loop = running_loop()
    return (loop and asyncio.current_task(loop)) or _this_thread.holder


# --- threads that sync_to_async lends to many asyncio tasks ---------------------------------------


class Mark:
    """Left in the context of what is granted a lease in such a thread, to be known again."""


_marks: ContextVar[tuple[ReferenceType[Mark], ...]] = ContextVar("redislock_marks", default=())


def new_mark() -> Mark | None:
    """Mark the context of a new lease; None in a thread that no task has been lent so far.

    asgiref copies the context of a task into each of its calls, and back when the call is over. So
    the mark is there in every later call of that task, and of tasks that it begins from then on.
    """
    if not hasattr(SyncToAsync.threadlocal, "main_event_loop"):
        return None
    mark = Mark()
    _marks.set((ref(mark), *(one for one in _marks.get() if one() is not None)))
    return mark


def is_marked(mark: object) -> bool:
    """Whether the lease of that *mark* was granted to the caller, if it was to this thread."""
    return mark is None or any(one() is mark for one in _marks.get())
