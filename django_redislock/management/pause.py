"""``manage.py locks pause`` and ``resume``: nobody gets a lock for a while."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

from django_redislock import held
from django_redislock.exceptions import LockTimeout
from django_redislock.humanize import duration, visible
from django_redislock.management.console import FOUND, USAGE, operator
from django_redislock.management.single_instance import release_on_sigterm
from django_redislock.management.terminal import local_time, pasteable
from django_redislock.rules.names import meant_by

if TYPE_CHECKING:
    from django_redislock.management.console import Console


def pause(
    console: Console,
    *,
    name: str,
    lasts: float,
    reason: str,
    **options: Any,
) -> None:
    """Pause a lock, with all its permits."""
    using = console.using
    if whole := _has_permit(name, using):
        raise CommandError(
            f"{pasteable(name)} is a permit. A pause has all permits: pause {pasteable(whole)}.",
            returncode=USAGE,
        )
    try:
        begun = _pause(console, name, lasts, reason, using)
    except LockTimeout as error:
        who = ": ".join(filter(None, (error.holder, error.reason)))
        says = f"{pasteable(name)} is paused already {_until(error.expires_in)}, by {who}."
        raise CommandError(visible(says), returncode=FOUND) from error
    others = held.detail(name, permit=1, using=using).others
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
