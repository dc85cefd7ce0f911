"""A panel for django-debug-toolbar: the locks of a request; see docs/monitoring.md."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from debug_toolbar.panels import Panel

from django_redislock import signals
from django_redislock.humanize import counted, duration, visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.dispatch import Signal
    from django.http import HttpRequest, HttpResponse

    from django_redislock.lease import Lease
    from django_redislock.rules.stored import Owner

# The panel of the request that is being served, also in threads and tasks that it has begun.
_current: ContextVar[LocksPanel | None] = ContextVar("_current", default=None)


class LocksPanel(Panel):
    """Each lock that was asked for: its wait, its time held, the holder in the way, the outcome.

    It receives signals while a request is served, and nothing otherwise.
    """

    title = nav_title = "Locks"
    template = "django_redislock/debug_toolbar.html"
    is_async = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._locks: list[dict[str, Any]] = []
        self._by_lease: dict[str, dict[str, Any]] = {}  # By their ids: leases must not be kept.
        self._receivers: dict[Signal, Callable[..., None]] = {
            signals.lock_acquired: self._acquired,
            signals.lock_released: self._released,
            signals.lock_timed_out: self._timed_out,
            signals.lock_unavailable: self._unavailable,
            signals.lock_lost: self._lost,
        }

    @property
    def nav_subtitle(self) -> str:
        """How many locks, and how long the request waited for them."""
        stats: dict[str, Any] = self.get_stats()  # type: ignore[no-untyped-call]
        locks = counted(len(stats.get("locks", ())), "lock")
        return f"{locks}, waited {stats.get('waited', duration(0.0))}"

    def enable_instrumentation(self) -> None:
        """Begin to listen."""
        for signal, receiver in self._receivers.items():
            signal.connect(receiver, dispatch_uid=id(self))
        _current.set(self)

    def disable_instrumentation(self) -> None:
        """Stop listening."""
        for signal in self._receivers:
            signal.disconnect(dispatch_uid=id(self))
        _current.set(None)

    def generate_stats(self, request: HttpRequest, response: HttpResponse) -> None:
        """Keep what was heard for the page, and for the toolbar's history."""
        self.record_stats(  # type: ignore[no-untyped-call]
            {
                "locks": self._locks,
                "waited": duration(sum(lock["seconds_waited"] for lock in self._locks)),
                "round_trips": sum(lock["round_trips"] for lock in self._locks),
            }
        )

    def _note(self, name: str, alias: str, waited: float, **more: Any) -> dict[str, Any]:
        lock = {
            "name": visible(name),
            "alias": visible(alias),
            "seconds_waited": waited,
            "waited": duration(waited),
            "held_for": "",
            "blocked_by": "",
            "round_trips": 1,
            **more,
        }
        self._locks.append(lock)
        return lock

    # --- receivers: keyword arguments may be added to signals ------------------------------------

    def _acquired(
        self, lease: Lease, waited: float, blocked_by: Owner | None = None, **_: Any
    ) -> None:
        if _current.get() is self:
            holder = "" if blocked_by is None else visible(str(blocked_by))
            lock = self._note(
                lease.name, lease.alias, waited, blocked_by=holder, outcome="still held"
            )
            self._by_lease[lease.id] = lock

    def _released(self, lease: Lease, held_for: float, success: bool, **_: Any) -> None:
        if lock := self._by_lease.get(lease.id):
            lock["held_for"] = duration(held_for)
            lock["outcome"] = "released" if success else "released after an error"
            lock["round_trips"] += 1

    def _timed_out(self, name: str, using: str, holder: str, waited: float, **_: Any) -> None:
        if _current.get() is self:
            self._note(name, using, waited, blocked_by=visible(str(holder)), outcome="busy")

    def _unavailable(
        self,
        name: str,
        using: str,
        reason: str,
        waited: float,
        lease: Lease | None = None,
        **_: Any,
    ) -> None:
        outcome = f"unavailable: {reason}"
        if lease is not None and (lock := self._by_lease.get(lease.id)):
            lock["outcome"] = f"{outcome}, at the release"
            lock["round_trips"] += 1
        elif _current.get() is self:
            self._note(name, using, waited, outcome=outcome)

    def _lost(self, lease: Lease, reason: str, **_: Any) -> None:
        if lock := self._by_lease.get(lease.id):
            lock["outcome"] = f"lost: {reason}"
