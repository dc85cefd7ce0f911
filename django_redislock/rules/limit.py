"""Limits: how many may hold a lock at a time. A job may have several, taken as one lock."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_redislock.exceptions import InvalidLockName
from django_redislock.rules.arguments import number
from django_redislock.rules.names import bound_arguments, check_name, formatter, signature_of
from django_redislock.rules.options import MOST_PERMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    NameOf = Callable[[tuple[Any, ...], Mapping[str, Any]], str]
    Made = Callable[[tuple[Any, ...], Mapping[str, Any]], "Limit"]


@dataclass(frozen=True)
class Limit:
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

    def __post_init__(self) -> None:
        is_template = isinstance(self.name, str) and "{" in self.name
        object.__setattr__(self, "name", check_name(self.name, template=is_template))
        if inspect.iscoroutinefunction(self.number):
            raise ValueError(
                f"The number of Limit({self.name!r}) must not be a coroutine function: nobody would"
                " await it."
            )
        if not callable(self.number):
            number(self.number, f"The number of Limit({self.name!r})", MOST_PERMITS)

    def maker(self, function: Callable[..., Any], name_of: NameOf | None = None) -> Made:
        """How to make the limit of a call of *function*: (args, kwargs) -> limit.

        Args:
            function: The function to be called.
            name_of: Makes the name, if it is not formatted in the usual way.

        Raises:
            InvalidLockName: The name or the number wants an argument that *function* does not take.
            ValueError: The number is a function that takes no arguments by name.
        """
        name_of, own = name_of or formatter(self.name, function), self.number
        if not callable(own):
            return lambda args, kwargs: Limit(name_of(args, kwargs), own)
        signature = signature_of(function)
        wanted, takes_all = _named_by(own, signature, self.name)
        counts: Callable[..., int] = own

        def make(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Limit:
            passed = bound_arguments(signature, args, kwargs)
            if absent := [one for one in wanted if wanted[one] and one not in passed]:
                raise _lacks(self.name, absent[0], passed)
            if not takes_all:
                passed = {name: passed[name] for name in wanted if name in passed}
            return Limit(name_of(args, kwargs), counts(**passed))

        return make


def _named_by(
    counts: Callable[..., int], signature: inspect.Signature, limit: str
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
            f"The number of Limit({limit!r}) is a function that takes no arguments by name: write"
            " one that does, such as lambda tenant: plans[tenant]."
        )
    known = signature.parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for one in named:
        if one.name not in known and one.default is one.empty and not takes_any:
            raise _lacks(limit, one.name, known)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return {one.name: one.default is one.empty for one in named}, takes_all


def _lacks(limit: str, argument: str, known: Iterable[str]) -> InvalidLockName:
    return InvalidLockName(
        repr(limit),
        f"the function that is its number names {argument!r}; the arguments are"
        f" {', '.join(known) or 'none'}",
    )


def check_limits(limits: Any) -> tuple[Limit, ...]:
    """The argument *limits*, checked.

    Raises:
        ValueError: It is no list of Limit, or has the same name twice.
    """
    if not isinstance(limits, list | tuple) or not limits:
        raise ValueError(
            "limits must be a list of at least one Limit, such as"
            f" [Limit('export:{{tenant}}', 2), Limit('export', 10)], not {limits!r}."
        )
    for one in limits:
        if not isinstance(one, Limit):
            raise ValueError(f"limits must be a list of Limit, and one is {one!r}.")
    return each_once(limits)


def each_once(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The same limits, as a tuple.

    Raises:
        ValueError: Two have the same name.
    """
    found = tuple(limits)
    names = [limit.name for limit in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"limits has {name!r} twice: a lock has one limit. Name each lock once, the"
                " narrowest first."
            )
    return found


def all_makers(
    limits: Iterable[Limit],
    function: Callable[..., Any],
    naming: Callable[[str], NameOf | None],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Limit, ...]]:
    """How to make the limits of a run of *function*; *naming* says how to make each name."""
    makers = [limit.maker(function, naming(limit.name)) for limit in limits]
    return lambda args, kwargs: each_once(make(args, kwargs) for make in makers)
