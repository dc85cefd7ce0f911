"""How the acts of ``manage.py locks`` print, ask and fail."""

from __future__ import annotations

import getpass
import json
import logging
import os
import shutil
import socket
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError

from django_redislock import conf, doctor, held
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import duration, visible
from django_redislock.jobs.options import Skipped
from django_redislock.management.terminal import moment
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.core.management.base import OutputWrapper


# --- asks several aliases. One that cannot answer must not hide the others ------------------------

Answer = TypeVar("Answer", held.HeldLocks, held.Records)


class Listed(NamedTuple):
    """The held locks of some aliases."""

    locks: list[held.HeldLock]
    total: int  # How many are held in all, selected or not.
    partial: bool  # Whether there may be more.
    problems: dict[str, str]  # By alias: why some or all of its locks are missing.


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


def beginnings(aliases: list[str]) -> Iterator[str]:
    """A sentence about each server whose records begin at its start."""
    for alias in aliases:
        with noting({}, alias, aliases):  # The problem is told where its records are read.
            for place, ago in doctor.beginnings(alias).items():
                started = f"at {moment(time.time() - ago)}, {duration(ago)} ago"
                yield visible(
                    f"The server {place} ({alias}) was started {started}. Records of runs begin"
                    " there."
                )


def listed(aliases: list[str], limit: int, only: held.Selection | None = None) -> Listed:
    """Up to *limit* held locks of each alias."""
    answers, problems = of_each(aliases, lambda one: held.list(using=one, limit=limit, only=only))
    return Listed(
        locks=[lock for some in answers.values() for lock in some],
        total=sum(some.total for some in answers.values()),
        partial=any(some.partial for some in answers.values()),
        problems=problems,
    )


# Exit statuses.
FOUND = 1  # --fail has found something, or the command failed.
USAGE = 2
UNAVAILABLE = 3
BUSY = 75  # EX_TEMPFAIL of sysexits.h.
LOST = 76
INTERRUPTED = 130


def misuse(says: str) -> CommandError:
    """The error of an act that cannot be meant so."""
    return CommandError(says, returncode=USAGE)


def failure(error: Exception, using: str, more: str = "") -> CommandError:
    """The error of an act that failed because of a server or the settings."""
    status = UNAVAILABLE if isinstance(error, LockUnavailable) else USAGE
    return CommandError(f"{held.problem(error, using)}{more}", returncode=status)


class Console:
    """Standard output and standard error. With --json, only the document is on the former.

    Attributes:
        alias: That of --using; None if it was not given.
        using: The same, or else the default: of acts on one alias.
        json: Whether a program reads the answer.
    """

    def __init__(
        self, out: OutputWrapper, err: OutputWrapper, *, alias: str | None, json: bool
    ) -> None:
        self.out = out
        self.err = err
        self.alias = alias
        self.using = alias or DEFAULT_ALIAS
        self.json = json
        self.for_humans = err if json else out

    @property
    def aliases(self) -> list[str]:
        """The alias that was given, or else all.

        Raises:
            ImproperlyConfigured: There is no such alias, or something about it is wrong.
        """
        if self.alias is None:
            return conf.aliases()
        conf.conf(self.alias)
        return [self.alias]

    @property
    def columns(self) -> int | None:
        """The width of standard output, if it is a terminal."""
        return columns_of(self.out)

    def print(self, lines: Iterable[str]) -> None:
        """Print *lines* as they are."""
        for line in lines:
            self.out.write(line, str)

    def answer(self, document: Any, lines: Iterable[str], *, known: bool = True) -> None:
        """Print the document that programs read, or the lines that humans do.

        Args:
            document: With --json.
            lines: Without.
            known: Whether anything is known. If not, since a server is silent, no document is
                printed: an empty one would say that there is nothing.
        """
        if not self.json:
            self.print(lines)
        elif known:
            self.out.write(json.dumps(document, indent=2))

    def confirm(
        self,
        question: str,
        *,
        table: Callable[[int | None], Iterable[str]] | None = None,
        yes: bool,
        done: str,
    ) -> None:
        """Show the leases or rows that an act is about to end or delete, and ask whether to go on.

        Args:
            question: The question.
            table: Makes the lines that show them, for a number of columns.
            yes: Do not ask; with --json, do not show them either.
            done: The act, as a participle.

        Raises:
            CommandError: The answer was no, or there was none.
        """
        out = self.for_humans
        if table and not (yes and out is self.err):
            for line in table(columns_of(out)):
                out.write(line, str)
        if yes:
            return
        try:
            out.write(f"{question} [y/N] ", str, ending="")
            out.flush()
            answer = input()
        except EOFError:
            out.write("")
            raise misuse(
                f"There was no answer, so nothing was {done}. --yes does not ask."
            ) from None
        except KeyboardInterrupt:
            out.write("")
            raise CommandError(f"Nothing was {done}.", returncode=INTERRUPTED) from None
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError(f"Nothing was {done}.", returncode=FOUND)


@contextmanager
def logging_afterwards(logger: logging.Logger) -> Iterator[None]:
    """Keep what *logger* prints on this terminal until the answer is printed.

    Other handlers, as for files, get each record at once.
    """
    kept: list[tuple[logging.Handler, logging.LogRecord]] = []

    def keeping(handler: logging.Handler) -> Callable[[logging.LogRecord], bool]:
        def keep(record: logging.LogRecord) -> bool:
            if record.name == logger.name:
                kept.append((handler, record))
            return record.name != logger.name

        return keep

    filters = {one: keeping(one) for one in _handlers_of(logger) if _prints(one)}
    for handler, keep in filters.items():
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler, keep in filters.items():
            handler.removeFilter(keep)
        for handler, record in kept:
            handler.handle(record)


def _handlers_of(logger: logging.Logger | None) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found or list(filter(None, [logging.lastResort]))


def _prints(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


def columns_of(out: OutputWrapper) -> int | None:
    """The width of *out*, if it is a terminal."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def finish(problems: Iterable[str], complaint: str = "") -> None:
    """Fail with the *complaint* of --fail, or else with the *problems* of servers, if any."""
    lines = [*problems, complaint]
    if any(lines):
        status = FOUND if complaint else UNAVAILABLE
        raise CommandError("\n".join(filter(None, lines)), returncode=status)


def operator() -> str:
    """The user of the command, for audit logs."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()} by manage.py locks"


# --- A skipped run in a shell: one line on standard error -----------------------------------------


def line_of(skipped: Skipped) -> str:
    """What became of a run, for humans."""
    why, who = skipped["skipped"], skipped.get("holder") or skipped.get("by")
    state = {"busy": "is held by", "cooling": "cools down after"}.get(why, f"is {why}, by")
    said = f"{state} {who}" if who else "has no start left"  # Of a rate.
    ago = f", {duration(skipped['ago'])} ago" if "ago" in skipped else ""
    reason = f": {skipped['reason']}" if "reason" in skipped else ""
    left = skipped.get("expires_in")
    until = f", until {moment(time.time() + left)}" if left is not None else ""
    return visible(f"Skipped: {skipped['lock']!r} {said}{ago}{until}{reason}")


@contextmanager
def no_second_line(job: str) -> Iterator[None]:
    """Without logging in a project, Python would print the log of a skip too. Prevent that.

    Args:
        job: The full name of the job whose skip has a line already.
    """
    logger = logging.getLogger("django_redislock.jobs")

    def is_wanted(record: logging.LogRecord) -> bool:
        is_ours = isinstance(getattr(record, "data", None), Skipped) and vars(record)["job"] == job
        return not is_ours or logger.hasHandlers()

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
