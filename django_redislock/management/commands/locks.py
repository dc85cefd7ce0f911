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
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections, transaction
from django.utils import timezone

from django_redislock import conf, doctor, effects, held
from django_redislock.completed_runs import CompletedRun
from django_redislock.exceptions import LockUnavailable
from django_redislock.humanize import counted, duration, visible
from django_redislock.management import aliases, arguments, release_on_sigterm, terminal
from django_redislock.management.live_view import LiveView
from django_redislock.management.terminal import pasteable
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFAULT_ALIAS
from django_redislock.task_runs import MOST_NAMES
from django_redislock.transactions import is_by_hand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    from django.core.management.base import OutputWrapper

    from django_redislock.completed_runs import CompletedRuns

FOUND = 1  # Exit status: found what --fail looks for, or failed.
USAGE = 2
UNAVAILABLE = 3
INTERRUPTED = 130

NO_RUN = "No run of a task is known."
SHORTEST_INTERVAL = 0.05  # Seconds: watching must not become a load.
CLEAR = "\x1b[H\x1b[J"
OTHER_SCREEN, MAIN_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Command(BaseCommand):
    """``manage.py locks list | show | runs | release | clean | once | doctor | watch``."""

    help = (
        "See who holds which locks and what became of the runs of tasks, release locks by force,"
        " and examine the server that keeps them."
    )
    requires_system_checks = ()  # It must help also when something is wrong.

    def add_arguments(self, parser: CommandParser) -> None:
        """Those of the acts, see arguments.py."""
        arguments.add_acts(parser, self.get_version())

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
        except held.TROUBLE as error:
            problem = held.problem(error, options["alias"] or DEFAULT_ALIAS)
            status = UNAVAILABLE if isinstance(error, LockUnavailable) else USAGE
            raise CommandError(problem, returncode=status) from error

    # --- acts -----------------------------------------------------------------------------------

    def _list(self, alias: str | None, limit: int, fail: bool, **options: Any) -> None:
        using = aliases.named(alias)
        found = aliases.listed(using, limit, arguments.selection(options))
        if options["json"]:
            self._print_json([lock.as_dict() for lock in found.locks])
        elif found.locks:
            several = len(using) > 1
            self._print(terminal.locks(found.locks, _columns(self.stdout), with_alias=several))
        elif not found.problems:
            self.stdout.write(_none_of(found.total, options, partial=found.partial))
        if options["json"] and found.total and not found.locks:
            self.stderr.write(_none_of(found.total, options, partial=found.partial))
        elif found.partial:
            self.stderr.write("These are not all of them; see --limit.")
        complaint = f"{counted(len(found.locks), 'lock')} found." if fail and found.locks else ""
        _finish(found.problems.values(), complaint)

    def _show(self, name: str, alias: str | None, **options: Any) -> None:
        detail = held.detail(name, using=alias or DEFAULT_ALIAS)
        record = held.record_of(detail)
        unknown = held.unknown(detail, record)
        similar = held.similar(detail.name, using=detail.alias) if unknown else []
        if not options["json"]:
            self._print(terminal.detail(detail, record, _columns(self.stdout)))
            self._print(filter(None, (unknown, terminal.meant(similar))))
            return
        free = {"name": detail.name, "alias": detail.alias, "state": "free"}
        self._print_json(
            {
                **(detail.lock.as_dict() if detail.lock else free),
                "waiting": [waiter.as_dict() for waiter in detail.waiters],
                "past": [lease.as_dict() for lease in detail.past],
                "runs": record and record.as_dict(),
                "known": not unknown,
                "similar": similar,
            }
        )

    def _runs(
        self,
        names: list[str],
        alias: str | None,
        task: str,
        prefix: str,
        no_success_for: float | None,
        fail: bool,
        **options: Any,
    ) -> None:
        if fail and no_success_for is None:
            raise CommandError("--fail goes with --no-success-for.", returncode=USAGE)
        chosen = arguments.spelled({"task": task, "prefix": prefix})
        if names and chosen:
            raise CommandError("NAME goes with neither --task nor --prefix.", returncode=USAGE)
        if no_success_for is not None:
            _check_kept(no_success_for, [alias or DEFAULT_ALIAS] if names else aliases.named(alias))
        known, problems, partial = _records(names, alias, task, prefix)
        found = known if no_success_for is None else _overdue(known, no_success_for, bool(chosen))
        notes = {one.name: note for one in found if not one.known and (note := _what_ran(one))}
        if options["json"]:
            self._print_json([{**one.as_dict(), "note": notes.get(one.name)} for one in found])
        elif found:
            several = not names and len(aliases.named(alias)) > 1
            columns = _columns(self.stdout)
            self._print(terminal.runs(found, columns, with_alias=several, notes=notes))
        elif known:
            self.stdout.write(_good_news(known, no_success_for, bool(chosen)), str)
        elif not problems:
            self.stdout.write(f"No run is known of {chosen}." if chosen else NO_RUN, str)
        if partial:
            self.stderr.write(f"Only the {MOST_NAMES} locks that ran last are looked at.")
        complaint = ""
        if fail and chosen and not problems and (found or not known):
            # A server that did not answer may know of one.
            among = f", among {counted(len(found), 'lock')}" if found else ""
            complaint = f"No success of {chosen} in the last {duration(no_success_for)}{among}."
        elif fail and not chosen and (found or not (known or problems)):
            without = counted(len(found), "lock") if found else "Nothing is known, so all are"
            complaint = f"{without} without a success in the last {duration(no_success_for)}."
        _finish(problems.values(), complaint)

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
                self._confirm(locks, yes=yes, json=options["json"])
            # The leases that were shown. A name that nobody holds is reported below.
            leases = [(n, lock.id if lock else "") for n, lock in zip(names, looked, strict=True)]
        released = self._force_release(leases, using, options["reason"])
        outcomes = list(zip(leases, released, strict=True))
        if options["json"]:
            self._print_json(
                [
                    {"name": name, "alias": using, "id": lease or None, "released": done}
                    for (name, lease), done in outcomes
                ]
            )
        elif any(released):
            self.stdout.write(f"Released {counted(sum(released), 'lock')}.")
        kept = [name for (name, _), done in outcomes if not done]
        if kept:
            raise CommandError(
                "\n".join(
                    f"{pasteable(name)} was not released. {_why_kept(name, using)}" for name in kept
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
        only = arguments.selection(options)
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
        locks = [lock for lock in held.every(using=using, only=only) if lock.gone or not dead_here]
        if locks:
            self._confirm(locks, yes=yes or dry_run, json=options["json"])
        else:
            total = held.list(using=using, limit=0).total
            out = self.stderr if options["json"] else self.stdout
            out.write(_none_of(total, {**options, "dead_here": dead_here}), str)
        released = [False] * len(locks)
        if not dry_run:
            leases = [(lock.name, lock.id) for lock in locks]
            released = self._force_release(leases, using, options["reason"])
        if options["json"]:
            self._print_json(
                [
                    {**lock.as_dict(), "released": done}
                    for lock, done in zip(locks, released, strict=True)
                ]
            )
        elif locks and dry_run:
            self.stdout.write(f"Would release {counted(len(locks), 'lock')}.")
        elif locks:
            over = len(released) - sum(released)
            meanwhile = f" {over} had ended before." if over else ""
            self.stdout.write(f"Released {counted(sum(released), 'lock')}.{meanwhile}")

    def _once_list(
        self,
        alias: str | None,
        database: str,
        older_than: float | None,
        search: str,
        limit: int,
        **options: Any,
    ) -> None:
        rows = _completed(alias, database)
        if older_than is not None:
            rows = rows.filter(completed_at__lt=_ago(older_than))
        if search:
            rows = rows.matching(search)
        with _asking(database):
            found = list(rows.order_by("-completed_at", "-pk")[: limit + 1])
        shown = found[:limit]
        if options["json"]:
            self._print_json([run.as_dict() for run in shown])
        elif shown:
            several = alias is None and len(conf.aliases()) > 1
            self._print(terminal.completed(shown, _columns(self.stdout), with_alias=several))
        else:
            such = " such" if search or older_than is not None else ""
            self.stdout.write(f"Database {database!r} has no{such} completed run.")
        if len(found) > limit:
            self.stderr.write("These are not all of them; see --limit.")

    def _once_forget(
        self,
        names: list[str],
        alias: str | None,
        database: str,
        older_than: float | None,
        **options: Any,
    ) -> None:
        if bool(names) == (older_than is not None):
            raise CommandError("Say which runs: NAME..., or --older-than TIME.", returncode=USAGE)
        if older_than is not None:
            with _asking(database):
                self._prune(_completed(alias, database), older_than, **options)
            return
        names = list(dict.fromkeys(map(check_name, names)))
        with _asking(database):
            rows = _completed(alias, database)
            runs = [run for name in names for run in rows.of(name)]
            if runs:
                self._show_meant(partial(terminal.completed, runs), **options)
                self._ask_whether(f"Forget {counted(len(runs), 'completed run')}?", **options)
            forgotten = 0
            if not options["dry_run"]:
                only = rows.filter(pk__in=[run.pk for run in runs])
                forgotten = only.forget(by=_operator(), reason=options["reason"])
        self._say_forgotten(forgotten, len(runs), **options)
        if unknown := set(names) - {run.name for run in runs}:
            raise CommandError(
                "\n".join(
                    f"Database {database!r} has no completed run of {pasteable(name)}."
                    for name in names
                    if name in unknown
                ),
                returncode=FOUND,
            )

    def _prune(self, rows: CompletedRuns, older_than: float, **options: Any) -> None:
        before, forgotten = _ago(older_than), 0
        total = rows.filter(completed_at__lt=before).count()
        if total:
            runs = counted(total, "completed run")
            self._ask_whether(f"Forget {runs} older than {duration(older_than)}?", **options)
        if total and not options["dry_run"]:
            forgotten = rows.prune(before, by=_operator(), reason=options["reason"])
        self._say_forgotten(forgotten, total, **options)

    def _say_forgotten(
        self, forgotten: int, total: int, *, json: bool, dry_run: bool, **options: Any
    ) -> None:
        if json:
            self._print_json({"forgotten": forgotten})
        elif dry_run:
            self.stdout.write(f"Would forget {counted(total, 'completed run')}.")
        else:
            self.stdout.write(f"Forgot {counted(forgotten, 'completed run')}.")

    def _doctor(self, alias: str | None, **options: Any) -> None:
        styles = {"ok": self.style.SUCCESS, "warn": self.style.WARNING, "fail": self.style.ERROR}
        printed = []
        examined: list[tuple[str | None, Iterator[doctor.Finding]]] = [
            (using, doctor.examine(using)) for using in aliases.named(alias)
        ]
        if alias is None:
            examined.append((None, doctor.examine_admin()))
        for using, findings in examined:
            if not options["json"]:
                what = f"REDISLOCK[{using!r}]" if using else "The admin"
                self.stdout.write(self.style.MIGRATE_HEADING(what))
            for finding in findings:
                printed.append({"alias": using, **vars(finding)})
                if options["json"]:
                    continue
                level = styles[finding.level](f"{finding.level:4}")
                self.stdout.write(f"  {level}  {finding.about:11}  {visible(finding.says)}")
                if finding.advice:
                    self.stdout.write(f"{'':21}{visible(finding.advice)}")
        if options["json"]:
            self._print_json(printed)
        if any(finding["level"] == "fail" for finding in printed):
            raise CommandError("The server is not fit to keep locks.", returncode=FOUND)

    def _watch(self, alias: str | None, interval: float, **options: Any) -> None:
        if options["json"]:
            self._list(alias, **{**arguments.LIST_DEFAULTS, **options})
            return
        view = LiveView(aliases.named(alias))
        if not self.stdout.isatty():
            lines, problems = view.look()
            self._print(lines)
            _finish(problems)
            return
        with suppress(KeyboardInterrupt), release_on_sigterm():
            try:
                self.stdout.write(OTHER_SCREEN, ending="")
                while True:
                    size = shutil.get_terminal_size()
                    lines, problems = view.look(size.lines, size.columns)
                    # In one write, so that it does not flicker.
                    frame = "\n".join([*problems, *lines][: size.lines])
                    self.stdout.write(CLEAR + frame, ending="")
                    self.stdout.flush()
                    time.sleep(max(interval, SHORTEST_INTERVAL))
            finally:
                self.stdout.write(MAIN_SCREEN, ending="")
                self.stdout.flush()

    # --- the rest ---------------------------------------------------------------------------------

    def _force_release(self, leases: list[tuple[str, str]], using: str, reason: str) -> list[bool]:
        """End these leases by force; say of each whether it was there to end."""
        released: list[bool] = []
        by = _operator()
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

    def _confirm(self, locks: list[held.HeldLock], *, yes: bool, json: bool) -> None:
        """Show what is meant, and ask."""
        self._show_meant(partial(terminal.locks, locks), yes=yes, json=json)
        question = f"Release {counted(len(locks), 'lock')}? The holders are not stopped."
        self._ask_whether(question, yes=yes, json=json, done="released")

    def _show_meant(
        self, table: Callable[[int | None], Iterable[str]], *, yes: bool, json: bool, **options: Any
    ) -> None:
        """Show it as a table. With --json, standard output is for programs alone."""
        out = self.stderr if json else self.stdout
        if not (json and yes):
            self._print(table(_columns(out)), out)

    def _ask_whether(
        self,
        question: str,
        *,
        yes: bool,
        json: bool,
        dry_run: bool = False,
        done: str = "forgotten",
        **options: Any,
    ) -> None:
        """Ask whether to go on, unless that was said already."""
        if yes or dry_run:
            return
        out = self.stderr if json else self.stdout
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

    def _print(self, lines: Iterable[str], to: OutputWrapper | None = None) -> None:
        for line in lines:
            (to or self.stdout).write(line, str)

    def _print_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, indent=2))


