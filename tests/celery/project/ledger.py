"""A scheduler whose messages say for which slot they are, and who sent them when."""

import os
import time

from celery.beat import PersistentScheduler


class Ledger(PersistentScheduler):
    """For entries with the schedule Noon, whose slots have numbers."""

    def is_due(self, entry):
        found = super().is_due(entry)
        # Later than the look at the clock that found it due, and earlier than what is written down.
        self.slot = int(time.time() // entry.schedule.every)
        return found

    def apply_async(self, entry, **kwargs):
        entry.options = {"headers": {"slot": self.slot, "at": time.time(), "pid": os.getpid()}}
        return super().apply_async(entry, **kwargs)
