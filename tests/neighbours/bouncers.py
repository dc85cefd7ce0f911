"""PgBouncer in transaction mode, in front of the PostgreSQL of the run."""

import os
import shutil
import signal
from functools import partial

import pytest

from tests.conftest import skip_or_fail
from tests.support.databases import POSTGRES, Postgres, forget, make_tables, use
from tests.support.run_servers import RunServer

CONNECTIONS = 2  # To the server, for all clients of a database.


class PgBouncer(RunServer):
    """It refuses to run as root, as PostgreSQL does."""

    name = "pgbouncer"
    ready = "process up"
    ended_by = signal.SIGQUIT
    user = Postgres.user

    def __init__(self, postgres, folder):
        super().__init__(folder)
        self._postgres = postgres

    def prepare(self):
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
        if (program := shutil.which("pgbouncer", path=path)) is None:
            skip_or_fail("no PgBouncer here: apt install pgbouncer")
        if user := self.user():
            os.chown(self.folder, user["user"], user["group"])
        settings = {
            "unix_socket_dir": self.folder,
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": CONNECTIONS,
        }
        (self.folder / "ini").write_text(
            f"[databases]\n* = host={self._postgres.folder} user=postgres\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in settings.items())
        )
        return [[program, self.folder / "ini"]]


@pytest.fixture
def bounced(database_servers, run_servers, django_db_blocker):
    """The alias of a database behind PgBouncer; "direct" is the same one without it."""
    postgres = database_servers(POSTGRES)
    bouncer = run_servers.get(partial(PgBouncer, postgres), PgBouncer.name)
    where = postgres.new_database()
    past = {**where, "HOST": str(bouncer.folder), "PORT": "6432"}
    use(direct=where, bounced={**past, "DISABLE_SERVER_SIDE_CURSORS": True})
    with django_db_blocker.unblock():
        make_tables("direct")
        yield "bounced"
        forget("bounced", "direct")
