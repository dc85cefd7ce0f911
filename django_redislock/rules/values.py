"""How names of locks show values: equal values look the same in each process."""

from __future__ import annotations

import json
from datetime import date, time
from enum import Enum
from typing import Any


def delivered(value: Any) -> Any:
    """The value that another process gets for *value*, if JSON carries it there."""
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        return value.value
    if isinstance(value, tuple | list):
        return [delivered(one) for one in value]
    if isinstance(value, dict):
        return {_json_key(name): delivered(one) for name, one in value.items()}
    return value


def _json_key(name: Any) -> str:
    if name is None or isinstance(name, bool):
        return json.dumps(name)
    return str(delivered(name))


def shown(value: Any) -> Any:
    """The form of *value* in a name: the same for equal values, in each process."""
    value = delivered(value)
    return _in_order(value) if isinstance(value, list | dict | set | frozenset) else value


def _in_order(value: Any) -> Any:
    """The same value, without differences between processes, or from the way through a broker."""
    if isinstance(value, list):
        return [_in_order(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_in_order(delivered(one)) for one in value), key=repr)
    if isinstance(value, dict):
        return {name: _in_order(value[name]) for name in sorted(value)}
    return value.isoformat() if isinstance(value, date | time) else value  # A zone is lost.
