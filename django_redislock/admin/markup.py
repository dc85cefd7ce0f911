"""A lock as HTML, for the admin. Anybody may write names and owners."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils.html import format_html, format_html_join
from django.utils.timezone import localtime

from django_redislock.humanize import duration, visible
from django_redislock.task_runs import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.utils.safestring import SafeString

    from django_redislock.held import Detail, HeldLock, PastLease, Waiter
    from django_redislock.held_lock import Fact, Kind
    from django_redislock.rules.stored import Owner
    from django_redislock.task_runs import Record, Run

_BETWEEN = re.compile(r"(?<=[:/._|,;=@])(?=[^:/._|,;=@])")
MOST_RUNS = 10  # A task with a large limit may have many under way.

PERMIT = "One of the permits of a lock with a limit."
WAITS = "Its holder waits for another lock, with this one."
GONE = "The process that took it does not exist on this host any more."
STATES = {
    "held": ("held", "Somebody holds it."),
    "cooling": ("cooling down", "Its owner is done; min_hold keeps it taken for a while."),
    "paused": ("paused", "An operator keeps it from everybody."),
    "overdue": (
        "overdue",
        "A renewal was due and was missed: its owner is stopped, cut off or dead.",
    ),
    "no-expiry": ("no expiry", "Its key has no expiry, so it would never become free."),
    "rate": ("rate", "No lock, but a Rate: it counts starts, and nobody holds it."),
    "foreign": ("foreign", "Its key holds a value that is no lock of ours."),
}


def name(text: str) -> SafeString:
    """A lock's name, with unprintable characters written out. It cannot reverse its neighbours."""
    shown = visible(text)
    return format_html('<bdi class="redislock-name" title="{}">{}</bdi>', shown, breakable(shown))


def breakable(text: str) -> SafeString:
    """*text*, with breaks allowed behind the signs between its words."""
    first, *others = _BETWEEN.split(text)
    return format_html("{}{}", first, format_html_join("", "<wbr>{}", ((part,) for part in others)))


def state(lock: HeldLock) -> SafeString:
    """Badges: the permit, the state, and the troubles of the lock."""
    badges = []
    if lock.permit:
        badges.append(("permit", f"permit {lock.permit}", PERMIT))
    if lock.state != "held" or lock.handed_over or not lock.permit:
        label = lock.shown_state if lock.handed_over else STATES[lock.state][0]
        badges.append((lock.state, label, _state_means(lock)))
    if lock.circle:
        badges.append(("circle", "circle", lock.note))
    elif lock.waits_for:
        badges.append(("waits", f"waits for {visible(lock.waits_for)}", WAITS))
    if lock.ends_late:
        badges.append(("late", "ends late", lock.note))
    if lock.newer_format is not None:
        badges.append(("newer", "newer version", lock.note))
    return format_html_join(" ", "{}", ((badge(*one),) for one in badges))


def badge(kind: str, label: str, meaning: str = "") -> SafeString:
    """A word that stands out."""
    return format_html(
        '<span class="redislock-badge redislock-{}" title="{}">{}</span>', kind, meaning, label
    )


def holder(lock: HeldLock) -> SafeString:
    """Its owner; of a foreign lock, the kind of value."""
    if lock.state == "foreign":
        return _lines([("doing", lock.strange)])
    return owner(lock.owner, gone=lock.gone)


def owner(who: Owner, *, gone: bool = False) -> SafeString:
    """Its host, its pid, and its work."""
    return _lines(
        [
            ("place", visible(who.place) or "unknown"),
            ("doing", visible(who.doing)),
            ("id", visible(who.task_id)),
        ],
        visible(f"thread {who.thread}") if who.thread else "",
        gone=gone,
    )


def _lines(lines: list[tuple[str, str]], title: str = "", *, gone: bool = False) -> SafeString:
    beside = {"place": format_html(" {}", badge("gone", "gone", GONE))} if gone else {}
    return format_html(
        '<span class="redislock-owner" title="{}">{}</span>',
        title,
        format_html_join(
            "",
            '<bdi class="redislock-{}" title="{}">{}{}</bdi>',
            (
                # Places and ids have hyphens, at which they break.
                (kind, line, breakable(line) if kind == "doing" else line, beside.get(kind, ""))
                for kind, line in lines
                if line
            ),
        ),
    )


def _place(lock: HeldLock) -> SafeString | str:
    place = visible(lock.owner.place)
    return format_html("{} {}", place, badge("gone", "gone", GONE)) if lock.gone else place


