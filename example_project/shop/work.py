"""How the shop's work goes on, whoever does it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_redislock import Lease

STEP = 0.5  # seconds


def work(lease: Lease, seconds: float) -> None:
    """Pretend to work for so long, in small steps; before each, make sure that we still may.

    Raises:
        LockLost: The lease has ended, and somebody else may be at work.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        lease.ensure_held()
        time.sleep(min(left, STEP))
