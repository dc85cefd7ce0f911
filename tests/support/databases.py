"""Real databases for tests: a file of SQLite, and servers of our own: PostgreSQL and MariaDB.

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
from abc import ABC, abstractmethod
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

SQLITE, POSTGRES, MARIADB = KINDS = ("sqlite", "postgres", "mariadb")

# The isolation levels, by the numbers that PostgreSQL's driver has for them.
LEVELS = {"read committed": 2, "repeatable read": 3, "serializable": 4}

on_sqlite = pytest.mark.parametrize("database_kind", [SQLITE])
on_postgres = pytest.mark.parametrize("database_kind", [POSTGRES])
on_mariadb = pytest.mark.parametrize("database_kind", [MARIADB])
on_servers = pytest.mark.parametrize("database_kind", [POSTGRES, MARIADB])


class MakeDatabase(Protocol):
    """The type of the fixture `make_database`."""

    def __call__(
        self, alias: str, *, migrate: bool = True, isolation: str = "", **options: Any
    ) -> str: ...


def use(**databases: dict[str, Any]) -> None:
    """Let Django know more databases, by their aliases."""
    if any(one["ENGINE"].endswith(".mysql") for one in databases.values()):
        import pymysql

        pymysql.install_as_MySQLdb()  # It needs no compiler.
    complete = connections.configure_settings({"default": {}, **databases})
    connections.settings.update({alias: complete[alias] for alias in databases})


def described(*aliases: str) -> dict[str, dict[str, Any]]:
    """What use() needs in another process, as JSON can carry it."""
    keys = {"ENGINE", "NAME", "HOST", "USER", "OPTIONS"}
    return {
        alias: {key: value for key, value in connections.settings[alias].items() if key in keys}
        for alias in aliases
    }


def sqlite(folder: Path, alias: str) -> dict[str, Any]:
    """A database in a file, as DATABASES describes one."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(folder / f"{alias}.sqlite3"),
        "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL", "timeout": 30},
    }


def make_tables(alias: str, *, migrate: bool = True) -> None:
    """Make those of tests/effects and, by the migrations, those of locks."""
    from tests.effects import models

    if migrate:
        call_command("migrate", "django_redislock", database=alias, verbosity=0)
    with connections[alias].schema_editor() as editor:
        for model in models.TABLES:
            editor.create_model(model)


def forget(*aliases: str) -> None:
    """Let Django know these databases no more."""
    for alias in aliases:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


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


class DatabaseServer(ABC):
    """A server in a folder of its own, reached by a socket in it."""

    name: str

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redislock-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """All that the server wrote."""
        return (self.folder / "log").read_text(errors="replace")

    @abstractmethod
    def start(self) -> None:
        """Start, and return when it answers."""

    @abstractmethod
    def new_database(self) -> dict[str, Any]:
        """Make an empty database, and return it as DATABASES describes one."""

    def close(self) -> None:
        """End it, and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if self.name == POSTGRES else signal.SIGTERM)
            try:
                self._process.wait(HUNG)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(HUNG)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self, command: list[Any], ready: str, **how: Any) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                tied_to_us([str(one) for one in command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for the tests, which then end their servers.
                **how,
            )

        def is_ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            return ready in self.log

        wait_until(is_ready, message=f"{self.name} answers")


class Postgres(DatabaseServer):
    """PostgreSQL; it refuses to run as root, so then it runs as nobody."""

    name = POSTGRES

    def __init__(self, programs: Path) -> None:
        super().__init__()
        self._programs = programs
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    def start(self) -> None:
        data = self.folder / "data"
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        initdb = [self._programs / "initdb", *options, "--no-sync", "-D", data]
        with (self.folder / "log").open("ab") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": self.folder, **self._as}
            subprocess.run(initdb, check=True, timeout=HUNG, **how)
        # No port, and no fsync.
        command = [self._programs / "postgres", "-D", data, "-k", self.folder, "-h", "", "-F"]
        self._launch(command, "ready to accept connections", **self._as)

    def new_database(self) -> dict[str, Any]:
        import psycopg

        name = f"test_{uuid.uuid4().hex[:12]}"
        how = {"host": str(self.folder), "user": "postgres"}
        with psycopg.connect(dbname="postgres", autocommit=True, **how) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        engine = "django.db.backends.postgresql"
        return {"ENGINE": engine, "NAME": name, "HOST": str(self.folder), "USER": "postgres"}


class MariaDB(DatabaseServer):
    """MariaDB on an empty folder: without tables of rights, everybody may do everything."""

    name = MARIADB

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def start(self) -> None:
        (self.folder / "data").mkdir()
        arguments = {
            "datadir": self.folder / "data",
            "socket": self.folder / "socket",
            "pid-file": self.folder / "pid",
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "innodb-flush-log-at-trx-commit": 0,
            "character-set-server": "utf8mb4",
        }
        flags = ["--no-defaults", "--skip-networking", "--skip-grant-tables"]
        command = [self._program, *flags, *(f"--{name}={one}" for name, one in arguments.items())]
        self._launch(command, "ready for connections")

    def new_database(self) -> dict[str, Any]:
        import pymysql

        name = f"test_{uuid.uuid4().hex[:12]}"
        socket = str(self.folder / "socket")
        with pymysql.connect(unix_socket=socket, user="root") as connection:
            connection.cursor().execute(f"CREATE DATABASE {name}")
        engine = "django.db.backends.mysql"
        return {"ENGINE": engine, "NAME": name, "HOST": socket, "USER": "root"}


def _server(kind: str) -> DatabaseServer:
    if kind == POSTGRES:
        if (programs := _programs()) is None:
            skip_or_fail("no PostgreSQL here: pip install pgserver, or apt install postgresql")
        return Postgres(programs)
    # Debian has it in /usr/sbin, which is in the PATH of root alone.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if (program := shutil.which("mariadbd", path=path)) is None:
        skip_or_fail("no MariaDB here: apt install mariadb-server-core")
    return MariaDB(program)


@pytest.fixture(scope="session")
def database_servers() -> Iterator[Callable[[str], DatabaseServer]]:
    """One server of each kind for the whole run (of an xdist worker), once it is asked for."""
    servers: dict[str, DatabaseServer] = {}

    def get(kind: str) -> DatabaseServer:
        if kind not in servers:
            server = _server(kind)
            try:
                server.start()
            except BaseException:
                server.close()
                raise
            servers[kind] = server
        return servers[kind]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture(params=KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """Run the test once with each kind of database."""
    return str(request.param)


@pytest.fixture
def make_database(
    database_kind: str,
    database_servers: Callable[[str], DatabaseServer],
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[MakeDatabase]:
    """Make databases with the tables of locks and of tests/effects, and tell Django of them."""
    made: list[str] = []

    def make(alias: str, *, migrate: bool = True, isolation: str = "", **options: Any) -> str:
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
    """Return once a transaction of this server waits for another one."""
    waiting = {
        # Not pg_stat_activity, which stands still within a transaction.
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT count(*) FROM information_schema.innodb_lock_waits",
    }

    def blocked() -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute(waiting[connections[alias].vendor])
            return bool(cursor.fetchone()[0])

    # MariaDB says the same as before to who asks again within a tenth of a second.
    wait_until(blocked, every=0.2)
