"""The operations on a lock: one Lua file each, read once.

Files that begin with an underscore hold parts of operations; each replaces a line
``-- include NAME``. The line ``local ... = unpack(KEYS)`` says which keys an operation is given. If
``local ... = unpack(ARGV)`` ends with the channel, the operation is told that, too.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from django_redislock.rules.keys import Keys

Arg = TypeVar("Arg")


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One operation, as the server runs it."""

    name: str
    source: bytes
    sha: str  # What EVALSHA asks for: the SHA-1 of the source.
    keys: tuple[str, ...]  # Which of a lock's keys it may touch.
    takes_channel: bool = False  # Whether it is told where the asking connection is rung.

    def given(self, keys: Keys) -> list[str]:
        """Its KEYS among those of a lock."""
        return [getattr(keys, key) for key in self.keys]

    def told(self, args: tuple[Arg, ...], channel: Arg) -> tuple[Arg, ...]:
        """Its ARGV: the arguments of a step, and the channel if it takes that."""
        return (*args, channel) if self.takes_channel else args


def _read(name: str) -> str:
    text = (resources.files("django_redislock") / "lua" / f"{name}.lua").read_text("utf-8")
    return re.sub(r"(?m)^ *-- include (\w+)$", lambda match: _read(match[1]), text)


def _load(name: str) -> Script:
    text = _read(name)
    (keys,) = re.findall(r"(?m)^local (.*) = unpack\(KEYS\)$", text)
    args = re.findall(r"(?m)^local (.*) = unpack\(ARGV\)$", text)
    source = text.encode()
    sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()
    takes_channel = "".join(args).endswith(", channel")
    return Script(name, source, sha, tuple(keys.lower().split(", ")), takes_channel)


# An acquire with done markers: of a run, or with `once`.
ACQUIRE_MARKED = _load("acquire")
# Any other acquire: the same text, without the last keys, which only done markers need.
ACQUIRE = replace(ACQUIRE_MARKED, keys=ACQUIRE_MARKED.keys[:5])
# Both for one of several permits.
ACQUIRE_PERMIT_MARKED = _load("acquire_permit")
ACQUIRE_PERMIT = replace(ACQUIRE_PERMIT_MARKED, keys=ACQUIRE_PERMIT_MARKED.keys[:5])
# An acquire of a run by which the newest call wins.
ACQUIRE_REPLACING = _load("acquire_replacing")
ACQUIRES = frozenset({ACQUIRE.name, ACQUIRE_PERMIT.name, ACQUIRE_REPLACING.name})
RENEW = _load("renew")
RELEASE = _load("release")
CONCLUDE = _load("conclude")
LEAVE = _load("leave")
HAND_OVER = _load("hand_over")
TAKE_UP = _load("take_up")
FORCE_RELEASE = _load("force_release")
RESUME = _load("resume")
LOOK = _load("look")
INSPECT = _load("inspect")
NOTE_WAIT = _load("note_wait")
FOLLOW_WAIT = _load("follow_wait")
NAMES = _load("names")
TAKE_START = _load("take_start")
GIVE_BACK_START = _load("give_back_start")

# Of jobs alone:
SKIP = _load("skip")
STAND_BY = _load("stand_by")
FINISH = _load("finish")
FORGET_START = _load("forget_start")
COUNT_START = _load("count_start")
UNCOUNT_START = _load("uncount_start")
RUNS = _load("runs")
CALLS = _load("calls")
ANNOUNCE = _load("announce")
REQUEUE = _load("requeue")
RETRACT = _load("retract")
STAND_IN_LINE = _load("stand_in_line")
LEAVE_LINE = _load("leave_line")
