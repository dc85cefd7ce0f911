"""Work put off until a server works on a command, while the sender has nothing else to do.

Recording how long a lock takes would lengthen that time a good deal, but not between a command and
its reply.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from django_redislock import logs, process

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logs.logger("django_redislock")

MOST = 100  # More waits only without commands: locks in memory have no server.


class PutOff:
    """Work of all threads of this process, the oldest first."""

    def __init__(self) -> None:
        # Looked at with each command, so it is no property. Empty: there is none.
        self.work: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        process.tell_after_fork.add(self)

    def after_fork(self) -> None:
        """In a forked child: leave the parent's work to the parent."""
        self.work.clear()


class _Thread(threading.local):
    catches_up = False


_put_off = PutOff()
put_off = _put_off.work
_this_thread = _Thread()


def later(work: Callable[..., object], *args: Any) -> None:
    """Put *work* off until a thread sends the next command, or catches up."""
    put_off.append((work, args))
    if len(put_off) > MOST:
        catch_up()


def catch_up() -> None:
    """Do the work that was put off, unless this thread is doing it already.

    A signal handler that uses a lock may have interrupted this thread while it had a mutex. The
    handler would wait for that mutex for ever.
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
            except Exception as error:
                process.pass_on_interrupt(error)  # Such as Celery's soft time limit.
                logger.exception("Could not measure a lock")
    finally:
        _this_thread.catches_up = False
