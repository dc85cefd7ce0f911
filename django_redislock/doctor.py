"""Is the server fit to keep locks? Each finding says ok, warn or fail, and what to do.

``manage.py locks doctor`` and ``manage.py check --deploy`` are made of these.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from redis.connection import parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from django_redislock.backends.cluster.backend import ClusterBackend
from django_redislock.backends.cluster.node import NoCluster
from django_redislock.backends.cluster.slots import DifferentClusters
from django_redislock.backends.quorum.backend import QuorumBackend
from django_redislock.backends.quorum.members import majority_of
from django_redislock.backends.redis.backend import RedisBackend
from django_redislock.backends.redis.dialing import OLDEST_VERSION
from django_redislock.backends.redis.errors import ReplyError, TooOld, described
from django_redislock.backends.registry import backends
from django_redislock.backends.sentinel.backend import SentinelBackend
from django_redislock.exceptions import LockError, LockUnavailable
from django_redislock.held import look_at
from django_redislock.humanize import counted, duration
from django_redislock.lock import distributed_lock
from django_redislock.rules import scripts
from django_redislock.rules.keys import IN_BUCKETS, lock_keys, name_of
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from django_redislock.backends.base import Backend
    from django_redislock.conf import Conf
    from django_redislock.held import HeldLock

Level = Literal["ok", "warn", "fail"]

SLOW_ROUND_TRIP = 0.01  # Seconds.
ROUND_TRIPS = 2  # That the time for one operation must be enough for.
CLOCK_DIFFERENCE = 1.0  # Seconds.
NEARLY_FULL = 0.8  # Of the memory that a server may use.
RECORD = 1_400  # Bytes that the records of one lock take, with names and hosts of some length.
MOST_KEYS = 20_000  # Looked at for what should not be there.
MOST_NAMED = 5
FEWEST_SENTINELS = 3
PROBE = "django_redislock.doctor"  # A lock that is taken and released to see whether it works.

# What a connection needs before and beside the scripts.
_CONNECTION = "auth eval evalsha hello info ping publish select subscribe"
# Which of all those are used on a cluster only, and which are not used there.
_ON_CLUSTERS = {"asking", "cluster|slots", "spublish", "ssubscribe"}
_NOT_ON_CLUSTERS = {"publish", "select", "subscribe"}
# For listings: `manage.py locks`, the admin.
_LISTINGS = "zcount zrange"


@dataclass(frozen=True)
class Finding:
    """One thing that was examined."""

    about: str  # One word, which never changes.
    level: Level
    says: str
    advice: str = ""  # What to do, unless all is well.


def examine(using: str) -> Iterator[Finding]:
    """Examine the server of one alias; stops early if it does not answer."""
    try:
        backend = backends[using]
    except ImproperlyConfigured as error:
        yield Finding(
            "settings",
            "fail",
            str(error),
            "Until this is put right, every lock of this alias raises it.",
        )
        return
    if not isinstance(backend, RedisBackend | ClusterBackend | QuorumBackend):
        yield Finding(
            "server",
            "warn",
            f"{type(backend).__name__} keeps locks within one process",
            "Use RedisBackend for locks that several processes or machines share.",
        )
        return
    if isinstance(backend, RedisBackend):
        yield from _examine([_Server(backend, backend)])
        return
    if isinstance(backend, QuorumBackend):
        with backend.servers() as by_name:
            servers = [_Server(backend, one, name) for name, one in by_name.items()]
            yield from _quorum(servers)
            yield from _examine(servers)
        return
    problem = backend.slots.settle(backend.within)
    if problem is not None:
        yield _no_answer(using, problem)
        return
    yield from _cluster(backend)
    yield from _examine([_Server(backend, node, node.address) for node in backend.slots.nodes()])


def _examine(servers: list[_Server]) -> Iterator[Finding]:
    """Examine servers that keep the locks of one backend; none that does not answer any more."""
    answering = list(servers)
    for check in _CHECKS:
        found: list[tuple[_Server, Finding]] = []
        for server in list(answering):
            try:
                found += [(server, finding) for finding in check(server)]
            except LockUnavailable as error:
                answering.remove(server)
                cause = error.__cause__ or error
                found.append((server, _no_answer(server.backend.alias, cause)))
        # What is found at several servers is said once.
        for one in dict.fromkeys(finding for _, finding in found):
            places = [server.place for server, same in found if same == one]
            who = "all servers" if len(places) == len(servers) else ", ".join(places)
            yield one if len(servers) == 1 else replace(one, says=f"{who}: {one.says}")


def _no_answer(using: str, error: BaseException) -> Finding:
    problem, cause = described(error), error.__cause__ or error
    if isinstance(cause, TooOld):
        return Finding("version", "fail", problem, "Use a newer server.")
    if isinstance(cause, NoCluster | DifferentClusters):
        return Finding("cluster", "fail", problem, f"Put LOCATION of REDISLOCK[{using!r}] right.")
    return Finding(
        "server",
        "fail",
        f"no answer: {problem}",
        f"Check LOCATION and OPTIONS of REDISLOCK[{using!r}], the network, and whether the"
        " server runs.",
    )


def examine_admin() -> Iterator[Finding]:
    """Examine whether ``migrate`` has made the permissions of the admin's page."""
    if not apps.is_installed("django.contrib.admin"):
        yield Finding("permissions", "ok", "not needed: the admin is not installed")
        return
    known = apps.get_model("auth", "Permission").objects.filter(
        content_type__app_label="django_redislock", codename="force_release_heldlock"
    )
    try:
        found = known.exists()
    except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
        yield Finding(
            "permissions",
            "warn",
            f"the database does not tell whether those of the admin's page are there: {error}",
            "Run manage.py migrate, or check DATABASES.",
        )
        return
    if found:
        yield Finding("permissions", "ok", "those of the admin's page are there")
    else:
        yield Finding(
            "permissions",
            "warn",
            "those of the admin's page are not there, so only superusers see it",
            "Run manage.py migrate.",
        )


