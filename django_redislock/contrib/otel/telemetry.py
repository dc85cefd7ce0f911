"""Receives the signals of locks and runs, for metrics and spans."""

from __future__ import annotations

import threading
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec
from weakref import WeakKeyDictionary

from opentelemetry.context import Context, create_key, get_current, set_value
from opentelemetry.metrics import Observation, get_meter
from opentelemetry.trace import Link, Status, StatusCode, get_current_span, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from django_redislock import process, signals
from django_redislock.backends.registry import backends
from django_redislock.deferred_work import catch_up, later
from django_redislock.holder import trace_owners
from django_redislock.rules.names import Written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider
    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from django_redislock.jobs.options import Skipped
    from django_redislock.lease import Lease
    from django_redislock.rules.stored import Owner


# --- names of locks as labels of metrics and spans: few, however many names there are -------------

# So many names that the code made itself, as by f-strings, are labels. Names and templates at
# decorators are as few as the decorators: their bound is for decorators made in a loop.
MOST_NAMES = 200
MOST_WRITTEN = 2000
OTHER = "other"  # The label of all others.


class Bounded(dict[str, str]):
    """By name, its label. The first *most* names have one of their own."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __missing__(self, name: str) -> str:
        if len(self) >= self._most:
            return OTHER
        label = self[name] = str(name)
        return label


class Labels:
    """By template, the label of a lock. Each kind of names has room of its own."""

    def __init__(self) -> None:
        self._bare = Bounded(MOST_NAMES)
        self._written = Bounded(MOST_WRITTEN)

    def of(self, template: str) -> str:
        """The label of a lock with this template."""
        return (self._written if isinstance(template, Written) else self._bare)[template]


# --- the instruments and their attributes; docs/monitoring.md has a table -------------------------

# Bounds of buckets, in seconds. A free lock takes a tenth of a millisecond or so.
ACQUIRE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
HELD_BUCKETS = (
    *(0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
    *(10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)

# A context without a span. The SDK takes an empty one for none, and would look at the current one:
# that of the thread that catches up.
NOWHERE = set_value(create_key("redislock"), True, Context())

_HELD = {outcome: {"outcome": outcome} for outcome in ("success", "failure", "lost")}


class _AcquireAttributes(dict[tuple[str, str, str], dict[str, str]]):
    """The attributes of an acquire by label, alias and outcome, made once."""

    def __missing__(self, key: tuple[str, str, str]) -> dict[str, str]:
        name, alias, outcome = key
        attributes = self[key] = {"name": name, "alias": alias, "outcome": outcome}
        return attributes


class Metrics:
    """The metrics of locks and runs; durations are seconds."""

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = get_meter("django_redislock", meter_provider=provider)
        self._acquire_duration = meter.create_histogram(
            "redislock.acquire.duration",
            "s",
            "How long it took to be granted a lock, or to be refused it.",
            explicit_bucket_boundaries_advisory=ACQUIRE_BUCKETS,
        )
        self._held_duration = meter.create_histogram(
            "redislock.held.duration",
            "s",
            "From a grant to the release or loss of its lease.",
            explicit_bucket_boundaries_advisory=HELD_BUCKETS,
        )
        self.lost = meter.create_counter(
            "redislock.lost", "{lease}", "Leases that ended while their owner relied on them."
        )
        self.endangered = meter.create_counter(
            "redislock.endangered",
            "{lease}",
            "Leases whose renewals were unanswered until half of the ttl was gone.",
        )
        self._runs = meter.create_counter("redislock.runs", "{run}", "Runs of jobs.")
        self.unavailable = meter.create_counter(
            "redislock.unavailable",
            "{error}",
            "Acquires and releases that the server did not or could not answer.",
        )
        meter.create_observable_up_down_counter(
            "redislock.waiters",
            [_waiters],
            "{waiter}",
            "Acquires of this process that wait now.",
        )
        meter.create_observable_up_down_counter(
            "redislock.held", [_held], "{lease}", "Leases that this process holds now."
        )
        meter.create_observable_counter(
            "redislock.renewal.failures",
            [_renewal_failures],
            "{failure}",
            "Tries to renew a lease that were refused, or not answered.",
        )
        self.labels = Labels()
        self._of_acquire = _AcquireAttributes()
        self._jobs = Bounded(MOST_WRITTEN)

    def asked(
        self, seconds: float, template: str, alias: str, outcome: str, context: Context
    ) -> None:
        """An acquire is over. Its exemplar is the span of *context*, if there is one."""
        attributes = self._of_acquire[self.labels.of(template), alias, outcome]
        self._acquire_duration.record(seconds, attributes, context or NOWHERE)

    def held(self, seconds: float, outcome: str, context: Context) -> None:
        """A lease is over; see asked()."""
        self._held_duration.record(seconds, _HELD[outcome], context or NOWHERE)

    def ran(self, job: str, outcome: str) -> None:
        """A run of a job is over, or did not happen."""
        self._runs.add(1, {"job": self._jobs[job], "outcome": outcome})


# --- counted when metrics are collected ---------------------------------------------------------


# Callbacks are called before the rest is collected, so it includes the work put off.


def _waiters(_: CallbackOptions) -> Iterable[Observation]:
    process.this()
    catch_up()
    yield Observation(sum(len(backend.waiting) for backend in list(backends.values())))


def _held(_: CallbackOptions) -> Iterable[Observation]:
    process.this()
    held = 0
    for backend in list(backends.values()):
        for name in list(backend.leases):
            held += sum(lease.held for lease in backend.leases.of(name))
    yield Observation(held)


def _renewal_failures(_: CallbackOptions) -> Iterable[Observation]:
    process.this()
    yield Observation(sum(backend.renewal_failures for backend in list(backends.values())))


# --- spans for waits and holds, and the traceparent by which a waiter finds its holder's trace ----

Told = ParamSpec("Told")

_propagator = TraceContextTextMapPropagator()


class _Nested(threading.local):
    """Calls that a thread put off while the SDK was at work."""

    def __init__(self) -> None:
        self.is_at_work = False
        self.put_off: list[Callable[[], None]] = []


_nested = _Nested()


def _one_at_a_time(
    tell: Callable[Concatenate[Spans, Told], None],
) -> Callable[Concatenate[Spans, Told], None]:
    """Put a call off while the SDK is at work in the same thread.

    A signal handler or a destructor that uses a lock may interrupt the SDK while that has a mutex.
    The handler would wait for the mutex for ever.
    """

    def told(self: Spans, /, *args: Told.args, **named: Told.kwargs) -> None:
        mine = _nested
        if mine.is_at_work:
            mine.put_off.append(partial(tell, self, *args, **named))
            return
        try:
            mine.is_at_work = True
            tell(self, *args, **named)
            while mine.put_off:
                mine.put_off.pop(0)()
        finally:
            mine.is_at_work = False

    return told


class Spans:
    """Children of the span that the caller is in; where nothing is traced, there are none.

    They never become the current span: a lease may end in another context than it began in.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer = get_tracer("django_redislock", tracer_provider=provider)
        # A lease that is dropped without a release takes its span with it.
        self.holds: WeakKeyDictionary[Lease, Span] = WeakKeyDictionary()

    def are_wanted(self) -> bool:
        """Whether the caller is in a span that is recorded."""
        return get_current_span().is_recording()

    def traceparent(self) -> str:
        """The traceparent of the caller's span; "" if nobody will see the span."""
        if not (current := get_current()):  # Most often: there is no span at all.
            return ""
        span = get_current_span(current)
        if not span.is_recording():
            return ""
        context = span.get_span_context()
        if not context.trace_flags.sampled:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @_one_at_a_time
    def waited(
        self,
        seconds: float,
        label: str,
        name: str,
        alias: str,
        outcome: str,
        blocked_by: Owner | None = None,
        error: str = "",
    ) -> None:
        """A wait is over. Its span links to the span of the owner that had the lock."""
        links = []
        attributes = {**_of_lock(label, name, alias), "redislock.outcome": outcome}
        if blocked_by is not None:
            attributes["redislock.blocked_by"] = str(blocked_by)
            read = _propagator.extract({"traceparent": blocked_by.traceparent})
            if (context := get_current_span(read).get_span_context()).is_valid:
                links.append(Link(context))
        now = time.time_ns()
        span = self._tracer.start_span(
            f"wait {label}",
            attributes=attributes,
            links=links,
            start_time=now - int(seconds * 1e9),
        )
        _end(span, error, now)

    @_one_at_a_time
    def hold_begins(self, lease: Lease, label: str) -> None:
        """A lease was granted."""
        attributes = {
            **_of_lock(label, lease.name, lease.alias),
            "redislock.lease": lease.id,
            "redislock.fence": lease.fence,
        }
        self.holds[lease] = self._tracer.start_span(f"hold {label}", attributes=attributes)

    @_one_at_a_time
    def is_endangered(self, lease: Lease, left: float) -> None:
        """The renewals of a lease are unanswered."""
        if (span := self.holds.get(lease)) is not None:
            span.add_event("redislock.endangered", {"redislock.left": left})

    @_one_at_a_time
    def hold_ends(self, lease: Lease, outcome: str, error: str = "") -> None:
        """A lease is over."""
        if (span := self.holds.pop(lease, None)) is not None:
            span.set_attribute("redislock.outcome", outcome)
            _end(span, error)


