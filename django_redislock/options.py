"""The table of options: what a lock takes, and how it is checked. Jobs and tasks add their rows.

A row says all of an option but its use: name, type, check, default and meaning. Signatures, checks,
docstrings, the arguments of ``manage.py locks run`` and the tables of the documentation are made of
it. The checked value is a field of rules.options.Options.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, lru_cache, partial
from inspect import Parameter
from types import NoneType
from typing import Annotated, Any, TypedDict, TypeVar, get_args, get_type_hints

from django_redislock.rules.arguments import SHORTEST_TTL, database, flag, number, seconds, text
from django_redislock.rules.limit import Limit, Rate, check_limits
from django_redislock.rules.names import signature_of
from django_redislock.rules.options import DEFAULT_ALIAS, MOST_COMBINATIONS, MOST_PERMITS, Options

Seconds = float | timedelta
Function = TypeVar("Function", bound=Callable[..., Any])

# What other libraries and other options call them.
_CALLED_HERE = {
    "timeout": "ttl=, how long the lease lasts unless renewed, or wait=, how long to wait for it",
    "expire": "ttl=, how long the lease lasts unless renewed",
    "name": "the name by position, as in distributed_lock('report')",
    "blocking": "wait=, how long to wait for it; 0 tries once",
    "blocking_timeout": "wait=, how long to wait for it; 0 tries once",
}


class Option:
    """What there is to say of an option beside its name."""

    type: Any  # As its TypedDict says; options_in() puts it here.

    def __init__(
        self,
        meaning: str,
        check: Callable[..., Any],
        default: Any = None,
        *,
        shell: str = "",
        **rule: Any,
    ) -> None:
        """A row of the table.

        Args:
            meaning: Its line in docstrings and documents. The first sentence is that of the shell.
            check: Called with a value and the option's name, returns the value as it is kept. It
                raises ValueError, and names the option.
            default: The value that counts if none is given. None: that of the settings, or none.
            shell: For ``locks run``: how its value is written there; "" if that does not take it.
            rule: Further arguments of *check*.
        """
        self.meaning, self.default, self.shell = meaning, default, shell
        self.check = partial(check, **rule) if rule else check

    @property
    def brief(self) -> str:
        """What it means in one sentence, for the shell."""
        sentence = self.meaning.partition(". ")[0].removesuffix(".")
        return sentence[0].lower() + sentence[1:]


def one_alias(value: object, argument: str) -> str:
    """Return the alias of REDISLOCK, or raise ValueError."""
    if isinstance(value, list | tuple):
        raise ValueError(
            f"{argument} must be one alias, not {value!r}: the names of one lock are kept in one"
            " place. Take the locks of two aliases by two blocks, one within the other, in the same"
            " order everywhere."
        )
    return text(value, argument)


class LeaseArguments(TypedDict, total=False):
    """What a lease is to be like: for locks, jobs, tasks and take_up()."""

    ttl: Annotated[
        Seconds | None,
        Option(
            "How long the lease lasts unless renewed, and so how long a dead holder keeps others"
            " out. At least 0.05 s.",
            seconds,
            least=SHORTEST_TTL,
            shell="TIME",
        ),
    ]
    renew: Annotated[
        bool | None,
        Option("Whether the lease is renewed, every ttl/3, while the lock is held.", flag),
    ]
    max_hold: Annotated[
        Seconds | None,
        Option(
            "How long the lease lasts at most, from the grant, so that a body that hangs does not"
            " keep the lock for ever.",
            seconds,
            least=SHORTEST_TTL,
        ),
    ]
    min_hold: Annotated[
        Seconds | None,
        Option(
            "How long the lock stays taken after a success, counted from the grant. So a host"
            " whose clock is late does not do the work again. After a failure it is free at once.",
            seconds,
            0,
            shell="TIME",
        ),
    ]
    atomic: Annotated[
        bool | str,
        Option(
            "Whether the block or body is a transaction too; a string is the alias in DATABASES."
            " The commit comes before the release, see ``Lease.atomic()``. Not for coroutines.",
            database,
            False,
        ),
    ]


class Arguments(LeaseArguments, total=False):
    """What locks, jobs and tasks take."""

    wait: Annotated[
        Seconds | None,
        Option(
            "How long to wait for the lock, or for all of several. 0 does not wait, ``math.inf``"
            ' waits for ever. A job or task waits only with on_conflict="wait".',
            seconds,
            endless=True,
            shell="TIME|inf",
        ),
    ]
    limit: Annotated[
        int | None,
        Option(
            "How many may hold the lock at a time, 1 to 1,000. Each has a lease of its own, for"
            " the permit with the number ``lease.permit``; first come, first served. Write the"
            " same limit wherever the lock is taken.",
            number,
            most=MOST_PERMITS,
            shell="N",
        ),
    ]
    limits: Annotated[
        Sequence[Limit | Rate] | None,
        Option(
            "In place of a name and a limit: locks with a limit each, all taken or none. Write"
            " the narrowest first, so that nobody keeps a wide one while waiting for a narrow one,"
            " and the same order everywhere. Above a function, names are format strings over its"
            " arguments, and a number may be a function of them. The first one names the lock of a"
            " job, for records. A ``Rate`` among them is asked for last.",
            lambda value, argument: check_limits(value),
        ),
    ]
    using: Annotated[str, Option("The alias in REDISLOCK.", one_alias, DEFAULT_ALIAS)]


class TakingUpArguments(LeaseArguments, total=False):
    """What take_up() takes."""

    release_on_commit: Annotated[
        bool,
        Option(
            "Whether a release waits for the end of an open transaction: the commit or rollback of"
            " the outermost atomic(). Blocking code only.",
            flag,
            False,
        ),
    ]


class LockArguments(Arguments, TakingUpArguments, total=False):
    """What distributed_lock() takes."""

    reentrant: Annotated[
        bool,
        Option(
            "Whether a thread or asyncio task that holds the lock may take it again. With a"
            " limit, it has the same permit then; without reentrant, it may take a second permit.",
            flag,
            False,
        ),
    ]


# --- what is made of the table --------------------------------------------------------------------


@cache
def options_in(arguments: type) -> dict[str, Option]:
    """The rows of a table, by name."""
    rows = {}
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        rows[name] = row = hint.__metadata__[0]
        row.type = hint.__origin__
    return rows


def checked(arguments: type, given: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The options that are *given*, each as it is kept; without those that are None.

    Args:
        arguments: The table.
        given: Values as they were written.
        of: Who takes them, for the message.

    Raises:
        TypeError: An option is unknown.
        ValueError: One is of the wrong type or out of range; the message names it.
    """
    rows = options_in(arguments)
    if unknown := [name for name in given if name not in rows]:
        cure = _CALLED_HERE.get(unknown[0], f"one of {', '.join(rows)}")
        raise TypeError(f"{of} takes no argument {unknown[0]!r}; pass {cure}.")
    return {
        name: rows[name].check(value, name)
        for name, value in given.items()
        if value is not None or NoneType not in get_args(rows[name].type)
    }