def minimal_acl(prefix: str, *, replicas: bool = False) -> str:
    """The ACL rules that suffice for all operations on locks under *prefix*, and no more."""
    every = [one for one in vars(scripts).values() if isinstance(one, scripts.Script)]
    source = b"".join(script.source for script in every)
    called = {name.decode().lower() for name in re.findall(rb"p?call\('([A-Z]+)'", source)}
    words = {*_CONNECTION.split(), *_LISTINGS.split(), *called, *(["wait"] if replicas else [])}
    if prefix.endswith(IN_BUCKETS):
        words = words - _NOT_ON_CLUSTERS | _ON_CLUSTERS
    else:
        words -= _ON_CLUSTERS
    rights = " ".join(f"+{word}" for word in sorted(words))
    return f"resetkeys ~{prefix}:* resetchannels &{prefix}:bell:* -@all {rights}"


def shared_caches(conf: Conf) -> list[str]:
    """The aliases in CACHES that use the database of these locks: their clear() flushes it."""
    ours = _places(servers(conf))
    found = []
    for alias, cache in getattr(settings, "CACHES", {}).items():
        location, options = cache.get("LOCATION", ""), cache.get("OPTIONS", {})
        if isinstance(location, str):
            location = re.split("[;,]", location)
        uses_redis = "redis" in str(cache.get("BACKEND", "")).lower()
        if uses_redis and ours & _places(addresses(location, options)):
            found.append(alias)
    return found


def servers(conf: Conf) -> list[dict[str, Any]]:
    """What redis-py makes of the addresses and options of the servers that keep the locks.

    Behind sentinels, the name of the service stands for the host, as it does in django-redis.
    """
    options = dict(conf.options)
    service = options.pop("service_name", None)
    if not isinstance(service, str):
        return list(addresses(conf.location, options))
    scheme = "rediss" if options.pop("ssl", False) else "redis"
    return list(addresses(f"{scheme}://{service}", options))