def _end(span: Span, error: str, at: int | None = None) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(at)


def _of_lock(label: str, name: str, alias: str) -> dict[str, AttributeValue]:
    backend = backends[alias]
    server = {} if backend.in_parts else _server(backend.conf.address)
    return {"redislock.name": name, "redislock.template": label, "redislock.alias": alias, **server}


@lru_cache(maxsize=64)
def _server(address: str) -> dict[str, AttributeValue]:
    """The server of a lock, if there is one: a socket, or a host and a port."""
    if not address or ", " in address:
        return {}
    host, colon, port = address.rpartition(":")
    if address.startswith("/") or not port.isdecimal():
        return {"server.address": address}
    return {"server.address": host.strip("[]"), "server.port": int(port)} if colon else {}


class Telemetry:
    """One receiver for each signal, since calling one costs an acquire about as much as its work.

    None blocks, so an event loop calls them itself. Recording a metric takes the SDK longer than
    the rest of an acquire. So it is done later, while a server works on the next command. Spans
    begin and end at once. Numbers that signals do not tell, such as how many leases are held now,
    are counted when metrics are collected.

    Args:
        meter_provider: Gets the metrics; None: the one that the program sets, also later.
        tracer_provider: The same for spans.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        self._metrics = Metrics(meter_provider)
        self._spans = Spans(tracer_provider)
        self._labels = self._metrics.labels
        self._receivers: dict[Any, Callable[..., None]] = {
            signals.lock_acquired: self._acquired,
            signals.lock_released: self._released,
            signals.lock_timed_out: self._timed_out,
            signals.lock_unavailable: self._unavailable,
            signals.lock_lost: self._lost,
            signals.lease_endangered: self._endangered,
            signals.run_ended: self._run_ended,
            signals.task_skipped: self._skipped,
            signals.task_abandoned: self._abandoned,
        }

    def connect(self) -> None:
        """Receive signals from now on."""
        for signal, receiver in self._receivers.items():
            signal.connect_prompt(receiver)
        trace_owners(self._spans.traceparent)

    def disconnect(self) -> None:
        """Receive none any more."""
        for signal, receiver in self._receivers.items():
            signal.disconnect_prompt(receiver)
        trace_owners(None)
        catch_up()

    # --- receivers ----------------------------------------------------------------------------

    def _acquired(
        self, lease: Lease, waited: float, blocked_by: Owner | None, template: str, **_: Any
    ) -> None:
        alias = lease.alias
        if not lease.owner.traceparent:  # Most often: nobody would see a span.
            later(self._metrics.asked, waited, template, alias, "acquired", NOWHERE)
            return
        later(self._metrics.asked, waited, template, alias, "acquired", get_current())
        if self._spans.are_wanted():
            label = self._labels.of(template)
            if blocked_by is not None:
                self._spans.waited(waited, label, lease.name, alias, "acquired", blocked_by)
            self._spans.hold_begins(lease, label)

    def _released(self, lease: Lease, held_for: float, success: bool, **_: Any) -> None:
        outcome = "success" if success else "failure"
        if not lease.owner.traceparent:
            later(self._metrics.held, held_for, outcome, NOWHERE)
            return
        later(self._metrics.held, held_for, outcome, get_current())
        self._spans.hold_ends(lease, outcome)

    def _timed_out(
        self, name: str, using: str, waited: float, blocked_by: Owner, template: str, **_: Any
    ) -> None:
        self._wait_ended(waited, template, name, using, "timed_out", blocked_by=blocked_by)

    def _unavailable(
        self,
        name: str,
        using: str,
        reason: str,
        waited: float,
        lease: Lease | None,
        template: str,
        **_: Any,
    ) -> None:
        later(self._metrics.unavailable.add, 1, {"reason": reason})
        if lease is not None:  # Its release was not answered.
            self._spans.hold_ends(lease, "unavailable", error=reason)
            return
        self._wait_ended(waited, template, name, using, "unavailable", error=reason)

    def _wait_ended(
        self, waited: float, template: str, name: str, alias: str, outcome: str, **why: Any
    ) -> None:
        """An acquire was granted no lock."""
        later(self._metrics.asked, waited, template, alias, outcome, get_current())
        if self._spans.are_wanted():
            label = self._labels.of(template)
            self._spans.waited(waited, label, name, alias, outcome, **why)

    def _lost(self, lease: Lease, reason: str, held_for: float, **_: Any) -> None:
        later(self._metrics.lost.add, 1, {"reason": reason})
        later(self._metrics.held, held_for, "lost", get_current())
        self._spans.hold_ends(lease, "lost", error=reason)

    def _endangered(self, lease: Lease, left: float, template: str, **_: Any) -> None:
        labels = {"name": self._labels.of(template), "alias": lease.alias}
        later(self._metrics.endangered.add, 1, labels)
        self._spans.is_endangered(lease, left)

    def _run_ended(self, job: str, outcome: str, **_: Any) -> None:
        later(self._metrics.ran, job, outcome)

    def _skipped(self, job: str, result: Skipped, **_: Any) -> None:
        later(self._metrics.ran, job, "skipped")

    def _abandoned(self, job: str, **_: Any) -> None:
        later(self._metrics.ran, job, "abandoned")