def _columns(out: OutputWrapper) -> int | None:
    """How many there are, if it is a terminal."""
    return shutil.get_terminal_size().columns if out.isatty() else None


def _finish(problems: Iterable[str], complaint: str = "") -> None:
    """Raise what --fail complains of, or else what keeps us from looking, if there is any."""
    lines = [*problems, complaint]
    if any(lines):
        status = FOUND if complaint else UNAVAILABLE
        raise CommandError("\n".join(filter(None, lines)), returncode=status)


def _why_kept(name: str, using: str) -> str:
    """Why it was not released; if nobody holds it, perhaps since it is misspelt."""
    why = held.why_kept(name, using=using)
    if held.get(name, using=using) is None:
        why = f"{why} {terminal.meant(held.similar(name, using=using))}".rstrip()
    return why


def _with_id(lease: str, alias: str | None) -> held.HeldLock:
    """The held lock with this lease, of all aliases unless one is named."""
    problems: list[str] = []
    bounded = False
    for using in aliases.named(alias):
        try:
            found = list(islice(held.every(using=using), held.MOST_LOOKS + 1))
        except LockUnavailable as error:  # Another one may have it.
            problems.append(held.problem(error, using))
            continue
        bounded = bounded or len(found) > held.MOST_LOOKS
        for lock in found[: held.MOST_LOOKS]:
            if lock.id == lease:
                return lock
    _finish(problems)
    where = f"among the first {held.MOST_LOOKS} locks; say its NAME too" if bounded else "held"
    raise CommandError(f"No lease {visible(lease)!r} is {where}.", returncode=FOUND)


