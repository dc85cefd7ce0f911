"""The options that every job has, and which of them are refused at import.

Also Conflict, the argument of a function given as on_conflict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from inspect import currentframe
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from django.conf import settings
from django.utils.timezone import get_default_timezone

from django_redislock.fencing import check_database
from django_redislock.misuse import generates, is_awaited
from django_redislock.monitors import Monitor, check_monitors
from django_redislock.options import Arguments, Option, Seconds, checked, options_in
from django_redislock.rules.arguments import SHORTEST_TTL, flag, period, seconds
from django_redislock.rules.limit import Limit, Rate, check_rates
from django_redislock.rules.names import check_limited, in_period
from django_redislock.rules.options import Options

# --- skipped: the result of a run that did not happen because of its lock -------------------------

# ``JobRun.skip`` in run.py makes it.

_REASONS = ("busy", "paused", "cooling", "done", "duplicate", "replaced")
_KEYS = {"skipped", "lock", "holder", "by", "ago", "reason", "expires_in"}

_ENCODERS = ("json.encoder", "simplejson.encoder")


class Skipped(dict[str, Any]):
    """The result of a run that did not happen because of its lock, in place of its body's result.

    It is a dictionary, so JSON, pickle and Celery's result backends carry it, and it is false:
    ``if not import_catalogue("eu"): ...``. After a way through JSON it is a plain dictionary.

    Its keys:
        skipped: Why: "busy" (somebody holds the lock), "paused" (an operator keeps it from
            everybody), "cooling" (min_hold keeps it), "done" (by once), "duplicate" (of a Celery
            task run that has succeeded) or "replaced" (by a newer call).
        lock: The name of the lock.
        holder: If it is busy or paused: the holder, as "host:pid" and what it runs; or the
            operator.
        by: Else: the owner that did the work, held the lock last, or made the newer call.
        ago: How many seconds ago that was; missing if unknown.
        expires_in: Of a cooling lock: in how many seconds it is free; missing if unknown.
        reason: Why an operator paused it, or another remark; missing if there is none.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        # Encoders in Python, as of json.dump() and of indented JSON, write a false dictionary as
        # {}.
        caller = currentframe().f_back  # type: ignore[union-attr] # CPython has frames
        return caller is not None and caller.f_globals.get("__name__") in _ENCODERS

    def __repr__(self) -> str:
        return f"Skipped({super().__repr__()})"


def is_skip(result: object) -> TypeGuard[dict[str, Any]]:
    """Whether *result*, perhaps after a way through JSON, is that of a skipped run."""
    return (
        isinstance(result, dict)
        and result.keys() <= _KEYS
        and result.get("skipped") in _REASONS
        and isinstance(result.get("lock"), str)
    )


DATABASE: Literal["database"] = "database"  # Where a `once` without an end is noted.
# How much longer than its period a success is remembered, for calls that come late.
REMEMBERED_FOR = timedelta(days=1)


@dataclass(frozen=True)
class Conflict:
    """The argument of a function given as on_conflict. The run has the function's result."""

    job: str  #: The full name of the function, the task or the command.
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lock: str  #: The lock's name.
    #: The holder, or the last one if the lock cools down, as "host:pid" and what it runs.
    holder: str
    expires_in: float  #: Seconds until the holder's lease ends unless renewed, or the cooling ends.
    cooling: bool  #: Whether it cools down: a run has succeeded, and min_hold keeps it taken.


def _database_or_seconds(value: object, argument: str) -> float | str:
    if value == DATABASE:
        return DATABASE
    if isinstance(value, str):
        raise ValueError(
            f'{argument} must be a number of seconds, a timedelta or "database", not {value!r}.'
        )
    return seconds(value, argument)


def one_of(value: object, argument: str, choices: tuple[str, ...], functions: bool = False) -> Any:
    """Return one of the choices, or a function if such are taken; or raise ValueError."""
    if value in choices or (functions and callable(value)):
        return value
    if value == "retry":
        raise ValueError(
            f'{argument}="retry" is for Celery tasks: only a broker brings a call back later. Write'
            ' on_conflict="wait" with wait=, or make the function a task:'
            f' @single_instance_task({argument}="retry").'
        )
    rest = ", or a function" if functions else ""
    listed = ", ".join(map(repr, choices))
    raise ValueError(f"{argument} must be one of {listed}{rest}, not {value!r}.")


