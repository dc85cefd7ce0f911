"""Metrics and spans of locks, by OpenTelemetry's own SDK and exporters."""

import json
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id
from prometheus_client.parser import text_string_to_metric_families

from django_redislock import (
    Limit,
    LockLost,
    LockUnavailable,
    distributed_lock,
    held,
    signals,
    single_instance,
)
from django_redislock import deferred_work as meanwhile
from django_redislock.backends.registry import backends
from django_redislock.contrib.otel import telemetry as metrics
from django_redislock.contrib.otel.telemetry import MOST_NAMES, OTHER, Labels, Metrics, Telemetry
from django_redislock.lock import Lock
from tests.support.matrix import CLUSTER, places
from tests.support.others import held_by_other
from tests.support.processes import hear, python, say
from tests.support.ways import both_ways


class Seen:
    """What a program's providers were told."""

    def __init__(self, **of_traces):
        self._reader = InMemoryMetricReader()
        self._exporter = InMemorySpanExporter()
        tracers = TracerProvider(shutdown_on_exit=False, **of_traces)
        tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = tracers.get_tracer("tests")
        self.telemetry = Telemetry(MeterProvider([self._reader], shutdown_on_exit=False), tracers)

    def points(self, *names):
        """The data points of these metrics."""
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name in names
            for point in metric.data.data_points
        ]

    def metric(self, name):
        """The data points by the values of their attributes: a sum, or the count of a histogram."""
        return {
            tuple(map(str, (point.attributes or {}).values())): (
                point.value if hasattr(point, "value") else point.count
            )
            for point in self.points(name)
        }

    def spans(self, name):
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    @contextmanager
    def on(self):
        self.telemetry.connect()
        try:
            yield self
        finally:
            self.telemetry.disconnect()


@pytest.fixture
def seen():
    with Seen().on() as seen:
        yield seen


def of(span, *names):
    """Attributes of a span."""
    return [(span.attributes or {}).get(name) for name in names]


# --- metrics ------------------------------------------------------------------------------------


@both_ways
async def test_a_hold_is_measured(way, locks, seen):
    held_now = []

    def body(number):
        held_now.append(seen.metric("redislock.held"))

    report = distributed_lock("report:{number}")(way.function(body))
    for number in (1, 2):
        await way.call(report, number)
    assert seen.metric("redislock.acquire.duration") == {
        ("report:{number}", "default", "acquired"): 2
    }
    assert seen.metric("redislock.held.duration") == {("success",): 2}
    assert held_now == [{(): 1}, {(): 1}]
    assert seen.metric("redislock.held") == seen.metric("redislock.waiters") == {(): 0}


@both_ways
async def test_what_could_not_be_had_is_measured(way, locks, proxy, seen):
    locks.on(proxy)
    with held_by_other("lottery"):
        assert not await way.acquire(distributed_lock("lottery", wait=0))
    proxy.refuse()
    with pytest.raises(LockUnavailable):
        await way.acquire(distributed_lock("lottery", wait=0))
    proxy.heal()
    assert seen.metric("redislock.acquire.duration") == {
        ("lottery", "default", "timed_out"): 1,
        ("lottery", "default", "unavailable"): 1,
    }
    assert seen.metric("redislock.unavailable") == {("connection",): 1}


@pytest.mark.waits
@both_ways
async def test_a_loss_is_measured_and_traced(way, locks, proxy, seen):
    locks.on(proxy, TTL=2)
    lock = distributed_lock("import")
    with seen.tracer.start_as_current_span("import"):
        assert await way.acquire(lock)
        assert seen.metric("redislock.renewal.failures") == {(): 0}
        proxy.blackhole()
        await way.until(lambda: seen.metric("redislock.lost"))
        proxy.heal()
        with pytest.raises(LockLost):
            await way.release(lock)
    assert seen.metric("redislock.lost") == {("unreachable",): 1}
    assert seen.metric("redislock.renewal.failures")[()] > 0
    assert seen.metric("redislock.endangered") == {("import", "default"): 1}
    assert seen.metric("redislock.held.duration") == {("lost",): 1}
    (span,) = seen.spans("hold import")
    assert of(span, "redislock.outcome", "error.type") == ["lost", "unreachable"]
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["redislock.endangered"]


def test_runs_are_measured(locks, seen):
    @single_instance("nightly")
    def nightly(): ...

    nightly()
    with held_by_other("nightly"):
        nightly()
    job = f"{nightly.__module__}.{nightly.__qualname__}"
    assert seen.metric("redislock.runs") == {(job, "success"): 1, (job, "skipped"): 1}


def test_few_bare_names_are_told():
    labels = Labels()
    told = {labels.of(f"report:{number}") for number in range(2 * MOST_NAMES)}
    assert len(told) == MOST_NAMES + 1
    assert OTHER in told
    assert labels.of("report:0") == "report:0"


@single_instance
def nameless(): ...


@single_instance(limits=[Limit("limited", 2), Limit("limited:too", 2)])
def limited(): ...