def _records(
    names: list[str], alias: str | None, task: str, prefix: str
) -> tuple[list[held.Record], dict[str, str], bool]:
    """What became of the runs under these locks, or all that are chosen.

    Also which aliases do not tell, and why; and whether there are more.
    """
    if names:
        using = alias or DEFAULT_ALIAS
        found = [
            held.record(name, using=using) or held.Record(name=name, alias=using)
            for name in dict.fromkeys(map(check_name, names))
        ]
        return found, {}, False
    answers, problems = aliases.ask(
        aliases.named(alias),
        lambda using: held.records(using=using, limit=MOST_NAMES, task=task, prefix=prefix),
    )
    found = [record for records in answers.values() for record in records]
    return found, problems, any(records.partial for records in answers.values())


def _check_kept(no_success_for: float, using: list[str]) -> None:
    """Refuse to judge by records that are not kept for so long."""
    for alias in using:
        kept = conf.conf(alias).records_for
        if no_success_for > kept:
            raise CommandError(
                f"--no-success-for must be {duration(kept)} at most: records are not kept for"
                f" longer, see REDISLOCK[{alias!r}]['RECORDS_FOR'].",
                returncode=USAGE,
            )


def _overdue(known: list[held.Record], no_success_for: float, together: bool) -> list[held.Record]:
    """Those without a success so long; together, any success counts for all of them."""
    overdue = [
        one for one in known if not one.last_success or one.last_success.ago > no_success_for
    ]
    return [] if together and len(overdue) < len(known) else overdue


