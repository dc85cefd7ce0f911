"""What the tasks of the tests did, written down by themselves: a list in Redis per key.

The journal is not on the lock server, which some tests stop or empty.
"""

import json
import os
import time
from functools import cache

import redis

PATIENCE = 60  # Seconds that a body waits for its gate; a test that needs longer has failed.


@cache
def server():
    """The journal's server; in a worker, and once per process."""
    # Newer clients wait for five seconds by default, and a gate may be shut for longer.
    return redis.Redis.from_url(os.environ["TESTS_JOURNAL"], socket_timeout=2 * PATIENCE)


def note(key, event, **details):
    """Write down that something happened."""
    entry = {"event": event, "pid": os.getpid(), "time": time.time(), **details}
    server().rpush(f"journal:{key}", json.dumps(entry))


def wait_at_gate(key):
    """Stand still until the test opens the gate of *key*."""
    if server().blpop([f"gate:{key}"], PATIENCE) is None:
        raise TimeoutError(f"nobody opened the gate of {key}")
