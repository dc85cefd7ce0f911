"""The scripts of our lock without its client: what a client of no weight at all would reach."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
from typing import TYPE_CHECKING, Any, cast

import hiredis

from benchmarks.server import is_request, monitoring

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

WORD = re.compile(rb'"(?:[^"\\]|\\.)*"')  # As MONITOR quotes it.


class ReadyBytes:
    """What one cycle of another contender sends, recorded once, and sent again over one socket."""

    def __init__(self, port: int, recorded: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._port = port
        self._recorded = recorded
        self._locks: dict[str, ReadyBytesLock] = {}

    def lock(self, name: str) -> ReadyBytesLock:
        """See Contender."""
        if name not in self._locks:
            self._locks[name] = ReadyBytesLock(self._port, *self._record(name))
        return self._locks[name]

    alock = lock

    def _record(self, name: str) -> list[bytes]:
        with self._recorded(name):  # The first cycle also connects and loads scripts.
            pass
        with monitoring(self._port) as lines, self._recorded(name):
            pass
        return [_packed(line) for line in lines if is_request(line)]


class ReadyBytesLock:
    """Two commands, ready to be sent."""

    def __init__(self, port: int, acquire: bytes, release: bytes) -> None:
        self._address = "127.0.0.1", port
        self._acquire = acquire
        self._release = release
        self._socket = socket.create_connection(self._address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._exchange: Exchange | None = None

    def __enter__(self) -> None:
        self._ask(self._acquire)

    def __exit__(self, *_: object) -> None:
        self._ask(self._release)

    def _ask(self, command: bytes) -> None:
        self._socket.sendall(command)
        if self._socket.recv(4096).startswith(b"-"):
            raise RuntimeError("A recorded command fails when it is sent again.")

    async def __aenter__(self) -> None:
        if self._exchange is None:
            loop = asyncio.get_running_loop()
            _, self._exchange = await loop.create_connection(Exchange, *self._address)
        await self._exchange.ask(self._acquire)

    async def __aexit__(self, *_: object) -> None:
        await cast("Exchange", self._exchange).ask(self._release)


class Exchange(asyncio.BufferedProtocol):
    """One command at a time, and its reply."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(4096)

    def ask(self, command: bytes) -> asyncio.Future[None]:
        """Send a command; the future is done when its reply is there."""
        self._replied = self._loop.create_future()
        self._transport.write(command)
        return self._replied

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._replied.set_result(None)


def _packed(line: bytes) -> bytes:
    """The command that a line of MONITOR tells of; its escapes are those of Python."""
    words = [ast.literal_eval(f"b{word.decode()}") for word in WORD.findall(line)]
    return cast("bytes", hiredis.pack_command(tuple(words)))
