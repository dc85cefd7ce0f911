"""Signal handlers that raise, as Ctrl-C and Celery's soft time limit do."""

import gc
import signal
import warnings
from contextlib import contextmanager
from functools import partial

import pytest

from django_redislock.backends.redis.pool import Loops
from django_redislock.transactions import note_collection

CALLBACKS = {
    note_collection.__qualname__,
    Loops._forget.__qualname__,  # An event loop has gone, which may be another test's.
    "finalize.__call__",
    "WeakSet.__init__.<locals>._remove",
    "WeakKeyDictionary.__init__.<locals>.remove",
    "WeakValueDictionary.__init__.<locals>.remove",
}


_announced = []  # Interrupts of the test that runs.


def announce():
    """Say that this test interrupts code anywhere.

    If redis-py is interrupted while it connects, it leaves its socket to the garbage collector,
    which would warn of it in another test.
    """
    _announced.append("")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Collect here what interrupts have left open."""
    _announced.clear()
    try:
        return (yield)
    finally:
        if _announced:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@contextmanager
def alarm(error):
    """Raise *error* in this thread so many seconds after each call of what this returns.

    with alarm(TooLong) as set_alarm, pytest.raises(TooLong):
        set_alarm(0.1)
        distributed_lock("lottery").acquire()
    """

    def ring(number, frame):
        if drops_errors(frame):
            set_alarm(0.001)
        else:
            raise error

    announce()
    set_alarm = partial(signal.setitimer, signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield set_alarm
    finally:
        set_alarm(0)
        signal.signal(signal.SIGALRM, before)


def drops_errors(frame):
    """Whether Python drops what is raised here, since it has called this for an object that goes.

    So it does in destructors, in callbacks of weak references, and in what the garbage collector
    calls when it begins and ends.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_qualname in CALLBACKS:
            return True
        frame = frame.f_back
    return False
