"""Actors of a random history: threads that do one thing after the other, each as it is told."""

import queue
import threading
from concurrent.futures import Future

from tests.support.waiting import HUNG


class Actor:
    """A thread that makes the calls it is told to make."""

    def __init__(self):
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def begin(self, call):
        """Start a call in the actor's thread."""
        future = Future()

        def job():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def does(self, call):
        """Make a call in the actor's thread, and return its result."""
        return self.begin(call).result(HUNG)

    def close(self):
        self._jobs.put(None)
        self._thread.join(HUNG)

    def _work(self):
        while (job := self._jobs.get()) is not None:
            job()
