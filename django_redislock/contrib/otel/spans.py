"""Spans for waits and holds, and the traceparent by which a waiter finds its holder's trace."""

from __future__ import annotations

import threading
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec
from weakref import WeakKeyDictionary

from opentelemetry.context import get_current
from opentelemetry.trace import Link, Status, StatusCode, get_current_span, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from django_redislock.backends.registry import backends

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from django_redislock.lease import Lease
    from django_redislock.rules.stored import Owner

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

    They never become the current span: a hold may end in another context than it began in.
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
