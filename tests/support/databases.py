"""Real databases for tests: a file of SQLite, and servers of this run: PostgreSQL and MariaDB.

    def test_a_draw_is_committed(database): ...

runs on each of them. `database` is an alias that Django knows for the time of the test, with empty
tables; child processes get to know it by ``use(**described(database))``.
"""

import functools
import os
import pwd
import shutil
import signal
import subprocess
import uuid
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.management import call_command
from django.db import connections

from tests.conftest import skip_or_fail
from tests.support.run_servers import RunServer
from tests.support.waiting import HUNG, wait_until

CONNECTIONS = 500  # That a server takes, of all test processes.

SQLITE, POSTGRES, MARIADB = KINDS = ("sqlite", "postgres", "mariadb")

# The isolation levels, by the numbers that PostgreSQL's driver has for them.
LEVELS = {"read committed": 2, "repeatable read": 3, "serializable": 4}

on_sqlite = pytest.mark.parametrize("database_kind", [SQLITE])
on_postgres = pytest.mark.parametrize("database_kind", [POSTGRES])
on_mariadb = pytest.mark.parametrize("database_kind", [MARIADB])
on_servers = pytest.mark.parametrize("database_kind", [POSTGRES, MARIADB])


def use(**databases):
    """Let Django know more databases, by their aliases."""
    if any(one["ENGINE"].endswith(".mysql") for one in databases.values()):
        import pymysql

        pymysql.install_as_MySQLdb()  # It needs no compiler.
    complete = connections.configure_settings({"default": {}, **databases})
    connections.settings.update({alias: complete[alias] for alias in databases})


def described(*aliases):
    """What use() needs in another process, as JSON can carry it."""
    keys = {"ENGINE", "NAME", "HOST", "USER", "OPTIONS"}
    return {
        alias: {key: value for key, value in connections.settings[alias].items() if key in keys}
        for alias in aliases
    }


def router(write, read):
    """For DATABASE_ROUTERS: the alias that all is written to, and the one that is read."""
    return SimpleNamespace(
        db_for_write=lambda model, **hints: write, db_for_read=lambda model, **hints: read
    )


def sqlite(folder, alias):
    """A database in a file, as DATABASES describes one."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(folder / f"{alias}.sqlite3"),
        "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "timeout": 30},
    }


def make_tables(alias, *, migrate=True):
    """Make those of tests/effects and, by the migrations, those of locks."""
    from tests.effects import models

    if migrate:
        call_command("migrate", "django_redislock", database=alias, verbosity=0)
    with connections[alias].schema_editor() as editor:
        for model in models.TABLES:
            editor.create_model(model)


def forget(*aliases):
    """Let Django know these databases no more."""
    for alias in aliases:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def _programs():
    """The folder of PostgreSQL's programs; None if this machine has none."""
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    # Debian keeps them out of the PATH. The wheel's may be where no other user may look.
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(debian, key=lambda path: float(path.parts[-3]), default=None)
    if newest is not None:
        return newest.parent
    spec = find_spec("pgserver")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


class DatabaseServer(RunServer):
    """A server that is reached by a socket in its folder."""

    socket = ""

    def new_database(self):
        """Make an empty database, and return it as DATABASES describes one."""
        name, host = f"test_{uuid.uuid4().hex[:12]}", str(self.folder / self.socket)
        self.run(f"CREATE DATABASE {name}", host)
        engine = f"django.db.backends.{self.engine}"
        return {"ENGINE": engine, "NAME": name, "HOST": host, "USER": self.superuser}


class Postgres(DatabaseServer):
    """PostgreSQL; it refuses to run as root, so then it runs as nobody."""

    name = POSTGRES
    engine, superuser = "postgresql", "postgres"
    ready = "ready to accept connections"
    ended_by = signal.SIGQUIT  # At once; killed, it would leave shared memory behind.

    def user(self):
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def prepare(self):
        if (programs := _programs()) is None:
            skip_or_fail("no PostgreSQL here: pip install pgserver, or apt install postgresql")
        user = self.user()
        if user:
            os.chown(self.folder, user["user"], user["group"])
        data = self.folder / "data"
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        initdb = [programs / "initdb", *options, "--no-sync", "-D", data]
        with (self.folder / "log").open("ab") as log:
            how = {"stdout": log, "stderr": log, "cwd": self.folder, **user}
            subprocess.run(initdb, check=True, timeout=HUNG, **how)
        # No port, no fsync, and connections for all test processes.
        options = ["-k", self.folder, "-h", "", "-F", "-N", CONNECTIONS]
        return [[programs / "postgres", "-D", data, *options]]

    def run(self, sql, host):
        import psycopg

        how = {"dbname": "postgres", "user": self.superuser, "autocommit": True}
        with psycopg.connect(host=host, **how) as connection:
            connection.execute(sql)


