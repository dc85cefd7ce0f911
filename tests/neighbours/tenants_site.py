"""A project of django-tenants and tenant-schemas-celery: each tenant has a schema of PostgreSQL.

``celery -A tests.neighbours.tenants_site worker`` works for it. As a program it makes the tables
and two tenants, ``prepare``; or it calls the task of each, ``send KEY``.
"""

import json
import os
import sys

import django
from celery import signals
from django.conf import settings

settings.configure(
    DATABASES={"default": json.loads(os.environ["TESTS_DATABASE"])},
    DATABASE_ROUTERS=["django_tenants.routers.TenantSyncRouter"],
    SHARED_APPS=["django_tenants", "tests.neighbours.tenants", "django.contrib.contenttypes"],
    TENANT_APPS=["django_redislock"],
    INSTALLED_APPS=[
        "django_tenants",
        "tests.neighbours.tenants",
        "django.contrib.contenttypes",
        "django_redislock",
    ],
    TENANT_MODEL="tenants.Client",
    TENANT_DOMAIN_MODEL="tenants.Domain",
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    REDISLOCK=json.loads(os.environ["TESTS_REDISLOCK"]),
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django_tenants.utils import schema_context  # noqa: E402
from tenant_schemas_celery.app import CeleryApp  # noqa: E402

from django_redislock import single_instance_task  # noqa: E402
from django_redislock.models import CompletedRun  # noqa: E402
from tests.celery.project.journal import note  # noqa: E402
from tests.neighbours.tenants.models import Client  # noqa: E402

TENANTS = "acme", "other"
app = CeleryApp("tenants", broker=os.environ["TESTS_JOURNAL"])
app.conf.broker_transport_options = {"global_keyprefix": os.environ["TESTS_BROKER_PREFIX"]}


@signals.worker_process_init.connect(weak=False)
def _forget_connections(**kwargs):
    connection.close()


def of_tenant(key):
    return f"{key}:{connection.schema_name}"


@single_instance_task(name="draw", key=of_tenant, once="database", atomic=True, on_conflict="retry")
def draw(key):
    """Note in which schema it runs."""
    note(key, "draw", schema=connection.schema_name, done=CompletedRun.objects.count())


def prepare():
    call_command("migrate_schemas", shared=True, run_syncdb=True, verbosity=0)
    for name in TENANTS:
        Client.objects.create(schema_name=name)


def send(key):
    for name in TENANTS:
        with schema_context(name):
            draw.delay(key)


if __name__ == "__main__":
    prepare() if sys.argv[1] == "prepare" else send(sys.argv[2])
