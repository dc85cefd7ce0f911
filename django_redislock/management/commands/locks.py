"""See who holds what, free it safely, and ask whether the server is fit: docs/locks-command.md."""

from __future__ import annotations

import getpass
import io
import json
import os
import shutil
import socket
import sys
import time
from argparse import SUPPRESS, ArgumentTypeError
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_redislock import doctor, held
from django_redislock.conf import aliases, conf
from django_redislock.exceptions import InvalidLockName, LockUnavailable
from django_redislock.humanize import counted, duration, parse_duration, visible
from django_redislock.management import release_on_sigterm, terminal
from django_redislock.management.live_view import Screen, listed
from django_redislock.management.terminal import pasteable
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFAULT_ALIAS
from django_redislock.task_runs import KEPT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django.core.management.base import OutputWrapper

FOUND = 1  # Exit status: found what --fail looks for, or failed.
USAGE = 2
UNAVAILABLE = 3
INTERRUPTED = 130

MOST_RECORDS = 10_000  # More are not kept.
SHORTEST_INTERVAL = 0.05  # Seconds: watching must not become a load.
CLEAR = "\x1b[H\x1b[J"
OTHER_SCREEN, MAIN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Command(BaseCommand):
    """``manage.py locks list | show | runs | release | clean | doctor | watch``."""

    help = (
        "See who holds which locks and what became of the runs of tasks, release locks by force,"
        " and examine the server that keeps them."
    )
    requires_system_checks = ()  # It must help also when something is wrong.

    def add_arguments(self, parser: CommandParser) -> None:
        """Each act has its own; --alias, --json and Django's own options go with all."""
        parser.set_defaults(act="list", alias=None, json=False, **_LIST_DEFAULTS)
        _add_common(parser)
        acts = parser.add_subparsers(
            title="acts",
            metavar="ACT",
            description="manage.py locks ACT --help has the options of each.",
        )

        act = self._add_act(acts, "list", "List the held locks. This is done without an ACT, too.")
        _add_selection(act)
        act.add_argument(
            "--state", default="", choices=held.STATES, help="in this state: %(choices)s"
        )
        act.add_argument(
            "--search", default="", metavar="TEXT", help="with this in the name or in the holder"
        )
        act.add_argument(
            "--limit", type=_limit, default=1000, metavar="N", help="how many at most (1000)"
        )
        act.add_argument("--fail", action="store_true", help="exit with 1 if there is any")

        act = self._add_act(
            acts,
            "show",
            "Show all about one lock: who holds it, who waits for it, who held it before, and what"
            " became of the runs of its task.",
        )
        act.add_argument("name", metavar="NAME", help=_NAME)

        act = self._add_act(
            acts,
            "runs",
            "Show what became of the runs of tasks: the last success, failure and skip, what is"
            " under way, and what began and never ended. Without a NAME it shows all.",
        )
        act.add_argument("names", nargs="*", metavar="NAME", help=_NAME)
        act.add_argument(
            "--no-success-for",
            type=_age,
            metavar="TIME",
            help="only those without a success so long: 90m, 26h, 3d; or not known at all",
        )
        act.add_argument(
            "--fail", action="store_true", help="exit with 1 if there is any such, for probes"
        )

        act = self._add_act(
            acts,
            "release",
            "End by force the leases of the locks that are named: show them, ask, and end exactly"
            " those. Their holders are not stopped.",
        )
        act.add_argument("names", nargs="*", metavar="NAME", help=_NAME)
        act.add_argument(
            "--id", dest="lease", metavar="LEASE", help="only this one; needs no NAME, asks nothing"
        )
        _add_decision(act)

        act = self._add_act(
            acts,
            "clean",
            "End by force the leases of all locks that are meant: show them, ask, and end exactly"
            " those. Their holders are not stopped.",
        )
        _add_selection(act)
        act.add_argument(
            "--dead-here",
            action="store_true",
            help="held by a process of this host that does not exist any more",
        )
        act.add_argument("--all", dest="every", action="store_true", help="all that are held")
        act.add_argument("--dry-run", action="store_true", help="only print what would be done")
        _add_decision(act)

        self._add_act(acts, "doctor", "Examine whether the server is fit to keep locks.")

        act = self._add_act(acts, "watch", "Show the held locks again and again, until Ctrl-C.")
        act.add_argument(
            "--interval", type=_duration, default=1.0, metavar="TIME", help="between looks (1s)"
        )

    def _add_act(self, acts: Any, name: str, does: str) -> CommandParser:
        brief = does.partition(".")[0].partition(":")[0]
        parser: CommandParser = acts.add_parser(
            name, help=brief[0].lower() + brief[1:], description=does
        )
        parser.set_defaults(act=name)
        _add_common(parser)
        # Django's own options may stand before or after the act; those before it have the help.
        hidden: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
        parser.add_argument(
            "--version", action="version", version=self.get_version(), help=SUPPRESS
        )
        parser.add_argument("-v", "--verbosity", type=int, choices=(0, 1, 2, 3), **hidden)
        parser.add_argument("--settings", **hidden)
        parser.add_argument("--pythonpath", **hidden)
        for flag in ("--traceback", "--no-color", "--force-color"):
            parser.add_argument(flag, action="store_true", **hidden)
        return parser

    def run_from_argv(self, argv: list[str]) -> None:
        """As from a shell, whose terminal may lack letters, and whose ``| head`` may close."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Nobody reads on. Python must not find out once more when it exits.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.exit(FOUND)
        except KeyboardInterrupt:
            sys.stderr.write("\nInterrupted.\n")
            sys.exit(INTERRUPTED)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """As https://no-color.org asks of all programs."""
        if os.environ.get("NO_COLOR") and not options["force_color"]:
            options["no_color"] = True
        return super().execute(*args, **options)

    def handle(self, *args: Any, act: str, **options: Any) -> None:
        """Do one act; errors become exit statuses."""
        try:
            getattr(self, f"_{act}")(**options)
        except LockUnavailable as error:
            using = options["alias"] or DEFAULT_ALIAS
            raise CommandError(held.problem(error, using), returncode=UNAVAILABLE) from error
        except (InvalidLockName, ImproperlyConfigured) as error:
            raise CommandError(visible(str(error)), returncode=USAGE) from error

    # --- acts -----------------------------------------------------------------------------------

    def _list(self, alias: str | None, limit: int, fail: bool, **options: Any) -> None:
        using = _aliases(alias)
        found = listed(using, limit, _selection(**options))
        several = len(using) > 1
        complaints = found.complaints()
        if options["json"]:
            self._print_json([lock.as_dict() for lock in found.locks])
        elif found.locks:
            self._print(terminal.locks(found.locks, _columns(self.stdout), aliases=several))
        elif not complaints:
            self.stdout.write(_none_of(found.total, found.partial, **options))
        if options["json"] and found.total and not found.locks:
            self.stderr.write(_none_of(found.total, found.partial, **options))
        elif found.partial:
            self.stderr.write("These are not all of them; see --limit.")
        if fail and found.locks:
            complaints.append(f"{counted(len(found.locks), 'lock')} found.")
            raise CommandError("\n".join(complaints), returncode=FOUND)
        if complaints:
            raise CommandError("\n".join(complaints), returncode=UNAVAILABLE)

    def _show(self, name: str, alias: str | None, **options: Any) -> None:
        detail = held.detail(name, using=alias or DEFAULT_ALIAS)
        became = _record_of(detail)
        if not options["json"]:
            self._print(terminal.detail(detail, became, _columns(self.stdout)))
            return
        free = {"name": detail.name, "alias": detail.alias, "state": "free"}
        self._print_json(
            {
                **(detail.lock.as_dict() if detail.lock else free),
                "waiting": [waiter.as_dict() for waiter in detail.waiters],
                "past": [lease.as_dict() for lease in detail.past],
                "runs": became and became.as_dict(),
            }
        )

    def _runs(
        self,
        names: list[str],
        alias: str | None,
        no_success_for: float | None,
        fail: bool,
        **options: Any,
    ) -> None:
        if fail and no_success_for is None:
            raise CommandError("--fail goes with --no-success-for.", returncode=USAGE)
        found, complaints = _records(names, alias)
        known = bool(found)
        if no_success_for is not None:
            found = [
                one
                for one in found
                if one.last_success is None or one.last_success.ago > no_success_for
            ]
        if options["json"]:
            self._print_json([one.as_dict() for one in found])
        elif found:
            several = not names and len(_aliases(alias)) > 1
            self._print(terminal.runs(found, _columns(self.stdout), aliases=several))
        elif known:
            self.stdout.write(f"Each had a success in the last {duration(no_success_for)}.")
        elif not complaints:
            self.stdout.write("No run of a task is known.")
        if fail and (found or not (known or complaints)):
            without = counted(len(found), "lock") if found else "Nothing is known, so all are"
            complaints.append(
                f"{without} without a success in the last {duration(no_success_for)}."
            )
            raise CommandError("\n".join(complaints), returncode=FOUND)
        if complaints:
            raise CommandError("\n".join(complaints), returncode=UNAVAILABLE)

    def _release(
        self, names: list[str], lease: str | None, alias: str | None, yes: bool, **options: Any
    ) -> None:
        if lease is None and not names:
            raise CommandError("Say which locks: NAME..., or --id LEASE.", returncode=USAGE)
        if lease is not None and len(names) > 1:
            raise CommandError("--id goes with one NAME, or with none.", returncode=USAGE)
        using = alias or DEFAULT_ALIAS
        if lease is not None and not names:
            found = _with_id(lease, alias)
            leases, using = [(found.name, lease)], found.alias
        elif lease is not None:
            leases = [(names[0], lease)]
        else:
            names = list(dict.fromkeys(names))
            looked = [held.get(name, using=using) for name in names]
            if locks := [lock for lock in looked if lock]:
                self._decide(locks, yes=yes, json=options["json"])
            # The leases that were shown. A name that nobody holds is reported below.
            leases = [(n, lock.id if lock else "") for n, lock in zip(names, looked, strict=True)]
        done = self._free(leases, using, options["reason"])
        if options["json"]:
            self._print_json(
                [
                    {"name": name, "alias": using, "id": lease or None, "released": one}
                    for (name, lease), one in zip(leases, done, strict=True)
                ]
            )
        elif any(done):
            self.stdout.write(f"Released {counted(sum(done), 'lock')}.")
        if not all(done):
            raise CommandError(
                "\n".join(
                    f"{pasteable(name)} was not released: {_why_not(name, using)}"
                    for (name, _), one in zip(leases, done, strict=True)
                    if not one
                ),
                returncode=FOUND,
            )

    def _clean(
        self,
        alias: str | None,
        every: bool,
        dead_here: bool,
        dry_run: bool,
        yes: bool,
        **options: Any,
    ) -> None:
        only = _selection(**options)
        chosen = dead_here or only != held.Selection()
        if every and chosen:
            raise CommandError(
                "--all means every lock; leave it out to end only those that the other options"
                " choose.",
                returncode=USAGE,
            )
        if not (every or chosen):
            raise CommandError(
                "Say which locks: --host, --task, --prefix, --older-than, --dead-here, or else"
                " --all.",
                returncode=USAGE,
            )
        using = alias or DEFAULT_ALIAS
        locks = list(held.every(using=using, only=only))
        if dead_here:
            locks = [lock for lock in locks if lock.gone]
        if locks:
            self._decide(locks, yes=yes or dry_run, json=options["json"])
        else:
            total = held.list(using=using, limit=0).total
            out = self.stderr if options["json"] else self.stdout
            out.write(_none_of(total, False, dead_here=dead_here, **options), str)
        done = [False] * len(locks)
        if locks and not dry_run:
            leases = [(lock.name, lock.id) for lock in locks]
            done = self._free(leases, using, options["reason"])
        if options["json"]:
            self._print_json(
                [{**lock.as_dict(), "released": one} for lock, one in zip(locks, done, strict=True)]
            )
        elif locks and dry_run:
            self.stdout.write(f"Would release {counted(len(locks), 'lock')}.")
        elif locks:
            ended = len(done) - sum(done)
            meanwhile = f" {ended} had ended before." if ended else ""
            self.stdout.write(f"Released {counted(sum(done), 'lock')}.{meanwhile}")

    def _doctor(self, alias: str | None, **options: Any) -> None:
        styles = {"ok": self.style.SUCCESS, "warn": self.style.WARNING, "fail": self.style.ERROR}
        printed = []
        failed = False
        examined: list[tuple[str | None, Iterator[doctor.Finding]]] = [
            (using, doctor.examine(using)) for using in _aliases(alias)
        ]
        if alias is None:
            examined.append((None, doctor.examine_admin()))
        for using, findings in examined:
            if not options["json"]:
                what = f"REDISLOCK[{using!r}]" if using else "The admin"
                self.stdout.write(self.style.MIGRATE_HEADING(what))
            for finding in findings:
                failed = failed or finding.level == "fail"
                printed.append({"alias": using, **vars(finding)})
                if options["json"]:
                    continue
                level = styles[finding.level](f"{finding.level:4}")
                self.stdout.write(f"  {level}  {finding.about:11}  {visible(finding.says)}")
                if finding.advice:
                    self.stdout.write(f"{'':21}{visible(finding.advice)}")
        if options["json"]:
            self._print_json(printed)
        if failed:
            raise CommandError("The server is not fit to keep locks.", returncode=FOUND)

    def _watch(self, alias: str | None, interval: float, **options: Any) -> None:
        if options["json"]:
            self._list(alias, **{**_LIST_DEFAULTS, **options})
            return
        screen = Screen(_aliases(alias))
        if not self.stdout.isatty():
            lines, complaints = screen.look()
            self._print(lines)
            if complaints:
                raise CommandError("\n".join(complaints), returncode=UNAVAILABLE)
            return
        with suppress(KeyboardInterrupt), release_on_sigterm():
            try:
                self.stdout.write(OTHER_SCREEN, ending="")
                while True:
                    size = shutil.get_terminal_size()
                    lines, complaints = screen.look(size.lines, size.columns)
                    # In one write, so that it does not flicker.
                    frame = "\n".join([*complaints, *lines][: size.lines])
                    self.stdout.write(CLEAR + frame, ending="")
                    self.stdout.flush()
                    time.sleep(max(interval, SHORTEST_INTERVAL))
            finally:
                self.stdout.write(MAIN_SCREEN, ending="")
                self.stdout.flush()

    # --- the rest ---------------------------------------------------------------------------------

    def _free(self, leases: list[tuple[str, str]], using: str, reason: str) -> list[bool]:
        """End these leases by force; say of each whether it was there to end."""
        done: list[bool] = []
        try:
            for name, id in leases:  # noqa: A001
                done.append(
                    bool(id)
                    and held.force_release(name, id, using=using, by=_operator(), reason=reason)
                )
        except KeyboardInterrupt:
            raise CommandError(
                f"Interrupted. Released {counted(sum(done), 'lock')}, and perhaps one more.",
                returncode=INTERRUPTED,
            ) from None
        return done

    def _decide(self, locks: list[held.HeldLock], *, yes: bool, json: bool) -> None:
        """Show what is meant, and ask. With --json, standard output is for programs alone."""
        out = self.stderr if json else self.stdout
        if not (json and yes):
            self._print(terminal.locks(locks, _columns(out)), out)
        if yes:
            return
        question = f"Release {counted(len(locks), 'lock')}? The holders are not stopped. [y/N] "
        out.write(question, str, ending="")
        out.flush()
        try:
            answer = input()
        except EOFError:
            out.write("")
            raise CommandError(
                "There was no answer, so nothing was released. --yes does not ask.",
                returncode=USAGE,
            ) from None
        except KeyboardInterrupt:
            out.write("")
            raise CommandError("Nothing was released.", returncode=INTERRUPTED) from None
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was released.", returncode=FOUND)

    def _print(self, lines: Iterable[str], to: OutputWrapper | None = None) -> None:
        for line in lines:
            (to or self.stdout).write(line, str)

    def _print_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, indent=2))


