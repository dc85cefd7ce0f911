"""Examines the keys under the prefix: locks that do not end, limits that differ, the index."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.findings import Finding, problem
from django_redislock.held import detail, look_at
from django_redislock.humanize import counted, duration
from django_redislock.rules.keys import lock_keys, permit_of
from django_redislock.rules.names import Permit
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from django_redislock.doctor.server import Server
    from django_redislock.held import HeldLock


# --- whether a server may throw locks away, and whether there is memory for more of them ----------

NEARLY_FULL = 0.8  # Of the memory that a server may use, and of the records that are kept.
RECORD = 1_400  # Bytes that the records of one lock take, with names and hosts of some length.


def eviction(server: Server) -> Iterator[Finding]:
    policy = server.info.get("maxmemory_policy", "")
    if not policy:
        yield problem("W025", "unknown: the server does not tell", "Allow +info.")
    elif not server.number("maxmemory"):
        yield Finding("eviction", "ok", "no memory limit, so no lock is evicted")
    elif policy == "noeviction":
        yield Finding("eviction", "ok", "memory is limited and nothing is evicted (noeviction)")
    else:
        evicted = server.number("evicted_keys")
        already = f"; it has evicted {counted(evicted, 'key')} already" if evicted else ""
        yield problem(
            "E025",
            f"the policy {policy} may evict a held lock{already}",
            "Set maxmemory-policy noeviction, or keep locks on a server of their own.",
        )


def memory(server: Server) -> Iterator[Finding]:
    """Whether memory is left for locks, and whether records of runs may fill it."""
    used, limit = server.number("used_memory"), server.number("maxmemory")
    if limit and used >= NEARLY_FULL * limit:
        yield problem(
            "W036",
            f"{used / limit:.0%} of maxmemory are in use; when it is full, no lock can be taken",
            "Raise maxmemory, and see what the memory is used for.",
        )
    if server.scripts_need:
        return
    backend = server.backend
    known, most = backend.ran_permits(0).total, backend.most_records
    lacking = (most - known) * RECORD - (limit - used)
    if known >= NEARLY_FULL * most:
        yield problem(
            "W037",
            f"{known} locks of tasks have records, and those of {most} are kept: the oldest go"
            f" before {duration(backend.conf.records_for)} are over, and `locks runs` does not know"
            " them then",
            "Is an object named in a key? Raise RECORDS if its records are needed for so long, or"
            " lower RECORDS_FOR if they are not.",
        )
    # Each server of a cluster has a part of them; and a few are no sign that there will be more.
    elif limit and not backend.in_buckets and known >= most / 10 and lacking > 0:
        yield problem(
            "W037",
            f"{known} locks of tasks have records, and those of {most} are kept: for so many, about"
            f" {lacking / 1_000_000:.1f} MB of maxmemory are lacking",
            "Lower RECORDS or RECORDS_FOR, or raise maxmemory.",
        )


# --- whether held locks survive a restart of the server, and its failure --------------------------


def persistence(server: Server) -> Iterator[Finding]:
    info = server.info
    if not info:
        return  # Nobody knows, and version() has said so.
    failed = [
        key
        for key in ("rdb_last_bgsave_status", "aof_last_write_status")
        if info.get(key, "ok") != "ok"
    ]
    if failed:
        yield problem(
            "E026",
            f"the last write to disk failed ({', '.join(failed)}); the server may refuse writes",
            "Look at the server's log, and at its disk.",
        )
    elif info.get("aof_enabled") == "1":
        if server.backend.supports_majority:
            yield _last_second(server)
        else:
            yield Finding("persistence", "ok", "held locks survive a restart (append-only file)")
    elif server.backend.supports_majority:
        yield problem(
            "W026",
            "a server that is restarted has forgotten its locks",
            "Start it again only after the longest ttl; or set appendonly yes and appendfsync"
            " always.",
        )
    else:
        yield problem(
            "W026",
            "a restart of the server frees locks that are still relied on",
            "Set appendonly yes; or guard what locks protect with the fence.",
        )


def _last_second(server: Server) -> Finding:
    """Whether a restarted server knows its last grants, and so will not vote against them."""
    reply = server.run("CONFIG", "GET", "appendfsync")
    if isinstance(reply, ReplyError):
        return Finding(
            "persistence",
            "ok",
            "held locks survive a restart (append-only file); with appendfsync always also those of"
            " the last second",
        )
    if b"always" in (reply.values() if isinstance(reply, dict) else reply):  # RESP3, or RESP2.
        return Finding("persistence", "ok", "held locks survive a restart (appendfsync always)")
    return problem(
        "W026",
        "a server that is restarted has forgotten the locks of its last second",
        "Start it again only after the longest ttl; or set appendfsync always.",
    )


def replication(server: Server) -> Iterator[Finding]:
    if not server.info:
        return  # Nobody knows, and version() has said so.
    backend = server.backend
    replicas, acknowledged = server.number("connected_slaves"), backend.conf.replicas_ack
    if server.info.get("role") == "slave":
        yield problem("E027", "LOCATION names a replica, which refuses writes", "Name the primary.")
    elif acknowledged > replicas:
        yield problem(
            "E027",
            f"REPLICAS_ACK is {acknowledged}, but the server has {counted(replicas, 'replica')}: no"
            " lock can be taken",
            "Connect more replicas, or lower REPLICAS_ACK.",
        )
    elif backend.supports_majority:
        yield Finding("replication", "ok", "a majority decides, and replicas do not count")
    elif not replicas and backend.supports_failover:
        yield problem(
            "W027", "no replicas, so no server can take over", "Connect replicas to the master."
        )
    elif replicas and not acknowledged:
        yield problem(
            "W027",
            f"{counted(replicas, 'replica')}; a failover may forget the last grants",
            "Set REPLICAS_ACK to 1 or more, so that a grant counts only when replicas know it.",
        )
    elif replicas:
        yield Finding("replication", "ok", f"{acknowledged} of {replicas} replicas acknowledge")
    else:
        yield Finding("replication", "ok", "no replicas")


MOST_KEYS = 20_000  # Keys, at most, that are looked at.
SCANNED_AT_ONCE = 1_000
MOST_NAMED = 5
MOST_QUEUES = 100  # Queues, at most, in which the limits of waiters are looked at.


def keyspace(server: Server) -> Iterator[Finding]:
    """Look at a bounded part of the keys for what should not be there."""
    backend = server.backend
    pattern = f"{backend.prefix}:{{*"
    cursor, scanned = b"0", 0
    odd: list[HeldLock] = []
    newer: list[str] = []
    limits: dict[str, set[int]] = {}  # By name, the limits of its holders and waiters.
    waited_for: set[str] = set()
    endless: list[str] = []
    unlisted = 0
    while True:
        reply = server.run("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE)
        if isinstance(reply, ReplyError):
            yield Finding("keys", "ok", "not looked through: SCAN is not allowed")
            return
        cursor, keys = reply
        scanned += SCANNED_AT_ONCE
        permits = {key: found for key in keys if (found := _permit(backend.prefix, key))}
        locks = [*look_at(permits.values(), using=backend.alias)]
        odd_here = [one for one in locks if _is_odd(one)]
        odd += odd_here
        newer += [lock.name for lock in locks if lock.newer_format is not None]
        for lock in locks:
            if lock.state not in {"cooling", "foreign", "rate"} and not lock.owner.operator:
                limits.setdefault(lock.key.name, set()).add(lock.owner.limit)
            if lock.waiters:
                waited_for.add(lock.key.name)
        # An odd lock is reported only as odd: one that is not ours need not be in the index.
        unlisted += len(_unlisted(server, permits) - {lock.key for lock in odd_here})
        endless += _endless(server, [key for key in keys if key not in permits])
        if cursor == b"0" or scanned >= MOST_KEYS:
            break
    part = "" if cursor == b"0" else f" among the first {scanned} keys"
    for name in islice(waited_for, MOST_QUEUES):
        waiters = detail(name, permit=1, using=backend.alias).waiters
        wanted = {one.owner.limit for one in waiters if not one.owner.operator}
        limits.setdefault(name, set()).update(wanted)
    yield _locks(odd, part, backend.alias)
    if newer:
        yield _newer(newer, part)
    yield from _limits({name: one for name, one in limits.items() if len(one) > 1})
    yield _keys(endless, part)
    yield _index(unlisted, part)


def _permit(prefix: str, key: bytes) -> Permit | None:
    """The lock, or the permit, with this key; None if it is another key."""
    found = permit_of(prefix, key.decode(errors="replace"))
    # A key may only look like ours: then the lock that it seems to stand for has another key.
    return Permit(*found) if found and lock_keys(prefix, *found).lock.encode() == key else None


def _is_odd(lock: HeldLock) -> bool:
    return bool(lock.strange) or lock.expires_in is None or lock.ends_late


def _unlisted(server: Server, permits: Mapping[bytes, Permit]) -> set[Permit]:
    """The locks with these keys that are not in the index."""
    prefix = server.backend.prefix
    scores = server.run_all(
        [("ZSCORE", lock_keys(prefix, one.name).held, key) for key, one in permits.items()]
    )
    return {one for one, score in zip(permits.values(), scores, strict=True) if score is None}


def _endless(server: Server, keys: list[bytes]) -> list[str]:
    """The keys without an expiry, of *keys*."""
    times = server.run_all([("PTTL", key) for key in keys])
    pairs = zip(keys, times, strict=True)
    return [key.decode(errors="backslashreplace") for key, left in pairs if left == -1]


def _locks(odd: list[HeldLock], part: str, alias: str) -> Finding:
    """The finding about locks that will not become free when they should."""
    never = [lock.name for lock in odd if lock.expires_in is None]
    foreign = [lock.name for lock in odd if lock.strange and lock.expires_in is not None]
    late = [lock.name for lock in odd if lock.ends_late]
    if not odd:
        return Finding("locks", "ok", f"every lock is ours and ends within its ttl{part}")
    says = [
        f"{counted(len(names), 'lock')} {what}: {_first(names)}"
        for names, what in (
            (never, "will never become free"),
            (foreign, "held by a value that is not ours"),
            (late, "held beyond the ttl, since the server's clock was set back"),
        )
        if names
    ]
    using = "" if alias == DEFAULT_ALIAS else f" --alias {alias}"
    return problem(
        "E031" if never else "W031",
        "; ".join(says) + part,
        f"manage.py locks release NAME{using} shows what is there, asks, and frees the lock. If it"
        " is not ours, find out who wrote it.",
    )


def _newer(names: list[str], part: str) -> Finding:
    """The finding about locks whose holder runs a newer version."""
    verb = "is" if len(names) == 1 else "are"
    return problem(
        "W040",
        f"{counted(len(names), 'lock')} {verb} held by a newer version of django_redislock, which"
        f" this one cannot read{part}: {_first(names)}",
        "Update every program that uses these locks to that version. Until then this one waits for"
        " them as for any other lock.",
    )


def _limits(differing: Mapping[str, set[int]]) -> Iterator[Finding]:
    """The finding about names that are used with several limits."""
    if not differing:
        return
    says = [
        f"{name!r} ({' and '.join(map(_spelt, sorted(found)))})"
        for name, found in differing.items()
    ]
    more = f" and {len(says) - MOST_NAMED} more" if len(says) > MOST_NAMED else ""
    yield problem(
        "W038",
        f"holders and waiters of {counted(len(says), 'lock')} differ in its limit:"
        f" {', '.join(says[:MOST_NAMED])}{more}",
        "Each counts by its own limit, so the greatest number of them may hold it. While a deploy"
        " changes the limit, that passes by itself; else give the name one limit everywhere.",
    )


def _spelt(limit: int) -> str:
    return f"limit={limit}" if limit else "no limit"


def _keys(endless: list[str], part: str) -> Finding:
    """The finding about other keys that never expire."""
    if not endless:
        return Finding("keys", "ok", f"every other key has an expiry{part}")
    never = "never expires" if len(endless) == 1 else "never expire"
    return problem(
        "E029",
        f"{counted(len(endless), 'key')} {never}{part}: {_first(endless)}",
        "No key of ours does that: find out which program wrote it, then delete it.",
    )


def _index(unlisted: int, part: str) -> Finding:
    """The finding about held locks that lists do not show."""
    if not unlisted:
        return Finding("index", "ok", f"every held lock is in the index{part}")
    verb, them = ("is", "it") if unlisted == 1 else ("are", "them")
    return problem(
        "W030",
        f"{counted(unlisted, 'held lock')} {verb} missing in the index{part}, so lists do not"
        f" show {them}",
        "A renewed lock comes back into it by itself. Did somebody delete the index?",
    )


def _first(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more
