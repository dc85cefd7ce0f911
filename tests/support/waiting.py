"""Waiting without guessing: poll until something is so, and say what was not when time is up.

A long timeout costs nothing when the condition comes true; a short one fails on a busy machine. So
there is one for all that a test waits for, HUNG, whether it polls, joins a thread or runs a
program. A shorter one is for what would come true by itself later, as when a lease expires; a
longer one for servers that take seconds of a processor to start (run_servers.py).
"""

import asyncio
import inspect
import time

# Seconds after which something hangs rather than being slow; less than pytest gives a whole test.
HUNG = 60.0


def wait_until(condition, timeout=HUNG, message="", *, every=0.005):
    """Return the first true answer of *condition*; fail after *timeout* seconds without one."""
    begin = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - begin
        if waited > timeout:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        time.sleep(_pause(every, waited))
    return answer


def eventually(call, error):
    """Return the first answer of *call* that is not this *error*: it has little time for each."""
    answers = []

    def answered():
        try:
            answers.append(call())
        except error:
            return False
        return True

    wait_until(answered)
    return answers[0]


async def await_until(condition, timeout=HUNG, message="", *, every=0.005):
    """See wait_until(); lets the event loop run, and *condition* may be a coroutine function."""
    begin = time.monotonic()
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        waited = time.monotonic() - begin
        if waited > timeout:
            raise AssertionError(_too_late(condition, timeout, message, answer))
        await asyncio.sleep(_pause(every, waited))


def _pause(every, waited):
    """Seconds until the next look: looks cost processor time, and are rarer in a long wait."""
    return max(every, min(waited / 20, 0.05))


def _too_late(condition, timeout, message, answer):
    what = message or getattr(condition, "__qualname__", repr(condition))
    return f"{what}: not so within {timeout:g} s, last answer {answer!r}"
