"""The instruments and their attributes; docs/monitoring.md has a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.context import Context, create_key, set_value
from opentelemetry.metrics import Observation, get_meter

from django_redislock import process
from django_redislock.backends.registry import backends
from django_redislock.contrib.otel.labels import MOST_WRITTEN, Bounded
from django_redislock.meanwhile import catch_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.metrics import CallbackOptions, MeterProvider

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
        self._lost = meter.create_counter(
            "redislock.lost", "{lease}", "Leases that ended while their owner relied on them."
        )
        self._endangered = meter.create_counter(
            "redislock.endangered",
            "{lease}",
            "Leases whose renewals were unanswered until half of the ttl was gone.",
        )
        self._runs = meter.create_counter("redislock.runs", "{run}", "Runs of jobs.")
        self._unavailable = meter.create_counter(
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
        self._of_acquire = _AcquireAttributes()
        self._jobs = Bounded(MOST_WRITTEN)

    def asked(self, seconds: float, label: str, alias: str, outcome: str, context: Context) -> None:
        """An acquire is over. Its exemplar is the span of *context*, if there is one."""
        attributes = self._of_acquire[label, alias, outcome]
        self._acquire_duration.record(seconds, attributes, context or NOWHERE)

    def held(self, seconds: float, outcome: str, context: Context) -> None:
        """A lease is over; see asked()."""
        self._held_duration.record(seconds, _HELD[outcome], context or NOWHERE)

    def lost(self, reason: str) -> None:
        """A lease was lost."""
        self._lost.add(1, {"reason": reason})

    def endangered(self, label: str, alias: str) -> None:
        """A lease is about to be lost."""
        self._endangered.add(1, {"name": label, "alias": alias})

    def unavailable(self, reason: str) -> None:
        """An acquire or a release has ended with LockUnavailable."""
        self._unavailable.add(1, {"reason": reason})

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
