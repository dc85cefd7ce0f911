"""Real databases for tests: a file of SQLite, and a PostgreSQL server of our own.

    def test_a_draw_is_committed(database): ...

runs on each of them. `database` is an alias that Django knows for the time of the test, with empty
tables; child processes get to know it by ``use(**described(database))``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from django.core.management import call_command
from django.db import connections

from tests.conftest import skip_or_fail
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_django import DjangoDbBlocker

SQLITE = "sqlite"
POSTGRES = "postgres"
KINDS = (SQLITE, POSTGRES)

# What PostgreSQL calls them, by the number that its driver has for each.
READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE = 2, 3, 4

on_postgres = pytest.mark.parametrize("database_kind", [POSTGRES])
on_sqlite = pytest.mark.parametrize("database_kind", [SQLITE])


class MakeDatabase(Protocol):
    """The type of the fixture `make_database`."""

    def __call__(self, alias: str, *, migrate: bool = True, **options: Any) -> str: ...


def use(**databases: dict[str, Any]) -> None:
    """Let Django know more databases, by their aliases."""
    complete = connections.configure_settings({"default": {}, **databases})
    connections.settings.update({alias: complete[alias] for alias in databases})


def described(*aliases: str) -> dict[str, dict[str, Any]]:
    """What use() needs in another process, as JSON can carry it."""
    keys = {"ENGINE", "NAME", "HOST", "USER", "OPTIONS"}
    return {
        alias: {key: value for key, value in connections.settings[alias].items() if key in keys}
        for alias in aliases
    }


def _programs() -> Path | None:
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


class Postgres:
    """A PostgreSQL server in a folder of its own, reached by a socket in it.

    It refuses to run as root, so then it runs as nobody.
    """

    def __init__(self, programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redislock-"))
        self._programs = programs
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that the server wrote."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Make the files, start, and return when it answers."""
        data = self.folder / "data"
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        with (self.folder / "log").open("ab") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": self.folder, **self._as}
            initdb = [self._programs / "initdb", *options, "--no-sync", "-D", data]
            subprocess.run(initdb, check=True, timeout=HUNG, **how)
            arguments = ["-D", data, "-k", self.folder, "-h", "", "-F"]  # -F: no fsync.
            self._process = subprocess.Popen(
                tied_to_us([str(one) for one in (self._programs / "postgres", *arguments)]),
                start_new_session=True,
                **how,
            )

        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            return "ready to accept connections" in self.log

        wait_until(ready, message="PostgreSQL answers")

    def new_database(self) -> dict[str, Any]:
        """Make an empty database, and return it as DATABASES describes one."""
        import psycopg

        name = f"test_{uuid.uuid4().hex[:12]}"
        how = {"host": str(self.folder), "user": "postgres"}
        with psycopg.connect(dbname="postgres", autocommit=True, **how) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "HOST": str(self.folder),
            "USER": "postgres",
        }

    def close(self) -> None:
        """End it, whoever is still connected, and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # "Fast": it does not wait for clients.
            try:
                self._process.wait(HUNG)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(HUNG)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for the whole run (of an xdist worker), started when first asked for."""
    programs = _programs()
    if programs is None:
        skip_or_fail("no PostgreSQL here: pip install pgserver, or apt-get install postgresql")
    assert programs is not None
    server = Postgres(programs)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """Run the test once with SQLite and once with PostgreSQL."""
    return str(request.param)


@pytest.fixture
def make_database(
    database_kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[MakeDatabase]:
    """Make databases with the tables of locks and of tests/effects, and tell Django of them."""
    made: list[str] = []

    def make(alias: str, *, migrate: bool = True, **options: Any) -> str:
        if database_kind == POSTGRES:
            server: Postgres = request.getfixturevalue("postgres")
            use(**{alias: {**server.new_database(), "OPTIONS": options}})
        else:
            options = {"init_command": "PRAGMA journal_mode=WAL", "timeout": 30, **options}
            path = str(tmp_path / f"{alias}.sqlite3")
            engine = "django.db.backends.sqlite3"
            use(**{alias: {"ENGINE": engine, "NAME": path, "OPTIONS": options}})
        made.append(alias)
        if migrate:
            call_command("migrate", "django_redislock", database=alias, verbosity=0)
        _make_tables(alias)
        return alias

    with django_db_blocker.unblock():
        yield make
        for alias in made:
            connections[alias].close()
            del connections[alias]
            del connections.settings[alias]


@pytest.fixture
def database(make_database: MakeDatabase) -> str:
    """The alias of a database with empty tables."""
    return make_database("effects")


@pytest.fixture
def in_threads() -> Callable[..., Any]:
    """Return a function as other threads run it: they leave no connection behind.

    A thread of sync_to_async lives on, and would know the database of an earlier test.
    """

    def leaving_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                return function(*args)
            finally:
                for connection in connections.all(initialized_only=True):
                    connection.close()
                    del connections[connection.alias]

        return run

    return leaving_nothing


def await_blocked(alias: str) -> None:
    """Return once a transaction of this PostgreSQL waits for another one."""

    def blocked() -> bool:
        with connections[alias].cursor() as cursor:
            # Not pg_stat_activity, which stands still within a transaction.
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    wait_until(blocked)


def _make_tables(alias: str) -> None:
    from tests.effects import models

    with connections[alias].schema_editor() as editor:
        for model in (models.Counter, models.Entry, models.Report, models.Unfenced):
            editor.create_model(model)
