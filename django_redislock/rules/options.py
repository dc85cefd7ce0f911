"""How to lock: the options of a call, and the terms that they make with the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from django_redislock.process import cached_property
from django_redislock.rules.lease_state import certain_for, will_renew

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.conf import Conf

DEFAULT_ALIAS = "default"
# What becomes of a release in an open transaction.
DEFER = "defer"  # It waits for the end of the transaction: release_on_commit.
RELEASES_BEFORE_COMMIT = ("warn", "ignore", "error")  # What the settings may say.
MOST_PERMITS = 1000  # Of a lock with a limit.
LONGEST_OPERATION = 5.0  # Seconds until a server counts as not answering, at most.
ONE_TRY = 0.75  # Of the operation timeout.
# Seconds that a call waits beyond the time in which a run that it has replaced must end.
REPLACED_WITHIN = 2.0
MOST_COMBINATIONS = 1000  # Of arguments that are kept: programs use few, many times.


class Options(NamedTuple):
    """How to lock, checked; None means the setting. Durations are seconds."""

    ttl: float | None = None
    wait: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    reentrant: bool = False
    using: str = DEFAULT_ALIAS
    once: float = 0.0
    renews_once: bool = False  # Whether one that is done begins anew, and keeps nobody out.
    durable: bool = False  # Whether a holder that dies must not leave the work undone.
    atomic: str | None = None  # The database of the transaction around the block.
    release_on_commit: bool = False
    replace: bool = False  # Whether the newest call wins,
    replace_within: float | None = None  # and how long the others have to end; None: the ttl.
    limit: int | None = None  # How many permits there are; None is not the same as one.


@dataclass(frozen=True)
class Terms:
    """Options and settings, combined. Durations are seconds."""

    ttl: float
    wait: float
    renew: bool
    max_hold: float  # math.inf if there is no bound.
    operation_timeout: float
    unavailable_after: float
    release_before_commit: str  # DEFER, or one of RELEASES_BEFORE_COMMIT.
    limit: int = 1  # How many permits the lock has.
    replace_within: float | None = None  # Seconds that a holder has to end; None: it is waited for.

    @cached_property
    def first_ttl(self) -> float:
        """That of the grant: max_hold may be shorter than ttl."""
        return min(self.ttl, self.max_hold)

    @cached_property
    def renews(self) -> bool:
        """Whether the first grant is going to be renewed."""
        return will_renew(self.renew, self.first_ttl, self.max_hold)

    @cached_property
    def certain(self) -> float:
        """How long the first grant is certainly ours."""
        return certain_for(self.first_ttl)

    @cached_property
    def one_try(self) -> float:
        """How long a server may take for one try."""
        return ONE_TRY * self.operation_timeout


def operation_timeout(ttl: float) -> float:
    """Seconds until a server counts as not answering, unless the settings say it."""
    return min(LONGEST_OPERATION, ttl / 3)


def terms_of(
    options: Options,
    conf: Conf,
    operation_timeout: Callable[[float], float] = operation_timeout,
) -> Terms:
    """The terms of a call. Only here do the settings replace an option that was not given."""
    ttl = conf.ttl if options.ttl is None else options.ttl
    max_hold = conf.max_hold if options.max_hold is None else options.max_hold
    timeout = operation_timeout(ttl)
    wait = conf.wait if options.wait is None else options.wait
    if options.durable and options.wait is None:
        wait = max(wait, 2 * ttl)  # The lease of a holder that dies meanwhile ends within.
    within = None
    if options.replace:
        within = ttl if options.replace_within is None else options.replace_within
        wait = within + REPLACED_WITHIN
    return Terms(
        ttl=ttl,
        wait=wait,
        renew=conf.renew if options.renew is None else options.renew,
        max_hold=math.inf if max_hold is None else max_hold,
        operation_timeout=timeout,
        unavailable_after=timeout if conf.unavailable_after is None else conf.unavailable_after,
        release_before_commit=DEFER if options.release_on_commit else conf.release_before_commit,
        limit=options.limit or 1,
        replace_within=within,
    )
