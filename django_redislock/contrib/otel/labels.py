"""Names as metrics and spans tell of them: of as many as a program has lines that lock."""

from __future__ import annotations

# Of so many bare names, and of so many jobs, they tell by name. All others are OTHER.
MOST_NAMES = 200
OTHER = "other"


class Labels(dict[str, str]):
    """By bare name, its label: MOST_NAMES names have their own."""

    def __missing__(self, name: str) -> str:
        if len(self) >= MOST_NAMES:
            return OTHER
        self[name] = name
        return name

    def of(self, name: str, template: str) -> str:
        """The label of a lock: its template, if the name was made of one."""
        return self[name] if template == name else template
