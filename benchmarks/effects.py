"""What a transaction under the fence costs beside a plain one, on each database."""

from __future__ import annotations

import functools
import os
import time
from contextlib import closing, contextmanager
from itertools import count
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from benchmarks.contenders import OURS
from benchmarks.figures import Row, Table, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from benchmarks.bench import Bench

    # What is to be timed, again and again; what a way does in between is not timed.
    Onces = Generator[Callable[[], None], None, None]

NAME = "bench:effects"
WARM_UP = 0.02  # Seconds before anything counts.
# Processes of the database share the cores with us and with others. So many have met nobody.
QUIET = 0.1

names = count()


def measure(bench: Bench) -> list[Table]:
    """Statements, round trips and time of each way to write one row."""
    from benchmarks.databases import databases, version

    if not bench.among([OURS]):
        return []
    bench.contender(OURS)  # It configures Django.
    with databases() as aliases:
        rows: list[Row] = []
        for alias in aliases:
            with connections[alias].schema_editor() as editor:
                editor.create_model(_counter())
            _counter()(pk=1).save(using=alias)
            rows += _rows(alias, version(alias), bench)
    return [Table("Transactions under the fence", rows)]


def _rows(alias: str, database: str, bench: Bench) -> Iterator[Row]:
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for nth in range(bench.effort.rounds):
        for at in range(len(WAYS)):
            # In turn, so that a noisy moment hits all alike.
            way = list(WAYS)[(nth + at) % len(WAYS)]
            _spin(way, alias, WARM_UP)
            samples[way] += _spin(way, alias, bench.effort.effect_seconds)
    for way, taken in samples.items():
        statements, round_trips = _counted(way, alias)
        yield {
            "database": database,
            "one row is written": way,
            "statements": statements,
            "round trips": round_trips,
            "p10 µs": percentile(taken, QUIET) * 1e6,
            "p50 µs": percentile(taken, 0.5) * 1e6,
            "of the plain one": percentile(taken, QUIET) / percentile(samples[BESIDE[way]], QUIET),
        }


def _spin(way: str, alias: str, seconds: float) -> list[float]:
    samples = []
    with closing(WAYS[way](alias)) as onces:
        now = time.perf_counter()
        end = now + seconds
        while now < end:
            once = next(onces)
            before = time.perf_counter()
            once()
            now = time.perf_counter()
            samples.append(now - before)
    return samples


# --- the ways -------------------------------------------------------------------------------------


@functools.cache
def _counter() -> Any:
    """What is written; a model cannot be defined before Django is configured."""
    from django.db.models import IntegerField, Model

    class Counter(Model):  # noqa: DJ008 - nobody looks at it
        number = IntegerField(default=0)

        class Meta:
            app_label = "benchmarks"

    return Counter


def _write(alias: str) -> None:
    _counter().objects.using(alias).filter(pk=1).update(number=1)


def _plain(alias: str) -> Onces:
    def once() -> None:
        with transaction.atomic(alias, durable=True):
            _write(alias)

    while True:
        yield once


def _fenced(alias: str) -> Onces:
    from django_redislock import distributed_lock

    with distributed_lock(NAME) as lease:

        def once() -> None:
            with lease.atomic(alias):
                _write(alias)

        once()  # The first time is another way.
        while True:
            yield once


def _fenced_first(alias: str) -> Onces:
    from django_redislock import distributed_lock

    for number in names:
        with distributed_lock(f"{NAME}:{number}") as lease:

            def once(lease: Any = lease) -> None:
                with lease.atomic(alias):
                    _write(alias)

            yield once


def _locked(alias: str) -> Onces:
    from django_redislock import distributed_lock

    @distributed_lock(NAME)
    def once() -> None:
        with transaction.atomic(alias, durable=True):
            _write(alias)

    while True:
        yield once


def _locked_fenced(alias: str) -> Onces:
    from django_redislock import distributed_lock

    @distributed_lock(NAME, atomic=alias)
    def once() -> None:
        _write(alias)

    once()
    while True:
        yield once


PLAIN = "`transaction.atomic(durable=True)`"
FENCED = "`lease.atomic()`"
FENCED_FIRST = "the same, the first time for a name"
LOCKED = "`@distributed_lock(...)` around the plain one"
LOCKED_FENCED = "`@distributed_lock(..., atomic=True)`"
WAYS: dict[str, Callable[[str], Onces]] = {
    PLAIN: _plain,
    FENCED: _fenced,
    FENCED_FIRST: _fenced_first,
    LOCKED: _locked,
    LOCKED_FENCED: _locked_fenced,
}
BESIDE = dict.fromkeys(WAYS, PLAIN) | {LOCKED: LOCKED, LOCKED_FENCED: LOCKED}


# --- what is sent ---------------------------------------------------------------------------------


def _counted(way: str, alias: str) -> tuple[int, int]:
    """How many statements are given to the database, and how many round trips that takes.

    The beginning and the end of a transaction are no statements here, but cost round trips.
    """
    statements: list[str] = []

    def look(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if not sql.startswith("BEGIN"):
            statements.append(sql)
        return execute(sql, *rest)

    connection = connections[alias]
    with closing(WAYS[way](alias)) as onces:
        once = next(onces)
        with ROUND_TRIPS[connection.vendor](connection) as trips, connection.execute_wrapper(look):
            once()
    return len(statements), trips[0]


@contextmanager
def _none(_: Any) -> Iterator[list[int]]:
    yield [0]  # It is a library.


@contextmanager
def _as_traced(connection: Any) -> Iterator[list[int]]:
    """As libpq has written them down."""
    trips: list[int] = []
    connection.ensure_connection()
    wire = connection.connection.pgconn
    with TemporaryFile() as file:
        wire.trace(file.fileno())
        yield trips
        wire.untrace()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        trips.append(file.read().count(b"ReadyForQuery"))


@contextmanager
def _as_asked(connection: Any) -> Iterator[list[int]]:
    """As the server has counted them."""

    def asked() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SHOW SESSION STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

    trips: list[int] = []
    before = asked()
    yield trips
    trips.append(asked() - before - 1)  # It counts this question too.


ROUND_TRIPS = {"sqlite": _none, "postgresql": _as_traced, "mysql": _as_asked}
