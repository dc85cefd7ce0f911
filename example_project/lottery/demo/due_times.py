"""A schedule that is due at the same moments for every beat, so that messages can be told apart."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery.schedules import schedule

if TYPE_CHECKING:
    from datetime import datetime


class EachSecond(schedule):
    """Due at each whole second, and knows for which one it was due last."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self._due = 0

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """Whether a second has begun since; and when to ask again."""
        now = time.time()
        is_due = int(now) > int(last_run_at.timestamp())
        if is_due:
            self._due = int(now)
        return is_due, 1 - now % 1

    def due(self) -> str:
        """The due time, as it is sent along with the task."""
        return time.strftime("%H:%M:%S", time.gmtime(self._due))
