"""Limits: how many may hold a lock at a time, and rates: how often work may start.

A job may have several, taken as one.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self

from django_redislock.exceptions import InvalidLockName
from django_redislock.process import cached_property
from django_redislock.rules.arguments import number
from django_redislock.rules.names import bound_arguments, check_name, formatter, signature_of
from django_redislock.rules.options import MOST_PERMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    NameOf = Callable[[tuple[Any, ...], Mapping[str, Any]], str]
    Made = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class _Named:
    """A name, and a value that may be a function of the arguments of a call."""

    name: str
    value_in: ClassVar[str]  #: The field with the value.

    @property
    def value(self) -> Any:
        """How many or how often, or the function that says so."""
        return getattr(self, self.value_in)

    @property
    def called(self) -> str:
        """What the value is called in messages."""
        return f"{self.value_in} of {type(self).__name__}({self.name!r})"

    def _of_call(self, name: str, value: Any) -> Self:
        """The same with the name and the value of a call."""
        return replace(self, name=name, **{self.value_in: value})  # type: ignore[type-var]

    def _check_name(self) -> None:
        is_template = isinstance(self.name, str) and "{" in self.name
        object.__setattr__(self, "name", check_name(self.name, template=is_template))
        if inspect.iscoroutinefunction(self.value):
            raise ValueError(
                f"The {self.called} must not be a coroutine function: nobody would await it."
            )

    def maker(self, function: Callable[..., Any], name_of: NameOf | None = None) -> Made:
        """How to make the one of a call of *function*: (args, kwargs) -> limit or rate.

        Args:
            function: The function to be called.
            name_of: Makes the name, if it is not formatted in the usual way.

        Raises:
            InvalidLockName: The name or the value wants an argument that *function* does not take.
            ValueError: The value is a function that takes no arguments by name.
        """
        name_of, own = name_of or formatter(self.name, function), self.value
        if not callable(own):
            return lambda args, kwargs: self._of_call(name_of(args, kwargs), own)
        signature = signature_of(function)
        wanted, takes_all = _named_by(own, signature, self)
        value_of: Callable[..., Any] = own

        def make(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            passed = bound_arguments(signature, args, kwargs)
            if absent := [one for one in wanted if wanted[one] and one not in passed]:
                raise _lacks(self, absent[0], passed)
            if not takes_all:
                passed = {name: passed[name] for name in wanted if name in passed}
            return self._of_call(name_of(args, kwargs), value_of(**passed))

        return make


@dataclass(frozen=True)
class Limit(_Named):
    """At most so many at a time: ``Limit("export:{tenant}", 2)``.

    Attributes:
        name: The name of the lock. Above a function it is a format string over its arguments.
        number: How many may hold the lock at a time, 1 to 1,000. Above a function it may be a
            function of the arguments that it names: ``lambda tenant: plans[tenant].exports``.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: The number is no integer, is out of range, or would have to be awaited.
    """

    name: str
    number: int | Callable[..., int]
    value_in = "number"

    def __post_init__(self) -> None:
        self._check_name()
        if not callable(self.number):
            number(self.number, f"The {self.called}", MOST_PERMITS)


_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/([smh]))?")  # As Celery's rate_limit has it.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
SHORTEST_BETWEEN = 1e-5  # Seconds between two starts: a server grants no more.
LONGEST_BETWEEN = 366 * 86_400.0
MOST_AT_ONCE = 10_000


@dataclass(frozen=True)
class Rate(_Named):
    """At most so many starts in a time: ``Rate("geo:{tenant}", "100/m", burst=20)``.

    In any time there are at most *burst* starts, and one more for each part of it in which one is
    due: ``"100/m"`` makes one due each 0.6 s. A start may be half a second late, or two intervals
    if that is longer, so as many more may come together. The end of the work gives no start back.

    Attributes:
        name: The name of the rate. Above a function it is a format string over its arguments.
        rate: How many starts in which time, as Celery's ``rate_limit``: ``"10/s"``, ``"100/m"``,
            ``"1000/h"``; or ``(number, seconds)``. Above a function it may be a function of the
            arguments that it names: ``lambda tenant: plans[tenant].rate``.
        burst: How many starts may be made at once after a quiet time, 1 to 10,000. Default: 1, so
            starts are spread evenly.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: The rate is none, is out of range, or would have to be awaited; or burst is no
            integer or out of range.
    """

    name: str
    rate: str | tuple[float, float | timedelta] | Callable[..., Any]
    burst: int | None = field(default=None, kw_only=True)
    value_in = "rate"

    def __post_init__(self) -> None:
        self._check_name()
        if not callable(self.rate):
            self.between  # noqa: B018 - its check
        if self.burst is not None:
            number(self.burst, f"The burst of Rate({self.name!r})", MOST_AT_ONCE)

    @cached_property
    def between(self) -> float:
        """Seconds between two starts."""
        found = None
        match self.rate:
            case str() as text if parts := _RATE.fullmatch(text.strip()):
                found = float(parts[1]), _UNITS[parts[2]]
            case (int() | float() as many, timedelta() as time):
                found = many, time.total_seconds()
            case (int() | float() as many, int() | float() as time):
                found = many, time
        if found is None or not (found[0] > 0 and math.isfinite(found[0]) and found[1] > 0):
            raise ValueError(
                f'The {self.called} must be a text such as "10/s", "100/m" or "1000/h", or'
                f" (number, seconds), not {self.rate!r}."
            )
        between = found[1] / found[0]
        if not SHORTEST_BETWEEN <= between <= LONGEST_BETWEEN:
            raise ValueError(
                f"The {self.called} must be at most 100,000 starts a second, and at least one a"
                f" year, not {self.rate!r}."
            )
        return between

    @property
    def at_once(self) -> int:
        """How many starts may be made at once."""
        return self.burst or 1


def _named_by(
    counts: Callable[..., Any], signature: inspect.Signature, limit: _Named
) -> tuple[dict[str, bool], bool]:
    """The arguments that the function *counts* names, and whether each must be passed.

    Also whether it takes all others too.
    """
    try:
        parameters = list(signature_of(counts).parameters.values())
    except ValueError:  # Python does not know the arguments of int(), and of others written in C.
        parameters = None
    if parameters is None or any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        raise ValueError(
            f"The {limit.called} is a function that takes no arguments by name: write one that"
            " does, such as lambda tenant: plans[tenant]."
        )
    known = signature.parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for one in named:
        if one.name not in known and one.default is one.empty and not takes_any:
            raise _lacks(limit, one.name, known)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return {one.name: one.default is one.empty for one in named}, takes_all


def _lacks(limit: _Named, argument: str, known: Iterable[str]) -> InvalidLockName:
    return InvalidLockName(
        repr(limit.name),
        f"the function that is its {limit.value_in} names {argument!r}; the arguments are"
        f" {', '.join(known) or 'none'}",
    )


def check_limits(limits: Any) -> tuple[Limit | Rate, ...]:
    """The argument *limits*, checked.

    Raises:
        ValueError: It is no list of Limit and Rate, or has the same name twice.
    """
    if not isinstance(limits, list | tuple) or not limits:
        raise ValueError(
            "limits must be a list of at least one Limit or Rate, such as"
            f" [Limit('export:{{tenant}}', 2), Rate('export', '100/m')], not {limits!r}."
        )
    for one in limits:
        if not isinstance(one, Limit | Rate):
            raise ValueError(f"limits must be a list of Limit and Rate, and one is {one!r}.")
    return locks_first(each_once(limits))


# What only a lease has.
_OF_LEASES = (
    *("ttl", "renew", "max_hold", "min_hold", "atomic", "reentrant", "release_on_commit"),
    *("abort_on_lost", "give_up_after"),
)


def check_rates(limits: Iterable[Limit | Rate], given: Mapping[str, Any]) -> None:
    """Refuse options that are *given* for a lease, if there are only rates.

    Raises:
        ValueError: One has no effect.
    """
    useless = [name for name in _OF_LEASES if given.get(name) is not None]
    if useless and all(isinstance(one, Rate) for one in limits):
        raise ValueError(
            f"{useless[0]} has no effect: under a Rate nothing is held. Leave it out, or add a"
            " Limit to limits."
        )


def locks_first(limits: Iterable[Limit | Rate]) -> tuple[Limit | Rate, ...]:
    """The limits, and then the rates: a start that is taken must not wait for a lock."""
    return tuple(sorted(limits, key=lambda one: isinstance(one, Rate)))


def each_once(limits: Iterable[Limit | Rate]) -> tuple[Limit | Rate, ...]:
    """The same limits, as a tuple.

    Raises:
        ValueError: Two have the same name.
    """
    found = tuple(limits)
    names = [limit.name for limit in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"limits has {name!r} twice: a name has one limit, or one rate. Write each name"
                " once, the narrowest first."
            )
    return found


def all_makers(
    limits: Iterable[Limit | Rate],
    function: Callable[..., Any],
    naming: Callable[[str], NameOf | None],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Limit | Rate, ...]]:
    """How to make the limits of a run of *function*; *naming* says how to make each name."""
    makers = [limit.maker(function, naming(limit.name)) for limit in limits]
    return lambda args, kwargs: each_once(make(args, kwargs) for make in makers)
