"""Small pictures of the last hour of a lock: runs, waits, skips, losses; beside each, its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from django_redislock.admin.markup import moment
from django_redislock.humanize import counted, duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.held import Detail, Record

HOUR = 3600.0
THINNEST = 0.8  # Percent: a moment must be seen on a phone too.
MOST_SKIPS = 30  # The server keeps so many, see lua/_runs.lua.
TICKS = 4


class Mark(NamedTuple):
    """Something that took a while, or a moment."""

    x: str  # Percent, as SVG wants it: never with a decimal comma.
    width: str
    kind: str  # Its colour: held, done, failed, forced, expired, wait or skip.
    says: str


class Tick(NamedTuple):
    """A time on the axis."""

    x: str
    label: str
    anchor: str


class Span(NamedTuple):
    """One lease, and how long its owner waited for it."""

    since: float
    until: float
    ended: str
    says: str
    waited: float


class Shown(NamedTuple):
    """The time that is shown: the last hour, or the part of it in which anything happened."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """Its seconds."""
        return max(self.end - self.start, 1.0)

    def mark(self, since: float, until: float, kind: str, says: str) -> Mark:
        """A mark, or the part of it that is shown."""
        since, until = (min(max(at, self.start), self.end) for at in (since, until))
        width = max(100 * (until - since) / self.length, THINNEST)
        x = min(100 * (since - self.start) / self.length, 100 - width)
        return Mark(_percent(x), _percent(width), kind, says)

    def tick(self, number: int) -> Tick:
        """One of the times on the axis, from 0 at its start to TICKS at its end."""
        share = number / TICKS
        at = moment(self.start + share * self.length)
        anchor = "start" if number == 0 else "end" if number == TICKS else "middle"
        return Tick(
            _percent(100 * share),
            f"{at:%H:%M}" if self.length == HOUR else f"{at:%H:%M:%S}",
            anchor,
        )


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
    now = detail.server_time
    leases = [span for span in _spans(detail) if span.until >= now - HOUR]
    skips = [at for at in (record.skipped_at if record else ()) if at >= now - HOUR]
    waits = [now - one.waiting_for for one in detail.waiters]
    earliest = min([now, *skips, *waits, *(span.since - span.waited for span in leases)])
    shown = Shown(max(earliest, now - HOUR), now)
    pictures = [
        _runs(leases, shown),
        _waits(detail, leases, shown),
        _skips(skips, shown),
        _losses(leases, shown),
    ]
    if not any(picture.marks for picture in pictures):
        return None
    return LastHour(
        pictures=pictures,
        ticks=[shown.tick(number) for number in range(TICKS + 1)],
        note=(
            f"Of this lock {most} earlier leases are kept (TIMELINE): less than an hour."
            if len(detail.past) >= most and detail.past[0].since > now - HOUR
            else ""
        ),
    )


def _spans(detail: Detail) -> Iterator[Span]:
    """All known leases: the present one, then the earlier ones, the oldest first."""
    lock, now = detail.lock, detail.server_time
    began = now  # When the present lease began, if there is one.
    if lock is not None and lock.held_for is not None:
        began = now - lock.held_for
        says = f"{visible(str(lock.owner))}, held for {duration(lock.held_for)} so far"
        yield Span(began, now, "held", says, lock.owner.waited)
    following = [*(lease.since for lease in detail.past), began][1:]
    for lease, next_began in zip(detail.past, following, strict=True):
        # Nobody knows the end of an expired lease, but it was before the next one began.
        until = max(lease.until or next_began, lease.since)
        at_most = "at most " if lease.until is None else ""
        lasted = f"{lease.ended} after {at_most}{duration(until - lease.since)}"
        says = f"{visible(str(lease.owner))}, {lasted}"
        yield Span(lease.since, until, lease.ended, says, lease.owner.waited)


def _runs(leases: list[Span], shown: Shown) -> Picture:
    held = sum(span.until - max(span.since, shown.start) for span in leases)
    says = f"{counted(len(leases), 'lease')}, held for {duration(held)} in all"
    marks = [shown.mark(span.since, span.until, span.ended, span.says) for span in leases]
    return Picture("Runs", says if leases else "none", marks)


def _waits(detail: Detail, leases: list[Span], shown: Shown) -> Picture:
    now = detail.server_time
    over = [span for span in leases if span.waited and span.since >= shown.start]
    longest = max([span.waited for span in over], default=0.0)
    said = [f"{len(over)} of a second or longer, the longest {duration(longest)}"] if over else []
    if detail.waiters:
        oldest = max(one.waiting_for for one in detail.waiters)
        said.append(f"{len(detail.waiters)} waiting now, the first for {duration(oldest)}")
    marks = [
        shown.mark(span.since - span.waited, span.since, "wait", _waited(span)) for span in over
    ]
    marks += [
        shown.mark(
            now - one.waiting_for,
            now,
            "wait",
            f"{visible(str(one.owner))}, waiting for {duration(one.waiting_for)} so far",
        )
        for one in detail.waiters
    ]
    return Picture("Waits", "; ".join(said) or "none", marks)


def _waited(span: Span) -> str:
    return f"waited {duration(span.waited)}; {span.says}"


def _skips(times: list[float], shown: Shown) -> Picture:
    ago = duration(shown.end - times[-1]) if times else ""
    more = " or more" if len(times) >= MOST_SKIPS else ""
    says = f"{len(times)}{more}, the last {ago} ago" if times else "none"
    return Picture("Skips", says, [shown.mark(at, at, "skip", "skipped") for at in times])


def _losses(leases: list[Span], shown: Shown) -> Picture:
    lost = [span for span in leases if span.ended in {"forced", "expired"}]
    forced = sum(span.ended == "forced" for span in lost)
    expired = len(lost) - forced
    kinds = (f"{forced} by force" * bool(forced), f"{expired} expired" * bool(expired))
    kind = {"forced": "forced", "expired": "failed"}  # A thin hatched mark would not be seen.
    marks = [shown.mark(span.until, span.until, kind[span.ended], span.says) for span in lost]
    return Picture("Losses", ", ".join(filter(None, kinds)) or "none", marks)


def _percent(share: float) -> str:
    return f"{share:.2f}%"
