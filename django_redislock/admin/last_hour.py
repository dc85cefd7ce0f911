"""Small pictures of the last hour of a lock: runs, waits, skips, losses; beside each, its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_redislock.admin.timeline import TICKS, percent, spans, tick
from django_redislock.humanize import counted, duration, visible

if TYPE_CHECKING:
    from django_redislock.admin.timeline import Span, Tick
    from django_redislock.held import Detail, Record

HOUR = 3600.0
THINNEST = 0.8  # Percent: a moment must be seen on a phone too.
MOST_SKIPS = 30  # The server keeps so many, see lua/_runs.lua.


@dataclass(frozen=True)
class Mark:
    """Something that took a while, or a moment."""

    x: str  # Percent, as SVG wants it.
    width: str
    kind: str  # Its colour: as in timeline.Bar, or wait or skip.
    says: str


@dataclass(frozen=True)
class Picture:
    """One row."""

    about: str
    says: str  # Stands beside the marks, and is read out in their place.
    marks: list[Mark]


@dataclass(frozen=True)
class LastHour:
    """All rows."""

    pictures: list[Picture]
    ticks: list[Tick]
    note: str  # About what is left out; "" if nothing is.


def draw(detail: Detail, record: Record | None, most: int) -> LastHour | None:
    """The pictures of a lock; None if nothing is known of the last hour.

    Args:
        detail: The lock, or a permit.
        record: The record of the runs of its task.
        most: How many earlier leases the server keeps.
    """
    start = detail.server_time - HOUR
    leases = [span for span in spans(detail) if span.until >= start]
    skips = [at for at in (record.skipped_at if record else ()) if at >= start]
    pictures = [
        _runs(leases, start),
        _waits(detail, leases, start),
        _skips(skips, start),
        _losses(leases, start),
    ]
    if not any(picture.marks for picture in pictures):
        return None
    return LastHour(
        pictures=pictures,
        ticks=[tick(start, HOUR, number) for number in range(TICKS + 1)],
        note=(
            f"Of this lock {most} earlier leases are kept (TIMELINE): less than an hour."
            if len(detail.past) >= most and detail.past[0].since > start
            else ""
        ),
    )


def _runs(leases: list[Span], start: float) -> Picture:
    held = sum(span.until - max(span.since, start) for span in leases)
    says = f"{counted(len(leases), 'lease')}, held for {duration(held)} in all"
    marks = [_mark(span.since, span.until, start, span.ended, span.says) for span in leases]
    return Picture("Runs", says if leases else "none", marks)


def _waits(detail: Detail, leases: list[Span], start: float) -> Picture:
    now = detail.server_time
    over = [span for span in leases if span.waited and span.since >= start]
    longest = max([span.waited for span in over], default=0.0)
    said = [f"{len(over)} of a second or longer, the longest {duration(longest)}"] if over else []
    if detail.waiters:
        oldest = max(one.waiting_for for one in detail.waiters)
        said.append(f"{len(detail.waiters)} waiting now, the first for {duration(oldest)}")
    marks = [
        _mark(span.since - span.waited, span.since, start, "wait", _waited(span)) for span in over
    ]
    marks += [
        _mark(
            now - one.waiting_for,
            now,
            start,
            "wait",
            f"{visible(str(one.owner))}, waiting for {duration(one.waiting_for)} so far",
        )
        for one in detail.waiters
    ]
    return Picture("Waits", "; ".join(said) or "none", marks)


def _waited(span: Span) -> str:
    return f"waited {duration(span.waited)}; {span.says}"


def _skips(times: list[float], start: float) -> Picture:
    ago = duration(start + HOUR - times[-1]) if times else ""
    more = " or more" if len(times) >= MOST_SKIPS else ""
    says = f"{len(times)}{more}, the last {ago} ago" if times else "none"
    return Picture("Skips", says, [_mark(at, at, start, "skip", "skipped") for at in times])


def _losses(leases: list[Span], start: float) -> Picture:
    lost = [span for span in leases if span.ended in {"forced", "expired"}]
    forced = sum(span.ended == "forced" for span in lost)
    expired = len(lost) - forced
    kinds = (f"{forced} by force" * bool(forced), f"{expired} expired" * bool(expired))
    kind = {"forced": "forced", "expired": "failed"}  # A thin hatched mark would not be seen.
    marks = [_mark(span.until, span.until, start, kind[span.ended], span.says) for span in lost]
    return Picture("Losses", ", ".join(filter(None, kinds)) or "none", marks)


def _mark(since: float, until: float, start: float, kind: str, says: str) -> Mark:
    since, until = (min(max(at - start, 0.0), HOUR) for at in (since, until))
    width = max(100 * (until - since) / HOUR, THINNEST)
    return Mark(percent(min(100 * since / HOUR, 100 - width)), percent(width), kind, says)
