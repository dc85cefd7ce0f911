"""A queue between threads, which signal handlers and destructors may use, too."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from queue import Empty
from typing import Generic, TypeVar

from django_redislock import clock

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
