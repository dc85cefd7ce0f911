"""Virtual time, and threads that run in it: one at a time, in an order that is always the same.

A thread is a greenlet: the code in it blocks, as that of a program does, and the timeline goes on.
"""

import heapq
import math
from contextlib import suppress
from itertools import count

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """The process of this thread has ended in the midst of it."""


class Timeline:
    """What happens when. Seconds."""

    def __init__(self):
        self.now = 0.0
        self.events = 0
        self.hub = getcurrent()  # Where all threads come back to.
        self._due = []
        self._numbers = count()

    def at(self, when, act, *args):
        """Do something then, or at once if that is past."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), act, args))

    def step(self, until):
        """Let the next thing happen; False if nothing will before that time."""
        if not self._due or self._due[0][0] > until:
            return False
        self.now, _, act, args = heapq.heappop(self._due)
        self.events += 1
        act(*args)
        return True


class Holder:
    """A thread as a holder of locks."""


class Thread(greenlet):
    """A thread of a process. It runs from begin() until its code blocks, and so on."""

    def __init__(self, timeline, place, code):
        super().__init__(self._perform, parent=timeline.hub)
        self.place = place
        self.holder = Holder()  # What locks know it by; see holder.py.
        self.is_asleep = False
        self._timeline = timeline
        self._code = code
        self._sleeps = 0
        self._interrupt = None

    def begin(self):
        """Run soon."""
        self._timeline.at(self._timeline.now, self._go_on, self._sleeps)

    def sleep(self, until):
        """Block until then, or until wake(). To be called by the thread itself."""
        if self.place.is_dead:
            raise Killed
        if until < math.inf:
            self._timeline.at(until, self._go_on, self._sleeps)
        self.is_asleep = True
        self.parent.switch()
        self.is_asleep = False
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt

    def wake(self):
        """Let it go on, if it sleeps."""
        self._timeline.at(self._timeline.now, self._go_on, self._sleeps)

    def interrupt(self, error):
        """Have the call in which it sleeps raise this."""
        self._interrupt = error
        self.wake()

    def kill(self):
        """End it, wherever it is."""
        self._sleeps += 1
        with suppress(Killed):  # It had not begun.
            self.throw(Killed)

    def _go_on(self, sleep):
        if sleep != self._sleeps or self.dead or self.place.is_dead:
            return
        if self.place.paused_until > self._timeline.now:
            self._timeline.at(self.place.paused_until, self._go_on, sleep)
            return
        self._sleeps += 1
        self.switch()

    def _perform(self):
        with suppress(Killed):
            self._code()


def this_thread():
    """The one that runs."""
    thread = getcurrent()
    assert isinstance(thread, Thread)
    return thread


class StandInThread:
    """In place of threading.Thread: a thread of the process that starts it."""

    def __init__(self, target, args, **_):
        self._code = lambda: target(*args)

    def start(self):
        this_thread().place.begin(self._code)


class StandInEvent:
    """In place of threading.Event."""

    def __init__(self):
        self._is_set = False
        self._sleepers = []

    def is_set(self):
        return self._is_set

    def set(self):
        self._is_set = True
        for thread in self._sleepers:
            thread.wake()

    def wait(self, seconds):
        """Sleep for so long, by the clock of the process, or until it is set."""
        thread = this_thread()
        until = thread.place.after(seconds)
        self._sleepers.append(thread)
        while not self._is_set and thread.place.now < until:
            thread.sleep(until)
        self._sleepers.remove(thread)
        return self._is_set


STANDINS = {"Thread": StandInThread, "Event": StandInEvent}
