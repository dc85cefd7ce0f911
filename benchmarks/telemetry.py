"""What an uncontended cycle costs more with django_redislock.contrib.otel, sync and asyncio."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider

from benchmarks.contenders import OURS
from benchmarks.distant import AWAY, distant
from benchmarks.figures import Row, Table, at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from benchmarks.bench import Bench

NAME = "bench:telemetry"
WARM_UP = 0.02
OFF = "off"
API = "on, API alone"
METRICS = "on, SDK"
SPANS = "on, SDK, in a span that is recorded"
BOUND_BY_SDK = (
    "two measurements by the SDK, for the acquire and for the hold. They are made while the client"
    " waits for the next reply, so they take no time of their own if that comes later than they"
    " are made: not from a server on loopback, still less one on the same core"
)


@dataclass(slots=True)
class Tally:
    """Of one row, over all rounds."""

    cycles: list[float] = field(default_factory=list)  # Seconds each; the median of each turn.
    fastest: list[float] = field(default_factory=list)  # Nobody else had the cores meanwhile.
    cpu: list[float] = field(default_factory=list)


def measure(bench: Bench) -> list[Table]:
    """Off and on take turns, so that a noisy minute hits all alike."""
    bench.contender(OURS)  # Sets Django up.
    from django.test import override_settings

    from django_redislock import distributed_lock
    from django_redislock.contrib.otel.telemetry import Telemetry

    traces = TracerProvider(shutdown_on_exit=False)
    with_sdk = Telemetry(MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False), traces)
    without = Telemetry(NoOpMeterProvider(), NoOpTracerProvider())

    @contextmanager
    def on(telemetry: Telemetry) -> Iterator[None]:
        telemetry.connect()
        try:
            yield
        finally:
            telemetry.disconnect()

    @contextmanager
    def in_a_span() -> Iterator[None]:
        with on(with_sdk), traces.get_tracer(__name__).start_as_current_span("request"):
            yield

    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        OFF: nullcontext,
        API: lambda: on(without),
        METRICS: lambda: on(with_sdk),
        SPANS: in_a_span,
    }

    def spin(seconds: float) -> list[float]:
        samples, now = [], time.perf_counter()
        end = now + seconds
        while now < end:
            with distributed_lock(NAME):
                pass
            before, now = now, time.perf_counter()
            samples.append(now - before)
        return samples

    async def aspin(seconds: float) -> list[float]:
        samples, now = [], time.perf_counter()
        end = now + seconds
        while now < end:
            async with distributed_lock(NAME):
                pass
            before, now = now, time.perf_counter()
            samples.append(now - before)
        return samples

    loop = asyncio.new_event_loop()  # A run copies the context, with the span.
    try:
        kinds = {"sync": spin, "asyncio": lambda seconds: loop.run_until_complete(aspin(seconds))}
        tables = [_table(bench, kind, ways, spins) for kind, spins in kinds.items()]
        with distant(bench.server.port) as url, override_settings(REDISLOCK=_at(url)):
            tables += [
                _table(bench, f"{kind}, server {AWAY * 1e3:.1f} ms away", ways, spins)
                for kind, spins in kinds.items()
            ]
        return tables
    finally:
        loop.close()


def _at(url: str) -> dict[str, dict[str, str]]:
    return {"default": {"LOCATION": url}}


def _table(
    bench: Bench,
    kind: str,
    ways: dict[str, Callable[[], AbstractContextManager[None]]],
    spin: Callable[[float], list[float]],
) -> Table:
    tallies: dict[tuple[str, str], Tally] = {}
    for turn in bench.turns([OURS], bench.effort.cycle_rounds):
        for way, block in ways.items():
            with block():
                spin(WARM_UP)
                cpu = time.process_time()
                samples = spin(bench.effort.cycle_seconds)
                cpu = (time.process_time() - cpu) / len(samples)
            tally = tallies.setdefault((turn.placement, way), Tally())
            tally.cycles.append(median(samples))
            tally.fastest.append(min(samples))
            tally.cpu.append(cpu)
    rows: list[Row] = [
        {
            "telemetry": way,
            "cores": cores,
            "p50 µs": median(tally.cycles) * 1e6,
            "of off": median(tally.cycles) / median(tallies[cores, OFF].cycles),
            "fastest µs": min(tally.fastest) * 1e6,
            "of off's": min(tally.fastest) / min(tallies[cores, OFF].fastest),
            "client CPU µs": median(tally.cpu) * 1e6,
        }
        for (cores, way), tally in tallies.items()
    ]
    rows.sort(key=lambda row: str(row["cores"]), reverse=True)
    claim = f"uncontended cycle, {kind}, with OpenTelemetry: time, of that without"
    measured = {str(row["cores"]): row["of off"] for row in rows if row["telemetry"] == METRICS}
    targets = at_most(claim, 1.05, measured, limited_by=BOUND_BY_SDK)
    return Table(f"Uncontended cycle with OpenTelemetry, {kind}", rows, targets)
