"""The options of single_instance_task, and what is refused at import.

Also the Conflict, which the option on_conflict gives to a function.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from celery import Task

from django_redislock.effects import check_database
from django_redislock.process import cached_property
from django_redislock.rules.arguments import SHORTEST_TTL, database, flag, seconds, text
from django_redislock.rules.options import DEFAULT_ALIAS, MOST_PERMITS, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CONFLICT_POLICIES = ("skip", "raise", "retry", "wait")
UNAVAILABLE_POLICIES = ("raise", "retry", "run")
DATABASE: Literal["database"] = "database"  # Where a `once` without an end is noted.

NEWEST: Literal["newest"] = "newest"  # Whose arguments a call runs with that stands for others.

HOUR = 3600.0


@dataclass(frozen=True)
class Conflict:
    """What a function given as on_conflict gets. Its return value is the task's result."""

    task: Task
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lock: str  # The lock's name.
    holder: str  # Who holds it, or held it last if it is cooling, as "host:pid task-id".
    expires_in: float  # Seconds until the holder's lease ends unless renewed, or the cooling ends.
    cooling: bool  # Whether nobody holds it any more: a run has succeeded, and min_hold keeps it.


@dataclass(frozen=True, kw_only=True)
class SingleInstance:
    """The options of single_instance_task, checked. Durations are seconds."""

    key: str | Callable[..., str] | None = None
    ttl: float | None = None
    wait: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    once: float | Literal["database"] = 0.0
    on_conflict: str | Callable[[Conflict], Any] = "skip"
    conflict_deadline: float = HOUR
    on_unavailable: str = "raise"
    abort_on_lost: bool = False
    limit: int = 1
    unique_queued: bool | Literal["newest"] = False
    queued_ttl: float = HOUR
    using: str = DEFAULT_ALIAS
    atomic: str | None = None  # The database of the transaction around the body.

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SingleInstance:
        """Check the options as they were written. None is as if one was not given.

        Raises:
            TypeError: An option is not known.
            ValueError: One is of the wrong type or out of range; the message names it.
        """
        if unknown := sorted(set(raw) - OPTIONS):
            raise TypeError(_unknown(unknown, OPTIONS))
        options = {name: value for name, value in raw.items() if value is not None}
        once = options.get("once")
        if isinstance(once, str) and once != DATABASE:
            raise ValueError(
                f'once must be a number of seconds, a timedelta or "database", not {once!r}.'
            )
        for name, least in _SHORTEST_DURATIONS.items():
            if name in options and (name, options[name]) != ("once", DATABASE):
                options[name] = seconds(options[name], name, least=least)
        for name in ("renew", "abort_on_lost"):
            if name in options:
                flag(options[name], name)
        unique_queued = options.get("unique_queued", False)
        if not isinstance(unique_queued, bool) and unique_queued != NEWEST:
            raise ValueError(
                f'unique_queued must be True, "newest" or False, not {unique_queued!r}: the call'
                " that waits runs with its own arguments, or with those of the last call."
            )
        if "using" in options:
            text(options["using"], "using")
        if "atomic" in options:
            options["atomic"] = database(options["atomic"], "atomic")
        _check_choice(options, "on_conflict", CONFLICT_POLICIES, or_callable=True)
        _check_choice(options, "on_unavailable", UNAVAILABLE_POLICIES)
        key = options.get("key")
        if not (key is None or isinstance(key, str) or callable(key)):
            raise ValueError(
                f"key must be a format string over the task's arguments, or a function of them,"
                f" not {key!r}."
            )
        limit = options.get("limit", 1)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_PERMITS:
            raise ValueError(f"limit must be an integer, 1 to {MOST_PERMITS}, not {limit!r}.")
        parsed = cls(**options)
        _check_together(parsed, options)
        return parsed

    @cached_property
    def lock_options(self) -> Options:
        """How the lock of a run is taken at first."""
        return Options(
            ttl=self.ttl,
            wait=self.wait if self.on_conflict == "wait" else 0.0,
            renew=self.renew,
            max_hold=self.max_hold,
            min_hold=self.min_hold,
            using=self.using,
            once=0.0 if self.once == DATABASE else self.once,
            atomic=self.atomic,
        )


OPTIONS = frozenset(field.name for field in fields(SingleInstance))

_SHORTEST_DURATIONS = {
    "ttl": SHORTEST_TTL,
    "wait": 0.0,
    "max_hold": SHORTEST_TTL,
    "min_hold": 0.0,
    "once": 0.0,
    "conflict_deadline": 0.0,
    "queued_ttl": 1.0,
}


def _check_together(options: SingleInstance, given: Mapping[str, Any]) -> None:
    """Refuse options that exclude each other, and those *given* that have no effect."""
    if options.wait is not None and options.on_conflict != "wait":
        raise ValueError('wait needs on_conflict="wait": no other policy waits for the lock.')
    policies = {options.on_conflict, options.on_unavailable}
    if "conflict_deadline" in given and "retry" not in policies:
        raise ValueError(
            'conflict_deadline needs on_conflict="retry" or on_unavailable="retry": no other'
            " policy comes back."
        )
    if "queued_ttl" in given and not options.unique_queued:
        raise ValueError("queued_ttl needs unique_queued=True: without it each call is published.")
    if options.atomic is not None:
        check_database(options.atomic, "atomic")
        if options.on_unavailable == "run":
            raise ValueError(
                'atomic and on_unavailable="run" exclude each other: without a lease there is no'
                " fence to claim. Leave one of them out."
            )
    if options.once == DATABASE and options.atomic is None:
        raise ValueError(
            'once="database" needs atomic: without it, what the body writes and the row that says'
            " so would not be committed together. Add atomic=True, or the alias of a database."
        )
    if options.once and options.limit > 1:
        raise ValueError("once and limit exclude each other: once lets one run succeed.")