def sentinels(conf: Conf) -> list[dict[str, Any]]:
    """See servers(), of the sentinels; none where there are none."""
    if "service_name" not in conf.options:
        return []
    return list(addresses(conf.location, conf.options.get("sentinel_kwargs", {})))


def addresses(location: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What redis-py makes of a URL, or of several: as there, they win over the options.

    What is no URL leads nowhere; an address from the environment is None where that has none.
    """
    for url in [location] if isinstance(location, str) else location or ():
        with suppress(ValueError, TypeError, AttributeError):
            yield {**options, **parse_url(url)}  # type: ignore[no-untyped-call]


def is_this_machine(host: str) -> bool:
    """Whether *host* is a name of this machine's own loopback."""
    return host.lower() in {"localhost", "::1"} or host.startswith("127.")


def _places(addresses: Iterable[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """Where they lead: (host, port, db) or (path, db)."""
    places = set()
    for parts in addresses:
        with suppress(ValueError, TypeError):
            port, db = int(parts.get("port", 6379)), int(parts.get("db") or 0)
            host = str(parts.get("host", "localhost")).lower()
            host = "localhost" if is_this_machine(host) else host
            places.add((parts["path"], db) if "path" in parts else (host, port, db))
    return places


class Asked(Protocol):
    """Who asks a server."""

    @property
    def scripting(self) -> bool: ...
    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]: ...


class _Server:
    """A server under examination: one of those that keep the locks of a backend."""

    def __init__(self, backend: Backend, asked: Asked, place: str = "") -> None:
        self.backend = backend
        self.asked = asked
        self.place = place  # Which of several it is.

    @cached_property
    def info(self) -> dict[str, str]:
        """What it tells about itself; nothing, if it does not allow us to ask."""
        reply = self.ask("INFO")
        if isinstance(reply, ReplyError):
            return {}
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        return {key: value for key, colon, value in lines if colon}

    def number(self, key: str) -> int:
        """A number in INFO; 0 if the server does not tell."""
        value = self.info.get(key, "0")
        return int(value) if value.isdecimal() else 0

    def ask(self, *command: str | int | bytes) -> Any:
        """Run one command; an error reply is returned."""
        return self.asked.commands(command)[0]

    @property
    def probe(self) -> str:
        """The name of a lock that is kept there."""
        if not isinstance(self.backend, ClusterBackend):
            return PROBE
        names = (f"{PROBE}-{number}" for number in count())
        slots = self.backend.slots
        return next(name for name in names if slots.last_keeper(name) is self.asked)


def _reachable(server: _Server) -> Iterator[Finding]:
    took = []
    for _ in range(5):
        started = time.perf_counter()
        reply = server.ask("PING")
        took.append(time.perf_counter() - started)
        if isinstance(reply, ReplyError):
            raise LockUnavailable(PROBE, str(reply)) from reply
    median = statistics.median(took)
    says = f"answers, in {median * 1000:.1f} ms"
    if median > SLOW_ROUND_TRIP:
        advice = (
            "An uncontended lock costs two round trips. Use a server that is closer, and no ttl"
            f" below {_shortest_ttl(server, median):.3g} s."
        )
        yield Finding("server", "warn", says, advice)
    else:
        yield Finding("server", "ok", says)
    yield from _far_away(server, median)


def _shortest_ttl(server: _Server, round_trip: float) -> float:
    """The shortest ttl with which an answer comes in time, and another try may follow."""
    return ROUND_TRIPS * round_trip / server.backend.operation_timeout(1.0)


def _far_away(server: _Server, round_trip: float) -> Iterator[Finding]:
    """Whether the ttl leaves time for a server at that distance."""
    backend = server.backend
    ttl, least = backend.conf.ttl, ROUND_TRIPS * round_trip
    if backend.operation_timeout(ttl) >= least:
        return
    if backend.operation_timeout(math.inf) >= least:
        advice = f"Set TTL to {_shortest_ttl(server, round_trip):.3g} or more."
    else:
        advice = f"Set OPTIONS['socket_timeout'] to {least:.3g} or more, and TTL to thrice that."
    yield Finding(
        "ttl",
        "warn",
        f"TTL is {ttl:g} s, too short for a round trip of {round_trip * 1000:.0f} ms: locks are not"
        " granted, or lost as they are not renewed in time",
        f"{advice} The same is true of each lock with a ttl of its own.",
    )


def _sentinels(server: _Server) -> Iterator[Finding]:
    """Whether the sentinels can have a replica take over."""
    backend = server.backend
    if not isinstance(backend, SentinelBackend):
        return
    service, number = backend.sentinels.service, len(backend.conf.location)
    said = backend.sentinels.ask_each(
        backend.within, ("SENTINEL", "MASTER", service), ("SENTINEL", "CKQUORUM", service)
    )
    silent = [place for place, replies in said.items() if isinstance(replies, Exception)]
    answers = [replies for replies in said.values() if not isinstance(replies, Exception)]
    states = [state for state, _ in answers if isinstance(state, dict)]
    masters = {b"%s:%s" % (state[b"ip"], state[b"port"]) for state in states}
    refusals = [quorum for _, quorum in answers if isinstance(quorum, ReplyError)]
    if refusals or len(masters) > 1:
        named = ", ".join(sorted(master.decode() for master in masters))
        yield Finding(
            "sentinels",
            "fail",
            f"they could not agree on a failover: {refusals[0]}"
            if refusals
            else f"they name different masters: {named}",
            "Let all of them run, and see what SENTINEL CKQUORUM and their logs say.",
        )
    elif silent:
        yield Finding(
            "sentinels",
            "warn",
            f"{len(silent)} of {number} do not answer: {', '.join(silent)}",
            "Start them, or put LOCATION and OPTIONS['sentinel_kwargs'] right.",
        )
    elif number < FEWEST_SENTINELS or number % 2 == 0:
        yield Finding(
            "sentinels",
            "warn",
            f"LOCATION names {number}; a majority must be alive for a failover",
            "Run three or five, on machines that do not fail together, and name all of them.",
        )
    else:
        named = masters.pop().decode()
        yield Finding("sentinels", "ok", f"all {number} answer, and call {named} the master")


def _version(server: _Server) -> Iterator[Finding]:
    info = server.info
    if "valkey_version" in info:
        yield Finding("version", "ok", f"Valkey {info['valkey_version']}")
        return
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not numbers:
        yield Finding("version", "warn", "unknown: the server does not tell", "Allow +info.")
    elif numbers < OLDEST_VERSION:
        yield Finding(
            "version", "fail", f"Redis {version}", "Use Redis 7.0 or newer, or any Valkey."
        )
    else:
        yield Finding("version", "ok", f"Redis {version}")


def _rights(server: _Server) -> Iterator[Finding]:
    backend = server.backend
    conf = backend.conf
    line = (
        "A user with no more rights than needed: ACL SETUSER redislock on >PASSWORD "
        f"{minimal_acl(backend.prefix, replicas=conf.replicas_ack > 0)}"
    )
    try:
        # Another doctor may be at it, as when all servers start at the same time.
        lock = distributed_lock(server.probe, ttl=10, wait=1, renew=False, using=backend.alias)
        is_free = lock.acquire()
        if is_free:
            lock.release()
    except LockError as error:
        yield Finding("rights", "fail", f"a lock cannot be taken: {error}", line)
        return
    who = server.ask("ACL", "WHOAMI")
    user = "" if isinstance(who, ReplyError) else f" as user {who.decode(errors='replace')!r}"
    if is_free:
        yield Finding("rights", "ok", f"a lock was taken and released{user}", line)
    else:
        problem = f"not tried: lock {server.probe!r} is held, as by another doctor"
        yield Finding("rights", "warn", problem, "Run it again.")
    if server.asked.scripting:
        yield Finding("scripting", "ok", "scripts are allowed")
    else:
        yield Finding(
            "scripting",
            "warn",
            "scripts are forbidden: waiters poll, nobody is served in turn, operations take more"
            " round trips; tasks, lists and force release are unavailable",
            "Allow +eval and +evalsha.",
        )


def _memory(server: _Server) -> Iterator[Finding]:
    policy = server.info.get("maxmemory_policy", "")
    if not policy:
        yield Finding("eviction", "warn", "unknown: the server does not tell", "Allow +info.")
    elif not server.number("maxmemory"):
        yield Finding("eviction", "ok", "no memory limit, so no lock is evicted")
    elif policy == "noeviction":
        yield Finding("eviction", "ok", "memory is limited and nothing is evicted (noeviction)")
    else:
        evicted = server.number("evicted_keys")
        already = f"; it has evicted {counted(evicted, 'key')} already" if evicted else ""
        yield Finding(
            "eviction",
            "fail",
            f"the policy {policy} may evict a held lock{already}",
            "Set maxmemory-policy noeviction, or keep locks on a server of their own.",
        )


def _room(server: _Server) -> Iterator[Finding]:
    """Whether there is memory left for locks, and whether records of task runs may fill it."""
    used, limit = server.number("used_memory"), server.number("maxmemory")
    if limit and used >= NEARLY_FULL * limit:
        yield Finding(
            "memory",
            "warn",
            f"{used / limit:.0%} of maxmemory are in use; when it is full, no lock can be taken",
            "Raise maxmemory, and see what the memory is used for.",
        )
    if not server.asked.scripting:
        return
    backend = server.backend
    known, most = backend.ran_names(0).total, backend.most_records
    lacking = (most - known) * RECORD - (limit - used)
    if known >= NEARLY_FULL * most:
        yield Finding(
            "records",
            "warn",
            f"{known} locks of tasks have records, and those of {most} are kept: the oldest go"
            f" before {duration(backend.conf.records_for)} are over, and `locks runs` does not know"
            " them then",
            "Is an object named in a key? Raise RECORDS if its records are needed for so long, or"
            " lower RECORDS_FOR if they are not.",
        )
    # Each server of a cluster has a part of them; and a few are no sign that there will be more.
    elif limit and not backend.in_buckets and known >= most / 10 and lacking > 0:
        yield Finding(
            "records",
            "warn",
            f"{known} locks of tasks have records, and those of {most} are kept: for so many, about"
            f" {lacking / 1_000_000:.1f} MB of maxmemory are lacking",
            "Lower RECORDS or RECORDS_FOR, or raise maxmemory.",
        )


def _persistence(server: _Server) -> Iterator[Finding]:
    info = server.info
    failed = [
        key
        for key in ("rdb_last_bgsave_status", "aof_last_write_status")
        if info.get(key, "ok") != "ok"
    ]
    if failed:
        yield Finding(
            "persistence",
            "fail",
            f"the last write to disk failed ({', '.join(failed)}); the server may refuse writes",
            "Look into the server's log, and at its disk.",
        )
    elif info.get("aof_enabled") == "1":
        if isinstance(server.backend, QuorumBackend):
            yield _last_second(server)
        else:
            yield Finding("persistence", "ok", "held locks survive a restart (append-only file)")
    elif isinstance(server.backend, QuorumBackend):
        yield Finding(
            "persistence",
            "warn",
            "a server that is restarted has forgotten its locks",
            "Start it again only after the longest ttl; or set appendonly yes and appendfsync"
            " always.",
        )
    else:
        yield Finding(
            "persistence",
            "warn",
            "a restart of the server frees locks that are still relied on",
            "Set appendonly yes; or guard what locks protect with the fence.",
        )


def _last_second(server: _Server) -> Finding:
    """Whether a server of a quorum that is restarted knows what it has granted last."""
    reply = server.ask("CONFIG", "GET", "appendfsync")  # A map, or in RESP2 a list of two.
    if isinstance(reply, ReplyError):
        return Finding(
            "persistence",
            "ok",
            "held locks survive a restart (append-only file); with appendfsync always also those of"
            " the last second",
        )
    if b"always" in (reply.values() if isinstance(reply, dict) else reply):
        return Finding("persistence", "ok", "held locks survive a restart (appendfsync always)")
    return Finding(
        "persistence",
        "warn",
        "a server that is restarted has forgotten the locks of its last second",
        "Start it again only after the longest ttl; or set appendfsync always.",
    )


def _replication(server: _Server) -> Iterator[Finding]:
    replicas = server.number("connected_slaves")
    acknowledged = server.backend.conf.replicas_ack
    if server.info.get("role") == "slave":
        yield Finding(
            "replication",
            "fail",
            "LOCATION names a replica, which refuses writes",
            "Name the primary.",
        )
    elif acknowledged > replicas:
        yield Finding(
            "replication",
            "fail",
            f"REPLICAS_ACK is {acknowledged}, but the server has {counted(replicas, 'replica')}: no"
            " lock can be taken",
            "Connect more replicas, or lower REPLICAS_ACK.",
        )
    elif isinstance(server.backend, QuorumBackend):
        yield Finding("replication", "ok", "a majority is what counts, and no replica")
    elif not replicas and isinstance(server.backend, SentinelBackend | ClusterBackend):
        yield Finding(
            "replication",
            "warn",
            "no replicas, so there is nobody to take over",
            "Connect replicas to the master.",
        )
    elif replicas and not acknowledged:
        yield Finding(
            "replication",
            "warn",
            f"{counted(replicas, 'replica')}; a failover may forget the last grants",
            "Set REPLICAS_ACK to 1 or more, so that a grant counts only when replicas know it.",
        )
    elif replicas:
        yield Finding("replication", "ok", f"{acknowledged} of {replicas} replicas acknowledge")
    else:
        yield Finding("replication", "ok", "no replicas")
    if isinstance(server.backend, SentinelBackend):
        yield from _isolation(server)


def _isolation(server: _Server) -> Iterator[Finding]:
    """Whether a master that is cut off from all others goes on."""
    if "min_slaves_good_slaves" in server.info:  # The server tells it if it is told to mind.
        yield Finding("isolation", "ok", "a master without its replicas grants nothing")
        return
    yield Finding(
        "isolation",
        "warn",
        "a master that is cut off goes on granting to those who reach it, beside its successor",
        "Set min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers; or REPLICAS_ACK.",
    )


def _clock(server: _Server) -> Iterator[Finding]:
    before = time.time()
    reply = server.ask("TIME")
    after = time.time()
    if isinstance(reply, ReplyError):
        return  # Then no lock works either, and that was said.
    difference = int(reply[0]) + int(reply[1]) / 1_000_000 - (before + after) / 2
    if abs(difference) < CLOCK_DIFFERENCE:
        yield Finding("clock", "ok", "the server's clock and this machine's agree")
        return
    ahead = "ahead of" if difference > 0 else "behind"
    yield Finding(
        "clock",
        "warn",
        f"the server's clock is {abs(difference):.1f} s {ahead} this machine's",
        "Locks do not mind, but jobs that start at a time of day do. Let NTP set both.",
    )


def _cluster(backend: ClusterBackend) -> Iterator[Finding]:
    """Whether the nodes in LOCATION answer, and all slots are kept."""
    said = backend.slots.ask_location(backend.within)
    answers = [ranges for ranges in said.values() if not isinstance(ranges, Exception)]
    wrong = {place: one for place, one in said.items() if isinstance(one, Exception)}
    kept = max((sum(last - first + 1 for first, last in one) for one in answers), default=0)
    if kept < REDIS_CLUSTER_HASH_SLOTS:
        yield Finding(
            "cluster",
            "fail",
            f"{REDIS_CLUSTER_HASH_SLOTS - kept} of {REDIS_CLUSTER_HASH_SLOTS} slots are kept by no"
            " node",
            "Let redis-cli --cluster check say what is wrong, and --cluster fix put it right.",
        )
    elif wrong:
        problems = ", ".join(f"{place}: {described(error)}" for place, error in wrong.items())
        yield Finding(
            "cluster",
            "warn",
            f"{len(wrong)} of {len(said)} in LOCATION cannot be asked: {problems}",
            "Start them, or put LOCATION right.",
        )
    else:
        nodes = counted(len(backend.slots.nodes()), "node")
        yield Finding("cluster", "ok", f"all slots are kept; {nodes} keep locks")


def _quorum(servers: list[_Server]) -> Iterator[Finding]:
    """Whether a majority of the servers answers, and none of them fails together with another."""
    ids: dict[str, list[str]] = {}
    silent = []
    for server in servers:
        try:
            ids.setdefault(server.info.get("run_id", server.place), []).append(server.place)
        except LockUnavailable:
            silent.append(server.place)
    same = [places for places in ids.values() if len(places) > 1]
    hosts = Counter(server.place.rpartition(":")[0] for server in servers)
    if same:
        yield Finding(
            "quorum",
            "fail",
            f"{' and '.join(same[0])} are the same server, which has one vote",
            "Name each server once, by the address that all machines reach it by.",
        )
    elif len(silent) >= majority_of(len(servers)):
        yield Finding(
            "quorum",
            "fail",
            f"{len(silent)} of {len(servers)} servers do not answer, so no lock can be taken",
            "Start them, or look at the network.",
        )
    elif silent:
        yield Finding(
            "quorum",
            "warn",
            f"{', '.join(silent)} of {len(servers)} servers cannot be asked; locks go on, but fewer"
            " may fail",
            "Start it. If it has lost its data, only after the longest ttl: see Topologies.",
        )
    elif len(hosts) < len(servers):
        yield Finding(
            "quorum",
            "warn",
            f"{hosts.most_common(1)[0][1]} of {len(servers)} servers are on one machine, and fail"
            " together",
            "Put each server on a machine of its own.",
        )
    else:
        yield Finding("quorum", "ok", f"all {len(servers)} servers answer, each on its own machine")


def _of_its_own(server: _Server) -> Iterator[Finding]:
    if isinstance(server.backend, ClusterBackend):
        return
    if not server.number("cluster_enabled"):
        yield Finding("cluster", "ok", "a server of its own, not one of a cluster")
        return
    yield Finding(
        "cluster",
        "fail",
        f"the server is one of a cluster, which {type(server.backend).__name__} cannot use",
        "Use django_redislock.backends.ClusterBackend.",
    )


def _keys(server: _Server) -> Iterator[Finding]:
    """Look through a bounded part of the keyspace for what should not be there."""
    backend = server.backend
    cursor, scanned = "0", 0
    odd: list[HeldLock] = []
    endless: list[str] = []
    unlisted = 0
    while True:
        reply = server.ask("SCAN", cursor, "MATCH", f"{backend.prefix}:{{*", "COUNT", 1000)
        if isinstance(reply, ReplyError):
            yield Finding("keys", "ok", "not looked through: SCAN is not allowed")
            return
        cursor, keys = reply[0].decode(), reply[1]
        scanned += 1000
        names = {key: name for key in keys if (name := _name_of_lock(backend.prefix, key))}
        odd_here = [one for one in look_at(names.values(), using=backend.alias) if _is_odd(one)]
        odd += odd_here
        # Of a lock that is odd no more is said: what is not ours need not be in the index.
        unlisted += len(_unlisted(server, names) - {lock.name for lock in odd_here})
        endless += _endless(server, [key for key in keys if key not in names])
        if cursor == "0" or scanned >= MOST_KEYS:
            break
    part = "" if cursor == "0" else f" among the first {scanned} keys"
    yield _odd_locks(odd, part, backend.alias)
    yield _endless_keys(endless, part)
    yield _index(unlisted, part)


def _name_of_lock(prefix: str, key: bytes) -> str | None:
    name = name_of(prefix, key.decode(errors="replace"))
    # Not one that only looks like ours, whose name leads to another key.
    return name if name and lock_keys(prefix, name).lock.encode() == key else None


def _is_odd(lock: HeldLock) -> bool:
    return bool(lock.strange) or lock.expires_in is None or lock.ends_late


def _unlisted(server: _Server, names: Mapping[bytes, str]) -> set[str]:
    """Those of the locks with these keys that are not in the index."""
    keys = [(lock_keys(server.backend.prefix, name).held, key) for key, name in names.items()]
    scores = server.asked.commands(*[("ZSCORE", *key) for key in keys]) if keys else []
    return {name for name, score in zip(names.values(), scores, strict=True) if score is None}


def _endless(server: _Server, keys: list[bytes]) -> list[str]:
    """Those of *keys* that have no expiry."""
    times = server.asked.commands(*[("PTTL", key) for key in keys]) if keys else []
    pairs = zip(keys, times, strict=True)
    return [key.decode(errors="backslashreplace") for key, left in pairs if left == -1]


def _odd_locks(locks: list[HeldLock], part: str, alias: str) -> Finding:
    """What is said of locks that will not become free when they should."""
    never = [lock.name for lock in locks if lock.expires_in is None]
    foreign = [lock.name for lock in locks if lock.strange and lock.expires_in is not None]
    late = [lock.name for lock in locks if lock.ends_late]
    if not (never or foreign or late):
        return Finding("locks", "ok", f"every lock is ours and ends within its ttl{part}")
    says = [
        f"{counted(len(names), 'lock')} {what}: {_named(names)}"
        for names, what in (
            (never, "will never become free"),
            (foreign, "held by what is not ours"),
            (late, "held beyond the ttl, since the server's clock was set back"),
        )
        if names
    ]
    using = "" if alias == DEFAULT_ALIAS else f" --alias {alias}"
    return Finding(
        "locks",
        "fail" if never else "warn",
        "; ".join(says) + part,
        f"manage.py locks release NAME{using} shows what is there, asks, and frees the lock. If it"
        " is not ours, find out who wrote it.",
    )


def _endless_keys(keys: list[str], part: str) -> Finding:
    """What is said of other keys that never expire."""
    if not keys:
        return Finding("keys", "ok", f"every other key has an expiry{part}")
    never = "never expires" if len(keys) == 1 else "never expire"
    return Finding(
        "keys",
        "fail",
        f"{counted(len(keys), 'key')} {never}{part}: {_named(keys)}",
        "Nothing of ours does that: find out who wrote that, then delete it.",
    )


def _index(unlisted: int, part: str) -> Finding:
    """What is said of held locks that lists do not show."""
    if not unlisted:
        return Finding("index", "ok", f"every held lock is in the index{part}")
    verb, them = ("is", "it") if unlisted == 1 else ("are", "them")
    return Finding(
        "index",
        "warn",
        f"{counted(unlisted, 'held lock')} {verb} missing in the index{part}, so lists do not"
        f" show {them}",
        "A renewed lock comes back into it by itself. Did somebody delete the index?",
    )


def _named(names: list[str]) -> str:
    """The first of many."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more


def _caches(server: _Server) -> Iterator[Finding]:
    shared = shared_caches(server.backend.conf)
    if shared:
        yield Finding(
            "cache",
            "warn",
            f"CACHES[{shared[0]!r}] uses the same database, and its clear() flushes all locks",
            "Give locks a database number of their own, in LOCATION or as OPTIONS['db'].",
        )
    else:
        yield Finding("cache", "ok", "no Django cache uses the same database")


_CHECKS: tuple[Callable[[_Server], Iterator[Finding]], ...] = (
    _reachable,
    _sentinels,
    _version,
    _of_its_own,
    _rights,
    _memory,
    _room,
    _persistence,
    _replication,
    _clock,
    _keys,
    _caches,
)
