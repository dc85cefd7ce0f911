"""The arguments of each act of ``manage.py locks``, as a table."""

from __future__ import annotations

import math
from argparse import SUPPRESS, Action, ArgumentError, ArgumentTypeError
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.management.base import CommandParser

from django_redislock import held
from django_redislock.humanize import parse_duration
from django_redislock.jobs.options import JobArguments
from django_redislock.management.console import BUSY
from django_redislock.management.terminal import pasteable
from django_redislock.monitors import Ping
from django_redislock.options import options_in
from django_redislock.rules.arguments import DEFAULT_DATABASE, PERIODS

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

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


# --- kinds of values, by how help writes them -----------------------------------------------------


def _read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Have argparse print the ValueError of *parse*."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


def _limit(text: str) -> int:
    if not (text.isdecimal() and text.strip("0")):
        raise ValueError(f"{text!r} is no number; write 1 or more.")
    return int(text[:10])  # Lists are bounded anyway.


def _period(text: str) -> str | timedelta:
    return text if text in PERIODS else timedelta(seconds=parse_duration(text))


def _status(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 3 and int(text) <= 255):
        raise ValueError(f"{text!r} is no exit status; write 0 to 255.")
    return int(text)


KINDS: dict[str, Callable[[str], Any]] = {
    "TIME": parse_duration,
    "TIME|inf": lambda text: math.inf if text == "inf" else parse_duration(text),
    "PERIOD": _period,
    "N": _limit,
    "STATUS": _status,
    "URL": Ping,
}


class Argument(NamedTuple):
    """What an argument means, and how it is more than its kind says: see add_argument()."""

    meaning: str
    how: dict[str, Any]


# By how help writes them: "--for TIME", "--yes", "name NAME".
Arguments = dict[str, str | Argument]


def _but(meaning: str, **how: Any) -> Argument:
    return Argument(meaning, how)


# --- the table ------------------------------------------------------------------------------------

NAME = "of a lock, as list prints it; write -- before one that begins with a dash"
NAMES = _but(NAME, nargs="*")
OF_PAUSE: Arguments = {"name NAME": f"{NAME}; it has all its permits"}
SKIP_CHECKS: Arguments = {"--skip-checks": _but(SUPPRESS, default=SUPPRESS)}
# They may stand before or after the act. Without SUPPRESS the act's default would win.
COMMON: Arguments = {
    "--alias ALIAS": _but("only the locks of this alias of REDISLOCK", default=SUPPRESS),
    "--json": _but("print JSON, for programs", default=SUPPRESS),
    # There are no checks to skip. Scripts for all commands need not know that.
    **SKIP_CHECKS,
}
OF_LOCKS: Arguments = {
    "--host HOST": "held from this host",
    "--task TASK": "held by runs of this task, by its full name",
    "--prefix PREFIX": "with a name that begins like this",
    "--older-than TIME": "held this long: 90s, 10m, 1h30m, 2d",
}
# Without defaults, as they may stand before and after the second act.
OF_ROWS: Arguments = {
    "--database ALIAS": _but("of DATABASES (default)", default=SUPPRESS),
    "--older-than TIME": _but("completed so long ago: 90m, 26h, 30d", default=SUPPRESS),
}
LIMIT = _but("how many at most (1000)", default=1000)
DRY_RUN = "only print what would be done"
CONFIRMATION: Arguments = {
    "--yes": "do not ask",
    "--reason TEXT": _but("why, for the audit log", action="store"),
}


class Act(NamedTuple):
    """What an act does, and its arguments.

    The list of acts has what it does up to the first full stop or colon.
    """

    does: str
    arguments: Arguments


