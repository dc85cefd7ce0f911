"""django-tenants and tenant-schemas-celery: a schema of PostgreSQL for each tenant."""

import json
import uuid

import pytest

from django_redislock import distributed_lock, held
from tests.support.databases import described, on_postgres
from tests.support.waiting import wait_until

pytest_plugins = ["tests.neighbours.programs"]
pytest.importorskip("tenant_schemas_celery")

SITE = "tests.neighbours.tenants_site"


@pytest.fixture
def site(program, make_database):
    (database,) = described(make_database("tenants")).values()
    known = {**database, "ENGINE": "django_tenants.postgresql_backend"}
    variables = {
        "TESTS_DATABASE": json.dumps(known),
        "TESTS_BROKER_PREFIX": f"{uuid.uuid4().hex}:",
    }

    def start(*arguments):
        return program(*arguments, **variables)

    assert start(SITE, "prepare").process.wait(60) == 0
    return start


@on_postgres
def test_each_tenant_has_its_lock_and_a_deferred_run_stays_in_its_schema(locks, site, journal):
    worker = site("celery", "-A", SITE, "worker", "--pool", "solo", "--loglevel", "INFO")
    worker.wait_for_log("ready.")
    key = journal.key
    with distributed_lock(f"{key}:acme"):
        assert site(SITE, "send", key).process.wait(60) == 0
        journal.wait_for("draw")
        assert [one["schema"] for one in journal.events("draw")] == ["other"]
        worker.wait_for_log(f"lock '{key}:acme' is busy")
    journal.wait_for("draw", 2)
    assert [one["schema"] for one in journal.events("draw")] == ["other", "acme"]
    assert site(SITE, "send", key).process.wait(60) == 0
    wait_until(
        lambda: worker.log.count("Skipped") == 2, message="both are done, each in its schema"
    )
    assert held.list() == []