def _check_choice(
    options: Mapping[str, Any], name: str, choices: tuple[str, ...], *, or_callable: bool = False
) -> None:
    choice = options.get(name, choices[0])
    if choice not in choices and not (or_callable and callable(choice)):
        rest = ", or a function" if or_callable else ""
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}{rest}, not {choice!r}.")


# Options that serve others: which they serve, and whether they are of use with these options.
_SERVES: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], bool]]] = {
    "wait": ({"on_conflict"}, lambda options: options.get("on_conflict") == "wait"),
    "conflict_deadline": (
        {"on_conflict", "on_unavailable"},
        lambda options: "retry" in (options.get("on_conflict"), options.get("on_unavailable")),
    ),
    "queued_ttl": ({"unique_queued"}, lambda options: bool(options.get("unique_queued"))),
}


def inherited(cls: type) -> dict[str, Any]:
    """The options in ``single_instance`` of a class of tasks, merged with those of its bases.

    Raises:
        TypeError: One of the classes has something else there.
    """
    layers = [(one, vars(one).get("single_instance", {})) for one in reversed(cls.__mro__)]
    for one, layer in layers:
        if not isinstance(layer, Mapping):
            raise TypeError(
                f"single_instance of {one.__name__} must be a dictionary of options, such as"
                f' {{"key": "lottery:{{draw_id}}"}}, not {layer!r}.'
            )
    return merge([layer for _, layer in layers])


def merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the options of classes and of a decorator, one by one. The later one wins.

    None is as if an option was not given. An option that serves another, such as wait, is dropped
    if a later layer changes that other so that it is of no use.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        merged |= given
        for name, (served, is_of_use) in _SERVES.items():
            if name not in given and served & set(given) and not is_of_use(merged):
                merged.pop(name, None)
    return merged


def refuse_attributes(cls: type, body: Callable[..., Any]) -> None:
    """Refuse an attribute of a task class that looks like an option of ours, and has no effect.

    Raises:
        TypeError: The message shows the line to write instead.
    """
    said = vars(cls)
    # Celery makes an attribute of each option that its decorator is given, whatever it is.
    is_decorated = "_decorated" in said
    unheard = {
        name: value
        for name, value in said.items()
        if name in OPTIONS and (is_decorated or not _is_behaviour(value))
    }
    if not unheard:
        return
    code = body.__code__ if is_decorated and inspect.isfunction(body) else None
    where = f", {code.co_filename}:{code.co_firstlineno}" if code else ""
    given = ", ".join(f'"{name}": {value!r}' for name, value in unheard.items())
    instead = f"single_instance={{{given}}}" if is_decorated else f"single_instance = {{{given}}}"
    raise TypeError(
        f"{', '.join(map(repr, unheard))} of the task {said.get('name') or cls.__name__}{where}"
        f" would have no effect: options of the lock are not attributes of a task. Write {instead}."
    )


def _is_behaviour(value: Any) -> bool:
    """Whether an attribute is a method or the like, and no value."""
    return callable(value) or hasattr(value, "__get__")


# What Celery's decorators take beside the attributes of a task: options of their own, those of
# autoretry, and those for publishing (celery.app.task.extract_exec_options).
_CELERYS_OPTIONS = frozenset(
    {
        *("name", "base", "bind", "pydantic", "pydantic_strict", "pydantic_context"),
        *("pydantic_dump_kwargs", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "queue", "routing_key", "exchange"),
        *("immediate", "mandatory", "delivery_mode", "compression"),
    }
)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our options and Celery's, and refuse what is neither.

    Celery makes an attribute of the task of each option, whatever it is. So it would accept a
    misspelt one, and the lock would be held for longer, or keep out less, than its author thinks.

    Raises:
        TypeError: An option belongs to nobody.
    """
    base = options.get("base") or Task
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    theirs = {name: value for name, value in options.items() if name not in OPTIONS}
    unknown = [name for name in theirs if name not in _CELERYS_OPTIONS and not hasattr(base, name)]
    if unknown:
        raise TypeError(_unknown(unknown, OPTIONS | _CELERYS_OPTIONS))
    return ours, theirs


def _unknown(names: Iterable[str], known: Iterable[str]) -> str:
    found = []
    for name in names:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = _CALLED_ELSEWHERE.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        found.append(f"{name!r}" + (f" ({hint})" if hint else ""))
    ours = ", ".join(sorted(OPTIONS))
    return (
        f"single_instance_task does not know the option {', '.join(found)}. Its own options are"
        f" {ours}; all of @shared_task are taken too. An attribute of your own belongs on the"
        " class given as base=."
    )


# What the same thing is called in other libraries.
_CALLED_ELSEWHERE = {
    "timeout": "the lease's length is 'ttl'",
    "lock_timeout": "the lease's length is 'ttl'",
    "lock_expiry": "the lease's length is 'ttl'",
    "expire": "the lease's length is 'ttl'",
    "lock_key": "the lock's name is 'key'",
    "unique_on": "name the arguments in 'key'",
    "keys": "name the arguments in 'key'",
    "raise_on_duplicate": "say on_conflict='raise'",
    "graceful": "on_conflict='skip' is the default",
    "release_on_commit": "the body runs under the lock, so a transaction in it ends in time",
    "once_per": "name the slot in 'key', and say 'once'",
}
