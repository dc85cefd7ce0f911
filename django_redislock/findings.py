"""The findings of an examination, for ``manage.py locks doctor`` and ``check --deploy``.

Each id has a section in docs/checks.md. Its letter is its level: E fails, and W warns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One point that was examined."""

    about: str  # One word, which never changes.
    level: Level
    says: str  # Without a full stop. That of an error in it is left out.
    advice: str = ""  # What to do, unless all is well.
    # Of the system check that reports it: "E020" of this package, "shop.W001" of yours. Without an
    # id, only the doctor reports it.
    id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", self.says.removesuffix("."))

    def as_dict(self) -> dict[str, str]:
        """The output of ``locks doctor --json`` about it."""
        return {
            "about": self.about,
            "level": self.level,
            "says": self.says,
            "advice": self.advice,
        }


# What a finding is about, by the number of its id.
ABOUT = {
    "004": "cache",
    "005": "server",
    "020": "server",
    "021": "version",
    "022": "cluster",
    "023": "rights",
    "024": "scripting",
    "025": "eviction",
    "026": "persistence",
    "027": "replication",
    "028": "clock",
    "029": "keys",
    "030": "index",
    "031": "locks",
    "032": "sentinels",
    "033": "isolation",
    "034": "quorum",
    "035": "ttl",
    "036": "memory",
    "037": "records",
    "038": "limits",
    "040": "versions",
}


def problem(id: str, says: str, advice: str) -> Finding:  # noqa: A002
    """The finding that a system check of this package reports."""
    return Finding(ABOUT[id[1:]], "fail" if id[0] == "E" else "warn", says, advice, id)
