"""How long the demo goes on."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import FrameType

POLL = 0.05  # seconds


class Interrupted(Exception):
    """The demo was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}; nothing is left running.")
        self.exit_status = 128 + number


class Patience:
    """Lasts for some seconds, or until a signal asks the demo to stop.

    Signals are noted and looked at between the steps. Raised where they strike, one could come
    between the birth of a child process and the moment its pid is known.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, seconds: float) -> None:
        self.last(seconds)
        self._signal: int | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def last(self, seconds: float) -> None:
        """Last for so long from now on."""
        self._deadline = time.monotonic() + seconds

    def pause(self, what: str, seconds: float = POLL) -> None:
        """Wait a moment, or raise Interrupted or TimeoutError if there is no point any more."""
        if self._signal is not None:
            raise Interrupted(self._signal)
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"Took too long: {what}.")
        time.sleep(seconds)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
