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
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
    by_name = _passed_by_name(key, parameters, own)
    rest = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), "")

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        passed = signature.bind(*itself, *args, **kwargs)
        passed.apply_defaults()
        for one in parameters:
            given = passed.arguments[one.name]
            if one.kind is one.VAR_POSITIONAL:
                given = tuple(map(delivered, given))
            else:
                given = delivered(see(one.name, given))
            passed.arguments[one.name] = given
        if by_name is None:
            name = key(*passed.args[len(itself) :], **passed.kwargs)
        else:
            given = {**passed.arguments, **passed.arguments.get(rest, {})}
            name = key(**{argument: given[argument] for argument in by_name if argument in given})
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
) -> list[str] | None:
    """Return the arguments of the task that its key function gets by name.

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
    kinds = {one.name: one.kind for one in parameters if one.kind not in _VARIADIC}
    # 1. The arguments of the task that the function names, if these are all that it needs.
    if not any(one.kind in _VARIADIC for one in signature.parameters.values()):
        shared = [name for name in signature.parameters if name in kinds]
        if (shared or not signature.parameters) and _accepts(signature, (), shared):
            # Others of its arguments, which have defaults, may arrive in **kwargs of the task.
            if any(one.kind is one.VAR_KEYWORD for one in parameters):
                variadic = {one.name for one in parameters if one.kind in _VARIADIC}
                named = (one for one in signature.parameters.values() if one.kind in _BY_NAME)
                return [one.name for one in named if one.name not in variadic]
            return shared
    # 2. All of them, as they are passed to the task. If the task itself takes *args or **kwargs,
    # nobody knows whether that is possible.
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [name for name in kinds if name not in keywords]
    if len(kinds) < len(parameters) or _accepts(signature, positional, keywords):
        return None
    # 3. All of them by name: the function names some, and has **kwargs for the others.
    if _accepts(signature, (), kinds):
        return list(kinds)
    raise InvalidLockName(
        shown,
        "it can be given neither the arguments that it names nor all of the task's, which are"
        f" {', '.join(kinds) or 'none'}",
    )


def _accepts(
    signature: inspect.Signature, positional: Iterable[str], keywords: Iterable[str]
) -> bool:
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
