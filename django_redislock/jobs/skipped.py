"""Skipped: what a run returns that did not happen because of its lock."""

from __future__ import annotations

from inspect import currentframe
from typing import Any

_ENCODERS = ("json.encoder", "simplejson.encoder")


class Skipped(dict[str, Any]):
    """What a run returns in place of its body's result if it did not happen because of its lock.

    It is a dictionary, so JSON, pickle and Celery's result backends carry it, and it is false:
    ``if not import_catalogue("eu"): ...``. What came through JSON is a plain dictionary again.

    Its keys:
        skipped: Why: "busy" (somebody holds the lock), "held" (an operator keeps it from
            everybody), "cooling" (min_hold keeps it), "done" (by once) or "duplicate" (of a Celery
            task run that has succeeded).
        lock: The name of the lock.
        holder: Who holds it, as "host:pid" and what that does, or the operator; if it is busy or
            held.
        by: Who did the work, or held the lock last; if it is neither.
        ago: How many seconds ago that was; missing if nobody knows.
        reason: Why an operator holds it, or what else there is to say; missing if nobody said.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        # Encoders in Python, as of json.dump() and of indented JSON, write what is false as {}.
        caller = currentframe().f_back  # type: ignore[union-attr] # CPython has frames
        return caller is not None and caller.f_globals.get("__name__") in _ENCODERS

    def __repr__(self) -> str:
        return f"Skipped({super().__repr__()})"
