"""The picture of a lock's recent leases. Positions are shares of the width, not pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_redislock.admin.markup import moment
from django_redislock.humanize import counted, duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.held import Detail

THINNEST = 0.5  # Percent: the bar of a short lease must be seen, too.
MOST_LANES = 8
COLOURED = ("held", "done", "failed", "forced", "expired")
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """One lease."""

    x: str  # Percent, as SVG wants it: never with a decimal comma.
    width: str
    ended: str  # Its colour: done, failed, forced, expired or held.
    says: str


@dataclass
class Lane:
    """The leases of one host."""

    host: str
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True)
class Tick:
    """A time on the axis."""

    x: str
    label: str
    anchor: str


@dataclass(frozen=True)
class Timeline:
    """The picture."""

    lanes: list[Lane]
    ticks: list[Tick]
    says: str  # For readers who do not see the picture.

    @property
    def legend(self) -> list[str]:
        """The colours that are used."""
        used = {bar.ended for lane in self.lanes for bar in lane.bars}
        return [ended for ended in COLOURED if ended in used]


@dataclass(frozen=True)
class Span:
    """One lease, and how long its owner waited for it."""

    host: str
    since: float
    until: float
    ended: str
    says: str
    waited: float


def draw(detail: Detail) -> Timeline | None:
    """The timeline of a lock; None if there is nothing to draw."""
    found = list(spans(detail))
    if not found:
        return None
    start = min(span.since for span in found)
    length = max(detail.server_time - start, 1.0)
    lanes: dict[str, Lane] = {}
    # The latest hosts have lanes of their own.
    for span in sorted(found, key=lambda span: span.until, reverse=True):
        host = span.host if span.host in lanes or len(lanes) < MOST_LANES - 1 else "other hosts"
        lane = lanes.setdefault(host, Lane(host))
        width = max(100 * (span.until - span.since) / length, THINNEST)
        x = min(100 * (span.since - start) / length, 100 - THINNEST)
        lane.bars.append(Bar(percent(x), percent(min(width, 100 - x)), span.ended, span.says))
    return Timeline(
        lanes=sorted(lanes.values(), key=lambda lane: lane.host),
        ticks=[tick(start, length, number) for number in range(TICKS + 1)],
        says=(
            f"{counted(len(found), 'lease')} of {counted(len(lanes), 'host')}"
            f" within {duration(length)}"
        ),
    )


def spans(detail: Detail) -> Iterator[Span]:
    """All known leases: the present one, then the earlier ones, the oldest first."""
    lock, now = detail.lock, detail.server_time
    began = now  # When the present lease began, if there is one.
    if lock is not None and lock.held_for is not None:
        began = now - lock.held_for
        says = f"{visible(str(lock.owner))}, held for {duration(lock.held_for)} so far"
        yield Span(_host(lock.owner.host), began, now, "held", says, lock.owner.waited)
    following = [*(lease.since for lease in detail.past), began][1:]
    for lease, next_began in zip(detail.past, following, strict=True):
        # Nobody knows the end of an expired lease, but it was before the next one began.
        until = max(lease.until or next_began, lease.since)
        at_most = "at most " if lease.until is None else ""
        lasted = f"{lease.ended} after {at_most}{duration(until - lease.since)}"
        says = f"{visible(str(lease.owner))}, {lasted}"
        host, waited = _host(lease.owner.host), lease.owner.waited
        yield Span(host, lease.since, until, lease.ended, says, waited)


def _host(host: str) -> str:
    return visible(host) or "unknown host"


def tick(start: float, length: float, number: int) -> Tick:
    """One of the times on an axis, from 0 at its start to TICKS at its end."""
    share = number / TICKS
    label = moment(start + share * length).strftime(
        "%H:%M:%S" if length < 3600 else "%H:%M" if length < 86400 else "%d.%m. %H:%M"
    )
    anchor = "start" if number == 0 else "end" if number == TICKS else "middle"
    return Tick(percent(100 * share), label, anchor)


def percent(share: float) -> str:
    """As SVG wants it."""
    return f"{share:.2f}%"
