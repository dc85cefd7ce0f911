"""One fence for all servers of a quorum, in one round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_redislock import clock
from django_redislock.backends.redis.protocol import packed
from django_redislock.rules.keys import fence_key

if TYPE_CHECKING:
    from django_redislock.backends.quorum.voting import Replies

LEARN_EVERY = 10.0  # Seconds: the clocks of machines run at about the same rate.
LEAST_MARGIN = 0.001  # Seconds.
MOST_LEAD = 0.1


class Fences:
    """Makes the servers give out the same fence.

    Each would give out the next after its own mark, or its time in microseconds if that is greater;
    and a majority must know the greatest of them before the lock counts as granted, which takes one
    more round trip. So the marks are raised before, in the same round trip, to the time that all of
    the servers' clocks will just not have reached: then all of them give out the next number.

    It only saves time. If it fails, the answers differ, and the marks are raised afterwards.

    A fence that is ahead of the clocks is a risk too: if all data is lost before they have reached
    it, the next one may be smaller. So it is ahead by a tenth of a second at most.
    """

    def __init__(self, prefix: str) -> None:
        self._key = fence_key(prefix)
        self._asked_at = -LEARN_EVERY
        self._ahead: float | None = None  # Seconds from our clock to the furthest of the servers'.

    @property
    def are_unknown(self) -> bool:
        """Whether the servers are to be asked for their time; once in a while."""
        return clock.now() - self._asked_at >= LEARN_EVERY

    def question(self) -> bytes:
        """What they are asked."""
        self._asked_at = clock.now()
        return packed("TIME")

    def learn(self, replies: Replies) -> None:
        """Read what they answered."""
        times = [_seconds(found[0]) for found in replies.values() if found.__class__ is list]
        times = [time for time in times if time]
        if times:
            now = clock.now()
            took = now - self._asked_at  # They may have read their clocks all that time ago.
            # Twice that: the next round trip may take longer.
            margin = max(2 * took, LEAST_MARGIN)
            self._ahead = max(times) - now + min(took + margin, MOST_LEAD)

    def before(self) -> list[bytes]:
        """What is sent before an acquire."""
        if self._ahead is None:
            return []
        return [self.raised(int((clock.now() + self._ahead) * 1_000_000))]

    def raised(self, fence: int) -> bytes:
        """The command that raises a server's mark to *fence*."""
        return packed("ZADD", self._key, "GT", fence, "last")


def _seconds(reply: Any) -> float:
    """What TIME was answered; 0 if the reply is to something else."""
    return int(reply[0]) + int(reply[1]) / 1_000_000 if reply.__class__ is list else 0.0