class MariaDB(DatabaseServer):
    """MariaDB on an empty folder: without tables of rights, everybody may do everything."""

    name = MARIADB
    engine, superuser, socket = "mysql", "root", "socket"
    ready = "ready for connections"

    def prepare(self):
        # Debian has it in /usr/sbin, which is in the PATH of root alone.
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
        if (program := shutil.which("mariadbd", path=path)) is None:
            skip_or_fail("no MariaDB here: apt install mariadb-server-core")
        (self.folder / "data").mkdir()
        arguments = {
            "datadir": self.folder / "data",
            "socket": self.folder / "socket",
            "pid-file": self.folder / "pid",
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "innodb-flush-log-at-trx-commit": 0,
            "character-set-server": "utf8mb4",
            "max-connections": CONNECTIONS,
        }
        flags = ["--no-defaults", "--skip-networking", "--skip-grant-tables"]
        return [[program, *flags, *(f"--{name}={one}" for name, one in arguments.items())]]

    def run(self, sql, host):
        import pymysql

        with pymysql.connect(unix_socket=host, user=self.superuser) as connection:
            connection.cursor().execute(sql)


@pytest.fixture(scope="session")
def database_servers(run_servers):
    """The server of each kind; each database is of one test alone."""
    kinds = {one.name: one for one in (Postgres, MariaDB)}
    return functools.cache(lambda name: run_servers.get(kinds[name], name))


@pytest.fixture(params=KINDS)
def database_kind(request):
    """Run the test once with each kind of database."""
    return str(request.param)


@pytest.fixture
def make_database(database_kind, database_servers, tmp_path, django_db_blocker):
    """Make databases with the tables of locks and of tests/effects, and tell Django of them."""
    made = []

    def make(alias, *, migrate=True, isolation="", **options):
        if database_kind == SQLITE:
            where = sqlite(tmp_path, alias)
        else:
            where = database_servers(database_kind).new_database()
        if isolation:
            is_number = database_kind == POSTGRES
            options["isolation_level"] = LEVELS[isolation] if is_number else isolation
        use(**{alias: {**where, "OPTIONS": {**where.get("OPTIONS", {}), **options}}})
        made.append(alias)
        make_tables(alias, migrate=migrate)
        return alias

    with django_db_blocker.unblock():
        yield make
        forget(*made)


@pytest.fixture
def database(make_database):
    """The alias of a database with empty tables."""
    return make_database("effects")


@pytest.fixture
def in_threads():
    """Return a function as other threads run it: they leave no connection behind.

    A thread of sync_to_async lives on, and would know the database of an earlier test.
    """

    def leaving_nothing(function):
        def run(*args):
            try:
                return function(*args)
            finally:
                for connection in connections.all(initialized_only=True):
                    connection.close()
                    del connections[connection.alias]

        return run

    return leaving_nothing


def await_blocked(alias):
    """Return once a transaction waits for another one in this database."""
    waiting = {
        # Not pg_stat_activity, which stands still within a transaction. A wait for a row names no
        # database, but its transaction has locked the table.
        "postgresql": """SELECT count(*) FROM pg_locks JOIN pg_locks has USING (pid)
            JOIN pg_database ON oid = has.database
            WHERE NOT pg_locks.granted AND datname = current_database()""",
        "mysql": """SELECT count(*) FROM information_schema.innodb_trx
            JOIN information_schema.processlist ON id = trx_mysql_thread_id
            WHERE trx_state = 'LOCK WAIT' AND db = database()""",
    }

    def blocked():
        with connections[alias].cursor() as cursor:
            cursor.execute(waiting[connections[alias].vendor])
            return bool(cursor.fetchone()[0])

    # MariaDB says the same as before to who asks again within a tenth of a second.
    wait_until(blocked, every=0.2)
