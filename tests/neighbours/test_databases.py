"""PgBouncer, psycopg's pool, and a router whose reads come from a replica that is behind."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from django_redislock import StaleFence, distributed_lock, single_instance
from tests.effects.conftest import holders, refusal  # noqa: F401 (a fixture)
from tests.effects.models import Counter, Entry, written
from tests.support.databases import on_postgres, router
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.neighbours.bouncers"]
pytest.importorskip("psycopg_pool")

CLIENTS, ROUNDS = 6, 5


def count(database, lock):
    """Read a number and write it one higher; without a lock, some of that would be lost.

    Each round gives its connection back, as the end of a request does.
    """
    for _ in range(ROUNDS):
        with lock as lease, lease.atomic(database):
            counter = Counter.objects.using(database).get()
            counter.value += 1
            counter.save(using=database)
        connections[database].close()


def check_counting(database, in_threads):
    Counter.objects.using(database).create(name="draws")
    connections[database].close()
    lock = distributed_lock("lottery", wait=HUNG)
    with ThreadPoolExecutor(CLIENTS) as threads:
        for one in [threads.submit(in_threads(count), database, lock) for _ in range(CLIENTS)]:
            one.result(HUNG)
    assert Counter.objects.using(database).get().value == CLIENTS * ROUNDS


def test_pgbouncer_no_update_is_lost_by_clients_that_share_two_connections(
    locks, bounced, in_threads
):
    check_counting(bounced, in_threads)
    connections["direct"].close()

    def backends():
        with connections[bounced].cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            )
            return cursor.fetchone()[0]

    wait_until(lambda: backends() <= 2, message="PgBouncer has two connections")


def test_pgbouncer_a_late_holder_is_refused(holders, bounced):  # noqa: F811
    early, late = holders(2)
    with late.atomic(bounced):
        Entry.objects.using(bounced).create(fence=late.fence)
    refusal(early.atomic(bounced), StaleFence)
    assert written("direct") == [late.fence]


def draw(database):
    """A job that writes one line, in the transaction that says it is done."""

    @single_instance("lottery", once="database", atomic=database, on_conflict="wait", wait=HUNG)
    def lottery():
        Entry.objects.using(database).create(fence=0)
        return "drawn"

    return lottery()


def test_pgbouncer_a_job_is_done_once(locks, bounced, in_threads):
    with ThreadPoolExecutor(CLIENTS) as threads:
        runs = [threads.submit(in_threads(draw), bounced) for _ in range(CLIENTS)]
        assert sum(run.result(HUNG) == "drawn" for run in runs) == 1
    assert written("direct") == [0]


@on_postgres
def test_a_pool_of_one_connection_serves_all_holders(locks, make_database, in_threads):
    database = make_database("pooled", pool={"min_size": 1, "max_size": 1, "timeout": HUNG})
    try:
        check_counting(database, in_threads)
        assert draw(database) == "drawn"
        assert draw(database)["skipped"] == "done"
        assert written(database) == [0]
    finally:
        connections[database].close()
        connections[database].close_pool()


@pytest.fixture
def behind(make_database, settings):
    """The alias that takes writes; reads without an alias go to a replica that has seen nothing."""
    settings.DATABASE_ROUTERS = [router("writer", make_database("replica"))]
    return make_database("writer")


@on_postgres
def test_a_stale_replica_hides_neither_a_newer_fence_nor_a_job_that_is_done(
    holders,  # noqa: F811
    behind,
):
    early, late = holders(2)
    with late.atomic(behind):
        Entry.objects.create(fence=late.fence)
    refusal(early.atomic(behind), StaleFence)
    assert Entry.objects.count() == 0, "reads do come from the replica"
    assert written(behind) == [late.fence]


@on_postgres
def test_a_job_that_is_done_is_known_past_a_stale_replica(locks, behind):
    assert draw(behind) == "drawn"
    assert draw(behind)["skipped"] == "done"
    assert written(behind) == [0]
