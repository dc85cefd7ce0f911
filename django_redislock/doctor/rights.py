"""Whether the user may do all that locks need, and the least rights that suffice."""

from __future__ import annotations

import math
import re
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from django_redislock.backends.redis.errors import (
    ReplyError,
    described,
    is_of_rights,
    is_transient,
    reason_of,
)
from django_redislock.doctor.server import of_servers
from django_redislock.exceptions import LockError, LockUnavailable
from django_redislock.findings import Finding, problem
from django_redislock.lock import distributed_lock
from django_redislock.rules import scripts
from django_redislock.rules.keys import IN_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.base import Backend
    from django_redislock.doctor.server import Server


# --- whether a server answers, how fast, and whether the ttl leaves time for that -----------------

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
            prefix = server.backend.prefix
            raise LockUnavailable(prefix, described(reply), reason_of(reply)) from reply
    median = statistics.median(took)
    says = f"answers, in {median * 1000:.1f} ms"
    if median > SLOW_ROUND_TRIP:
        advice = (
            "An uncontended lock costs two round trips. Use a server that is closer, and no ttl"
            f" below {_shortest_ttl(server.backend, median):.3g} s."
        )
        yield problem("W020", says, advice)
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
    yield problem(
        "W035",
        f"TTL is {ttl:g} s, too short for a round trip of {round_trip * 1000:.0f} ms: locks are not"
        " granted, or lost as they are not renewed in time",
        f"{advice} The same is true of each lock with a ttl of its own.",
    )


def _shortest_ttl(backend: Backend, round_trip: float) -> float:
    """The shortest ttl with which an answer comes in time, and another try may follow."""
    return ROUND_TRIPS * round_trip / backend.operation_timeout(1.0)


PROBE = "django_redislock.doctor"  # A lock that is taken and released to see whether it works.

# Commands that a connection needs before and beside the scripts.
_CONNECTION = "auth eval evalsha hello info ping publish select subscribe"
# For listings: `manage.py locks`, the admin.
_LISTINGS = "zcount zrange"
# Commands that are used on clusters only, and those never used there.
_ON_CLUSTERS = {"asking", "cluster|slots", "spublish", "ssubscribe"}
_NOT_ON_CLUSTERS = {"publish", "subscribe"}

_MORE_RIGHTS = "Give the user of the locks all rights that they need."
_NOT_OF_RIGHTS = "Put right what it says; a user with more rights would be refused, too."


def rights(server: Server) -> Iterator[Finding]:
    """Whether a lock can be taken there, and whether scripts are allowed."""
    backend = server.backend
    finding = take_and_release(server.own_name(PROBE), backend.alias)
    if finding.advice != _NOT_OF_RIGHTS and finding.level != "warn":
        line = fewest_rights(backend, per_database=server.has_rights_per_database)
        finding = replace(finding, advice=line)
    if finding.level == "fail":
        yield finding
        return
    user = server.run("ACL", "WHOAMI")
    if finding.level == "ok" and not isinstance(user, ReplyError):
        user = user.decode(errors="replace")
        finding = replace(finding, says=f"{finding.says} as user {user!r}")
    yield finding
    if not server.scripts_need:
        yield Finding("scripting", "ok", "scripts are allowed")
    else:
        need = server.scripts_need
        yield problem(
            "W024",
            "scripts are forbidden: waiters poll and are not served in turn, operations take more"
            " round trips; tasks, lists and force release are unavailable",
            f"{need[0].upper()}{need[1:]}.",
        )


def take_and_release(name: str, using: str) -> Finding:
    """Whether the lock *name* can be taken."""
    # Another doctor may have it, as when all servers start at the same time.
    lock = distributed_lock(name, ttl=10, wait=1, renew=False, using=using)
    try:
        if not lock.acquire():
            says = f"not tried: lock {name!r} is held, as by another doctor"
            return Finding("rights", "warn", says, "Run it again.")
        lock.release()
    except LockError as error:
        advice = _MORE_RIGHTS if is_of_rights(error.__cause__) else _NOT_OF_RIGHTS
        return problem("E023", f"a lock cannot be taken: {error}", advice)
    return Finding("rights", "ok", "a lock was taken and released")


def fewest_rights(backend: Backend, *, per_database: bool) -> str:
    """The advice that gives a user the rights that locks need."""
    rules = minimal_acl(backend.prefix, replicas=backend.conf.replicas_ack > 0)
    if per_database:
        numbers = dict.fromkeys(str(one.get("db") or 0) for one in of_servers(backend.conf))
        rules += f" resetdbs db={','.join(numbers)}"
    return f"A user with no more rights than needed: ACL SETUSER redislock on >PASSWORD {rules}"


def minimal_acl(prefix: str, *, replicas: bool = False) -> str:
    """The ACL rules that suffice for all operations on locks under *prefix*, and no more."""
    words = {*_CONNECTION.split(), *_LISTINGS.split(), *called_by_scripts()}
    if replicas:
        words.add("wait")
    if prefix.endswith(IN_BUCKETS):
        words = words - _NOT_ON_CLUSTERS | _ON_CLUSTERS
    else:
        words -= _ON_CLUSTERS
    rights = " ".join(f"+{word}" for word in sorted(words))
    return f"resetkeys ~{prefix}:* resetchannels &{prefix}:bell:* -@all {rights}"


def called_by_scripts() -> set[str]:
    """The commands that scripts call, in lower case."""
    every = [one for one in vars(scripts).values() if isinstance(one, scripts.Script)]
    source = b"".join(script.source for script in every)
    # In a call, or in a table, as in _sight.lua.
    return {name.decode().lower() for name in re.findall(rb"(?:call\(|= )'([A-Z]+)'", source)}
