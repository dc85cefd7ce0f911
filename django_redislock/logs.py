"""The loggers of the package, and the fields that each of their records has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from django_redislock.holder import current_activity

if TYPE_CHECKING:
    from collections.abc import Mapping

_KNOWN = "_redislock"  # Of a record on its way: what the caller knows of the FIELDS.

# Formatters may rely on these attributes of a record; None where the package does not know them.
# docs/monitoring.md explains each.
FIELDS = ("lock", "alias", "lease", "fence", "reason", "waited", "held_for", "task_id", "job")


class OfLease(Protocol):
    """A lease, as far as a log record tells of it."""

    @property
    def name(self) -> str: ...
    @property
    def alias(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def owner(self) -> Any: ...


def logger(name: str) -> logging.Logger:
    """The logger *name*, whose records have all FIELDS."""
    found = logging.getLogger(name)
    if _complete not in found.filters:
        found.filters.insert(0, _complete)  # Those that the project has added see FIELDS, too.
    return found


def of(held: OfLease | None = None, /, **known: Any) -> Mapping[str, Any]:
    """The *extra* of a record: what the caller knows of the FIELDS.

    They become attributes in the filter. Python's logging raises a KeyError for a key of *extra*
    that the record has already, and a project's record factory may give it a task_id.

    Args:
        held: The lease that the record is about, if any.
        known: The other fields, by name.
    """
    if held is None:
        return {_KNOWN: known}
    owner = held.owner
    told = {
        "lock": held.name,
        "alias": held.alias,
        "lease": held.id,
        "fence": held.fence,
        "job": owner.task or None,
        "task_id": owner.task_id or None,
    }
    return {_KNOWN: {**told, **known}}


def _complete(record: logging.LogRecord) -> bool:
    """Make what the caller knows attributes, and add the others. Drops no record."""
    attributes = vars(record)
    known = attributes.pop(_KNOWN, {})
    attributes.update((field, value) for field, value in known.items() if value is not None)
    for field in FIELDS:
        attributes.setdefault(field, None)
    if record.job is None:  # type: ignore[attr-defined] # set above
        activity = current_activity.get()
        record.job = activity.task or None
        record.task_id = activity.task_id or attributes["task_id"]
    return True
