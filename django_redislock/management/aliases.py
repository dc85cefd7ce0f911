"""Asks several aliases. A server that does not answer must not hide the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from django_redislock import conf, held
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer", held.HeldLocks, held.Records)


class Listed(NamedTuple):
    """The held locks of some aliases."""

    locks: list[held.HeldLock]
    total: int  # How many are held in all, selected or not.
    partial: bool  # Whether there may be more.
    problems: dict[str, str]  # By alias: why some or all of its locks are missing.


def named(alias: str | None) -> list[str]:
    """The named alias, or else all.

    Raises:
        ImproperlyConfigured: There is no such alias, or something about it is wrong.
    """
    if alias is None:
        return conf.aliases()
    conf.conf(alias)
    return [alias]


def of_each(
    aliases: list[str], question: Callable[[str], Answer]
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Ask each alias. Return the answers, and why aliases did not answer, or not in full."""
    answers: dict[str, Answer] = {}
    problems: dict[str, str] = {}
    for alias in aliases:
        try:
            answers[alias] = question(alias)
        except LockUnavailable as error:
            problems[alias] = held.problem(error, alias)
        else:
            if silent := answers[alias].silent:
                problems[alias] = " ".join(held.silence(silent, alias).values())
    return answers, problems


def listed(aliases: list[str], limit: int, only: held.Selection | None = None) -> Listed:
    """Up to *limit* held locks of each alias."""
    answers, problems = of_each(aliases, lambda one: held.list(using=one, limit=limit, only=only))
    return Listed(
        locks=[lock for some in answers.values() for lock in some],
        total=sum(some.total for some in answers.values()),
        partial=any(some.partial for some in answers.values()),
        problems=problems,
    )
