"""The operations on a lock: one Lua file each, read once.

A script is known by its name. Its text is ``lua/_lock.lua``, which all share, and its own file.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple


class Script(NamedTuple):
    """One operation, as the server runs it."""

    name: str
    source: bytes
    sha: str  # What EVALSHA asks for: the SHA-1 of the source.


def _load(name: str) -> Script:
    folder = resources.files("django_redislock") / "lua"
    source = (folder / "_lock.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return Script(name, source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


ACQUIRE = _load("acquire")
RENEW = _load("renew")
RELEASE = _load("release")
LEAVE = _load("leave")
FORCE_RELEASE = _load("force_release")
LOOK = _load("look")
