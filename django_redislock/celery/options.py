"""The options of single_instance_task, and which of them are refused at import.

Also Conflict, the argument of a function given as on_conflict.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from string import Formatter
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_type_hints

from celery import Task

from django_redislock.exceptions import InvalidLockName
from django_redislock.jobs.options import Conflict as JobConflict
from django_redislock.jobs.options import JobOptions
from django_redislock.rules.names import (
    check_name,
    check_shared,
    delivered,
    formatter,
    signature_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Naming = Callable[[tuple[Any, ...], Mapping[str, Any]], str]


NEWEST: Literal["newest"] = "newest"  # The call that waits runs with the newest's arguments.

HOUR = 3600.0


@dataclass(frozen=True)
class Conflict(JobConflict):
    """The argument of a function given as on_conflict. The task has the function's result."""

    task: Task


@dataclass(frozen=True, kw_only=True)
class SingleInstance(JobOptions):
    """The options of single_instance_task, checked. Durations are seconds."""

    key: str | Callable[..., str] | None = None
    conflict_deadline: float = HOUR
    abort_on_lost: bool = False
    unique_queued: bool | Literal["newest"] = False
    queued_ttl: float = HOUR
    queued_headers: tuple[str, ...] | None = None
    give_up_after: int | None = None

    conflict_policies: ClassVar[tuple[str, ...]] = ("skip", "raise", "retry", "wait")
    unavailable_policies: ClassVar[tuple[str, ...]] = ("raise", "retry", "run")
    durations: ClassVar[Mapping[str, float]] = {
        **JobOptions.durations,
        "conflict_deadline": 0.0,
        "queued_ttl": 1.0,
    }
    flags: ClassVar[tuple[str, ...]] = ("renew", "abort_on_lost")

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """See JobOptions.parse()."""
        unique_queued = raw.get("unique_queued")
        if not (
            unique_queued is None or unique_queued == NEWEST or isinstance(unique_queued, bool)
        ):
            raise ValueError(
                f'unique_queued must be True, "newest" or False, not {unique_queued!r}: the call'
                " that waits runs with its own arguments, or with those of the last call."
            )
        key = raw.get("key")
        if not (key is None or isinstance(key, str) or callable(key)):
            raise ValueError(
                f"key must be a format string over the task's arguments, or a function of them,"
                f" not {key!r}."
            )
        most = raw.get("give_up_after")
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(
                f"give_up_after must be an integer, at least 1, not {most!r}: how many starts of a"
                " call may kill their worker."
            )
        if (headers := raw.get("queued_headers")) is not None:
            raw = {**raw, "queued_headers": _check_headers(headers)}
        parsed = super().parse(raw)
        parsed.check_answered()
        if isinstance(key, str):
            parsed.check_named(key)
        return parsed

    @classmethod
    def unknown(cls, names: Iterable[str]) -> str:
        """The message about options that are neither ours nor Celery's."""
        return _unknown(names, OPTIONS)

    def check_redelivered(self, task: Mapping[str, Any]) -> None:
        """Refuse give_up_after for a *task*, given by its attributes, without acks_late.

        Raises:
            ValueError: Its message is acknowledged before its run.
        """
        if self.give_up_after and task.get("acks_late") is False:
            raise ValueError(
                "give_up_after needs acks_late=True: by acks_late=False the message is acknowledged"
                " before its run, so a call that kills its worker is not delivered again. Write"
                " acks_late=True, or leave give_up_after out."
            )

    def check_together(self, given: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other, and those *given* that have no effect."""
        policies = {self.on_conflict, self.on_unavailable}
        comes_back = "retry" in policies or (self.on_conflict == "wait" and self.unique_queued)
        if "conflict_deadline" in given and not comes_back:
            raise ValueError(
                'conflict_deadline needs on_conflict="retry" or on_unavailable="retry", or'
                ' on_conflict="wait" with unique_queued: no other run comes back.'
            )
        for name in ("queued_ttl", "queued_headers"):
            if name in given and not self.unique_queued:
                raise ValueError(
                    f"{name} needs unique_queued=True: without it each call is published."
                )
        if self.key is not None and self.limits:
            raise ValueError("limits say the names of the locks themselves: leave key out.")
        super().check_together(given)


OPTIONS = SingleInstance.names()


# Options that serve others: which they serve, and whether they are of use with these options.
_SERVES: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], bool]]] = {
    "wait": ({"on_conflict"}, lambda options: options.get("on_conflict") == "wait"),
    "conflict_deadline": (
        {"on_conflict", "on_unavailable", "unique_queued"},
        lambda options: (
            "retry" in (options.get("on_conflict"), options.get("on_unavailable"))
            or (options.get("on_conflict") == "wait" and bool(options.get("unique_queued")))
        ),
    ),
    "queued_ttl": ({"unique_queued"}, lambda options: bool(options.get("unique_queued"))),
    "queued_headers": ({"unique_queued"}, lambda options: bool(options.get("unique_queued"))),
}


def _check_headers(names: Any) -> tuple[str, ...]:
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise ValueError(
        "queued_headers must be a list of the names of headers that belong to a call's identity,"
        f' such as ["_schema_name"], not {names!r}.'
    )


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

    None means that an option was not given. An option such as wait serves another one. It is
    dropped if a later layer changes that other option so that it has no use.
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
    # Celery makes every option of its decorator an attribute.
    is_decorated = "_decorated" in said
    unheard = {
        name: value
        for name, value in said.items()
        if name in OPTIONS and (is_decorated or not _is_behaviour(value))
    }
    if not unheard:
        return
    body = inspect.unwrap(body)
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


# What Celery's decorators take besides the attributes of a task: options of their own, those of
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
    """Return our options and Celery's, and refuse all others.

    Celery makes every option an attribute of the task. So it would accept a misspelt one, and the
    lock would be held for longer, or keep out less, than its author thinks.

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


# Names of the same things in other libraries.
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


# --- the option *key*: how the lock of a run is named after the task's arguments ------------------

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY_PLACE = inspect.Parameter.VAR_POSITIONAL
_VARIADIC = (_ANY_PLACE, inspect.Parameter.VAR_KEYWORD)


def naming(
    key: str | Callable[..., str] | None,
    run: Any,
    *,
    bound: bool = False,
    validation: Mapping[str, Any] | None = None,
) -> Naming | None:
    """Return the function that makes the name of the lock from the arguments of a run.

    It is None for a task without a key: its lock has the name of the task. However a task is
    called, the name is the same, though a worker gets lists for tuples, and dictionaries for
    models.

    Args:
        key: The option of that name.
        run: The function of the task.
        bound: Whether it gets the task first, which is no argument of a run.
        validation: How Celery makes the models of pydantic that it is annotated with, see
            validation_of(); None if it makes none.

    Raises:
        InvalidLockName: The key wants arguments that the task does not take.
    """
    if key is None:
        return None
    signature = signature_of(run)
    itself = (None,) if bound else ()
    own = next(iter(signature.parameters), "") if bound else ""
    models = {} if validation is None else _models(run)

    def see(name: str, value: Any) -> Any:
        model = models.get(name)
        if model is None or value is None:
            return value
        return model.model_validate(value, **(validation or {}))

    if isinstance(key, str):
        formatted = formatter(key, run, see=see if models else None)
        if own and any(_first_name(field) == own for _, field, _, _ in Formatter().parse(key)):
            raise _names_the_task(repr(key), own)
        return lambda args, kwargs: formatted((*itself, *args), kwargs)
    parameters = list(signature.parameters.values())[len(itself) :]
    chosen = _passed_by_name(key, parameters, own)

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        passed = signature.bind(*itself, *args, **kwargs)
        passed.apply_defaults()
        given: dict[str, Any] = {}
        for one in parameters:
            value = passed.arguments[one.name]
            if one.kind is one.VAR_POSITIONAL:
                passed.arguments[one.name] = tuple(map(delivered, value))
                continue
            value = passed.arguments[one.name] = delivered(see(one.name, value))
            given |= value if one.kind is one.VAR_KEYWORD else {one.name: value}
        if chosen is None:
            name = key(*passed.args[len(itself) :], **passed.kwargs)
        else:
            name = key(**chosen(given))
        return check_shared(check_name(name))

    return name_of


def validation_of(run: Any) -> dict[str, Any] | None:
    """The options with which Celery makes the pydantic models in the annotations of ``run``.

    Returns:
        The options of model_validate(); None if it makes none: the task has no pydantic=True.
    """
    wrapper = getattr(run, "__func__", run)
    own = getattr(wrapper, "__globals__", {})
    if not hasattr(wrapper, "__wrapped__") or own.get("__name__") != "celery.app.base":
        return None
    # They stand nowhere else. The wrapper validates itself, or by a function from Celery 5.6 on.
    known = getclosurevars(wrapper).nonlocals
    for one in tuple(known.values()):
        if isfunction(one) and one.__module__ == "celery.app.base":
            known = {**getclosurevars(one).nonlocals, **known}
    tells = {"celery_app": known.get("app"), "celery_task_name": known.get("task_name")}
    return {"strict": known.get("strict"), "context": {**known.get("context", {}), **tells}}


def _first_name(field: str | None) -> str:
    """The argument that a field of a format string names: order of {order.pk}."""
    return re.split(r"[.\[]", field or "", maxsplit=1)[0]


def _names_the_task(key: str, own: str) -> InvalidLockName:
    return InvalidLockName(
        key,
        f"it uses {own!r}, which is the task itself and no argument of a run: write the name of the"
        " task into the key",
    )


def _models(run: Any) -> dict[str, Any]:
    """The models of pydantic that arguments are annotated with, as Celery finds them."""
    try:
        hints = get_type_hints(run)
    except (NameError, AttributeError, TypeError):
        hints = {one.name: one.annotation for one in signature_of(run).parameters.values()}
    found = {}
    for name, hint in hints.items():
        models = [one for one in (hint, *get_args(hint)) if hasattr(one, "model_validate")]
        # Or a model or None. Celery leaves other annotations alone.
        if models and (models == [hint] or set(get_args(hint)) == {models[0], NoneType}):
            found[name] = models[0]
    return found


def _passed_by_name(
    key: Callable[..., str], parameters: list[inspect.Parameter], own: str
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return how to choose, of all arguments of a run, those that its key function gets by name.

    None means that the function is called like the task: with all arguments, by position where
    possible.

    Args:
        key: The function.
        parameters: Those of the task.
        own: The parameter for the task itself, which is no argument; "" if there is none.
    """
    shown = f"{getattr(key, '__qualname__', repr(key))}()"
    if inspect.iscoroutinefunction(key) or inspect.isgeneratorfunction(key):
        raise InvalidLockName(shown, "a key function returns a str, this one would not")
    try:
        signature = signature_of(key)
    except ValueError:  # Some builtins have none.
        return None
    if own and own in signature.parameters:
        raise _names_the_task(shown, own)
    takes = {one.kind for one in signature.parameters.values()}
    passes = {one.kind for one in parameters}
    kinds = {one.name: one.kind for one in parameters if one.kind not in _VARIADIC}
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    places = [name for name in kinds if name not in keywords]
    named = [one.name for one in signature.parameters.values() if one.kind in _BY_NAME]
    shared = [name for name in signature.parameters if name in kinds]
    # What the function lacks may arrive in *args or **kwargs of the task.
    is_open = not passes.isdisjoint(_VARIADIC)
    for bind in (signature.bind, signature.bind_partial) if is_open else (signature.bind,):
        # 1. The arguments of the task that the function names, if these are all that it needs.
        if takes.isdisjoint(_VARIADIC):
            can_arrive = bind == signature.bind or _ANY_PLACE not in passes
            if (shared or not takes) and can_arrive and _fits(bind, (), shared):
                return lambda given: {name: given[name] for name in named if name in given}
        # 2. All of them by name: the function names some, and has **kwargs for the others.
        elif _ANY_PLACE not in takes | passes and _fits(bind, (), kinds):
            return dict
        # 3. All of them, as they are passed to the task.
        if _fits(bind, places, keywords):
            return None
    raise InvalidLockName(
        shown,
        "it can be given neither the arguments that it names nor all of the task's, which are"
        f" {', '.join(kinds) or 'none'}",
    )


def _fits(bind: Callable[..., Any], places: Iterable[str], keywords: Iterable[str]) -> bool:
    """Whether a function can be called so, with no argument for another one of its names."""
    passed = [*places, *keywords]
    try:
        got = bind(*places, **{name: name for name in keywords}).arguments
    except TypeError:
        return False
    return all(got[name] == name for name in passed if isinstance(got.get(name), str))
