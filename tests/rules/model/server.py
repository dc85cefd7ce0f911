"""The server of the model: the scripts that ship, run over what was kept before.

What a script does follows from what is kept, its arguments, the time and who is subscribed. Each
such case is run once, in Lua, and then remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from django_redislock.backends.memory.interpreter import Interpreter, Key
from django_redislock.rules.keys import lock_keys

INDEXES = {"held", "ran"}  # They are for listings only, and so no part of what is kept.


class Lease(NamedTuple):
    """The value of the lock key, see lua/_lease.lua, and when the key expires."""

    value: bytes
    ends: int | None  # ms

    @property
    def token(self):
        return self.value[:32].decode()

    @property
    def id(self):
        return self.value[39:55].decode()

    @property
    def is_pause(self):
        return self.value.startswith(b"hold")

    @property
    def is_unconfirmed(self):
        return self.value[32:33] == b"c"

    @property
    def waits_for_baton(self):
        """Whether whoever has the baton may take it up."""
        return self.is_unconfirmed and self.value.split(b"|")[5] == b"baton:"

    @property
    def fence(self):
        return int(self.value.split(b"|")[1])

    @property
    def confirm_by(self):
        """Until when it can be confirmed, in ms; 0 if nobody has to."""
        return int(self.value.split(b"|")[4])


@dataclass(frozen=True, eq=False)
class Kept:
    """All that the server keeps at one moment. The same content is always the same object."""

    entries: tuple[Key, ...]
    leases: tuple[Lease | None, ...]  # Of each permit, from the first on.
    queue: tuple[str, ...]  # Tokens of the waiters.


class Ran(NamedTuple):
    """What became of a script."""

    kept: Kept
    answer: Any
    rung: tuple[tuple[str, tuple[str, ...]], ...]  # Channels, and the words said on them.


class Server:
    """Runs scripts on the lock *name*; some *instead* of those that it is asked for."""

    def __init__(self, name, instead, permits):
        self._keys = lock_keys("model", name)
        self._locks = [self._keys.of_permit(number).lock for number in range(1, permits + 1)]
        self._indexes = {getattr(self._keys, key) for key in INDEXES}
        self._instead = instead
        self._interpreter = Interpreter()
        self._known = {}
        self._ran = {}
        self.empty = self._keep(())

    def run(self, kept, script, args, us, subscribed, permit=1):
        """Run a script at server time *us*; on the channels *subscribed* somebody is heard."""
        case = kept, script, args, us, subscribed, permit
        if case not in self._ran:
            self._ran[case] = self._run(*case)
        return self._ran[case]

    def at(self, kept, us):
        """What is left of it by then."""
        there = tuple(one for one in kept.entries if one.ends is None or one.ends >= us // 1000)
        return kept if there == kept.entries else self._keep(there)

    def _run(self, kept, script, args, us, subscribed, permit):
        server = self._interpreter
        server.clear()
        for key in kept.entries:
            for command in writing(key):
                server.perform(*command)
        for channel in subscribed:
            server.listen(channel.encode())
        script = self._instead.get(script, script)
        keys = script.given(self._keys.of_permit(permit))
        answer, rings = server.run(script, us, keys, args)
        for channel in subscribed:
            server.stop_listening(channel.encode())
        rung = [
            (channel.decode(), tuple(message.decode().split()))
            for channel, message in zip(rings[::2], rings[1::2], strict=True)
        ]
        entries = sorted(
            key._replace(content=_frozen(key.content))
            for key in server.every_key()
            if key.name.decode() not in self._indexes
        )
        return Ran(self._keep(tuple(entries)), _frozen(answer), tuple(rung))

    def _keep(self, entries):
        if entries not in self._known:
            by_key = {entry.name.decode(): entry for entry in entries}
            locks, queue = map(by_key.get, self._locks), by_key.get(self._keys.queue)
            self._known[entries] = Kept(
                entries,
                tuple(lock and Lease(lock.content, lock.ends) for lock in locks),
                # Of each waiter its token, the score of that, its record, and the score of that.
                tuple(token.decode() for token in queue.content[::4]) if queue else (),
            )
        return self._known[entries]


def writing(key):
    """Those that write a key, while the clock of the server is at 0."""
    name, content = key.name, key.content
    match key.kind:
        case b"string":
            yield "SET", name, content
        case b"list":
            yield "RPUSH", name, *content
        case b"hash":
            for field, value in zip(content[::2], content[1::2], strict=True):
                yield "HSET", name, field, value
        case b"zset":
            for member, score in zip(content[::2], content[1::2], strict=True):
                yield "ZADD", name, score, member
    if key.ends is not None:
        yield "PEXPIRE", name, key.ends


def _frozen(value):
    return tuple(value) if isinstance(value, list) else value
