"""What a server keeps, and the commands on it: those that lua/*.lua use, and no others.

They take bytes, as a server does, and return what it gives to Lua; only nil is None here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Reply = int | bytes | list[bytes] | None


class ReplyError(Exception):
    """A server's error reply."""


class Status(bytes):
    """A reply such as OK, which Lua sees as a table with the field `ok`."""

    __slots__ = ()


class SortedSet(dict[bytes, float]):
    """Members and their scores; put in order when somebody asks for it."""


class Stream(list[bytes]):
    """Only asked for its length: nobody here can make one."""


OK = Status(b"OK")
WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
_TYPES: dict[type[Any], bytes] = {
    bytes: b"string",
    list: b"list",
    set: b"set",
    SortedSet: b"zset",
    dict: b"hash",
    Stream: b"stream",
}

Value = TypeVar("Value", bytes, list[bytes], set[bytes], SortedSet, dict[bytes, bytes], Stream)


class Keyspace:
    """The methods in capitals are commands. Not thread-safe.

    Attributes:
        us: What its clock shows, in microseconds; whoever runs commands sets it.
        values: What each key holds, one Python type for each of Redis.
        ends: When keys expire, in milliseconds, for those that do. An expired key stays in both
            until a command meets it.
    """

    def __init__(self, publish: Callable[[bytes, bytes], int]) -> None:
        """*publish* rings a channel, and returns how many heard it."""
        self.us = 0
        self.values: dict[bytes, Any] = {}
        self.ends: dict[bytes, int] = {}
        self._publish = publish

    def perform(self, name: bytes, *args: bytes) -> Reply:
        """Run one command.

        Raises:
            ReplyError: What a server's error reply would say.
        """
        command = COMMANDS.get(name)
        if command is None:
            raise ReplyError(f"ERR unknown command {name.decode(errors='replace')!r}")
        return command(self, *args)

    # --- keys and their expiry --------------------------------------------------------------------

    def DEL(self, key: bytes) -> int:
        there = self._find(key) is not None
        self._drop(key)
        return int(there)

    def EXISTS(self, key: bytes) -> int:
        return int(self._find(key) is not None)

    def TYPE(self, key: bytes) -> Status:
        return Status(_TYPES.get(type(self._find(key)), b"none"))

    def PEXPIRE(self, key: bytes, ms: bytes, condition: bytes = b"") -> int:
        end = self.us // 1000 + _integer(ms)
        if self._find(key) is None or (
            condition == b"GT" and end <= self.ends.get(key, math.inf)  # None at all is the latest.
        ):
            return 0
        self.ends[key] = end
        if end <= self.us // 1000:
            self._drop(key)
        return 1

    def PTTL(self, key: bytes) -> int:
        if self._find(key) is None:
            return -2
        return self.ends[key] - self.us // 1000 if key in self.ends else -1

    # --- strings ----------------------------------------------------------------------------------

    def GET(self, key: bytes) -> bytes | None:
        return self._get(key, bytes)

    def SET(self, key: bytes, value: bytes, *options: bytes) -> Status:
        end = None
        if b"PX" in options:
            ms = _integer(options[options.index(b"PX") + 1])
            if ms <= 0:
                raise ReplyError("ERR invalid expire time in 'set' command")
            end = self.us // 1000 + ms
        self._drop(key)
        self.values[key] = value
        if end is not None:
            self.ends[key] = end
        return OK

    def STRLEN(self, key: bytes) -> int:
        return len(self._get(key, bytes) or b"")

    def GETRANGE(self, key: bytes, start: bytes, stop: bytes) -> bytes:
        value = self._get(key, bytes) or b""
        return value[_part(start, stop, len(value))]

    def SETRANGE(self, key: bytes, offset: bytes, part: bytes) -> int:
        at, value = _integer(offset), self._get(key, bytes) or b""
        if part:
            self.values[key] = value = value[:at].ljust(at, b"\0") + part + value[at + len(part) :]
        return len(value)

    # --- hashes -----------------------------------------------------------------------------------

    def HGET(self, key: bytes, field: bytes) -> bytes | None:
        return (self._get(key, dict) or {}).get(field)

    def HSET(self, key: bytes, field: bytes, value: bytes) -> int:
        fields = self._make(key, dict)
        new = field not in fields
        fields[field] = value
        return int(new)

    def HDEL(self, key: bytes, *fields: bytes) -> int:
        return self._remove(key, dict, fields)

    def HEXISTS(self, key: bytes, field: bytes) -> int:
        return int(field in (self._get(key, dict) or {}))

    def HGETALL(self, key: bytes) -> list[bytes]:
        return [part for pair in (self._get(key, dict) or {}).items() for part in pair]

    def HVALS(self, key: bytes) -> list[bytes]:
        return list((self._get(key, dict) or {}).values())

    def HLEN(self, key: bytes) -> int:
        return len(self._get(key, dict) or ())

    def HINCRBY(self, key: bytes, field: bytes, by: bytes) -> int:
        more = _integer(by)
        fields = self._make(key, dict)
        number = _integer(fields.get(field, b"0"), "ERR hash value is not an integer") + more
        fields[field] = b"%d" % number
        return number

    # --- lists ------------------------------------------------------------------------------------

    def LLEN(self, key: bytes) -> int:
        return len(self._get(key, list) or ())

    def LINDEX(self, key: bytes, index: bytes) -> bytes | None:
        elements, at = self._get(key, list) or [], _integer(index)
        return elements[at] if -len(elements) <= at < len(elements) else None

    def LRANGE(self, key: bytes, start: bytes, stop: bytes) -> list[bytes]:
        elements = self._get(key, list) or []
        return elements[_part(start, stop, len(elements))]

    def RPUSH(self, key: bytes, *elements: bytes) -> int:
        there = self._make(key, list)
        there.extend(elements)
        return len(there)

    def LSET(self, key: bytes, index: bytes, element: bytes) -> Status:
        elements = self._get(key, list)
        if elements is None:
            raise ReplyError("ERR no such key")
        try:
            elements[_integer(index)] = element
        except IndexError:
            raise ReplyError("ERR index out of range") from None
        return OK

    def LTRIM(self, key: bytes, start: bytes, stop: bytes) -> Status:
        elements = self._get(key, list) or []
        elements[:] = elements[_part(start, stop, len(elements))]
        self._drop_empty(key)
        return OK

    # --- sorted sets ------------------------------------------------------------------------------

    def ZADD(self, key: bytes, *args: bytes) -> int:
        *options, text, member = args
        score = _score(text)
        scores = self._make(key, SortedSet)
        before = scores.get(member)
        if before is None or not (b"NX" in options or (b"GT" in options and score <= before)):
            scores[member] = score
        counts = scores[member] != before if b"CH" in options else before is None
        return int(counts)

    def ZREM(self, key: bytes, member: bytes) -> int:
        return self._remove(key, SortedSet, (member,))

    def ZSCORE(self, key: bytes, member: bytes) -> bytes | None:
        scores = self._scores(key)
        return _digits(scores[member]) if member in scores else None

    def ZCARD(self, key: bytes) -> int:
        return len(self._scores(key))

    def ZCOUNT(self, key: bytes, least: bytes, most: bytes) -> int:
        return len(self._between(key, least, most))

    def ZRANGE(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        if b"BYSCORE" not in options:
            members = self._ordered(key)
            return self._told(key, members[_part(start, stop, len(members))], options)
        if b"REV" in options:
            members = self._between(key, stop, start)[::-1]
        else:
            members = self._between(key, start, stop)
        offset, count = map(_integer, options[options.index(b"LIMIT") + 1 :][:2])
        return self._told(key, members[offset : offset + count], options)

    def ZREVRANGE(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        members = self._ordered(key)[::-1]
        return self._told(key, members[_part(start, stop, len(members))], options)

    def ZREMRANGEBYSCORE(self, key: bytes, least: bytes, most: bytes) -> int:
        return self._remove(key, SortedSet, self._between(key, least, most))

    def ZREMRANGEBYRANK(self, key: bytes, start: bytes, stop: bytes) -> int:
        part = _part(start, stop, self.ZCARD(key))
        # To put a long index in order costs time, and most often nothing is to go.
        members = self._ordered(key)[part] if part.start < part.stop else []
        return self._remove(key, SortedSet, members)

    # --- what nobody here can make ----------------------------------------------------------------

    def SCARD(self, key: bytes) -> int:
        return len(self._get(key, set) or ())

    def XLEN(self, key: bytes) -> int:
        return len(self._get(key, Stream) or ())

    # --- the server -------------------------------------------------------------------------------

    def TIME(self) -> list[bytes]:
        return [b"%d" % part for part in divmod(self.us, 1_000_000)]

    def PUBLISH(self, channel: bytes, message: bytes) -> int:
        return self._publish(channel, message)

    def SPUBLISH(self, channel: bytes, message: bytes) -> int:
        return self.PUBLISH(channel, message)

    # --- what they are made of --------------------------------------------------------------------

    def _find(self, key: bytes) -> Any:
        """What a key holds, of whatever type; None if it is not there."""
        end = self.ends.get(key)
        if end is not None and end < self.us // 1000:
            self._drop(key)
        return self.values.get(key)

    def _get(self, key: bytes, kind: type[Value]) -> Value | None:
        value: Value | None = self._find(key)
        if value is not None and type(value) is not kind:
            raise ReplyError(WRONGTYPE)
        return value

    def _make(self, key: bytes, kind: type[Value]) -> Value:
        """What a key holds, to be added to."""
        value = self._get(key, kind)
        if value is None:
            value = self.values[key] = kind()
        return value

    def _remove(self, key: bytes, kind: type[Any], members: tuple[bytes, ...] | list[bytes]) -> int:
        there = self._get(key, kind)
        removed = sum(there.pop(member, None) is not None for member in members) if there else 0
        self._drop_empty(key)
        return removed

    def _drop_empty(self, key: bytes) -> None:
        if not self.values.get(key, True):
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self.values.pop(key, None)
        self.ends.pop(key, None)

    def _scores(self, key: bytes) -> SortedSet:
        return self._get(key, SortedSet) or SortedSet()

    def _ordered(self, key: bytes) -> list[bytes]:
        scores = self._scores(key)
        return sorted(scores, key=lambda member: (scores[member], member))

    def _between(self, key: bytes, least: bytes, most: bytes) -> list[bytes]:
        low, high = (_score(text, "ERR min or max is not a float") for text in (least, most))
        scores = self._scores(key)
        return [one for one in self._ordered(key) if low <= scores[one] <= high]

    def _told(self, key: bytes, members: list[bytes], options: tuple[bytes, ...]) -> list[bytes]:
        if b"WITHSCORES" not in options:
            return members
        scores = self._scores(key)
        return [part for member in members for part in (member, _digits(scores[member]))]


COMMANDS: dict[bytes, Callable[..., Reply]] = {
    name.encode(): method for name, method in vars(Keyspace).items() if name.isupper()
}


def _integer(text: bytes, problem: str = NOT_AN_INTEGER) -> int:
    try:
        return int(text)
    except ValueError:
        raise ReplyError(problem) from None


def _score(text: bytes, problem: str = "ERR value is not a valid float") -> float:
    try:
        return float(text)
    except ValueError:
        raise ReplyError(problem) from None


def _digits(score: float) -> bytes:
    return b"%.17g" % score


def _part(start: bytes, stop: bytes, length: int) -> slice:
    """The part from *start* to *stop*, which belongs to it; negative ones count from the end."""
    first, last = _integer(start), _integer(stop)
    first = max(first + length, 0) if first < 0 else first
    last = last + length if last < 0 else last
    return slice(first, max(last + 1, 0))
