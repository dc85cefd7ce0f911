"""The findings of an examination, for ``manage.py locks doctor`` and ``check --deploy``."""

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
