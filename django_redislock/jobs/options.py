"""The options that every job has, and which of them are refused at import.

Also Conflict, the argument of a function given as on_conflict.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import currentframe
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeGuard

from django_redislock.fencing import check_database
from django_redislock.misuse import generates, is_awaited
from django_redislock.monitors import Monitor, check_monitors
from django_redislock.process import cached_property
from django_redislock.rules.arguments import SHORTEST_TTL, database, flag, number, seconds, text
from django_redislock.rules.limit import Limit, check_limits
from django_redislock.rules.names import check_limited
from django_redislock.rules.options import DEFAULT_ALIAS, MOST_PERMITS, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# --- skipped: the result of a run that did not happen because of its lock -------------------------

# ``JobRun._skipped_by`` in run.py decides that.

_REASONS = ("busy", "held", "cooling", "done", "duplicate")
_KEYS = {"skipped", "lock", "holder", "by", "ago", "reason", "expires_in"}

_ENCODERS = ("json.encoder", "simplejson.encoder")


class Skipped(dict[str, Any]):
    """The result of a run that did not happen because of its lock, in place of its body's result.

    It is a dictionary, so JSON, pickle and Celery's result backends carry it, and it is false:
    ``if not import_catalogue("eu"): ...``. After a way through JSON it is a plain dictionary.

    Its keys:
        skipped: Why: "busy" (somebody holds the lock), "held" (an operator keeps it from
            everybody), "cooling" (min_hold keeps it), "done" (by once) or "duplicate" (of a Celery
            task run that has succeeded).
        lock: The name of the lock.
        holder: If it is busy or held: the holder, as "host:pid" and what it runs, or the operator.
        by: Else: the owner that did the work, or held the lock last.
        ago: How many seconds ago that was; missing if unknown.
        expires_in: Of a cooling lock: in how many seconds it is free; missing if unknown.
        reason: Why an operator holds it, or another remark; missing if there is none.
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


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of a job; parse() has checked them. Durations are seconds; None: the setting."""

    ttl: float | None = None
    wait: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    once: float | Literal["database"] = 0.0
    on_conflict: str | Callable[[Any], Any] = "skip"
    on_unavailable: str = "raise"
    limit: int | None = None  # How many runs may happen at a time; None: one.
    limits: tuple[Limit, ...] | None = None  # A run takes all of them; the first names its lock.
    using: str = DEFAULT_ALIAS
    atomic: str | None = None  # The database of the transaction around the body.
    monitor: tuple[Monitor, ...] = ()  # They are told of runs that are not skipped.

    conflict_policies: ClassVar[tuple[str, ...]] = ("skip", "raise", "wait")
    unavailable_policies: ClassVar[tuple[str, ...]] = ("raise", "run")
    # Durations, and the shortest of each.
    durations: ClassVar[Mapping[str, float]] = {
        "ttl": SHORTEST_TTL,
        "wait": 0.0,
        "max_hold": SHORTEST_TTL,
        "min_hold": 0.0,
        "once": 0.0,
    }
    flags: ClassVar[tuple[str, ...]] = ("renew",)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all options."""
        return frozenset(field.name for field in fields(cls))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Check the options as they were written. None means that an option was not given.

        Raises:
            TypeError: An option is not known.
            ValueError: One is of the wrong type, out of range or useless with the others; the
                message names it.
        """
        if unknown := sorted(set(raw) - cls.names()):
            raise TypeError(cls.unknown(unknown))
        options = {name: value for name, value in raw.items() if value is not None}
        once = options.get("once")
        if isinstance(once, str) and once != DATABASE:
            raise ValueError(
                f'once must be a number of seconds, a timedelta or "database", not {once!r}.'
            )
        for name, least in cls.durations.items():
            if name in options and (name, options[name]) != ("once", DATABASE):
                options[name] = seconds(options[name], name, least=least, endless=name == "wait")
        for name in cls.flags:
            if name in options:
                flag(options[name], name)
        if "using" in options:
            options["using"] = text(options["using"], "using")
        if "atomic" in options:
            options["atomic"] = database(options["atomic"], "atomic")
        _check_policy(options, "on_conflict", cls.conflict_policies, or_callable=True)
        _check_policy(options, "on_unavailable", cls.unavailable_policies)
        limit = options.get("limit", 1)
        number(limit, "limit", MOST_PERMITS)
        if "limits" in options:
            options["limits"] = check_limits(options["limits"])
        if "monitor" in options:
            options["monitor"] = check_monitors(options["monitor"])
        parsed = cls(**options)
        parsed.check_together(options)
        return parsed

    def checked(self) -> Self:
        """The same options, checked: for those that were not made by parse()."""
        return self.parse({name: getattr(self, name) for name in self.names()})

    @classmethod
    def unknown(cls, names: list[str]) -> str:
        """The message about unknown options."""
        known = ", ".join(sorted(cls.names()))
        return f"A job has no option {names[0]!r}. Its options are {known}."

    def check_together(self, given: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other, and those *given* that have no effect."""
        if self.wait is not None and self.on_conflict != "wait":
            raise ValueError('wait needs on_conflict="wait": no other policy waits for the lock.')
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
        if self.limits and self.limit is not None:
            raise ValueError("limits say the limit of each lock themselves: leave limit out.")
        for one in self.limits or ():
            if isinstance(one.number, int) and one.number > 1:
                check_limited(one.name)
        if self.once and self.limits:
            raise ValueError("once and limits exclude each other: once lets one run succeed.")
        if self.once and (self.limit or 1) > 1:
            raise ValueError("once and limit exclude each other: once lets one run succeed.")

    def check_named(self, name: str) -> None:
        """Refuse the *name* of a lock that does not go with these options, see check_limited()."""
        if (self.limit or 1) > 1:
            check_limited(name)

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

    @cached_property
    def lock_options(self) -> Options:
        """The options of a run's first try for its lock."""
        return Options(
            ttl=self.ttl,
            wait=self.wait if self.on_conflict == "wait" else 0.0,
            renew=self.renew,
            max_hold=self.max_hold,
            min_hold=self.min_hold,
            using=self.using,
            once=0.0 if self.once == DATABASE else self.once,
            atomic=self.atomic,
            limit=self.limit,
        )


def _check_policy(
    options: Mapping[str, Any], name: str, choices: tuple[str, ...], *, or_callable: bool = False
) -> None:
    choice = options.get(name, choices[0])
    if choice in choices or (or_callable and callable(choice)):
        return
    if choice == "retry":
        raise ValueError(
            f'{name}="retry" is for Celery tasks: only a broker brings a call back later. Write'
            ' on_conflict="wait" with wait=, or make the function a task:'
            f' @single_instance_task({name}="retry").'
        )
    rest = ", or a function" if or_callable else ""
    listed = ", ".join(map(repr, choices))
    raise ValueError(f"{name} must be one of {listed}{rest}, not {choice!r}.")
