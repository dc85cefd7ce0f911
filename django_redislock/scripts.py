"""The operations on a lock: one Lua file each, read once.

What several of them need stands in files that begin with an underscore; a line
``-- include NAME`` puts one there.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from typing import NamedTuple


class Script(NamedTuple):
    """One operation, as the server runs it."""

    name: str
    source: bytes
    sha: str  # What EVALSHA asks for: the SHA-1 of the source.


def _read(name: str) -> str:
    text = (resources.files("django_redislock") / "lua" / f"{name}.lua").read_text("utf-8")
    return re.sub(r"(?m)^ *-- include (\w+)$", lambda match: _read(match[1]), text)


def _load(name: str) -> Script:
    source = _read(name).encode()
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


ACQUIRE = _load("acquire")
RENEW = _load("renew")
RELEASE = _load("release")
LEAVE = _load("leave")
FORCE_RELEASE = _load("force_release")
LOOK = _load("look")
INSPECT = _load("inspect")

# Of tasks alone:
SKIP = _load("skip")
FINISH = _load("finish")
FINISHED = _load("finished")
RUNS = _load("runs")
ANNOUNCE = _load("announce")
RETRACT = _load("retract")
