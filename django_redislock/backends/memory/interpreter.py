"""Runs the scripts in lua/ as a server does: in Lua 5.1, over a keyspace of this process."""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any

from lupa.lua51 import LuaError, LuaRuntime

from django_redislock.backends.memory.keyspace import ReplyError, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_redislock.backends.memory.keyspace import Keyspace
    from django_redislock.rules.scripts import Script

# One crossing of the border for all keys and arguments.
_RUN = b"""
return function(script, keys, ...)
  local all = {...}
  KEYS = { unpack(all, 1, keys) }
  ARGV = { unpack(all, keys + 1) }
  return script()
end
"""


class Interpreter:
    """A Lua with the `redis` that servers give to scripts. Not thread-safe."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        # Lua refers to us weakly: no garbage collector would see the circle through it.
        this = weakref.proxy(self)

        def call(*command: bytes | float) -> Any:
            return this._call(*command)

        def pcall(*command: bytes | float) -> Any:
            return this._pcall(*command)

        self._lua.globals()[b"redis"] = self._lua.table_from(
            {
                b"call": call,
                b"pcall": pcall,
                b"sha1hex": _sha1hex,
                # There are no replicas.
                b"set_repl": lambda which: None,
                b"REPL_NONE": 0,
                b"REPL_ALL": 3,
            }
        )
        self._run = self._lua.execute(_RUN)
        self._compiled: dict[str, Any] = {}  # By SHA.

    def run(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script, and return what a client reads from a server.

        Raises:
            ReplyError: The script answers an error, or has met one. What it wrote before stays, as
                on a server.
        """
        compiled = self._compiled.get(script.sha)
        if compiled is None:
            compiled = self._compiled[script.sha] = self._lua.compile(script.source)
        given = [*map(_sent, keys), *map(_sent, args)]
        try:
            return _answered(self._run(compiled, len(keys), *given))
        except LuaError as error:
            raise ReplyError(f"ERR {error}") from error

    def _call(self, name: bytes, *args: bytes | float) -> Any:
        # A number of Lua's is sent with all its digits.
        texts = [one if isinstance(one, bytes) else b"%.17g" % one for one in args]
        return self._in_lua(self._keyspace.perform(name, *texts))

    def _pcall(self, name: bytes, *args: bytes | float) -> Any:
        try:
            return self._call(name, *args)
        except ReplyError as error:
            return self._lua.table_from({b"err": str(error).encode()})

    def _in_lua(self, reply: Any) -> Any:
        """A reply as Lua sees it."""
        kind = type(reply)
        if kind is bytes or kind is int:
            return reply
        if reply is None:
            return False
        return self._lua.table_from({b"ok": bytes(reply)} if kind is Status else reply)


def _sent(arg: str | bytes | int) -> bytes:
    return arg if isinstance(arg, bytes) else str(arg).encode()


def _sha1hex(text: bytes) -> bytes:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


def _answered(value: Any) -> Any:
    """What a client reads when a script returns this."""
    match value:
        case None | False:
            return None
        case True:
            return 1
        case bytes():
            return value
        case int() | float():
            return int(value)  # As on a server, which cuts off what is behind the point.
    if (error := value[b"err"]) is not None:
        raise ReplyError(error.decode(errors="replace"))
    if (status := value[b"ok"]) is not None:
        return status
    answers: list[Any] = []
    while (one := value[len(answers) + 1]) is not None:  # An array ends with its first nil.
        answers.append(_answered(one))
    return answers
