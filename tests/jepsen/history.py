"""What has happened in a trial, event by event; kept in the format of Jepsen's own histories.

A file has a map of EDN (https://github.com/edn-format/edn) on each line, in the order of time:

    {:process 3, :type :invoke, :f :acquire, :value nil, :time 1002003, :index 17}

See tests/jepsen/README.md for what the events are.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.jepsen.checker import Ledger, Operation, judge

NEMESIS = "nemesis"
READER = 0  # The process that reads the counters at the end; clients have numbers from 1.


@dataclass(frozen=True, slots=True)
class Event:
    """An operation begins, or comes to an end."""

    process: int | str  # A client, the READER or the NEMESIS.
    type: str  # "invoke", then "ok" or "fail"; all that the nemesis does is "info".
    f: str  # The operation.
    value: dict[str, Any] | None = None
    error: str = ""
    time: int = field(default_factory=time.monotonic_ns)  # Nanoseconds.

    def as_json(self):
        return json.dumps(asdict(self))


def write(events, path):
    """Keep a history."""
    with path.open("w", encoding="utf-8") as file:
        for index, event in enumerate(events):
            process = event.process if isinstance(event.process, int) else f":{event.process}"
            error = f", :error :{event.error}" if event.error else ""
            file.write(
                f"{{:process {process}, :type :{event.type}, :f :{event.f}, "
                f":value {_edn(event.value)}, :time {event.time}, :index {index}{error}}}\n"
            )


def read(path):
    """The events of a file, read by a library that knows nothing of us."""
    import edn_format

    def plain(value):
        if isinstance(value, edn_format.Keyword):
            return value.name
        if isinstance(value, edn_format.ImmutableDict):
            return {plain(key): plain(one) for key, one in value.items()}
        return list(value) if isinstance(value, edn_format.ImmutableList) else value

    # As one vector, since it takes a while to begin.
    maps = map(plain, edn_format.loads(f"[{path.read_text(encoding='utf-8')}]"))
    return [Event(**{name: one for name, one in each.items() if name != "index"}) for each in maps]


def verdict_on(events):
    """What the checker says of a history."""
    begun = {}
    ended = []
    ledgers = {}
    for event in events:
        if event.process == READER:
            if event.value:
                ledgers[event.f] = Ledger(**event.value)
        elif event.f == "acquire" and event.type == "invoke":
            if event.process in begun:
                ended.append(begun[event.process])
            asked = event.time / 1e9
            begun[event.process] = Operation(client=int(event.process), asked=asked)
        elif event.process != NEMESIS and event.type != "invoke":
            begun[event.process] = _after(event, begun[event.process])
    return judge([*ended, *begun.values()], ledgers["read-plain"], ledgers["read-fenced"])


def _after(event, operation):
    """The operation once an event has ended a part of it."""
    if event.type == "fail":
        return replace(operation, error=operation.error or event.error)
    match event.f:
        case "acquire":
            return replace(operation, granted=event.time / 1e9, fence=event.value["fence"])
        case "increment-plain":
            return replace(operation, plain=True)
        case "increment-fenced":
            return replace(operation, fenced=True)
    return operation


def _edn(value):
    """Of what we have in events: maps by name, lists, numbers."""
    if isinstance(value, dict):
        return f"{{{', '.join(f':{name} {_edn(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{' '.join(map(_edn, value))}]"
    return "nil" if value is None else str(value)