class RunArguments(Arguments, total=False):
    """What jobs and tasks take."""

    once_per: Annotated[
        Literal["day", "hour"] | timedelta | None,
        Option(
            'Let the work be done once in each period: "day", "hour", or a ``timedelta`` of whole'
            " days or of a part that divides the day. The lock has the period of the call in its"
            " name, by TIME_ZONE: ``lottery:2026-11-28``. For a message it is the period in which"
            " it was published, or with ``eta`` or ``countdown`` is due; retries and redeliveries"
            " keep it. Unless ``once`` says more, a success is remembered for a day longer than the"
            " period.",
            period,
            shell="PERIOD",
        ),
    ]
    durable: Annotated[
        bool,
        Option(
            "Whether the work outlives kills, redeliveries and a loss of Redis. It stands for"
            ' ``atomic=True, once="database"``; for a task with ``on_conflict="retry",'
            ' on_unavailable="retry", acks_late=True, reject_on_worker_lost=True``, else with'
            ' ``on_conflict="wait"`` and a wait of twice the ttl, or of WAIT if that is longer.'
            " Each of these may be given beside it. It needs once_per, or a name with fields.",
            flag,
            False,
        ),
    ]
    once: Annotated[
        Seconds | Literal["database"],
        Option(
            "How long later runs are skipped after a success. A failure leaves the work to others."
            ' "database" commits a row together with the writes of the body, and skips later runs'
            " until that row is deleted; it needs atomic.",
            _database_or_seconds,
            0,
            shell="TIME",
        ),
    ]
    replace_within: Annotated[
        Seconds | None,
        Option(
            'With ``on_conflict="replace"``: how long a run has to end after a newer call has'
            " replaced it. Then it loses its lease. Default: the ttl.",
            seconds,
            least=SHORTEST_TTL,
        ),
    ]
    monitor: Annotated[
        Monitor | Sequence[Monitor] | None,
        Option(
            "Who is told of the start and end of each run that is not skipped: a Monitor, or a"
            ' list of them. See django_redislock.monitors: ``Ping(url)``, ``Sentry("nightly")``.'
            " The lock does not wait for them.",
            lambda value, argument: check_monitors(value),
        ),
    ]


class JobArguments(RunArguments, total=False):
    """What @single_instance takes."""

    on_conflict: Annotated[
        Literal["skip", "raise", "wait", "replace"] | Callable[[Conflict], Any],
        Option(
            'What a run does if the lock is not free: ``"skip"``, ``"raise"``, ``"wait"``,'
            ' ``"replace"``, or a function. "skip" returns Skipped. "raise" raises LockTimeout.'
            ' "wait" queues for the lock, then skips. "replace" lets the newest call win: the run'
            " that has the lock is told to end, and this one follows it. A function gets a"
            " Conflict, and its return value is the result.",
            one_of,
            "skip",
            choices=("skip", "raise", "wait", "replace"),
            functions=True,
        ),
    ]
    on_unavailable: Annotated[
        Literal["raise", "run"],
        Option(
            'What a run does if Redis cannot answer: ``"raise"`` LockUnavailable, or ``"run"``'
            " without the lock, logged at ERROR.",
            one_of,
            "raise",
            choices=("raise", "run"),
        ),
    ]


