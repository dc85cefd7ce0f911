"""Whether a server answers, how fast, and whether the ttl leaves time for that."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from django_redislock.backends.redis.errors import ReplyError, described, is_transient, reason_of
from django_redislock.exceptions import LockUnavailable
from django_redislock.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.base import Backend
    from django_redislock.doctor.server import Server

SLOW_ROUND_TRIP = 0.01  # Seconds.
ROUND_TRIPS = 2  # The time for one operation must be enough for so many.


def distance(server: Server) -> Iterator[Finding]:
    """How long a round trip takes, and whether the ttl leaves time for it."""
    took = []
    for _ in range(5):
        started = time.perf_counter()
        reply = server.run("PING")
        took.append(time.perf_counter() - started)
        # With any other refusal, such as MISCONF, the server still answers: others tell more.
        if isinstance(reply, ReplyError) and is_transient(reply):
            problem, reason = described(reply), reason_of(reply)
            raise LockUnavailable(server.backend.prefix, problem, reason) from reply
    median = statistics.median(took)
    says = f"answers, in {median * 1000:.1f} ms"
    if median > SLOW_ROUND_TRIP:
        advice = (
            "An uncontended lock costs two round trips. Use a server that is closer, and no ttl"
            f" below {_shortest_ttl(server.backend, median):.3g} s."
        )
        yield Finding("server", "warn", says, advice, id="W020")
    else:
        yield Finding("server", "ok", says)
    yield from _ttl(server.backend, median)


def _ttl(backend: Backend, round_trip: float) -> Iterator[Finding]:
    ttl, least = backend.conf.ttl, ROUND_TRIPS * round_trip
    if backend.operation_timeout(ttl) >= least:
        return
    if backend.operation_timeout(math.inf) >= least:
        advice = f"Set TTL to {_shortest_ttl(backend, round_trip):.3g} or more."
    else:
        advice = f"Set OPTIONS['socket_timeout'] to {least:.3g} or more, and TTL to thrice that."
    yield Finding(
        "ttl",
        "warn",
        f"TTL is {ttl:g} s, too short for a round trip of {round_trip * 1000:.0f} ms: locks are not"
        " granted, or lost as they are not renewed in time",
        f"{advice} The same is true of each lock with a ttl of its own.",
        id="W035",
    )


def _shortest_ttl(backend: Backend, round_trip: float) -> float:
    """The shortest ttl with which an answer comes in time, and another try may follow."""
    return ROUND_TRIPS * round_trip / backend.operation_timeout(1.0)
