"""Runs the scripts in lua/ as a server does: in Lua 5.1, over a keyspace of this process."""

from __future__ import annotations

from copy import copy
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis
from lupa.lua51 import LuaRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.rules.scripts import Script

_KEYSPACE = (resources.files("django_redislock.backends.memory") / "keyspace.lua").read_bytes()
_PERFORM = b"return redis.call(unpack(ARGV))"
_ALONE = b"local act = ... return act()"


class ReplyError(Exception):
    """A server's error reply."""


class Key(NamedTuple):
    """One key, with all that is in it."""

    name: bytes
    kind: bytes  # As TYPE says.
    ends: int | None  # When it expires, in ms.
    content: bytes | list[bytes]  # Of a hash pairs, as HGETALL has them; of a sorted set as well.


class Interpreter:
    """What a server keeps, and the Lua that runs scripts on it; shared by all threads.

    A script is one call, which no Python code interrupts. The only mutex is that of Lua, which Lua
    holds during such a call.
    """

    def __init__(self) -> None:
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        server = self._lua.execute(_KEYSPACE)
        self._run = server[b"run"]
        self._dump = server[b"dump"]
        self.listen = server[b"listen"]
        self.stop_listening = server[b"stop_listening"]
        self.clear = server[b"clear"]
        self.commands = frozenset(server[b"commands"].values())
        self._compiled: dict[str, Any] = {}  # By SHA.
        self._perform = self._lua.compile(_PERFORM)
        self._alone = self._lua.compile(_ALONE)

    def run(
        self, script: Script, us: int, keys: Sequence[str], args: Sequence[str | bytes | int]
    ) -> tuple[Any, list[bytes]]:
        """Run a script at a time in microseconds.

        Returns the reply that a client reads, and the messages on channels with a listener:
        channel, message, channel, message, …

        Raises:
            ReplyError: The script answers an error, or has met one. As on a server, its writes
                before that stay.
        """
        compiled = self._compiled.get(script.sha)
        if compiled is None:
            compiled = self._compiled[script.sha] = self._lua.compile(script.source)
        return self._answered(compiled, us, keys, args)

    def perform(self, *command: str | bytes | int, us: int = 0) -> Any:
        """Run one command; see run()."""
        return self._answered(self._perform, us, (), command)[0]

    def alone(self, act: Callable[[], float]) -> float:
        """Call *act*, which may run scripts. Scripts of other threads wait until it returns.

        *act* must wait for no other thread. Returns its result.
        """
        seconds: float = self._alone(act)  # Lua keeps its mutex while it calls Python.
        return seconds

    def every_key(self) -> list[Key]:
        """All keys."""
        found: list[list[Any]] = _read(self._dump())
        return [
            Key(name, kind, int(ends) if ends else None, rest) for name, kind, ends, rest in found
        ]

    def _answered(
        self, compiled: Any, us: int, keys: Sequence[str], args: Sequence[str | bytes | int]
    ) -> tuple[Any, list[bytes]]:
        given = [*map(_sent, keys), *map(_sent, args)]
        answer, rings = _read(self._run(compiled, us, len(keys), *given))
        if isinstance(answer, ReplyError):
            raise copy(answer)  # Else the frame and the error would refer to each other.
        return answer, rings


def _read(reply: bytes) -> Any:
    reader = hiredis.Reader(replyError=ReplyError)
    reader.feed(reply)
    return reader.gets()


def _sent(arg: str | bytes | int) -> bytes:
    return arg if isinstance(arg, bytes) else str(arg).encode()
