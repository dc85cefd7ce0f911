"""A RabbitMQ server of our own, where the machine has the program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.support.servers import free_port, tied_to_us
from tests.support.waiting import HUNG, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


def program() -> str | None:
    """The server's program. Debian's wrapper in the PATH wants to be another user."""
    direct = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    return str(direct) if direct.exists() else shutil.which("rabbitmq-server")


class RabbitMQ:
    """A broker on a loopback port; all its files are in a directory of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        self.port = free_port()
        node = f"tests-{uuid.uuid4().hex[:8]}@localhost"
        environment = os.environ | {
            "HOME": str(self._folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(free_port()),
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self._folder),
            "RABBITMQ_LOG_BASE": str(self._folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(self._folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
        }
        command = program()
        assert command is not None
        self._log = (self._folder / "log").open("wb")
        self._environment = environment
        self.process = subprocess.Popen(
            tied_to_us([command]),
            env=environment,
            cwd=self._folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        """The address for Celery."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def wait_ready(self, timeout: float = HUNG) -> Self:
        """Return when it takes connections."""
        log = self._folder / "log"

        def ready() -> bool:
            text = log.read_text(errors="replace")
            assert self.process.poll() is None, f"RabbitMQ ended\n{text}"
            return "Server startup complete" in text

        wait_until(ready, timeout, "RabbitMQ is ready", every=0.1)
        return self

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(HUNG)
        # The port mapper that Erlang has started beside it, on a port of our own.
        # It does not end before it has noticed that the server is gone.
        wait_until(self._port_mapper_ended, message="epmd has ended", every=0.1)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _port_mapper_ended(self) -> bool:
        epmd = shutil.which("epmd")
        if epmd is None:
            return True
        asked = subprocess.run(
            [epmd, "-kill"], env=self._environment, capture_output=True, text=True, check=False
        )
        return "Killed" in asked.stdout or "Cannot connect" in asked.stdout + asked.stderr


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitMQ]:
    """A RabbitMQ server."""
    if program() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI needs rabbitmq-server")
        pytest.skip("no rabbitmq-server here")
    with RabbitMQ() as rabbit:
        yield rabbit
