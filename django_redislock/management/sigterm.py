"""SIGTERM ends a management command in an orderly way, so that its locks are free at once."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django_redislock.decorating import runs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

Function = TypeVar("Function", bound="Callable[..., Any]")


def release_on_sigterm() -> _Block:
    """Have SIGTERM end the block as ``sys.exit(143)`` would, so that its locks are released.

    Without it, SIGTERM (``docker stop``, ``systemctl stop``) ends a Python program on the spot:
    nothing is cleaned up, and its locks stay taken until their ttl is over. It is a decorator too::

        class Command(BaseCommand):
            @release_on_sigterm()
            def handle(self, *args, **options):
                with distributed_lock("import"):
                    ...

    Python runs signal handlers in the main thread alone: in another thread this does nothing. If
    SIGTERM is ignored, it stays so. A child that is forked within the block dies of SIGTERM on the
    spot, as it would without this. Its parent cleans up.

    Raises:
        TypeError: It decorates a coroutine function or a generator function, whose body would run
            after the block.
    """
    return _Block()


class _Block:
    """The block, which can decorate a function."""

    def __enter__(self) -> None:
        self._handled = _handled()
        self._handled.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handled.__exit__(kind, error, traceback)

    def __call__(self, function: Function) -> Function:
        if runs_later(function):
            raise TypeError(
                f"release_on_sigterm cannot decorate {getattr(function, '__qualname__', function)}"
                "(): its body runs after the call has returned. Write `with release_on_sigterm():`"
                " around what runs it, such as asyncio.run()."
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Block():
                return function(*args, **kwargs)

        return cast("Function", call)


@contextmanager
def _handled() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
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
