"""The server of the model: the scripts that ship, run over what was kept before.

What a script does follows from what is kept, its arguments, the time and who is subscribed. Each
such case is run once, in Lua, and then remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_redislock.backends.memory.interpreter import Interpreter
from django_redislock.backends.memory.keyspace import Keyspace, SortedSet
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.scripts import Script

# As on a cluster, where scripts do without them; they are for listings only.
INDEXES = {"held", "ran"}


class Lease(NamedTuple):
    """The value of the lock key, see lua/_lease.lua, and when the key expires."""

    value: bytes
    ends: int | None  # ms

    @property
    def token(self) -> str:
        return self.value[:32].decode()

    @property
    def is_claim(self) -> bool:
        return self.value[32:33] == b"c"

    @property
    def fence(self) -> int:
        return int(self.value.split(b"|")[1])

    @property
    def claim(self) -> int:
        """Until when a claim can be confirmed, in ms."""
        return int(self.value.split(b"|")[4])


class Entry(NamedTuple):
    """One key of the server."""

    key: bytes
    kind: type
    content: Any  # Immutable.
    ends: int | None  # ms


@dataclass(frozen=True, eq=False)
class Kept:
    """All that the server keeps at one moment. The same content is always the same object."""

    entries: tuple[Entry, ...]
    lease: Lease | None
    queue: tuple[str, ...]  # Tokens of the waiters.


class Ran(NamedTuple):
    """What became of a script."""

    kept: Kept
    answer: Any
    rung: tuple[tuple[str, tuple[str, ...]], ...]  # Channels, and the words said on them.


class Server:
    """Runs scripts on the lock *name*; some *instead* of those that it is asked for."""

    def __init__(self, name: str, instead: Mapping[Script, Script]) -> None:
        self._keys = lock_keys("model", name)
        self._instead = instead
        self._keyspace = Keyspace(self._publish)
        self._interpreter = Interpreter(self._keyspace)
        self._known: dict[tuple[Entry, ...], Kept] = {}
        self._ran: dict[tuple[Any, ...], Ran] = {}
        self._subscribed: frozenset[str] = frozenset()
        self._rung: list[tuple[str, tuple[str, ...]]] = []
        self.empty = self._keep(())

    def run(
        self,
        kept: Kept,
        script: Script,
        args: tuple[Any, ...],
        us: int,
        subscribed: frozenset[str],
    ) -> Ran:
        """Run a script at server time *us*; on the channels *subscribed* somebody is heard."""
        case = kept, script, args, us, subscribed
        if case not in self._ran:
            self._ran[case] = self._run(*case)
        return self._ran[case]

    def at(self, kept: Kept, us: int) -> Kept:
        """What is left of it by then."""
        there = tuple(one for one in kept.entries if one.ends is None or one.ends >= us // 1000)
        return kept if there == kept.entries else self._keep(there)

    def _run(
        self,
        kept: Kept,
        script: Script,
        args: tuple[Any, ...],
        us: int,
        subscribed: frozenset[str],
    ) -> Ran:
        keyspace = self._keyspace
        keyspace.us, self._subscribed, self._rung = us, subscribed, []
        keyspace.values = {
            one.key: one.content if one.kind is bytes else one.kind(one.content)
            for one in kept.entries
        }
        keyspace.ends = {one.key: one.ends for one in kept.entries if one.ends is not None}
        script = self._instead.get(script, script)
        keys = [getattr(self._keys, key) for key in script.keys if key not in INDEXES]
        answer = self._interpreter.run(script, keys, args)
        entries = sorted(
            Entry(key, type(value), _frozen(value), keyspace.ends.get(key))
            for key, value in keyspace.values.items()
        )
        return Ran(self._keep(tuple(entries)), _frozen(answer), tuple(self._rung))

    def _keep(self, entries: tuple[Entry, ...]) -> Kept:
        if entries not in self._known:
            by_key = {entry.key.decode(): entry for entry in entries}
            lock, queue = by_key.get(self._keys.lock), by_key.get(self._keys.queue)
            self._known[entries] = Kept(
                entries,
                Lease(lock.content, lock.ends) if lock else None,
                tuple(member.decode() for member, _ in queue.content) if queue else (),
            )
        return self._known[entries]

    def _publish(self, channel: bytes, message: bytes) -> int:
        if channel.decode() not in self._subscribed:
            return 0
        self._rung.append((channel.decode(), tuple(message.decode().split())))
        return 1


def _frozen(value: Any) -> Any:
    if isinstance(value, SortedSet):
        return tuple(sorted(value.items()))
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value
