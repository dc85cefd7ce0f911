"""Server memory of what is known of, and promised to, tasks whose key names an object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from benchmarks.contenders import OURS
from benchmarks.figures import Row, Table

if TYPE_CHECKING:
    from benchmarks.bench import Bench

NAMES = 10_000
DAY = 86_400.0


def measure(bench: Bench) -> list[Table]:
    """Bytes per name by INFO used_memory, after one run of a task under each."""
    bench.contender(OURS)  # It configures Django.
    rows = [_row(bench, "with its record", NAMES), _row(bench, "after its record has gone", 1)]
    return [Table(f"Server memory, a task that has run under {NAMES:,} names", rows)]


def _row(bench: Bench, what: str, records: int) -> Row:
    from django.conf import settings
    from django.test import override_settings

    from django_redislock.holder import Activity, busy_with
    from django_redislock.lock import Lock
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.options import Options

    def run(name: str) -> None:
        id = str(uuid4())  # noqa: A001 - as a worker has it
        activity = Activity(task="shop.tasks.send_invoice", task_id=id)
        with busy_with(activity), Lock(name, Options(), RunMarker(f"{id}:0.0", DAY)):
            pass

    setting = {"default": {**settings.REDISLOCK["default"], "RECORDS": records}}
    with override_settings(REDISLOCK=setting):
        run("bench:memory")  # Connections and scripts take memory too.
        before = _memory_when_empty(bench)
        for nth in range(NAMES):
            run(f"order:{nth:010}")
        taken = bench.server.memory() - before
    return {"name": what, "bytes": round(taken / NAMES)}


def _memory_when_empty(bench: Bench) -> int:
    """Bytes that the server has without keys; it frees the memory of many in its own time."""
    bench.server.clear()
    memory = bench.server.memory()
    while True:
        time.sleep(0.2)
        before, memory = memory, bench.server.memory()
        if memory >= before:
            return memory
