"""Celery tasks that do nothing, from publishing to the result, with one worker process."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import count, islice
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import BARE, TASKS
from benchmarks.crew import PATIENCE, PROCESSES
from benchmarks.figures import Chart, Row, Table, at_most, ours_to, times
from benchmarks.placement import ALL_CORES, ONE_CORE, confine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench
    from benchmarks.server import Traffic

COUNTED = 100  # Tasks of which the commands are counted, those of broker and results included.
TWO_MORE = "it sends two requests more than a bare one, with 34 commands in scripts"
WARM_UP = 10  # Tasks before anything counts: connections, scripts, caches.

# No two tasks have the same, or some locks would refuse the second.
numbers = count()


def measure(bench: Bench) -> list[Table]:
    """Tasks per second, end to end."""
    # Not at the top: nobody else is to be measured with all of Celery in memory.
    from benchmarks import celery_app

    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    traffic: dict[str, Traffic] = {}
    celery_app.connect(bench.server.port)
    with _worker(bench.server.port):
        processes = celery_app.processes.delay().get(PATIENCE)
        for turn in bench.turns(TASKS):
            for process in processes:
                confine(process, turn.cores)
            task = celery_app.TASKS[turn.name]
            _run(task, WARM_UP)
            seconds = _run(task, bench.effort.tasks)
            rates[turn.placement, turn.name].append(bench.effort.tasks / seconds)
            if turn.name not in traffic:
                with bench.server.counting() as traffic[turn.name]:
                    _run(task, COUNTED)
    rows: list[Row] = [
        {
            "lock": name,
            "cores": cores,
            "tasks/s": median(seen),
            "µs": 1e6 / median(seen),
            "requests": traffic[name].requests / COUNTED,
            "in scripts": traffic[name].scripted / COUNTED,
        }
        for (cores, name), seen in rates.items()
    ]
    rows.sort(key=lambda row: row["cores"], reverse=True)
    claim = "a Celery task that does nothing: time, of a bare one's"
    ratios = ours_to(rows, "µs", BARE)
    targets = [
        *at_most(claim, 1.15, _only(ratios, ONE_CORE), limited_by=TWO_MORE),
        *at_most(f"{claim}, on all cores", 1.3, _only(ratios, ALL_CORES), limited_by=TWO_MORE),
    ]
    gain = f"A Celery task that does nothing takes {times(ratios)} as long as without a lock."
    chart = Chart("tasks", "tasks/s", "longer")
    return [Table("Celery tasks", rows, targets, chart, gain if ratios else "")]


def _only(ratios: dict[str, float], cores: str) -> dict[str, float]:
    return {cores: ratios[cores]} if cores in ratios else {}


@contextmanager
def _worker(port: int) -> Iterator[None]:
    from benchmarks import celery_app

    worker = PROCESSES.Process(target=celery_app.work, args=(port,))
    worker.start()
    try:
        yield
    finally:
        worker.terminate()
        worker.join()


def _run(task: Any, tasks: int) -> float:
    """Publish so many tasks and wait for their results; returns the seconds it took."""
    sent = list(islice(numbers, tasks))
    began = time.perf_counter()
    results = [task.delay(number) for number in sent]
    got = [result.get(PATIENCE) for result in results]
    seconds = time.perf_counter() - began
    if got != sent:
        raise RuntimeError(f"{task.name}: not every task has run.")
    return seconds
