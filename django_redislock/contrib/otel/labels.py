"""Names of locks as labels of metrics and spans: few, however many names there are."""

from __future__ import annotations

from django_redislock.rules.names import Written

# So many names that the code made itself, as by f-strings, are labels. Names and templates at
# decorators are as few as the decorators: their bound is for decorators made in a loop.
MOST_NAMES = 200
MOST_WRITTEN = 2000
OTHER = "other"  # The label of all others.


class Bounded(dict[str, str]):
    """By name, its label. The first *most* names have one of their own."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, name: str) -> str:
        if len(self) >= self._most:
            return OTHER
        label = self[name] = str(name)
        return label


class Labels:
    """By template, the label of a lock. Each kind of names has room of its own."""

    def __init__(self) -> None:
        self._bare = Bounded(MOST_NAMES)
        self._written = Bounded(MOST_WRITTEN)

    def of(self, template: str) -> str:
        """The label of a lock with this template."""
        return (self._written if isinstance(template, Written) else self._bare)[template]
