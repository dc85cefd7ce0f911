"""How long to wait for the servers of a quorum."""

from __future__ import annotations

from django_redislock import clock

PARTS = 4


class Patience:
    """Seconds to wait for servers. They do not pass while this thread or event loop stands still.

    A thread that stands still hears no answer, not even a fast one, and cannot complete a
    connection. So the time is spent in parts. A part that takes longer than it was meant to does
    not count as longer.
    """

    __slots__ = ("_left", "_longest", "_part", "_started")

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._longest = seconds / PARTS
        self._started = clock.now()
        self._part = 0.0

    def part(self) -> float:
        """Seconds to wait now that the last part is over; 0 to look once more without waiting."""
        now = clock.now()
        self._left -= min(now - self._started, self._part)
        self._started = now
        self._part = max(0.0, min(self._left, self._longest))
        return self._part