ACTS = {
    "list": Act(
        "List the held locks. This is done without an ACT, too.",
        {
            **OF_LOCKS,
            "--state STATE": _but("in this state: %(choices)s", choices=held.STATES, metavar=None),
            "--search TEXT": "with this in the name or in the holder",
            "--limit N": LIMIT,
            "--fail": "exit with 1 if there is any",
        },
    ),
    "show": Act(
        "Show all about one lock: its holder, its waiters, its past leases, and what became of the"
        " runs of its task.",
        {"name NAME": NAME, "--permit N": "the Nth permit of NAME; 1: NAME itself"},
    ),
    "explain": Act(
        "Say what became of a call, in sentences with absolute times: of all under a lock,"
        " of a job, or of the task with an id.",
        {
            "what NAME_OR_TASK_ID": "of a lock, or the id of a task",
            "--job": "it is the full name of a job",
        },
    ),
    "runs": Act(
        "Show what became of the runs of jobs, tasks among them: the last success, failure and"
        " skip, the runs under way, and those that never ended. Without a NAME it shows all.",
        {
            "--task TASK": "only locks under which this task has run, by its full name",
            "--prefix PREFIX": "only locks with a name that begins like this",
            "--job JOB": "one line for a job, over all names of its locks: the full name of a"
            " function or task, or 'manage.py NAME'",
            "names NAME": NAMES,
            "--no-success-for TIME": "only those without a success for so long: 90m, 26h, 3d; or"
            " without any. With --job, --task or --prefix, the latest success of any of them"
            " counts",
            "--fail": "exit with 1 if there is any such, for probes",
            "--ping URL": "tell this URL if there is none such, and URL/fail if there is any, as"
            " healthchecks.io has it: an alarm that rings also if no run ever begins",
        },
    ),
    "run": Act(
        "Run a command under a lock: where several start it, one runs it. A TIME is 90s, 10m, 1h30m"
        " or 2d; a PERIOD is day, hour or a TIME. The exit status is that of the command; or"
        " 75: the lock was busy, 76: the lease was lost, 3: the server did not answer. -v 0 says"
        " nothing of a skip.",
        {
            "name NAME": "of the lock",
            **{
                f"--{name.replace('_', '-')} {option.shell}": option.brief
                for name, option in options_in(JobArguments).items()
                if option.shell
            },
            "--rate RATE": "at most so many starts in a time, as 10/s, 100/m or 1000/h. It takes no"
            " lock, so it is for no other option of one",
            "--burst N": "with --rate: how many may start at once after a quiet time (1)",
            "--grace TIME": _but(
                "from SIGTERM to SIGKILL when the command is to end (10s)", default=10.0
            ),
            "--busy-exit STATUS": _but("exit status of a skip (75)", default=BUSY),
            "--job NAME": _but(
                "what the job is called in records, alarms and metrics (the lock's name)",
                default=None,
            ),
            "--using --alias ALIAS": _but(
                "an alias of REDISLOCK (default)", dest="alias", default=SUPPRESS
            ),
            **SKIP_CHECKS,
        },
    ),
    "release": Act(
        "End by force the leases of the named locks: show them, ask, and end exactly those. Their"
        " holders are not stopped.",
        {
            "names NAME": NAMES,
            "--id LEASE": _but(
                "only this one; needs no NAME, asks nothing",
                dest="lease",
                action="store",
                default=None,
            ),
            **CONFIRMATION,
        },
    ),
    "pause": Act(
        "Keep a lock from everybody for a while: runs are skipped as paused, and name the operator"
        " and the reason. A run that holds it goes on to its end; then the pause begins.",
        {
            **OF_PAUSE,
            "--for TIME": _but(
                "from now: 90s, 10m, 1h30m, 2d; at most 30d",
                type=_read(lambda text: held.pause_seconds(parse_duration(text))),
                dest="lasts",
                required=True,
            ),
            "--reason TEXT": _but("why, for all who are told", action="store"),
        },
    ),
    "resume": Act("End such a pause. The lease of a run is left alone.", OF_PAUSE),
    "clean": Act(
        "End by force the leases of all chosen locks: show them, ask, and end exactly those. Their"
        " holders are not stopped.",
        {
            **OF_LOCKS,
            "--dead-here": "held by a process of this host that does not exist any more",
            "--all": _but("all that are held", dest="every"),
            "--queued": _but(
                "no locks, but the calls that unique_queued has announced, as after a purge of the"
                " broker: later calls are published. Asks nothing; goes with --task",
                dest="queued_calls",
            ),
            "--dry-run": DRY_RUN,
            **CONFIRMATION,
        },
    ),
    "once": Act(
        'See and forget completed runs: those of tasks with once="database". A database keeps'
        " a row of each.",
        OF_ROWS,
    ),
    "doctor": Act("Examine whether the server is fit to keep locks.", {}),
    "metrics": Act(
        "Print the servers' metrics in the text format of Prometheus: of held locks, waiters, runs"
        " of jobs, and the findings of doctor.",
        {
            "--output FILE": "write them there, in one step; print nothing",
            "--limit N": _but(
                "how many names of locks, and how many jobs, have labels at most (100)", default=100
            ),
            "--no-doctor": "leave out the findings of doctor",
        },
    ),
    "watch": Act(
        "Show the held locks again and again, until Ctrl-C.",
        {"--interval TIME": _but("between looks (1s)", default=1.0)},
    ),
}
ONCE_ACTS = {
    "list": Act(
        "List the completed runs, the latest first. This is done without an ACT, too.",
        {
            **OF_ROWS,
            "--search TEXT": "with this in the name of the lock, the task or its id",
            "--limit N": LIMIT,
        },
    ),
    "forget": Act(
        "Delete the rows of completed runs: show them, ask, and delete exactly those. The next run"
        " under such a lock does its work again.",
        {"names NAME": NAMES, **OF_ROWS, "--dry-run": DRY_RUN, **CONFIRMATION},
    ),
}


