"""Receives the signals of locks and runs, for metrics and spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.context import get_current

from django_redislock import signals
from django_redislock.contrib.otel.labels import Labels
from django_redislock.contrib.otel.metrics import NOWHERE, Metrics
from django_redislock.contrib.otel.spans import Spans
from django_redislock.holder import trace_owners
from django_redislock.meanwhile import catch_up, later

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from django_redislock.jobs.skipped import Skipped
    from django_redislock.lease import Lease
    from django_redislock.rules.stored import Owner


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
        self._labels = Labels()
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
            later(self._asked, waited, template, alias, "acquired", NOWHERE)
            return
        later(self._asked, waited, template, alias, "acquired", get_current())
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
        later(self._asked, waited, template, using, "timed_out", get_current())
        if self._spans.are_wanted():
            label = self._labels.of(template)
            self._spans.waited(waited, label, name, using, "timed_out", blocked_by)

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
        later(self._metrics.unavailable, reason)
        if lease is not None:  # Its release was not answered.
            self._spans.hold_ends(lease, "unavailable", error=reason)
            return
        later(self._asked, waited, template, using, "unavailable", get_current())
        if self._spans.are_wanted():
            label = self._labels.of(template)
            self._spans.waited(waited, label, name, using, "unavailable", error=reason)

    def _lost(self, lease: Lease, reason: str, held_for: float, **_: Any) -> None:
        later(self._metrics.lost, reason)
        later(self._metrics.held, held_for, "lost", get_current())
        self._spans.hold_ends(lease, "lost", error=reason)

    def _endangered(self, lease: Lease, left: float, template: str, **_: Any) -> None:
        later(self._metrics.endangered, self._labels.of(template), lease.alias)
        self._spans.is_endangered(lease, left)

    def _run_ended(self, job: str, outcome: str, **_: Any) -> None:
        later(self._metrics.ran, job, outcome)

    def _skipped(self, job: str, result: Skipped, **_: Any) -> None:
        later(self._metrics.ran, job, "skipped")

    def _abandoned(self, job: str, **_: Any) -> None:
        later(self._metrics.ran, job, "abandoned")

    # --- later ------------------------------------------------------------------------------------

    def _asked(
        self, waited: float, template: str, alias: str, outcome: str, context: Context
    ) -> None:
        self._metrics.asked(waited, self._labels.of(template), alias, outcome, context)
