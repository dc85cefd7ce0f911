"""The arguments of each act of ``manage.py locks``."""

from __future__ import annotations

import math
from argparse import SUPPRESS, Action, ArgumentError, ArgumentTypeError
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandParser

from django_redislock import held
from django_redislock.humanize import parse_duration
from django_redislock.jobs.options import JobArguments
from django_redislock.management.console import BUSY
from django_redislock.management.terminal import pasteable
from django_redislock.monitors import Ping
from django_redislock.options import options_in
from django_redislock.rules.arguments import DEFAULT_DATABASE

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

NAME = "of a lock, as list prints it; write -- before one that begins with a dash"

# Options that choose locks, as in held.Selection, and their defaults.
CHOICES: dict[str, Any] = {
    "host": "",
    "task": "",
    "prefix": "",
    "older_than": None,
    "state": "",
    "search": "",
}
LIST_DEFAULTS: dict[str, Any] = {**CHOICES, "limit": 1000, "fail": False}
ONCE_DEFAULTS: dict[str, Any] = {
    "database": DEFAULT_DATABASE,
    "older_than": None,
    "search": "",
    "limit": 1000,
}


class Given(Action):
    """A text that is not empty: that of an unset variable would choose all, or the default."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option: Any = None) -> None:
        """Keep the text."""
        if not values:
            raise ArgumentError(self, "it is empty; leave the option out if that is meant.")
        setattr(namespace, self.dest, values)


class ActParser(CommandParser):
    """The arguments of one act."""

    takes_command = False  # Whether the arguments after the first -- are a command.

    def parse_known_args(  # type: ignore[override] # the namespace is always one
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Leave the command alone. To argparse, its options would look like ours."""
        if not self.takes_command:
            return super().parse_known_args(args, namespace)
        end = args.index("--") if "--" in args else len(args)
        found, unknown = super().parse_known_args(args[:end], namespace)
        found.command = list(args[end + 1 :])
        if not found.command:
            self.error("no COMMAND; write it after --, as in: NAME -- COMMAND ARG...")
        return found, unknown


def add_acts(parser: CommandParser, version: str) -> None:
    """Add the arguments of each act; --alias, --json and Django's options go with all."""
    parser.set_defaults(act="list", alias=None, json=False, **LIST_DEFAULTS)
    _add_common(parser)
    acts = parser.add_subparsers(
        title="acts",
        metavar="ACT",
        description="manage.py locks ACT --help has the options of each.",
        parser_class=ActParser,
    )

    def add_act(name: str, does: str, to: Any = acts, prefix: str = "") -> CommandParser:
        brief = does.partition(".")[0].partition(":")[0]
        act: CommandParser = to.add_parser(
            name, help=brief[0].lower() + brief[1:], description=does
        )
        act.set_defaults(act=prefix + name)
        _add_common(act)
        _add_djangos(act, version)
        return act

    act = add_act("list", "List the held locks. This is done without an ACT, too.")
    _add_choices(act)
    act.add_argument("--state", default="", choices=held.STATES, help="in this state: %(choices)s")
    act.add_argument(
        "--search",
        action=Given,
        default="",
        metavar="TEXT",
        help="with this in the name or in the holder",
    )
    act.add_argument(
        "--limit", type=_limit, default=1000, metavar="N", help="how many at most (1000)"
    )
    act.add_argument("--fail", action="store_true", help="exit with 1 if there is any")

    act = add_act(
        "show",
        "Show all about one lock: its holder, its waiters, its past leases, and what became of the"
        " runs of its task.",
    )
    act.add_argument("name", metavar="NAME", help=NAME)
    act.add_argument(
        "--permit", type=_limit, metavar="N", help="the Nth permit of NAME; 1: NAME itself"
    )

    act = add_act(
        "explain",
        "Say what became of a call, in sentences with absolute times: of all under a lock,"
        " of a job, or of the task with an id.",
    )
    act.add_argument("what", metavar="NAME_OR_TASK_ID", help="of a lock, or the id of a task")
    act.add_argument("--job", action="store_true", help="it is the full name of a job")

    act = add_act(
        "runs",
        "Show what became of the runs of jobs, tasks among them: the last success, failure and"
        " skip, the runs under way, and those that never ended. Without a NAME it shows all.",
    )
    _add_choices_of_runs(act)
    act.add_argument("names", nargs="*", metavar="NAME", help=NAME)
    act.add_argument(
        "--no-success-for",
        type=_duration,
        metavar="TIME",
        help="only those without a success for so long: 90m, 26h, 3d; or without any. With --job,"
        " --task or --prefix, the latest success of any of them counts",
    )
    act.add_argument(
        "--fail", action="store_true", help="exit with 1 if there is any such, for probes"
    )
    act.add_argument(
        "--ping",
        type=_ping,
        metavar="URL",
        help="tell this URL if there is none such, and URL/fail if there is any, as healthchecks.io"
        " has it: an alarm that rings also if no run ever begins",
    )

    add_run(acts, version)

    act = add_act(
        "release",
        "End by force the leases of the named locks: show them, ask, and end exactly those. Their"
        " holders are not stopped.",
    )
    act.add_argument("names", nargs="*", metavar="NAME", help=NAME)
    act.add_argument(
        "--id", dest="lease", metavar="LEASE", help="only this one; needs no NAME, asks nothing"
    )
    _add_confirmation(act)

    _add_pause(add_act)

    act = add_act(
        "clean",
        "End by force the leases of all chosen locks: show them, ask, and end exactly those. Their"
        " holders are not stopped.",
    )
    _add_choices(act)
    act.add_argument(
        "--dead-here",
        action="store_true",
        help="held by a process of this host that does not exist any more",
    )
    act.add_argument("--all", dest="every", action="store_true", help="all that are held")
    act.add_argument(
        "--queued",
        dest="queued_calls",
        action="store_true",
        help="no locks, but the calls that unique_queued has announced, as after a purge of the"
        " broker: later calls are published. Asks nothing; goes with --task",
    )
    act.add_argument("--dry-run", action="store_true", help="only print what would be done")
    _add_confirmation(act)

    _add_once(add_act)

    add_act("doctor", "Examine whether the server is fit to keep locks.")

    act = add_act(
        "metrics",
        "Print the servers' metrics in the text format of Prometheus: of held locks, waiters, runs"
        " of jobs, and the findings of doctor.",
    )
    act.add_argument(
        "--output",
        action=Given,
        default="",
        metavar="FILE",
        help="write them there, in one step; print nothing",
    )
    act.add_argument(
        "--limit",
        type=_limit,
        default=100,
        metavar="N",
        help="how many names of locks, and how many jobs, have labels at most (100)",
    )
    act.add_argument("--no-doctor", action="store_true", help="leave out the findings of doctor")

    act = add_act("watch", "Show the held locks again and again, until Ctrl-C.")
    act.add_argument(
        "--interval", type=_duration, default=1.0, metavar="TIME", help="between looks (1s)"
    )