def counting(seconds: float | None, direction: str) -> SafeString:
    """A duration that goes on counting in the browser, up or down."""
    if seconds is None:
        return format_html('<span class="quiet">{}</span>', "unknown")
    return format_html(
        '<span class="redislock-clock" data-redislock-{}="{}">{}</span>',
        direction,
        f"{seconds:.3f}",
        duration(seconds),
    )


def expiry(lock: HeldLock, says: str = "") -> SafeString:
    """When the lock ends, a note on that, and a gauge."""
    if lock.expires_in is None:
        return format_html('<span class="redislock-never">{}</span>', "never")
    clock = counting(lock.expires_in, "down")
    most = max(lock.ttl or 0.0, lock.expires_in)
    return format_html(
        '<span title="{}">{} {}<progress class="redislock-gauge" max="{}" value="{}"'
        ' aria-hidden="true"></progress></span>',
        lock.ends,
        clock,
        says,
        f"{most:.3f}",
        f"{lock.expires_in:.3f}",
    )


def waiters(number: int) -> SafeString:
    """A number that stands out unless it is 0."""
    return format_html('<span class="redislock-{}">{}</span>', "some" if number else "none", number)


def facts(known: Iterable[Fact]) -> list[tuple[str, Any]]:
    """The facts about a lock or a record, as labels and values."""
    return [
        (fact.label, _RENDER.get(fact.kind, _text)(fact.value))
        for fact in known
        if fact.kind not in {"name", "badge"}  # The title, and the badges, have them.
    ]


def _meaning(lock: HeldLock) -> str:
    """The meaning of its badges."""
    permit = PERMIT if lock.permit else ""
    is_noted = lock.circle or lock.ends_late or lock.newer_format is not None
    late = lock.note if is_noted else WAITS if lock.waits_for else ""
    return " ".join(filter(None, (permit, _state_means(lock), late, GONE * lock.gone)))


def _state_means(lock: HeldLock) -> str:
    """The meaning of its state; if it will never become free, the note says more."""
    tells = lock.handed_over or lock.state in {"foreign", "no-expiry"}
    return lock.note if tells else STATES[lock.state][1]


def waiter(one: Waiter) -> tuple[SafeString, SafeString]:
    """A line of the queue: the owner, and how long it has waited."""
    pending = badge("waits", one.note) if one.note else ""
    return format_html("{} {}", owner(one.owner), pending), counting(one.waiting_for, "up")


def past(lease: PastLease) -> dict[str, Any]:
    """A line of the table of earlier leases."""
    return {
        "since": moment(lease.since),
        "waited": duration(lease.owner.waited) if lease.owner.waited else "",
        "lasted": duration(lease.lasted),
        "ended": badge(lease.ended, lease.ended),
        "owner": owner(lease.owner),
        "fence": str(lease.fence),
    }


def last_runs(found: Record) -> str:
    """When the last runs ended, or the last unended one began, for a line."""
    ended = [
        f"{OUTCOMES[outcome]} {duration(run.ago)} ago"
        for outcome, run in found.last.items()
        if outcome != "unended"
    ]
    return ", ".join(filter(None, [*ended, never_ended(found)]))


def never_ended(found: Record) -> str:
    """The last unended run, for a line; "" if there is none."""
    run = found.last_unended
    return f"one that began {duration(run.ago)} ago never ended" if run else ""


def last_lease(found: Detail) -> str:
    """The last lease, for a line."""
    lease = found.past[-1]
    ago = duration(max(0.0, found.server_time - (lease.until or lease.since)))
    word = "until" if lease.until else "since"
    return f"last held by {visible(str(lease.owner))}, {word} {ago} ago"


def moment(seconds: float) -> datetime:
    """A server's time as templates show it."""
    return localtime(datetime.fromtimestamp(seconds, UTC))


def _under_way(runs: tuple[Run, ...]) -> SafeString:
    lines = [
        (
            format_html("for {}, {}", counting(run.ago, "up"), visible(str(run.owner))),
            badge("gone", "gone", GONE) if run.gone else "",
        )
        for run in runs[:MOST_RUNS]
    ]
    if len(runs) > MOST_RUNS:
        lines.append((format_html("and {} more", len(runs) - MOST_RUNS), ""))
    return format_html_join("", "<div>{} {}</div>", lines)


def _text(value: object) -> str:
    return visible(str(value))


_RENDER: dict[Kind, Callable[[Any], str]] = {
    "state": lambda lock: format_html("{} {}", state(lock), _meaning(lock)),
    "holder": _place,
    "lock": name,
    "duration": duration,
    "age": lambda seconds: counting(seconds, "up"),
    "left": lambda lock: expiry(lock, lock.ends),
    "moment": lambda at: f"{moment(at):%Y-%m-%d %H:%M:%S}",
    "runs": _under_way,
}
