"""Asks several aliases. One that cannot answer must not hide the others."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import conf, doctor, held
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


@contextmanager
def noting(problems: dict[str, str], alias: str, asked: Sequence[str]) -> Iterator[None]:
    """Note in *problems* why *alias*, one of those *asked*, cannot answer.

    Raises:
        ImproperlyConfigured: Something is wrong about the only alias that is asked.
    """
    try:
        yield
    except (LockUnavailable, ImproperlyConfigured) as error:
        if len(asked) == 1 and isinstance(error, ImproperlyConfigured):
            raise
        problems[alias] = held.problem(error, alias)


def of_each(
    aliases: list[str], question: Callable[[str], Answer]
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Ask each alias. Return the answers, and why aliases did not answer, or not in full."""
    answers: dict[str, Answer] = {}
    problems: dict[str, str] = {}
    for alias in aliases:
        with noting(problems, alias, aliases):
            answers[alias] = question(alias)
            if silent := answers[alias].silent:
                problems[alias] = " ".join(held.silence(silent, alias).values())
    return answers, problems


def beginnings(aliases: list[str]) -> list[tuple[str, int]]:
    """The servers whose records begin at their start, and how many seconds ago that was."""
    found: list[tuple[str, int]] = []
    for alias in aliases:
        with noting({}, alias, aliases):  # The problem is told where its records are read.
            found += [
                (f"{place} ({alias})", ago) for place, ago in doctor.beginnings(alias).items()
            ]
    return found


def listed(aliases: list[str], limit: int, only: held.Selection | None = None) -> Listed:
    """Up to *limit* held locks of each alias."""
    answers, problems = of_each(aliases, lambda one: held.list(using=one, limit=limit, only=only))
    return Listed(
        locks=[lock for some in answers.values() for lock in some],
        total=sum(some.total for some in answers.values()),
        partial=any(some.partial for some in answers.values()),
        problems=problems,
    )