def _good_news(known: list[held.Record], no_success_for: float | None, together: bool) -> str:
    """Why no lock is shown."""
    if not together:
        return f"Each had a success in the last {duration(no_success_for)}."
    ago, name = min((one.last_success.ago, one.name) for one in known if one.last_success)
    return f"The last success was {duration(ago)} ago, under {pasteable(name)}."


def _what_ran(record: held.Record) -> str:
    """What is known of a name under which no task has run; "" if nothing is."""
    name, using = record.name, record.alias
    detail = held.detail(name, using=using)
    leases = len(detail.past) + bool(detail.lock)
    by_task = held.records(using=using, limit=MOST_NAMES, task=name)
    by_prefix = held.records(using=using, limit=MOST_NAMES, prefix=name)
    says = [
        f"`locks show` has {counted(leases, 'lease')}" * bool(leases),
        f"--task {pasteable(name)} finds {counted(len(by_task), 'lock')}" * bool(by_task),
        f"--prefix {pasteable(name)} finds {counted(len(by_prefix), 'lock')}" * bool(by_prefix),
    ]
    known = "; ".join(filter(None, says))
    return f"no task has run under this name; {known}" if known else ""


def _completed(alias: str | None, database: str) -> CompletedRuns:
    """The rows of completed runs, of the alias that was named or else of all."""
    try:
        effects.check_database(database, "--database")
    except ValueError as error:
        raise CommandError(str(error), returncode=USAGE) from None
    rows = CompletedRun.objects.using(database)
    return rows if alias is None else rows.filter(alias__in=aliases.named(alias))


def _ago(seconds: float) -> datetime:
    return timezone.now() - timedelta(seconds=seconds)


@contextmanager
def _asking(database: str) -> Iterator[None]:
    """Errors of this database become exit statuses; what was written is committed in any case."""
    try:
        yield
        if is_by_hand(connections[database]):
            transaction.commit(using=database)
    except DatabaseError as error:
        if problem := effects.missing_table(CompletedRun, database):
            raise CommandError(problem[0].upper() + problem[1:], returncode=USAGE) from error
        problem = visible(f"The database {database!r} cannot answer: {error}")
        raise CommandError(problem, returncode=UNAVAILABLE) from error


def _none_of(total: int, options: dict[str, Any], *, partial: bool = False) -> str:
    """That none of the held locks is one of those that were asked for."""
    asked = arguments.spelled(options)
    if not (total and asked):
        return "No lock is held."
    are = "lock is" if total == 1 else "locks are"
    looked = "none that was looked at" if partial else "none"
    return f"{total} {are} held, but {looked} matches {asked}."


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()} by manage.py locks"
