"""Work that waits until a server works on a command, and the sender has nothing else to do.

To record how long a lock took costs a good part of the time that the lock took. Between a command
and its reply, it costs none.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from django_redislock import logs, process

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logs.logger("django_redislock")

MOST = 100  # With more than that waiting, nobody sends commands: locks in memory have no server.


class PutOff:
    """Work of all threads of this process, the oldest first."""

    def __init__(self) -> None:
        # Looked at with each command, so it is no property: empty means that there is none.
        self.work: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        process.tell_after_fork.add(self)

    def after_fork(self) -> None:
        """In a forked child: the parent does its work itself."""
        self.work.clear()


class _Thread(threading.local):
    catches_up = False


_put_off = PutOff()
put_off = _put_off.work
_this_thread = _Thread()


def later(work: Callable[..., object], *args: Any) -> None:
    """Have *work* done by whoever sends the next command, or catches up."""
    put_off.append((work, args))
    if len(put_off) > MOST:
        catch_up()


def catch_up() -> None:
    """Do what was put off, unless this thread is at it.

    A signal handler that uses a lock may have interrupted it while it had a mutex, and would wait
    for that mutex for ever.
    """
    if _this_thread.catches_up:
        return
    try:
        _this_thread.catches_up = True
        while True:
            try:
                work, args = put_off.popleft()  # Other threads take some, too.
            except IndexError:
                break
            try:
                work(*args)
            except Exception:
                logger.exception("Could not measure a lock")
    finally:
        _this_thread.catches_up = False
