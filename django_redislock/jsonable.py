"""The output of ``manage.py locks --json`` about locks, waiters and runs, for programs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from django_redislock.rules.stored import Owner


class Jsonable:
    """A dataclass whose fields are printed under their own names, so none is renamed or removed.

    An owner's fields stand among the others, times are rounded to milliseconds, and None means
    unknown.
    """

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what is printed."""
        return _printed(self)


def _printed(found: Any) -> dict[str, Any]:
    printed: dict[str, Any] = {}
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Owner):
            printed |= {key: one or None for key, one in _printed(value).items()}
        elif isinstance(value, Jsonable):
            printed[field.name] = value.as_dict()
        elif isinstance(value, tuple):
            printed[field.name] = [
                one.as_dict() if isinstance(one, Jsonable) else one for one in value
            ]
        elif isinstance(value, float):
            printed[field.name] = round(value, 3)
        else:
            printed[field.name] = None if value == "" else value
    return printed
