"""What the admin shows of a lock, as HTML. Names and owners are what anybody may have written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.utils.html import format_html, format_html_join
from django.utils.timezone import localtime

from django_redislock.wording import duration, visible

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    from django_redislock.held import Detail, HeldLock, PastLease, Waiter
    from django_redislock.lease import Owner
    from django_redislock.records import Record, Run

PERMIT = "One of the permits of a task with a limit."
STATES = {
    "held": ("held", "Somebody holds it."),
    "cooling": ("cooling down", "Its owner is done; min_hold keeps it taken for a while."),
    "overdue": (
        "overdue",
        "A renewal was due and was missed: its owner is stopped, cut off or dead.",
    ),
    "no-expiry": ("no expiry", "Its key has no expiry, so it would never become free."),
    "foreign": ("foreign", "Its key holds something that is not a lock of ours."),
}


def name(text: str) -> SafeString:
    """A lock's name; what is not seen is written out, and it cannot turn its neighbours around."""
    shown = visible(text)
    return format_html('<bdi class="redislock-name" title="{}">{}</bdi>', shown, shown)


def state(lock: HeldLock) -> SafeString:
    """A badge; that of a permit says which one of how many it is."""
    label, meaning = STATES[lock.state]
    if not lock.owner.permit:
        return badge(lock.state, label, meaning)
    permit = badge("permit", f"permit {visible(lock.owner.permit)}", PERMIT)
    return permit if lock.state == "held" else permit + badge(lock.state, label, meaning)


def badge(kind: str, label: str, meaning: str = "") -> SafeString:
    """A word that stands out."""
    return format_html(
        '<span class="redislock-badge redislock-{}" title="{}">{}</span>', kind, meaning, label
    )


def owner(who: Owner) -> SafeString:
    """Where it is, and what it is busy with."""
    doing = who.task or who.path or who.command
    lines = [("place", who.place or "unknown"), ("doing", doing), ("id", who.task_id)]
    return format_html(
        '<span class="redislock-owner" title="{}">{}</span>',
        visible(f"thread {who.thread}") if who.thread else "",
        format_html_join(
            "",
            '<bdi class="redislock-{}">{}</bdi>',
            ((kind, visible(text)) for kind, text in lines if text),
        ),
    )


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


def expiry(lock: HeldLock) -> SafeString:
    """When it ends unless renewed, with a gauge."""
    if lock.expires_in is None:
        return format_html('<span class="redislock-never">{}</span>', "never")
    clock = counting(lock.expires_in, "down")
    most = max(lock.ttl or 0.0, lock.expires_in)
    return format_html(
        '{}<progress class="redislock-gauge" max="{}" value="{}" aria-hidden="true"></progress>',
        clock,
        f"{most:.3f}",
        f"{lock.expires_in:.3f}",
    )


def waiters(number: int) -> SafeString:
    """A number that stands out unless it is 0."""
    return format_html('<span class="redislock-{}">{}</span>', "some" if number else "none", number)


def facts(lock: HeldLock) -> list[tuple[str, Any]]:
    """All that is known about a held lock, as labels and values."""
    who = lock.owner
    known = [
        ("State", format_html("{} {}", state(lock), _meaning(lock))),
        ("Note", visible(lock.note)),
        ("Holder", visible(who.place) + " (gone: no such process on this host)" * lock.gone),
        ("Thread", visible(who.thread)),
        ("Task", visible(who.task)),
        ("Task id", visible(who.task_id)),
        ("Request", visible(who.path)),
        ("Command", visible(who.command)),
        ("Held for", counting(lock.held_for, "up")),
        ("Expires in", expiry(lock)),
        ("TTL", duration(lock.ttl) if lock.ttl else ""),
        ("Renewals", str(lock.renewals)),
        ("Waiters", str(lock.waiters)),
        ("Fence", str(lock.fence or "")),
        ("Lease", visible(lock.id)),
        ("Alias", visible(lock.alias)),
    ]
    return [(label, value) for label, value in known if value]


def _meaning(lock: HeldLock) -> str:
    meaning = STATES[lock.state][1]
    return f"{PERMIT} {meaning}" if lock.owner.permit else meaning


def waiter(one: Waiter) -> tuple[SafeString, SafeString]:
    """A line of the queue: who, and for how long."""
    return owner(one.owner), counting(one.waiting_for, "up")


def past(lease: PastLease) -> dict[str, Any]:
    """A line of the table of earlier leases."""
    return {
        "since": moment(lease.since),
        "lasted": duration(None if lease.until is None else lease.until - lease.since),
        "ended": badge(lease.ended, lease.ended),
        "owner": owner(lease.owner),
        "fence": str(lease.fence),
    }


def record(found: Record) -> list[tuple[str, Any]]:
    """What became of the runs of a task, as labels and values."""
    skipped = f"{found.skips} since the last success" if found.skips else ""
    lines = [
        ("Last success", _run(found.last_success)),
        ("Last failure", _run(found.last_failure)),
        ("Last skip", _run(found.last_skip)),
        ("Skips", skipped),
    ]
    return [(label, value) for label, value in lines if value]


def last_runs(found: Record) -> str:
    """When its runs ended last, for a line."""
    runs = [
        ("last success", found.last_success),
        ("last failure", found.last_failure),
        ("last skip", found.last_skip),
    ]
    return ", ".join(f"{label} {duration(run.ago)} ago" for label, run in runs if run)


def last_lease(found: Detail) -> str:
    """Who held it last, for a line."""
    lease = found.past[-1]
    ago = duration(max(0.0, found.server_time - (lease.until or lease.since)))
    word = "until" if lease.until else "since"
    return f"last held by {visible(str(lease.owner))}, {word} {ago} ago"


def moment(seconds: float) -> datetime:
    """A server's time as templates show it."""
    return localtime(datetime.fromtimestamp(seconds, UTC))


def _run(run: Run | None) -> SafeString | str:
    if run is None:
        return ""
    how = (
        f"took {duration(run.lasted)}"
        if run.lasted is not None
        else f"because it was {visible(run.why)}"
    )
    return format_html("{} ago, {}, {}", duration(run.ago), how, visible(str(run.owner)))
