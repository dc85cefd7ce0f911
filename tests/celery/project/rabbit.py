"""A RabbitMQ server, where the machine has the program."""

import os
import shutil
import uuid
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.support.run_servers import RunServer
from tests.support.servers import free_port


class RabbitMQ(RunServer):
    """A broker on a loopback port, whose queues have names that no other test uses."""

    name = "rabbitmq"
    ready = "Server startup complete"

    @property
    def url(self):
        """The address for Celery."""
        return f"amqp://guest:guest@127.0.0.1:{(self.folder / 'port').read_text()}//"

    def prepare(self):
        # Debian's wrapper in the PATH wants to be another user.
        direct = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
        program = str(direct) if direct.exists() else shutil.which("rabbitmq-server")
        if program is None:
            skip_or_fail("no rabbitmq-server here")
        (self.folder / "port").write_text(str(free_port()))
        # Erlang's port mapper. Started by RabbitMQ it would outlive it.
        mapper = [shutil.which("epmd") or "epmd"]  # On the port that the environment names.
        return [mapper, [program]]

    def environment(self):
        here = str(self.folder)
        return os.environ | {
            "HOME": here,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(free_port()),
            "RABBITMQ_NODENAME": f"tests-{uuid.uuid4().hex[:8]}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": (self.folder / "port").read_text(),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": here,
            "RABBITMQ_LOG_BASE": here,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
        }


@pytest.fixture(scope="session")
def rabbit(run_servers):
    """The RabbitMQ server of this run."""
    return run_servers.get(RabbitMQ, RabbitMQ.name)
