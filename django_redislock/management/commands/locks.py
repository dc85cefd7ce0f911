"""See holders of locks, free locks safely, examine the server: docs/locks-command.md."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    OutputWrapper,
)

from django_redislock import doctor, held
from django_redislock.humanize import counted, visible
from django_redislock.management import (
    arguments,
    explain,
    metrics,
    once,
    operate,
    release_on_sigterm,
    run,
    runs,
    terminal,
)
from django_redislock.management.console import (
    FOUND,
    INTERRUPTED,
    Console,
    beginnings,
    failure,
    finish,
    listed,
    logging_afterwards,
)
from django_redislock.management.live_view import LiveView
from django_redislock.management.terminal import pasteable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.core.management.color import Style

SHORTEST_INTERVAL = 0.05  # Seconds: watching must not become a load.
CLEAR = "\x1b[H\x1b[J"
OTHER_SCREEN, MAIN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Command(BaseCommand):
    """``manage.py locks list | show | runs | run | release | clean | doctor | metrics``..."""

    help = (
        "See the holders of locks and what became of the runs of jobs, run a command under a lock,"
        " release locks by force, pause locks, and examine their server."
    )
    requires_system_checks = ()  # It must help also if something is wrong.

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments of the acts, see arguments.py."""
        arguments.add_acts(parser, self.get_version())

    def run_from_argv(self, argv: list[str]) -> None:
        """Run from a shell: its terminal may lack letters, its pipe a reader, its disk room."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # It is closed, as by ``>&-``.
                nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (until our end)
                setattr(sys, name, nowhere)
                setattr(self, name, OutputWrapper(nowhere))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno in _NO_ROOM:
                with suppress(OSError):
                    sys.stderr.write(f"The output cannot be written: {error.strerror}.\n")
            elif error.errno != errno.EPIPE:  # As of ``| head``.
                raise
            # Without this, Python would complain once more at its exit.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.exit(FOUND)
        except KeyboardInterrupt:
            sys.stderr.write("\nInterrupted.\n")
            sys.exit(INTERRUPTED)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Respect NO_COLOR, see https://no-color.org."""
        if os.environ.get("NO_COLOR") and not options["force_color"]:
            options["no_color"] = True
        return super().execute(*args, **options)

    def handle(self, *args: Any, act: str, **options: Any) -> None:
        """Do one act; errors become exit statuses."""
        console = Console(self.stdout, self.stderr, alias=options["alias"], json=options["json"])
        try:
            with logging_afterwards(held.audit):
                ACTS[act](console, style=self.style, **options)
        except held.PROBLEMS as error:
            raise failure(error, console.using) from error


# --- acts -----------------------------------------------------------------------------------------


def _list(console: Console, *, limit: int, fail: bool = False, **options: Any) -> None:
    using = console.aliases
    found = listed(using, limit, arguments.selection(options))
    lines: Iterable[str] = ()
    if found.locks:
        lines = terminal.locks(found.locks, console.columns, with_alias=len(using) > 1)
    elif not found.problems:
        lines = [arguments.none_of(found.total, options, partial=found.partial)]
    locks = [lock.as_dict() for lock in found.locks]
    console.answer(locks, lines, known=bool(locks) or not found.problems)
    if console.json and found.total and not found.locks:
        console.err.write(arguments.none_of(found.total, options, partial=found.partial))
    elif found.partial:
        console.err.write("These are not all of them; see --limit.")
    complaint = f"{counted(len(found.locks), 'lock')} found." if fail and found.locks else ""
    finish(found.problems.values(), complaint)


