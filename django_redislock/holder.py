"""Who holds a lock within this process: a thread, or an asyncio task."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

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