def test_what_stands_at_a_decorator_takes_no_room_of_bare_names(locks, seen):
    for number in range(MOST_NAMES + 1):
        with distributed_lock(f"order:{number}"):
            pass
    for names in (("constant",), ("template:{number}",), ("of:{number}", "several")):
        distributed_lock(*names)(lambda number: None)(7)
    nameless()
    limited()
    told = {name for name, *_ in seen.metric("redislock.acquire.duration")}
    bare = {name for name in told if name.startswith("order:")}
    assert len(bare) == MOST_NAMES
    assert told - bare == {
        *("constant", "template:{number}", "of:{number}", "several", "limited", "limited:too"),
        *(f"{__name__}.nameless", OTHER),
    }


def test_buckets_are_advised(locks, seen):
    with distributed_lock("lottery"):
        pass
    meanwhile.catch_up()
    (asked,), (kept,) = map(seen.points, ("redislock.acquire.duration", "redislock.held.duration"))
    assert asked.explicit_bounds == metrics.ACQUIRE_BUCKETS
    assert kept.explicit_bounds == metrics.HELD_BUCKETS


@both_ways
async def test_a_measurement_waits_for_the_next_command(way, locks, seen, monkeypatch):
    """While a server works on that, there is nothing else to do."""
    recorded = []
    for name in ("asked", "held"):
        monkeypatch.setattr(Metrics, name, lambda *args, name=name: recorded.append(name))
    lock = distributed_lock("lottery")
    for _ in range(2):
        recorded.clear()
        assert await way.acquire(lock)
        before_the_release = [*recorded]
        await way.release(lock)
    assert before_the_release == ["held"]  # Of the lease before.
    assert recorded == ["held", "asked"]
    assert len(meanwhile.put_off) == 1
    meanwhile.catch_up()
    assert recorded == ["held", "asked", "held"]