def _show(console: Console, *, name: str, permit: int | None, **options: Any) -> None:
    detail = held.detail(name, permit=permit, using=console.using)
    record = held.record_of(detail)
    unknown = held.unknown(detail, record)
    similar = held.similar(detail.name, using=detail.alias) if unknown else []
    lines: list[str] = []
    if not unknown:
        lines += terminal.detail(detail, record, console.columns)
    if not (console.json or (detail.past and (record is None or record.last_success))):
        lines += beginnings([detail.alias])
    free = {"name": detail.name, "alias": detail.alias, "state": "free"}
    taken, ends = detail.moments
    times = {"taken_at": _rounded(taken), "expires_at": _rounded(ends)}
    document = {
        **({**detail.lock.as_dict(), **times} if detail.lock else free),
        "others": [lock.as_dict() for lock in detail.others],
        "waiting": [
            {**one.as_dict(), "queued_at": _rounded(detail.server_time - one.waiting_for)}
            for one in detail.waiters
        ],
        "past": [lease.as_dict() for lease in detail.past],
        "runs": record and record.as_dict(),
        "known": not unknown,
        "similar": similar,
    }
    console.answer(document, lines)
    if unknown:
        says = f"{pasteable(detail.name)}: {unknown} {terminal.meant(similar)}".rstrip()
        raise CommandError(says, returncode=FOUND)


def _run(console: Console, **options: Any) -> None:
    if status := run.run(console, **options):
        sys.exit(status)


def _doctor(console: Console, *, style: Style, **options: Any) -> None:
    styles = {"ok": style.SUCCESS, "warn": style.WARNING, "fail": style.ERROR}
    printed = []
    examined: list[tuple[str, str | None, Iterator[doctor.Finding]]] = [
        (f"REDISLOCK[{using!r}]", using, doctor.examine(using)) for using in console.aliases
    ]
    if console.alias is None:
        examined.append(("The admin", None, doctor.examine_admin()))
        examined.append(("The database", None, doctor.examine_tables()))
    for what, using, findings in examined:
        if not console.json:
            console.out.write(style.MIGRATE_HEADING(what))
        for finding in findings:
            printed.append({"alias": using, **finding.as_dict()})
            if console.json:
                continue
            level = styles[finding.level](f"{finding.level:4}")
            console.out.write(f"  {level}  {finding.about:11}  {visible(finding.says)}")
            if finding.advice:
                console.out.write(f"{'':21}{visible(finding.advice)}")
    console.answer(printed, ())  # The lines were printed one by one: an examination takes a while.
    if any(finding["level"] == "fail" for finding in printed):
        raise CommandError("The server is not fit to keep locks.", returncode=FOUND)


def _watch(console: Console, *, interval: float, **options: Any) -> None:
    if console.json:
        _list(console, **{**arguments.LIST_DEFAULTS, **options})
        return
    view = LiveView(console.aliases)
    if not console.out.isatty() or os.environ.get("TERM") == "dumb":  # It has no screen.
        lines, problems = view.look(columns=console.columns)
        console.print(lines)
        finish(problems)
        return
    with suppress(KeyboardInterrupt), release_on_sigterm():
        try:
            console.out.write(OTHER_SCREEN, ending="")
            while True:
                size = shutil.get_terminal_size()
                lines, problems = view.look(size.lines, size.columns)
                # In one write, so that it does not flicker.
                frame = "\n".join([*problems, *lines][: size.lines])
                console.out.write(CLEAR + frame, ending="")
                console.out.flush()
                time.sleep(max(interval, SHORTEST_INTERVAL))
        finally:
            console.out.write(MAIN_SCREEN, ending="")
            console.out.flush()


ACTS: dict[str, Callable[..., None]] = {
    "list": _list,
    "show": _show,
    "runs": runs.show,
    "explain": explain.explain,
    "run": _run,
    "release": operate.release,
    "pause": operate.pause,
    "resume": operate.resume,
    "clean": operate.clean,
    "once_list": once.show,
    "once_forget": once.forget,
    "doctor": _doctor,
    "metrics": metrics.show,
    "watch": _watch,
}


def _rounded(at: float | None) -> float | None:
    return None if at is None else round(at, 3)
