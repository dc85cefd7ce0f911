"""See holders of locks, free locks safely, examine the server: docs/locks-command.md."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    OutputWrapper,
)

from django_redislock import doctor, held
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import counted, visible
from django_redislock.management import (
    arguments,
    explain,
    metrics,
    once,
    pause,
    queued,
    release_on_sigterm,
    run,
    runs,
    terminal,
)
from django_redislock.management.console import (
    FOUND,
    INTERRUPTED,
    UNAVAILABLE,
    USAGE,
    Console,
    beginnings,
    finish,
    listed,
    logging_afterwards,
    noting,
    operator,
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
            problem = held.problem(error, console.using)
            status = UNAVAILABLE if isinstance(error, LockUnavailable) else USAGE
            raise CommandError(problem, returncode=status) from error


# --- acts -----------------------------------------------------------------------------------------


def _list(console: Console, *, limit: int, fail: bool = False, **options: Any) -> None:
    using = console.aliases
    found = listed(using, limit, arguments.selection(options))
    lines: Iterable[str] = ()
    if found.locks:
        lines = terminal.locks(found.locks, console.columns, with_alias=len(using) > 1)
    elif not found.problems:
        lines = [_none_of(found.total, options, partial=found.partial)]
    locks = [lock.as_dict() for lock in found.locks]
    console.answer(locks, lines, known=bool(locks) or not found.problems)
    if console.json and found.total and not found.locks:
        console.err.write(_none_of(found.total, options, partial=found.partial))
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
        lines += terminal.beginnings(beginnings([detail.alias]))
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


def _release(
    console: Console, *, names: list[str], lease: str | None, yes: bool, reason: str, **options: Any
) -> None:
    if lease is None and not names:
        raise CommandError("Say which locks: NAME..., or --id LEASE.", returncode=USAGE)
    if lease is not None and len(names) > 1:
        raise CommandError("--id goes with one NAME, or with none.", returncode=USAGE)
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


def _clean(
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
    only = arguments.selection(options)
    if queued_calls:
        others = every or dead_here
        queued.forget(console, only=only, others=others, dry_run=dry_run, reason=reason)
        return
    chosen = dead_here or only != held.Selection()
    if every and chosen:
        raise CommandError(
            "--all means every lock; leave it out to end only those that the other options choose.",
            returncode=USAGE,
        )
    if not (every or chosen):
        raise CommandError(
            "Say which locks: --host, --task, --prefix, --older-than, --dead-here, or else --all;"
            " or --queued.",
            returncode=USAGE,
        )
    using = console.using
    locks = [lock for lock in held.every(using=using, only=only) if lock.gone or not dead_here]
    if locks:
        _confirm(console, locks, yes=yes or dry_run)
    else:
        total = held.list(using=using, limit=0).total
        console.for_humans.write(_none_of(total, {**options, "dead_here": dead_here}), str)
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
    "release": _release,
    "pause": pause.pause,
    "resume": pause.resume,
    "clean": _clean,
    "once_list": once.show,
    "once_forget": once.forget,
    "doctor": _doctor,
    "metrics": metrics.show,
    "watch": _watch,
}


# --- force release --------------------------------------------------------------------------------


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
        problem = f"{held.problem(error, using)} {so_far}"
        raise CommandError(problem, returncode=UNAVAILABLE) from error
    return released


def _confirm(console: Console, locks: list[held.HeldLock], *, yes: bool) -> None:
    """Show these locks, and ask."""
    question = f"Release {counted(len(locks), 'lock')}? The holders are not stopped."
    table = partial(terminal.locks, locks)
    console.confirm(question, table=table, yes=yes, done="released")


def _rounded(at: float | None) -> float | None:
    return None if at is None else round(at, 3)


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


def _none_of(total: int, options: dict[str, Any], *, partial: bool = False) -> str:
    """A sentence instead of an empty table."""
    asked = arguments.spelled(options)
    if not (total and asked):
        return "No lock is held."
    are = "lock is" if total == 1 else "locks are"
    looked = "none that was looked at" if partial else "none"
    return f"{total} {are} held, but {looked} matches {asked}."
