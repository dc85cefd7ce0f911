"""The key: how the lock of a run is named after the task's arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from django_redislock.exceptions import InvalidLockName
from django_redislock.rules.names import check_name, check_shared, formatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Naming = Callable[[tuple[Any, ...], Mapping[str, Any]], str]

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def naming(
    key: str | Callable[..., str] | None, function: Callable[..., Any], *, bound: bool
) -> Naming | None:
    """How to name the lock of a run after its arguments; None for the task's own name.

    Args:
        key: The option of that name.
        function: The body of the task.
        bound: Whether it is given the task itself, which is no argument of a run.

    Raises:
        InvalidLockName: The key wants arguments that the task does not take.
    """
    if key is None:
        return None
    itself = (None,) if bound else ()
    if isinstance(key, str):
        named = formatter(key, function)
        return lambda args, kwargs: named((*itself, *args), kwargs)
    signature = inspect.signature(function)
    wanted = _wanted(key, signature, skip=len(itself))

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        run = signature.bind(*itself, *args, **kwargs)
        run.apply_defaults()
        if wanted is None:
            name = key(*run.args[len(itself) :], **run.kwargs)
        else:
            name = key(**{one: run.arguments[one] for one in wanted})
        return check_shared(check_name(name))

    return name_of


def _wanted(
    key: Callable[..., str], signature: inspect.Signature, *, skip: int
) -> list[str] | None:
    """Which of a task's arguments a key function names; None if it is to be given all of them."""
    shown = f"{getattr(key, '__qualname__', repr(key))}()"
    if inspect.iscoroutinefunction(key) or inspect.isgeneratorfunction(key):
        raise InvalidLockName(shown, "a key function returns a str, this one would not")
    try:
        takes = inspect.signature(key)
    except ValueError:  # Some builtins do not tell.
        return None
    own = list(signature.parameters.values())[skip:]
    fixed = {one.name: one.kind for one in own if one.kind not in _VARIABLE}
    if not any(one.kind in _VARIABLE for one in takes.parameters.values()):
        named = [name for name in takes.parameters if name in fixed]
        if (named or not takes.parameters) and _fits(takes, (), named):
            return named
    by_name = [name for name, kind in fixed.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    by_place = [name for name in fixed if name not in by_name]
    if len(fixed) < len(own) or _fits(takes, by_place, by_name):
        return None
    if _fits(takes, (), fixed):
        return list(fixed)
    raise InvalidLockName(
        shown,
        "it can be given neither the arguments that it names nor all of the task's, which are"
        f" {', '.join(fixed) or 'none'}",
    )


def _fits(takes: inspect.Signature, by_place: Iterable[str], by_name: Iterable[str]) -> bool:
    try:
        takes.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True