# --- parsers of it --------------------------------------------------------------------------------


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
    _add(parser, COMMON)
    acts = parser.add_subparsers(
        title="acts",
        metavar="ACT",
        description="manage.py locks ACT --help has the options of each.",
        parser_class=ActParser,
    )
    for name, act in ACTS.items():
        if name == "run":
            add_run(acts, version)
            continue
        added = _add_act(acts, name, act, version)
        if name == "once":
            added.set_defaults(act="once_list", **ONCE_DEFAULTS)
            once_acts = added.add_subparsers(title="acts", metavar="ACT")
            for below, one in ONCE_ACTS.items():
                _add_act(once_acts, below, one, version, prefix="once_")


def add_run(acts: Any, version: str) -> CommandParser:
    """Add the act that runs a command under a lock."""
    does = ACTS["run"].does
    brief = does.partition(".")[0]
    act: ActParser = acts.add_parser(
        "run",
        help=brief[0].lower() + brief[1:],
        usage="%(prog)s NAME [options] -- COMMAND ARG...",
        description=does,
    )
    act.takes_command = True
    act.set_defaults(act="run")
    _add(act, ACTS["run"].arguments)
    _add_djangos(act, version)
    return act


def _add_act(acts: Any, name: str, act: Act, version: str, prefix: str = "") -> CommandParser:
    brief = act.does.partition(".")[0].partition(":")[0]
    parser: CommandParser = acts.add_parser(
        name, help=brief[0].lower() + brief[1:], description=act.does
    )
    parser.set_defaults(act=prefix + name)
    _add(parser, COMMON)
    _add_djangos(parser, version)
    _add(parser, act.arguments)
    return parser


def _add(parser: CommandParser, arguments: Arguments) -> None:
    for written, one in arguments.items():
        meaning, how = one if isinstance(one, Argument) else (one, {})
        *flags, value = written.split(" ") if " " in written else (written, "")
        kind: dict[str, Any] = {"metavar": value}
        if not value:
            kind = {"action": "store_true"}
        elif value in KINDS:
            kind["type"] = _read(KINDS[value])
        elif written.startswith("-"):  # A text.
            kind |= {"action": Given, "default": ""}
        parser.add_argument(*flags, **{**kind, "help": meaning, **how})


def _add_djangos(act: CommandParser, version: str) -> None:
    """Django's own options may stand before or after the act. Help shows those before it."""
    hidden: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
    act.add_argument("--version", action="version", version=version, help=SUPPRESS)
    act.add_argument("-v", "--verbosity", type=int, choices=(0, 1, 2, 3), **hidden)
    act.add_argument("--settings", **hidden)
    act.add_argument("--pythonpath", **hidden)
    for flag in ("--traceback", "--no-color", "--force-color"):
        act.add_argument(flag, action="store_true", **hidden)


# --- the options that choose locks ----------------------------------------------------------------


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


def none_of(total: int, options: dict[str, Any], *, partial: bool = False) -> str:
    """A sentence instead of an empty table."""
    asked = spelled(options)
    if not (total and asked):
        return "No lock is held."
    are = "lock is" if total == 1 else "locks are"
    looked = "none that was looked at" if partial else "none"
    return f"{total} {are} held, but {looked} matches {asked}."
