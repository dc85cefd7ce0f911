"""SIGTERM ends a management command in an orderly way, so that its locks are free at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def release_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end the block as ``sys.exit(143)`` would, so that its locks are released.

    Without it, SIGTERM (``docker stop``, ``systemctl stop``) ends a Python program on the spot:
    nothing is cleaned up, and its locks stay taken until their ttl is over. It is a decorator too::

        class Command(BaseCommand):
            @release_on_sigterm()
            def handle(self, *args, **options):
                with distributed_lock("import"):
                    ...

    Python runs signal handlers in the main thread alone: in another thread this does nothing. A
    child that is forked within the block dies of SIGTERM on the spot, as it would without this. Its
    parent cleans up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