def _add_pause(add_act: Callable[..., CommandParser]) -> None:
    """Add the acts by which an operator keeps a lock from everybody."""
    pause = add_act(
        "pause",
        "Keep a lock from everybody for a while: runs are skipped as held, and name the operator"
        " and the reason. A run that holds it goes on to its end; then the pause begins.",
    )
    resume = add_act("resume", "End such a pause. The lease of a run is left alone.")
    for act in (pause, resume):
        act.add_argument("name", metavar="NAME", help=f"{NAME}; it has all its permits")
    pause.add_argument(
        "--for",
        dest="lasts",
        type=_pause_seconds,
        required=True,
        metavar="TIME",
        help="from now: 90s, 10m, 1h30m, 2d; at most 30d",
    )
    pause.add_argument("--reason", default="", metavar="TEXT", help="why, for all who are told")


def _add_once(add_act: Callable[..., CommandParser]) -> None:
    """Add the act for completed runs, with its own acts."""
    once = add_act(
        "once",
        'See and forget completed runs: those of tasks with once="database". A database keeps'
        " a row of each.",
    )
    _add_rows(once)
    once.set_defaults(act="once_list", **ONCE_DEFAULTS)
    once_acts = once.add_subparsers(title="acts", metavar="ACT")

    act = add_act(
        "list",
        "List the completed runs, the latest first. This is done without an ACT, too.",
        once_acts,
        "once_",
    )
    _add_rows(act)
    act.add_argument(
        "--search",
        action=Given,
        default="",
        metavar="TEXT",
        help="with this in the name of the lock, the task or its id",
    )
    act.add_argument(
        "--limit", type=_limit, default=1000, metavar="N", help="how many at most (1000)"
    )

    act = add_act(
        "forget",
        "Delete the rows of completed runs: show them, ask, and delete exactly those. The next run"
        " under such a lock does its work again.",
        once_acts,
        "once_",
    )
    act.add_argument("names", nargs="*", metavar="NAME", help=NAME)
    _add_rows(act)
    act.add_argument("--dry-run", action="store_true", help="only print what would be done")
    _add_confirmation(act)


def add_run(acts: Any, version: str) -> CommandParser:
    """Add the act that runs a command under a lock."""
    does = "run a command under a lock: where several start it, one runs it"
    act: ActParser = acts.add_parser(
        "run",
        help=does,
        usage="%(prog)s NAME [options] -- COMMAND ARG...",
        description=f"{does[0].upper()}{does[1:]}. A TIME is 90s, 10m, 1h30m or 2d. The exit status"
        " is that of the command; or 75: the lock was busy, 76: the lease was lost, 3: the server"
        " did not answer. -v 0 says nothing of a skip.",
    )
    act.takes_command = True
    act.set_defaults(act="run")
    act.add_argument("name", metavar="NAME", help="of the lock")
    for name, option in options_in(JobArguments).items():
        if option.shell:
            act.add_argument(
                f"--{name.replace('_', '-')}",
                type={"TIME": _duration, "TIME|inf": _wait, "N": _limit}[option.shell],
                metavar=option.shell,
                help=option.brief,
            )
    act.add_argument(
        "--grace",
        type=_duration,
        metavar="TIME",
        help="from SIGTERM to SIGKILL when the command is to end (10s)",
    )
    act.add_argument(
        "--busy-exit", type=_status, metavar="STATUS", help="exit status of a skip (75)"
    )
    act.add_argument(
        "--job",
        action=Given,
        metavar="NAME",
        help="what the job is called in records, alarms and metrics (the lock's name)",
    )
    act.set_defaults(grace=10.0, busy_exit=BUSY)
    act.add_argument(
        "--using",
        "--alias",
        action=Given,
        dest="alias",
        default=SUPPRESS,
        help="an alias of REDISLOCK (default)",
    )
    act.add_argument("--skip-checks", action="store_true", default=SUPPRESS, help=SUPPRESS)
    _add_djangos(act, version)
    return act