def test_without_commands_few_measurements_wait(settings, seen):
    settings.REDISLOCK = {"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}}
    for _ in range(meanwhile.MOST):
        with distributed_lock("lottery"):
            pass
        assert len(meanwhile.put_off) <= meanwhile.MOST
    assert seen.metric("redislock.held.duration") == {("success",): meanwhile.MOST}


def test_an_exemplar_is_of_the_span_that_was_measured(locks, seen):
    def traced():  # Since it was asked last.
        points = seen.points("redislock.acquire.duration", "redislock.held.duration")
        return [one.trace_id for point in points for one in point.exemplars]

    with seen.tracer.start_as_current_span("of the lock") as span, distributed_lock("lottery"):
        pass
    with seen.tracer.start_as_current_span("of whoever catches up"):
        meanwhile.catch_up()
    assert traced() == [span.get_span_context().trace_id] * 2
    with distributed_lock("tombola"):
        pass
    with seen.tracer.start_as_current_span("of whoever catches up"):
        meanwhile.catch_up()
    assert traced() == []


def test_what_cannot_be_recorded_is_logged(locks, seen, monkeypatch, caplog):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(Metrics, "asked", fail)
    with distributed_lock("lottery"):
        pass
    assert seen.metric("redislock.held.duration") == {("success",): 1}
    assert [record.message for record in caplog.records] == ["Could not measure a lock"]


# --- traces -------------------------------------------------------------------------------------


@both_ways
async def test_a_wait_links_to_the_span_that_blocks_it(way, locks, seen):
    lock = distributed_lock("lottery")

    async def wait():
        with seen.tracer.start_as_current_span("waiter"):
            async with way.entered(distributed_lock("lottery")):
                pass

    with seen.tracer.start_as_current_span("holder"):
        assert await way.acquire(lock)
    waiting = way.start(wait)
    await way.until(lambda: seen.metric("redislock.waiters") == {(): 1})
    await way.release(lock)
    await waiting.result()

    (holder,), (waiter,) = seen.spans("holder"), seen.spans("waiter")
    (waited,) = seen.spans("wait lottery")
    # The next hold may end before the first one is told to have ended.
    first, then = sorted(seen.spans("hold lottery"), key=lambda span: span.start_time)
    assert [link.context.span_id for link in waited.links] == [holder.context.span_id]
    parents = [span.parent.span_id for span in (first, waited, then)]
    assert parents == [one.context.span_id for one in (holder, waiter, waiter)]
    assert waited.end_time <= then.start_time
    host, port = locks.server.host, locks.server.port
    assert of(waited, "redislock.name", "redislock.outcome") == ["lottery", "acquired"]
    assert of(waited, "server.address", "server.port") == [host, port]
    assert first.end_time > holder.end_time  # The hold goes on after the span in which it began.


@places(CLUSTER)
def test_a_span_names_no_server_of_a_cluster_since_another_one_may_keep_the_lock(place, seen):
    with seen.tracer.start_as_current_span("holder"), distributed_lock("lottery"):
        pass
    (hold,) = seen.spans("hold lottery")
    assert of(hold, "redislock.name", "server.address", "server.port") == ["lottery", None, None]


def test_the_record_of_a_holder_has_its_traceparent(locks, seen):
    def traceparent():
        return held.get("lottery").owner.traceparent

    with seen.tracer.start_as_current_span("holder") as span, distributed_lock("lottery"):
        context = span.get_span_context()
        ids = format_trace_id(context.trace_id), format_span_id(context.span_id)
        written = traceparent()
    assert written.startswith("00-{}-{}-".format(*ids))
    with distributed_lock("lottery"):  # Outside of a span.
        assert traceparent() == ""
    seen.telemetry.disconnect()
    with seen.tracer.start_as_current_span("holder"), distributed_lock("lottery"):
        assert traceparent() == ""
    seen.telemetry.connect()


@pytest.mark.parametrize("is_sampled", [True, False])
def test_nothing_is_traced_outside_of_a_trace(locks, is_sampled):
    with Seen(**({} if is_sampled else {"sampler": ALWAYS_OFF})).on() as seen:
        with distributed_lock("lottery"):
            pass
        if not is_sampled:
            with seen.tracer.start_as_current_span("holder"), distributed_lock("lottery"):
                assert held.get("lottery").owner.traceparent == ""
        assert seen.spans("hold lottery") == []
    assert backends["default"].waiting == set()


class InterruptedSum(float):
    """While it is added up, which the SDK does under a mutex, a handler uses a lock."""

    def __radd__(self, other):
        with distributed_lock("of a handler"):
            return other + float(self)


def test_a_handler_may_use_a_lock_while_another_one_is_measured(locks, seen):
    lock = distributed_lock("lottery")
    with lock as lease:
        news = {"lease": lease, "success": True, "template": "lottery"}
        signals.lock_released.send_robust(sender=Lock, held_for=InterruptedSum(0.5), **news)
    assert seen.metric("redislock.held.duration") == {("success",): 3}


# --- the app --------------------------------------------------------------------------------------

WITHOUT_THE_API = """
import sys
sys.modules["opentelemetry"] = None
import django
from django.conf import settings
settings.configure(INSTALLED_APPS={})
django.setup()
from django_redislock import signals
print(len(signals.lock_acquired.receivers))
"""


def test_only_the_app_needs_the_api_and_says_what_to_install():
    apps = ["django_redislock"]
    assert python("-c", WITHOUT_THE_API.format(apps)).stdout == "0\n"
    with pytest.raises(AssertionError, match=r"pip install 'django_redislock\[otel\]'"):
        python("-c", WITHOUT_THE_API.format([*apps, "django_redislock.contrib.otel"]))


EXPORTED_AT_EXIT = """
import json, sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
exporter = ConsoleMetricExporter(formatter=lambda data: data.to_json(indent=None) + "\\n")
metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(exporter)]))
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_redislock", "django_redislock.contrib.otel"],
    REDISLOCK={{"default": {{"LOCATION": {location!r}, "KEY_PREFIX": {prefix!r}}}}},
)
django.setup()
from django_redislock import distributed_lock
with distributed_lock("lottery"):
    pass
"""


def test_the_last_measurements_of_a_process_are_exported_at_its_end(locks):
    script = EXPORTED_AT_EXIT.format(location=locks.server.url, prefix=locks.prefix)
    (exported,) = python("-c", script).stdout.splitlines()
    metrics_ = json.loads(exported)["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    counted = {
        one["name"]: [point["count"] for point in one["data"]["data_points"]]
        for one in metrics_
        if one["unit"] == "s"
    }
    assert counted == {"redislock.acquire.duration": [1], "redislock.held.duration": [1]}


def serve_metrics_of_a_fork():
    """The app is on before the fork; each process sets its own provider after it, as advised."""
    import os

    from opentelemetry import metrics
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import start_http_server

    Telemetry().connect()
    with distributed_lock("before"):
        pass
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    server, _ = start_http_server(0, addr="127.0.0.1")
    lock = distributed_lock(f"report:{1}")
    with lock:
        say(server.server_port)
        hear()
    say("released")
    hear()
    sys.stdout.flush()
    os._exit(0)


def test_prometheus_reads_the_metrics_of_a_forked_process(locks, spawn):
    child = spawn(serve_metrics_of_a_fork)
    port = child.read()

    def scraped(sample, **labels):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return [
            one.value
            for family in families
            for one in family.samples
            if one.name == sample and labels.items() <= one.labels.items()
        ]

    assert scraped("redislock_held") == [1]
    child.send(None)
    assert child.read() == "released"
    assert scraped("redislock_held") == [0]
    acquires = "redislock_acquire_duration_seconds_count"
    asked = {"alias": "default", "outcome": "acquired"}
    assert scraped(acquires, name="report:1", **asked) == [1]
    assert scraped(acquires) == [1]  # Without that of the parent.
    assert scraped("redislock_held_duration_seconds_count", outcome="success") == [1]
    child.send(None)
    child.wait()