@dataclass(frozen=True, init=False)
class JobOptions:
    """The options of a job, checked. Each is an attribute; those that a run reads are listed."""

    lock: Options  # How a run asks for its lock first.
    once_per: timedelta | None
    durable: bool
    once: float | Literal["database"]
    on_conflict: str | Callable[[Any], Any]
    on_unavailable: str
    limit: int | None  # How many runs may happen at a time; None: one.
    limits: tuple[Limit | Rate, ...] | None  # A run takes all of them; the first names its lock.
    using: str
    atomic: str | None  # The database of the transaction around the body.
    min_hold: float
    monitor: tuple[Monitor, ...]  # They are told of runs that are not skipped.

    arguments: ClassVar[type] = JobArguments
    taken_by: ClassVar[str] = "single_instance"
    # What durable stands for.
    of_durable: ClassVar[Mapping[str, Any]] = {
        "atomic": True,
        "once": DATABASE,
        "on_conflict": "wait",
    }

    def __init__(self, **given: Any) -> None:
        """Check the options as they were written. None means that an option was not given.

        Raises:
            TypeError: An option is not known, or on_conflict runs only after its call.
            ValueError: One is of the wrong type, out of range or useless with the others; the
                message names it.
        """
        given = {name: value for name, value in given.items() if value is not None}
        given = {**self.of_durable, **given} if given.get("durable") else given
        options = checked(self.arguments, given, self.taken_by)
        if every := options.get("once_per"):
            options.setdefault("once", (every + REMEMBERED_FOR).total_seconds())
        defaults = {name: row.default for name, row in options_in(self.arguments).items()}
        of_lock = {name: value for name, value in options.items() if name in Options._fields}
        of_lock |= {"once": 0.0} if options.get("once") == DATABASE else {}
        of_lock |= {} if options.get("on_conflict") == "wait" else {"wait": 0.0}
        of_lock |= {"replace": True} if options.get("on_conflict") == "replace" else {}
        how = Options(**of_lock)
        vars(self).update({**defaults, "monitor": (), "atomic": None, **options, "lock": how})
        self.check_together(options)

    def check_together(self, given: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other, and those *given* that have no effect."""
        if "wait" in given and self.on_conflict != "wait":
            raise ValueError('wait needs on_conflict="wait": no other policy waits for the lock.')
        self._check_replacing(given)
        if self.atomic is not None:
            check_database(self.atomic, "atomic")
            if self.on_unavailable == "run":
                raise ValueError(
                    'atomic and on_unavailable="run" exclude each other: without a lease there is'
                    " no fence to claim. Leave one of them out."
                )
        if self.once == DATABASE and self.atomic is None:
            raise ValueError(
                'once="database" needs atomic: without it, the writes of the body and the row of'
                " its run would not be committed together. Add atomic=True, or the alias of a"
                " database."
            )
        if self.once_per and self.once != DATABASE and self.once < self.once_per.total_seconds():
            raise ValueError(
                f"once={self.once:g} is less than the period of once_per, so the work would be done"
                " again in it. Leave once out."
            )
        if self.limits and self.limit is not None:
            raise ValueError("limits say the limit of each lock themselves: leave limit out.")
        for one in self.limits or ():
            if isinstance(one, Limit) and isinstance(one.number, int) and one.number > 1:
                check_limited(one.name)
        if self.limits:
            check_rates(self.limits, given)
        if self.once and self.limits:
            raise ValueError("once and limits exclude each other: once lets one run succeed.")
        if self.once and (self.limit or 1) > 1:
            raise ValueError("once and limit exclude each other: once lets one run succeed.")

    def _check_replacing(self, given: Mapping[str, Any]) -> None:
        """Refuse options that would keep the newest call from its run."""
        if self.on_conflict != "replace":
            if "replace_within" in given:
                raise ValueError(
                    'replace_within needs on_conflict="replace": no other policy replaces a run.'
                )
            return
        clean = "Leave it out, or write another on_conflict."
        if self.once or self.min_hold:
            which = next(
                one for one in ("durable", "once_per", "once", "min_hold") if given.get(one)
            )
            raise ValueError(
                f'{which} and on_conflict="replace" exclude each other: after a success, {which}'
                f" would skip the newest call or keep it waiting. {clean}"
            )
        if self.limit is not None or self.limits:
            which = "limits" if self.limits else "limit"
            raise ValueError(
                f'{which} and on_conflict="replace" exclude each other: of several runs, none is'
                f" the one to replace. {clean}"
            )
        if self.on_unavailable == "run":
            raise ValueError(
                'on_unavailable="run" and on_conflict="replace" exclude each other: a run without'
                " the lock cannot be replaced. Leave on_unavailable out."
            )

    def check_named(self, name: str) -> None:
        """Refuse the *name* of a lock that does not go with these options, see check_limited()."""
        if (self.limit or 1) > 1:
            check_limited(name)
        if self.durable and not self.once_per and "{" not in name:
            raise ValueError(
                f"durable would do the work of {name!r} once and never again. Add once_per, such as"
                ' once_per="day", or name the lock by a field, such as "lottery:{day}".'
            )

    def in_period(self, name: str, at: float | None = None) -> str:
        """The *name* of a lock, with the period of a call in it if there is once_per.

        Args:
            name: That for all periods.
            at: When the call was made, in seconds since the epoch. Default: now.
        """
        if self.once_per is None:
            return name
        zone = get_default_timezone() if settings.TIME_ZONE else None
        moment = datetime.fromtimestamp(time.time() if at is None else at, zone)
        return in_period(name, self.once_per, moment.astimezone(zone))

    def in_periods(self, name_of: Callable[..., str]) -> Callable[..., str]:
        """A naming of locks, with the period of a call made now if there is once_per."""
        if self.once_per is None:
            return name_of
        return lambda args, kwargs: self.in_period(name_of(args, kwargs))

    def check_answered(self, *, awaited: bool = False) -> None:
        """Refuse a function as on_conflict that would not have answered when it returns.

        Args:
            awaited: Whether the job awaits it.
        """
        policy = self.on_conflict
        if callable(policy) and (generates(policy) or (is_awaited(policy) and not awaited)):
            raise TypeError(
                f"on_conflict cannot be {getattr(policy, '__qualname__', policy)}(), which runs"
                " after its call. Write a plain function, or for the job of a coroutine function a"
                " coroutine function."
            )