# Typed: 1 is no flag, though it equals True.
@lru_cache(maxsize=MOST_COMBINATIONS, typed=True)
def lock_options(**given: Any) -> Options:
    """The arguments of distributed_lock(), checked.

    Raises:
        TypeError, ValueError: See checked().
    """
    options = checked(LockArguments, given, "distributed_lock")
    if options.get("release_on_commit") and options.get("atomic"):
        raise ValueError(
            "atomic and release_on_commit exclude each other: with atomic, the commit comes before"
            " the release."
        )
    return Options(**options)


def taking(arguments: type) -> Callable[[Function], Function]:
    """Let help() and documents show each option of a function with ``**options``.

    In its docstring, the line ``{options}`` becomes a line for each of them.
    """

    def show(function: Function) -> Function:
        signature, rows = signature_of(function), options_in(arguments)
        own = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=row.type)
            for name, row in rows.items()
        ]
        shown: Any = function
        shown.__signature__ = signature.replace(parameters=[*own, *options])
        fill = partial(textwrap.fill, width=100, subsequent_indent=12 * " ")
        lines = [fill(f"        {name}: {row.meaning}") for name, row in rows.items()]
        if shown.__doc__:  # Not with python -OO.
            shown.__doc__ = shown.__doc__.replace("        {options}", "\n".join(lines))
        return function

    return show
