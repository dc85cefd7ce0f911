"""The option *key*: how the lock of a run is named after the task's arguments."""

from __future__ import annotations

import inspect
import re
from inspect import getclosurevars, isfunction
from string import Formatter
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from django_redislock.exceptions import InvalidLockName
from django_redislock.rules.names import check_name, check_shared, formatter, signature_of
from django_redislock.rules.values import delivered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Naming = Callable[[tuple[Any, ...], Mapping[str, Any]], str]

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
