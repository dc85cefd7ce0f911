"""How the acts of ``manage.py locks`` print, ask and fail."""

from __future__ import annotations

import getpass
import json
import logging
import os
import shutil
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.core.management.base import OutputWrapper

# Exit statuses.
FOUND = 1  # --fail has found something, or the command failed.
USAGE = 2
UNAVAILABLE = 3
BUSY = 75  # EX_TEMPFAIL of sysexits.h.
LOST = 76
INTERRUPTED = 130


class Console:
    """Standard output and standard error. With --json, only the document is on the former."""

    def __init__(self, out: OutputWrapper, err: OutputWrapper, *, json: bool) -> None:
        self.out = out
        self.err = err
        self.for_humans = err if json else out

    @property
    def columns(self) -> int | None:
        """The width of standard output, if it is a terminal."""
        return columns_of(self.out)

    def print(self, lines: Iterable[str]) -> None:
        """Print *lines* as they are."""
        for line in lines:
            self.out.write(line, str)

    def print_json(self, value: Any, *, known: bool = True) -> None:
        """Print the document that programs read.

        Args:
            value: The document.
            known: Whether anything is known. If not, since a server is silent, nothing is printed:
                an empty document would say that there is nothing.
        """
        if known:
            self.out.write(json.dumps(value, indent=2))

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
            raise CommandError(
                f"There was no answer, so nothing was {done}. --yes does not ask.",
                returncode=USAGE,
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
