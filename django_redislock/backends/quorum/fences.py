"""One fence for all servers of a quorum, in one round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends.redis.protocol import packed
from django_redislock.rules.keys import fence_key

if TYPE_CHECKING:
    from collections.abc import Iterable

LEARN_EVERY = 10.0  # Seconds: the clocks of machines run at about the same rate.
LEAST_MARGIN = 0.001  # Seconds.
MOST_LEAD = 0.1


class Fences:
    """Makes the servers give out the same fence.

    By itself, each server gives out its greatest fence plus one, or its time in microseconds if
    that is greater. But a majority must know the greatest fence of all before the lock counts as
    granted, which takes one more round trip. So each acquire first raises the greatest fence of
    every server, in the same round trip, to a time that none of their clocks has reached yet. Then
    all of them give out the next number.

    This only saves time. If it fails, the answers differ, and the fences are raised afterwards.

    A fence ahead of the clocks is a risk: if all data is lost before the clocks reach it, the next
    fence may be smaller. So a fence is ahead by a tenth of a second at most.
    """

    def __init__(self, prefix: str) -> None:
        self._key = fence_key(prefix)
        self._asked_at = -LEARN_EVERY
        self._ahead: float | None = None  # Seconds from our clock to the furthest of the servers'.

    @property
    def are_unknown(self) -> bool:
        """Whether it is time again to ask the servers for their time."""
        return clock.now() - self._asked_at >= LEARN_EVERY

    def question(self) -> bytes:
        """The command that asks for a server's time."""
        self._asked_at = clock.now()
        return packed("TIME")

    def learn(self, replies: Iterable[Any]) -> None:
        """Read the replies to question(); anything that is no time is left out."""
        times = [
            int(reply[0]) + int(reply[1]) / 1_000_000 for reply in replies if type(reply) is list
        ]
        if times:
            now = clock.now()
            took = now - self._asked_at  # The servers may have read their clocks so long ago.
            # Twice that: the next round trip may take longer.
            margin = max(2 * took, LEAST_MARGIN)
            self._ahead = max(times) - now + min(took + margin, MOST_LEAD)

    def before(self) -> list[bytes]:
        """The commands to send before an acquire."""
        if self._ahead is None:
            return []
        return [self.raised(int((clock.now() + self._ahead) * 1_000_000))]

    def raised(self, fence: int) -> bytes:
        """The command that raises a server's greatest fence to *fence*."""
        return packed("ZADD", self._key, "GT", fence, "last")
