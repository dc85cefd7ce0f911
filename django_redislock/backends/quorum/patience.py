"""How long the servers of a quorum are waited for."""

from __future__ import annotations

from django_redislock import clock

PARTS = 4


class Patience:
    """Seconds to wait for others. They do not pass while this thread or event loop stands still.

    Who does not run hears nothing, however fast the servers answer, and cannot go on with a
    connection that is half made. So it is waited in parts, and a part that took longer than it was
    to take counts no more than that.
    """

    __slots__ = ("_begun", "_left", "_longest", "_part")

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._longest = seconds / PARTS
        self._begun = clock.now()
        self._part = 0.0

    def part(self) -> float:
        """Seconds to wait now, after the last part is over; 0 if it is time to look once more."""
        now = clock.now()
        self._left -= min(now - self._begun, self._part)
        self._begun = now
        self._part = max(0.0, min(self._left, self._longest))
        return self._part
