"""One backend, one seed: clients at work, a nemesis, and what the checker says of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from random import Random

from django.db import connections, transaction
from redis.exceptions import MovedError

from django_redislock.rules.keys import IN_BUCKETS, fence_key, index_key, prefix_of, ran_index_key
from tests.effects.models import Counter, Entry, written
from tests.jepsen import history
from tests.jepsen.checker import Ledger, Verdict
from tests.jepsen.crew import Crew
from tests.jepsen.nemesis import Nemesis
from tests.jepsen.places import CONTENDERS
from tests.jepsen.workload import DATABASES, NAME, PLAIN, TTL, Desk, clock, work
from tests.support.databases import described, forget, make_tables, sqlite, use
from tests.support.processes import Child
from tests.support.waiting import HUNG

CLIENTS = 4
FIRST = 30  # Writes before anything goes wrong.
PREFIX = "jepsen"


@dataclass(frozen=True)
class Report:
    """What was done, and what came of it."""

    has_fence: bool  # A lock of another library has none.
    verdict: Verdict
    harm: Mapping[str, int]  # What the nemesis did, and how often.
    immortal: list[bytes]  # Keys on the servers that would stay for ever.

    @property
    def wrong(self):
        """What must not be, for people."""
        return [*self.verdict.wrong, *(f"{key!r} never expires" for key in self.immortal)]


def run(backend, *, seconds, seed, packages=("",), keep=None):
    """Let clients increment counters while much goes wrong, and judge it.

    It takes longer if nobody was too late by then, since that would prove nothing.

    Args:
        backend: One of CONTENDERS.
        seconds: How long the nemesis is at work.
        seed: What it does, in which order. Not when, which the machine decides.
        packages: What the clients have by turns: see environment_for() in tests/support/nursery.py.
        keep: Where to keep the history, if anywhere.
    """
    contender = CONTENDERS[backend]
    dice, package = Random(seed), cycle(packages)
    with tempfile.TemporaryDirectory() as folder, _databases(Path(folder)):
        desk = Desk(folder)
        try:
            with contender.place(dice) as place:
                setting = {
                    "KEY_PREFIX": PREFIX,
                    "TTL": TTL,
                    "WAIT": HUNG,
                    **place.setting,
                    **contender.options,
                }

                def start(number):
                    databases, port = described(*DATABASES), place.network.port
                    arguments = (folder, databases, contender.lock, port, number)
                    how = {"redislock": {"default": setting}, "package": next(package)}
                    return Child(work, *arguments, **how)

                with Crew(start, CLIENTS, desk, _writes) as crew:
                    crew.await_writes(FIRST)
                    nemesis = Nemesis(place, crew, desk, dice)
                    until = clock() + seconds
                    while clock() < until or not _is_any_missing():
                        nemesis.strike()
                    desk.close()
                    crew.finish()
                immortal = _immortal(place)
        finally:  # A trial that fails is worth a look.
            for counter in DATABASES:
                with desk.operation(history.READER, f"read-{counter}") as value:
                    value.update(asdict(_ledger(counter)))
            if keep:
                history.write(desk.events(), keep)
        verdict = history.verdict_on(desk.events())
        has_fence = contender.lock == "ours"
        return Report(has_fence=has_fence, verdict=verdict, harm=nemesis.done, immortal=immortal)


@contextmanager
def _databases(folder):
    """Make both, with a counter each."""
    use(**{alias: sqlite(folder, alias) for alias in DATABASES})
    try:
        for alias in DATABASES:
            make_tables(alias)
            Counter.objects.using(alias).create(name=alias)
        yield
    finally:
        forget(*DATABASES)


def _ledger(database):
    with transaction.atomic(using=database):  # Both are of the same moment.
        value = Counter.objects.using(database).get().value
        return Ledger(value=value, fences=written(database))


def _is_any_missing():
    plain = _ledger(PLAIN)
    return plain.value < len(plain.fences)


def _writes():
    try:
        return Entry.objects.using(PLAIN).count()
    finally:
        connections[PLAIN].close()  # Nobody else would, in the thread that asks.


def _immortal(place):
    """The keys that would stay for ever; those of all names may, which do not grow with them."""
    prefixes = (PREFIX, prefix_of(f"{PREFIX}{IN_BUCKETS}", NAME))  # On a cluster it is the latter.
    ways = (fence_key, index_key, ran_index_key)
    common = {key(prefix).encode() for key in ways for prefix in prefixes}
    return [
        key
        for client in (server.client() for server in place.servers)
        for key in client.scan_iter(count=1000)
        if key not in common and _has_no_ttl(client, key)
    ]


def _has_no_ttl(client, key):
    try:
        return bool(client.pttl(key) == -1)
    except MovedError:
        return False  # This node has just become a replica. Its master is looked at, too.
