"""The acts by which an operator changes something: release, clean, pause, resume."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from django_redislock import held, logs, task_runs
from django_redislock.exceptions import LockTimeout, LockUnavailable
from django_redislock.humanize import counted, duration, visible
from django_redislock.management import arguments, terminal
from django_redislock.management.console import (
    FOUND,
    INTERRUPTED,
    failure,
    finish,
    misuse,
    noting,
    operator,
)
from django_redislock.management.single_instance import release_on_sigterm
from django_redislock.management.terminal import local_time, moment, pasteable
from django_redislock.rules.names import meant_by

if TYPE_CHECKING:
    from django_redislock.management.console import Console

audit = logs.logger("django_redislock.audit")


# --- force release --------------------------------------------------------------------------------


def release(
    console: Console, *, names: list[str], lease: str | None, yes: bool, reason: str, **options: Any
) -> None:
    """End the leases of these locks, or one lease."""
    if lease is None and not names:
        raise misuse("Say which locks: NAME..., or --id LEASE.")
    if lease is not None and len(names) > 1:
        raise misuse("--id goes with one NAME, or with none.")
    using = console.using
    if lease is not None and not names:
        found = _with_id(lease, console.aliases)
        leases, using = [(found.name, lease)], found.alias
    elif lease is not None:
        leases = [(names[0], lease)]
    else:
        names = list(dict.fromkeys(names))
        looked = [held.get(name, using=using) for name in names]
        if locks := [lock for lock in looked if lock]:
            _confirm(console, locks, yes=yes)
        # The leases that were shown. A name that nobody holds is reported below.
        leases = [(n, lock.id if lock else "") for n, lock in zip(names, looked, strict=True)]
    released = _force_release(leases, using, reason)
    document = [
        {"name": name, "alias": using, "id": lease or None, "released": done}
        for (name, lease), done in zip(leases, released, strict=True)
    ]
    says = [f"Released {counted(sum(released), 'lock')}."] if any(released) else []
    console.answer(document, says)
    left = [name for (name, _), done in zip(leases, released, strict=True) if not done]
    if left:
        raise CommandError(
            "\n".join(
                f"{pasteable(name)} was not released. {_why_not_released(name, using)}"
                for name in left
            ),
            returncode=FOUND,
        )


def clean(
    console: Console,
    *,
    every: bool,
    dead_here: bool,
    queued_calls: bool,
    dry_run: bool,
    yes: bool,
    reason: str,
    **options: Any,
) -> None:
    """End the leases of all chosen locks; or forget announced calls."""
    only = arguments.selection(options)
    if queued_calls:
        others = every or dead_here
        _forget_announced(console, only=only, others=others, dry_run=dry_run, reason=reason)
        return
    chosen = dead_here or only != held.Selection()
    if every and chosen:
        raise misuse(
            "--all means every lock; leave it out to end only those that the other options choose."
        )
    if not (every or chosen):
        raise misuse(
            "Say which locks: --host, --task, --prefix, --older-than, --dead-here, or else --all;"
            " or --queued."
        )
    using = console.using
    locks = [lock for lock in held.every(using=using, only=only) if lock.gone or not dead_here]
    if locks:
        _confirm(console, locks, yes=yes or dry_run)
    else:
        total = held.list(using=using, limit=0).total
        console.for_humans.write(arguments.none_of(total, {**options, "dead_here": dead_here}), str)
    released = [False] * len(locks)
    if not dry_run:
        released = _force_release([(lock.name, lock.id) for lock in locks], using, reason)
    says = []
    if locks and dry_run:
        says = [f"Would release {counted(len(locks), 'lock')}."]
    elif locks:
        over = len(released) - sum(released)
        meanwhile = f" {over} had ended before." if over else ""
        says = [f"Released {counted(sum(released), 'lock')}.{meanwhile}"]
    outcomes = zip(locks, released, strict=True)
    console.answer([{**lock.as_dict(), "released": done} for lock, done in outcomes], says)


def _force_release(leases: list[tuple[str, str]], using: str, reason: str) -> list[bool]:
    """End these leases by force. Returns of each whether it was there to end."""
    released: list[bool] = []
    by = operator()
    try:
        for name, id in leases:  # noqa: A001
            released.append(
                bool(id) and held.force_release(name, id, using=using, by=by, reason=reason)
            )
    except (KeyboardInterrupt, LockUnavailable) as error:
        so_far = f"Released {counted(sum(released), 'lock')}, and perhaps one more."
        if isinstance(error, KeyboardInterrupt):
            raise CommandError(f"Interrupted. {so_far}", returncode=INTERRUPTED) from None
        raise failure(error, using, f" {so_far}") from error
    return released


def _confirm(console: Console, locks: list[held.HeldLock], *, yes: bool) -> None:
    """Show these locks, and ask."""
    question = f"Release {counted(len(locks), 'lock')}? The holders are not stopped."
    table = partial(terminal.locks, locks)
    console.confirm(question, table=table, yes=yes, done="released")


def _why_not_released(name: str, using: str) -> str:
    """Why it was not released. If nobody holds it, also the names that may have been meant."""
    why = held.why_not_released(name, using=using)
    if held.get(name, using=using) is None:
        others = [pasteable(lock.name) for lock in held.detail(name, using=using).others]
        hint = f"Permits of it are held: {', '.join(others)}." if others else ""
        why = f"{why} {hint or terminal.meant(held.similar(name, using=using))}".rstrip()
    return why


def _with_id(lease: str, asked: list[str]) -> held.HeldLock:
    """The held lock with this lease, in one of these aliases."""
    problems: dict[str, str] = {}
    bounded = False
    for using in asked:
        found: list[held.HeldLock] = []
        with noting(problems, using, asked):  # Another one may have it.
            found = list(islice(held.every(using=using), held.MOST_LOOKS + 1))
        bounded = bounded or len(found) > held.MOST_LOOKS
        for lock in found[: held.MOST_LOOKS]:
            if lock.id == lease:
                return lock
    finish(problems.values())
    where = f"among the first {held.MOST_LOOKS} locks; say its NAME too" if bounded else "held"
    raise CommandError(f"No lease {visible(lease)!r} is {where}.", returncode=FOUND)


# --- pauses ---------------------------------------------------------------------------------------


def pause(console: Console, *, name: str, lasts: float, reason: str, **options: Any) -> None:
    """Pause a lock, with all its permits."""
    using = console.using
    if whole := _has_permit(name, using):
        raise misuse(
            f"{pasteable(name)} is a permit. A pause has all permits: pause {pasteable(whole)}."
        )
    try:
        begun = _pause(console, name, lasts, reason, using)
    except LockTimeout as error:
        who = ": ".join(filter(None, (error.holder, error.reason)))
        says = f"{pasteable(name)} is paused already {_until(error.expires_in)}, by {who}."
        raise CommandError(visible(says), returncode=FOUND) from error
    detail = held.detail(name, permit=1, using=using)
    others = detail.others
    says = f"{'Paused' if begun else 'Pending'}: {pasteable(name)}, {_until(lasts)}"
    if not begun:
        says = f"{says}; the pause begins when the lease in its way is over"
    under_way = [lock.name for lock in others]
    console.answer(
        [{"name": name, "alias": using, "begun": begun, "others": under_way}],
        [
            f"{says}.",
            *(
                visible(f"{pasteable(lock.name)} ends as it would: {lock.holder}.")
                for lock in others
            ),
        ],
    )
    if begun and not (others or detail.waiters or detail.past or held.record_of(detail)):
        hint = terminal.meant(held.similar(name, using=using))
        console.err.write(f"Nothing else is known of {pasteable(name)}. {hint}".rstrip())


def resume(console: Console, *, name: str, **options: Any) -> None:
    """End the pause of a lock."""
    using = console.using
    ended = held.resume(name, using=using, by=operator())
    says = [f"Resumed: {pasteable(name)}."] if ended else []
    console.answer([{"name": name, "alias": using, "ended": ended}], says)
    if not ended:
        lock = held.get(name, using=using)
        newer = lock is not None and lock.newer_format is not None and lock.note
        raise CommandError(newer or f"No operator has paused {pasteable(name)}.", returncode=FOUND)


def _has_permit(name: str, using: str) -> str:
    """The lock of which *name* is a permit, held or free; "" if it is a lock itself."""
    likeliest = meant_by(name)[0]
    lock = held.get(name, using=using)
    if lock is not None:
        return lock.key.name if lock.number > 1 else ""
    if likeliest.number == 1:
        return ""
    limit = held.detail(likeliest.name, permit=1, using=using).limit
    return likeliest.name if likeliest.number <= limit else ""


def _pause(console: Console, name: str, lasts: float, reason: str, using: str) -> bool:
    """Pause one lock. On a quorum, which has no queue, wait until nobody else holds it.

    Raises:
        LockTimeout: Another pause is in the way.
    """
    with release_on_sigterm():
        try:
            return held.pause(name, lasts, by=operator(), reason=reason, using=using)
        except LockTimeout as busy:
            if busy.reason is not None:
                raise
            says = f"{pasteable(name)} is held by {busy.holder}. A quorum keeps no queue, so this"
            console.err.write(visible(f"{says} command waits until it is free."), str)
            console.err.flush()
        return held.pause(name, lasts, by=operator(), reason=reason, using=using, wait=math.inf)


def _until(seconds: float | None) -> str:
    """When a pause ends, if it has so many seconds left."""
    left = seconds or 0.0
    ends = local_time(time.time() + left)
    return f"until {ends:%Y-%m-%d %H:%M:%S}, for {duration(left)}"


# --- announced calls ------------------------------------------------------------------------------


def _forget_announced(
    console: Console, *, only: held.Selection, others: bool, dry_run: bool, reason: str
) -> None:
    """Forget the announced calls, or those of one task. At worst a call is published twice.

    Args:
        console: Where to print.
        only: Nothing but a task may be chosen.
        others: Whether other options choose locks.
        dry_run: Only print them.
        reason: Why, for the audit log.
    """
    if others or only != held.Selection(task=only.task):
        raise misuse("--queued goes with --task alone: a call that waits has no holder.")
    using = console.using
    listed = task_runs.announced(using=using)
    found = [one for one in listed.locks if only.task in {"", one[1].queued_task}]
    if found and not dry_run:
        for name, calls in found:
            task_runs.forget_announced(name, calls, using=using)
        says = "%d announced calls of %r (%s) forgotten by %r, reason %r"
        extra = logs.of(alias=using, job=only.task or None, reason=reason or None)
        audit.warning(
            says, len(found), only.task or "all tasks", using, operator(), reason, extra=extra
        )
    document: list[dict[str, Any]] = [
        {
            "name": name,
            "alias": using,
            "task": calls.queued_task,
            "id": calls.queued,
            "until": round(calls.queued_until or 0.0, 3),
            "forgotten": not dry_run,
        }
        for name, calls in found
    ]
    rows = [
        {
            "NAME": pasteable(one["name"]),
            "TASK": one["task"] or "-",
            "ID": one["id"],
            "UNTIL": moment(one["until"]),
        }
        for one in document
    ]
    lines = terminal.table(rows, console.columns) if rows else ()
    did = "Would forget" if dry_run else "Forgot"
    console.answer(document, [*lines, f"{did} {counted(len(found), 'announced call')}."])
    if listed.partial:
        console.err.write("These were not all of them; do it again.")
    finish(held.silence(listed.silent, using).values())
