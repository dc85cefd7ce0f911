"""Two real databases with a table of orders each, for what locks and transactions do together.

They are files of SQLite. Each thread has connections of its own, as with any other database; but
there is one writer at a time, and who finds it locked is told so at once.
"""

import pytest
from django.db import connections

from tests.support.ways import in_thread

SHOP, AUDIT = "shop", "audit"


class OnPurpose(Exception):
    """What a transaction is rolled back by."""


@pytest.fixture
def databases(tmp_path, django_db_blocker):
    """Two databases more than the settings have, without any orders."""
    with django_db_blocker.unblock():
        for alias in (SHOP, AUDIT):
            own = {"NAME": str(tmp_path / f"{alias}.sqlite3"), "OPTIONS": {"timeout": 0}}
            connections.settings[alias] = {**connections.settings["default"], **own}
            with connections[alias].cursor() as cursor:
                cursor.execute("PRAGMA journal_mode=wal")
                cursor.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        yield
        close_connections()
        for alias in (SHOP, AUDIT):
            del connections[alias], connections.settings[alias]


def close_connections():
    for alias in (SHOP, AUDIT):
        connections[alias].close()


def orders():
    """How many orders there are in the shop."""
    with connections[SHOP].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM orders")
        return int(cursor.fetchone()[0])


def order():
    with connections[SHOP].cursor() as cursor:
        cursor.execute("INSERT INTO orders DEFAULT VALUES")


def in_thread_of_its_own(function):
    """Call *function* in a new thread, and close its connections then."""

    def call():
        try:
            return function()
        finally:
            close_connections()

    return in_thread(call)
