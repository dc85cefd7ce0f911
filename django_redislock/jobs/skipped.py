"""Skipped: the result of a run that did not happen because of its lock.

``JobRun._skipped_by`` in run.py decides that.
"""

from __future__ import annotations

from inspect import currentframe
from typing import Any, TypeGuard

_REASONS = ("busy", "held", "cooling", "done", "duplicate")
_KEYS = {"skipped", "lock", "holder", "by", "ago", "reason", "expires_in"}

_ENCODERS = ("json.encoder", "simplejson.encoder")


class Skipped(dict[str, Any]):
    """The result of a run that did not happen because of its lock, in place of its body's result.

    It is a dictionary, so JSON, pickle and Celery's result backends carry it, and it is false:
    ``if not import_catalogue("eu"): ...``. After a way through JSON it is a plain dictionary.

    Its keys:
        skipped: Why: "busy" (somebody holds the lock), "held" (an operator keeps it from
            everybody), "cooling" (min_hold keeps it), "done" (by once) or "duplicate" (of a Celery
            task run that has succeeded).
        lock: The name of the lock.
        holder: If it is busy or held: the holder, as "host:pid" and what it runs, or the operator.
        by: Else: the owner that did the work, or held the lock last.
        ago: How many seconds ago that was; missing if unknown.
        expires_in: Of a cooling lock: in how many seconds it is free; missing if unknown.
        reason: Why an operator holds it, or another remark; missing if there is none.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        # Encoders in Python, as of json.dump() and of indented JSON, write a false dictionary as
        # {}.
        caller = currentframe().f_back  # type: ignore[union-attr] # CPython has frames
        return caller is not None and caller.f_globals.get("__name__") in _ENCODERS

    def __repr__(self) -> str:
        return f"Skipped({super().__repr__()})"


def is_skip(result: object) -> TypeGuard[dict[str, Any]]:
    """Whether *result*, perhaps after a way through JSON, is that of a skipped run."""
    return (
        isinstance(result, dict)
        and result.keys() <= _KEYS
        and result.get("skipped") in _REASONS
        and isinstance(result.get("lock"), str)
    )
