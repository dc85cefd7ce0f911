"""Names as metrics and spans tell of them: of as many as a program has lines that lock."""

from __future__ import annotations

from django_redislock.rules.names import Written

# Of so many names that the code made itself they tell by name, as by f-strings. Names and templates
# at decorators are as many as there are decorators: their bound is for those made in a loop.
MOST_NAMES = 200
MOST_WRITTEN = 2000
OTHER = "other"  # All others.


class Bounded(dict[str, str]):
    """By name, its label: the first *most* names have their own."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, name: str) -> str:
        if len(self) >= self._most:
            return OTHER
        label = self[name] = str(name)
        return label


class Labels:
    """By template, the label of a lock. Neither kind of names takes the room of the other."""

    def __init__(self) -> None:
        self._bare = Bounded(MOST_NAMES)
        self._written = Bounded(MOST_WRITTEN)

    def of(self, template: str) -> str:
        """The label of a lock with this template."""
        return (self._written if isinstance(template, Written) else self._bare)[template]