def _columns(out: OutputWrapper) -> int | None:
    """How many there are, if it is a terminal."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def _with_id(lease: str, alias: str | None) -> held.HeldLock:
    """The held lock with this lease, of all aliases unless one is named."""
    unavailable: list[str] = []
    bounded = False
    for using in _aliases(alias):
        try:
            found = list(islice(held.every(using=using), held.MOST_LOOKS + 1))
        except LockUnavailable as error:  # Another one may have it.
            unavailable.append(held.problem(error, using))
            continue
        bounded = bounded or len(found) > held.MOST_LOOKS
        for lock in found[: held.MOST_LOOKS]:
            if lock.id == lease:
                return lock
    if unavailable:
        raise CommandError("\n".join(unavailable), returncode=UNAVAILABLE)
    where = f"among the first {held.MOST_LOOKS} locks; say its NAME too" if bounded else "held"
    raise CommandError(f"No lease {visible(lease)!r} is {where}.", returncode=FOUND)


def _record_of(detail: held.Detail) -> held.Record | None:
    """What became of the runs under a lock; that of a permit is one of all permits."""
    owners = [one.owner for one in (detail.lock, *detail.past) if one]
    is_permit = any(owner.permit for owner in owners)
    name = detail.name.rpartition("#")[0] if is_permit else detail.name
    return held.record(name, using=detail.alias)


def _records(names: list[str], alias: str | None) -> tuple[list[held.Record], list[str]]:
    """What became of the runs under these locks, or all; and what is wrong with servers."""
    if names:
        using = alias or DEFAULT_ALIAS
        named = list(dict.fromkeys(map(check_name, names)))
        return [
            held.record(name, using=using) or held.Record(name=name, alias=using) for name in named
        ], []
    found: list[held.Record] = []
    complaints = []
    for using in _aliases(alias):
        try:
            found += held.records(using=using, limit=MOST_RECORDS)
        except LockUnavailable as error:  # It must not hide the others.
            complaints.append(held.problem(error, using))
    return found, complaints


def _none_of(total: int, partial: bool, **options: Any) -> str:
    """That none of the held locks is one of those that were asked for."""
    asked = " ".join(
        f"--{key.replace('_', '-')} {_age_of(value) if key == 'older_than' else pasteable(value)}"
        for key in ("host", "task", "prefix", "older_than", "state", "search")
        if (value := options.get(key)) not in {"", None}
    )
    if options.get("dead_here"):
        asked = f"{asked} --dead-here".strip()
    if not (total and asked):
        return "No lock is held."
    are = "lock is" if total == 1 else "locks are"
    looked = "none that was looked at" if partial else "none"
    return f"{total} {are} held, but {looked} matches {asked}."


def _age_of(seconds: float) -> str:
    """A duration as it may be given to an option: 90 is 1m30s."""
    parts = []
    for unit, size in {"d": 86400, "h": 3600, "m": 60}.items():
        whole, seconds = divmod(seconds, size)
        if whole:
            parts.append(f"{whole:g}{unit}")
    return "".join([*parts, f"{seconds:g}s"] if seconds or not parts else parts)


def _aliases(alias: str | None) -> list[str]:
    if alias is None:
        return aliases()
    conf(alias)  # Raises if there is none.
    return [alias]


def _selection(
    host: str = "",
    task: str = "",
    prefix: str = "",
    older_than: float | None = None,
    state: str = "",
    search: str = "",
    **options: Any,
) -> held.Selection:
    return held.Selection(
        host=host, task=task, prefix=prefix, older_than=older_than, state=state, search=search
    )


def _why_not(name: str, using: str) -> str:
    lock = held.get(name, using=using)
    if lock is None:
        return "nobody holds it."
    return f"somebody else holds it now, {terminal.place(lock.owner)} by lease {lock.id}."


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()} by manage.py locks"


def _limit(text: str) -> int:
    if not (text.isdecimal() and text.strip("0")):
        raise ArgumentTypeError(f"{text!r} is no number of locks; write 1 or more.")
    return int(text[:10])  # Lists are bounded anyway.


def _age(text: str) -> float:
    seconds = _duration(text)
    if seconds > KEPT:
        raise ArgumentTypeError(f"{text!r} is too long ago: runs are remembered for 30 days.")
    return seconds


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


_NAME = "of a lock, as list prints it; write -- before one that begins with a dash"

_LIST_DEFAULTS: dict[str, Any] = {
    "host": "",
    "task": "",
    "prefix": "",
    "older_than": None,
    "state": "",
    "search": "",
    "limit": 1000,
    "fail": False,
}


def _add_common(parser: CommandParser) -> None:
    # They may stand before or after the act: SUPPRESS, or the act's would undo the command's.
    parser.add_argument(
        "--alias", default=SUPPRESS, help="only the locks of this alias of REDISLOCK"
    )
    parser.add_argument(
        "--json", action="store_true", default=SUPPRESS, help="print JSON, for programs"
    )
    # It has none, but who writes scripts for all commands need not know.
    parser.add_argument("--skip-checks", action="store_true", default=SUPPRESS, help=SUPPRESS)


def _add_selection(parser: CommandParser) -> None:
    parser.add_argument("--host", default="", help="held from this host")
    parser.add_argument("--task", default="", help="held by runs of this task, by its full name")
    parser.add_argument("--prefix", default="", help="with a name that begins like this")
    parser.add_argument(
        "--older-than", type=_duration, metavar="TIME", help="held this long: 90s, 10m, 1h30m, 2d"
    )


def _add_decision(parser: CommandParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit log")