def selection(options: dict[str, Any]) -> held.Selection:
    """The selection of locks."""
    return held.Selection(**{key: options[key] for key in CHOICES if key in options})


def spelled(options: dict[str, Any]) -> str:
    """The *options* that choose locks, as they were typed."""
    words = [
        f"--{key.replace('_', '-')} {_spelled(value) if key == 'older_than' else pasteable(value)}"
        for key in CHOICES
        if (value := options.get(key)) not in {"", None}
    ]
    return " ".join([*words, "--dead-here"] if options.get("dead_here") else words)


def _spelled(seconds: float) -> str:
    """A duration as it may be given to an option: 90 is 1m30s."""
    parts = []
    for unit, size in {"d": 86400, "h": 3600, "m": 60}.items():
        whole, seconds = divmod(seconds, size)
        if whole:
            parts.append(f"{whole:g}{unit}")
    return "".join([*parts, f"{seconds:g}s"] if seconds or not parts else parts)


def _add_common(parser: CommandParser) -> None:
    # They may stand before or after the act. Without SUPPRESS the act's default would win.
    parser.add_argument(
        "--alias",
        action=Given,
        default=SUPPRESS,
        help="only the locks of this alias of REDISLOCK",
    )
    parser.add_argument(
        "--json", action="store_true", default=SUPPRESS, help="print JSON, for programs"
    )
    # There are no checks to skip. Scripts for all commands need not know that.
    parser.add_argument("--skip-checks", action="store_true", default=SUPPRESS, help=SUPPRESS)


def _add_djangos(act: CommandParser, version: str) -> None:
    """Django's own options may stand before or after the act. Help shows those before it."""
    hidden: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
    act.add_argument("--version", action="version", version=version, help=SUPPRESS)
    act.add_argument("-v", "--verbosity", type=int, choices=(0, 1, 2, 3), **hidden)
    act.add_argument("--settings", **hidden)
    act.add_argument("--pythonpath", **hidden)
    for flag in ("--traceback", "--no-color", "--force-color"):
        act.add_argument(flag, action="store_true", **hidden)


def _add_choices(act: CommandParser) -> None:
    for option, does in (
        ("--host", "held from this host"),
        ("--task", "held by runs of this task, by its full name"),
        ("--prefix", "with a name that begins like this"),
    ):
        act.add_argument(option, action=Given, default="", help=does)
    act.add_argument(
        "--older-than", type=_duration, metavar="TIME", help="held this long: 90s, 10m, 1h30m, 2d"
    )


def _add_choices_of_runs(act: CommandParser) -> None:
    act.add_argument(
        "--task",
        action=Given,
        default="",
        help="only locks under which this task has run, by its full name",
    )
    act.add_argument(
        "--prefix",
        action=Given,
        default="",
        help="only locks with a name that begins like this",
    )
    act.add_argument(
        "--job",
        action=Given,
        default="",
        metavar="JOB",
        help="one line for a job, over all names of its locks: the full name of a function or task,"
        " or 'manage.py NAME'",
    )


def _add_rows(act: CommandParser) -> None:
    # Without defaults, as they may stand before and after the second act.
    act.add_argument(
        "--database",
        action=Given,
        default=SUPPRESS,
        metavar="ALIAS",
        help="of DATABASES (default)",
    )
    act.add_argument(
        "--older-than",
        type=_duration,
        default=SUPPRESS,
        metavar="TIME",
        help="completed so long ago: 90m, 26h, 30d",
    )


def _add_confirmation(act: CommandParser) -> None:
    act.add_argument("--yes", action="store_true", help="do not ask")
    act.add_argument("--reason", default="", metavar="TEXT", help="why, for the audit log")


def _limit(text: str) -> int:
    if not (text.isdecimal() and text.strip("0")):
        raise ArgumentTypeError(f"{text!r} is no number; write 1 or more.")
    return int(text[:10])  # Lists are bounded anyway.


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _ping(text: str) -> Ping:
    try:
        return Ping(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _pause_seconds(text: str) -> float:
    try:
        return held.pause_seconds(parse_duration(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _wait(text: str) -> float:
    return math.inf if text == "inf" else _duration(text)


def _status(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 3 and int(text) <= 255):
        raise ArgumentTypeError(f"{text!r} is no exit status; write 0 to 255.")
    return int(text)
