"""The databases that effects are measured on: a file of SQLite, and servers of our own.

None of them waits for the disk, which would take most of the time of every transaction.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from django.core.management import call_command
from django.db import OperationalError, connections

from benchmarks.crew import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

Description = dict[str, Any]  # As DATABASES has it.


@contextmanager
def databases() -> Iterator[list[str]]:
    """Let Django know each kind of database that this machine has; yields their aliases."""
    found: dict[str, Description] = {}
    with ExitStack() as stack:
        for alias, start in KINDS.items():
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
            if described := start(folder, stack):
                found[alias] = described
            else:
                sys.stderr.write(f"effects: {alias} is not installed here, and is left out.\n")
        connections.settings.update(connections.configure_settings({"default": {}, **found}))
        for alias in found:
            stack.callback(connections[alias].close)
            _await(alias)
            call_command("migrate", "django_redislock", database=alias, verbosity=0)
        yield list(found)


def version(alias: str) -> str:
    """What runs there, for people."""
    return f"{alias} {'.'.join(map(str, connections[alias].get_database_version()))}"


def _await(alias: str) -> None:
    """Return when it answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return connections[alias].ensure_connection()
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _sqlite(folder: Path, _: ExitStack) -> Description:
    pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(folder / "bench.sqlite3"),
        "OPTIONS": {"init_command": pragmas, "transaction_mode": "IMMEDIATE"},
    }


def _postgresql(folder: Path, stack: ExitStack) -> Description | None:
    if (programs := _postgresql_programs()) is None:
        return None
    who: dict[str, Any] = {}
    if os.geteuid() == 0:  # Which it refuses to run as.
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    data = folder / "data"
    options = ["--auth=trust", "--username=bench", "--no-sync"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **who}
    subprocess.run([programs / "initdb", *options, "-D", data], check=True, **quiet)
    server = [programs / "postgres", "-D", data, "-k", folder, "-h", "", "-F"]
    stack.enter_context(_running(server, signal.SIGINT, **quiet))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "HOST": str(folder),
        "USER": "bench",
    }


def _postgresql_programs() -> Path | None:
    """Where they are; Debian keeps them out of the PATH, and there is a wheel with them."""
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    if debian := list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        return max(debian, key=lambda path: float(path.parts[-3])).parent
    wheel = find_spec("pgserver")
    return Path(wheel.origin).parent / "pginstall" / "bin" if wheel and wheel.origin else None


def _mariadb(folder: Path, stack: ExitStack) -> Description | None:
    import pymysql  # type: ignore[import-untyped]

    # Debian has it where only root looks.
    program = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return None
    pymysql.install_as_MySQLdb()  # It needs no compiler.
    data, socket = folder / "data", folder / "socket"
    data.mkdir()
    server = [
        *(program, "--no-defaults", "--skip-networking", "--skip-grant-tables"),
        *(f"--datadir={data}", f"--socket={socket}", f"--pid-file={folder / 'pid'}"),
        *("--innodb-flush-log-at-trx-commit=0", f"--user={pwd.getpwuid(os.geteuid()).pw_name}"),
        f"--init-file={folder / 'init.sql'}",
    ]
    (folder / "init.sql").write_text("CREATE DATABASE bench;\n")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    stack.enter_context(_running(server, signal.SIGTERM, **quiet))
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "bench",
        "HOST": str(socket),
        "USER": "root",
    }


@contextmanager
def _running(command: list[Any], last_signal: signal.Signals, **how: Any) -> Iterator[None]:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **how)
    try:
        yield
    finally:
        server.send_signal(last_signal)
        try:
            server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


KINDS = {"SQLite": _sqlite, "PostgreSQL": _postgresql, "MariaDB": _mariadb}
