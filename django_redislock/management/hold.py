"""``manage.py locks hold`` and ``unhold``: nobody gets a lock for a while."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError
from django.utils.timezone import localtime

from django_redislock import held
from django_redislock.exceptions import LockTimeout
from django_redislock.humanize import duration, visible
from django_redislock.management.console import FOUND, operator
from django_redislock.management.sigterm import release_on_sigterm
from django_redislock.management.terminal import pasteable
from django_redislock.rules.names import permit_name
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from django_redislock.management.console import Console


def hold(
    console: Console,
    *,
    name: str,
    alias: str | None,
    limit: int | None,
    lasts: float,
    reason: str,
    json: bool,
    **options: Any,
) -> None:
    """Hold a lock, or all permits of a name."""
    held_now, refused = [], []
    for one in _locks(name, limit):
        try:
            begun = _hold(console, one, lasts, reason, alias or DEFAULT_ALIAS)
        except LockTimeout as error:
            who = ": ".join(filter(None, (error.holder, error.reason)))
            refused.append(
                visible(f"{pasteable(one)} is held already {_until(error.expires_in)}, by {who}.")
            )
            continue
        held_now.append({"name": one, "alias": alias or DEFAULT_ALIAS, "begun": begun})
        if not json:
            after = "" if begun else "; it begins when the lease in its way is over"
            console.out.write(f"Held: {pasteable(one)}, {_until(lasts)}{after}.", str)
    if json:
        console.print_json(held_now)
    if refused:
        raise CommandError("\n".join(refused), returncode=FOUND)


def unhold(
    console: Console, *, name: str, alias: str | None, limit: int | None, json: bool, **options: Any
) -> None:
    """End the hold of a lock, or of all permits of a name."""
    using = alias or DEFAULT_ALIAS
    locks = _locks(name, limit)
    ended = [held.unhold(one, using=using, by=operator()) for one in locks]
    if json:
        console.print_json(
            [
                {"name": one, "alias": using, "ended": done}
                for one, done in zip(locks, ended, strict=True)
            ]
        )
    elif any(ended):
        console.out.write(f"No longer held: {pasteable(name)}.", str)
    if not any(ended):
        raise CommandError(f"No operator holds {pasteable(name)}.", returncode=FOUND)


def _hold(console: Console, name: str, lasts: float, reason: str, using: str) -> bool:
    """Hold one lock. Where there is no queue to stand in, wait until nobody else holds it.

    Raises:
        LockTimeout: Another hold is in the way.
    """
    with release_on_sigterm():
        try:
            return held.hold(name, lasts, by=operator(), reason=reason, using=using)
        except LockTimeout as busy:
            if busy.reason is not None:
                raise
            says = f"{pasteable(name)} is held by {busy.holder}. A quorum keeps no queue, so this"
            console.err.write(visible(f"{says} command waits until it is free."), str)
            console.err.flush()
        return held.hold(name, lasts, by=operator(), reason=reason, using=using, wait=math.inf)


def _locks(name: str, limit: int | None) -> list[str]:
    """The lock, or the locks that are the permits of *name*."""
    return [name] if limit is None else [permit_name(name, n) for n in range(1, limit + 1)]


def _until(seconds: float | None) -> str:
    """When a hold ends that has so many seconds left."""
    left = seconds or 0.0
    ends = localtime(datetime.fromtimestamp(datetime.now(UTC).timestamp() + left, UTC))
    return f"until {ends:%Y-%m-%d %H:%M:%S}, for {duration(left)}"
