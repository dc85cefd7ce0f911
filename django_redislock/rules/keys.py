"""The only place where the names of keys are spelled."""

from __future__ import annotations

import re
from binascii import crc32
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

# Characters that stand in a key as they are. All others are percent-encoded: braces, so that a name
# cannot choose its cluster slot or split a lock's keys; glob characters, so that a name is harmless
# in a scan.
_PLAIN = " !#$&'()+,-./:;<=>@_`|~\""

# On a cluster the names are spread over so many buckets. All keys of a bucket, its indexes and its
# mark of fences too, have its number as their hash tag. So they are in one slot: a script may
# touch them together, and a name cannot choose its slot. Neither this number nor the way to find a
# bucket can ever change: during a deployment, old and new processes would look for the same lock in
# different buckets, and grant it twice.
BUCKETS = 256
IN_BUCKETS = ":{*}"  # Ends a prefix of which each bucket has its own. To scans it is a pattern.


_OF_ONE_PERMIT = ("lock", "forced", "past", "waits")


class Keys(NamedTuple):
    """The keys of one permit of a lock. Each script gets the keys that it names, see scripts.py.

    A lock without a limit has one permit, the first. Each permit has a key `lock`, `forced`,
    `past` and `waits` of its own; all other keys are common to the permits of a name.
    """

    lock: str  # String: the current lease, see lua/_lease.lua. Its TTL is the lease's.
    queue: str  # Sorted set: token and record of each waiter -> its ticket, see lua/_queue.lua.
    done: str  # String: set while a `once` of this name is done.
    forced: str  # String: the lease that an operator released last, and by which request.
    past: str  # List: the last leases that lasted a while, see lua/_past.lua.
    finished: str  # Sorted set: ids of task runs that must not run again -> their end, in ms.
    starts: str  # Sorted set: starts of task runs that have not ended, see lua/count_start.lua.
    runs: str  # Hash: the last runs, and the call that waits to start, see lua/_runs.lua.
    line: str  # Sorted set: ids of deferred task runs -> their tickets, see lua/stand_in_line.lua.
    due: str  # Sorted set: the same ids -> when each is given up unless it is back, in ms.
    waits: str  # String: what the holder of the lease waits for, see lua/note_wait.lua.
    replaced: str  # Hash: the calls that a newer one has replaced, see lua/_replaced.lua.
    rate: str  # Sorted set: the starts under a rate -> when each is over, see lua/_starts.lua.
    fence: str  # Sorted set of one: the greatest fence given out under this prefix.
    held: str  # Sorted set: the index of all held locks (their lock keys) by expiry in ms.
    ran: str  # Sorted set: the index of all locks of jobs by their last run in ms.
    calls: str  # Sorted set: the index of all locks with an announced call by its end in ms.

    def of_permit(self, permit: int) -> Keys:
        """The keys of a permit, if these are those of the first, as a plain lock has them."""
        if permit == 1:
            return self
        return self._replace(**{key: f"{getattr(self, key)}#{permit}" for key in _OF_ONE_PERMIT})


@lru_cache(maxsize=4096)
def bucket_of(name: str) -> int:
    """The bucket of the lock *name*."""
    return crc32(name.encode()) % BUCKETS


def hash_tag(bucket: int) -> str:
    """The hash tag by which a cluster finds the slot of a bucket."""
    return str(bucket)


@lru_cache(maxsize=4096)
def prefix_of(prefix: str, name: str) -> str:
    """The prefix of all keys and channels of the lock *name*: *prefix*, or that of its bucket."""
    if not prefix.endswith(IN_BUCKETS):
        return prefix
    return f"{prefix.removesuffix(IN_BUCKETS)}:{{{hash_tag(bucket_of(name))}}}"


def fence_key(prefix: str) -> str:
    """The key of the greatest fence given out under *prefix*."""
    return f"{prefix}:fence"


def index_key(prefix: str) -> str:
    """The sorted set of all held locks under *prefix*."""
    return f"{prefix}:index"


def ran_index_key(prefix: str) -> str:
    """The sorted set of all locks under *prefix* with runs of jobs."""
    return f"{prefix}:ran"


def channel(prefix: str, process: str, number: int) -> str:
    """The channel on which the connection *number* of a process is rung.

    With the prefix of a bucket, the channel is in the slot of the bucket, see lua/_queue.lua.
    """
    return f"{prefix}:bell:{process}:{number}"


def prefix_in(channel: str) -> str:
    """The prefix of the locks that a channel serves."""
    return channel.rpartition(":bell:")[0]


@lru_cache(maxsize=4096)
def lock_keys(prefix: str, name: str, permit: int = 1) -> Keys:
    """The keys of a permit of the lock *name*: ``redislock:{report}:lock``, or ``…:lock#2``.

    In buckets, all keys share the hash tag of the bucket. Else all but the fence and the indexes
    share the hash tag of the name.
    """
    prefix = prefix_of(prefix, name)
    base = f"{prefix}:{{{quote(name, safe=_PLAIN)}}}:"
    first = Keys(
        lock=base + "lock",
        queue=base + "waiting",  # Not "queue": another format stood under that name.
        done=base + "done",
        forced=base + "forced",
        past=base + "past",
        finished=base + "finished",
        starts=base + "starts",
        runs=base + "runs",
        line=base + "line",
        due=base + "due",
        waits=base + "waits",
        replaced=base + "replaced",
        rate=base + "rate",
        fence=fence_key(prefix),
        held=index_key(prefix),
        ran=ran_index_key(prefix),
        calls=f"{prefix}:calls",
    )
    return first.of_permit(permit)


_LOCK_KEY = re.compile(r"(.*):\{(.*)\}:lock(?:#([1-9]\d{0,3}))?", re.DOTALL)


def permit_of(prefix: str, lock_key: str) -> tuple[str, int] | None:
    """The lock name and the permit behind a lock key; None if the key is not one of ours."""
    found = _LOCK_KEY.fullmatch(lock_key)  # A name's own braces are encoded.
    if found is None:
        return None
    name, permit = unquote(found[2]), int(found[3] or 1)
    is_ours = found[1] == prefix_of(prefix, name) and found[3] != "1"
    return (name, permit) if is_ours else None


def name_of(prefix: str, lock_key: str) -> str | None:
    """The lock name behind the lock key of any permit; None if the key is not one of ours."""
    found = permit_of(prefix, lock_key)
    return found and found[0]
