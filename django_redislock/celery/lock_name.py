"""The option *key*: how the lock of a run is named after the task's arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from django_redislock.exceptions import InvalidLockName
from django_redislock.rules.names import check_name, check_shared, formatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Naming = Callable[[tuple[Any, ...], Mapping[str, Any]], str]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def naming(
    key: str | Callable[..., str] | None, body: Callable[..., Any], *, bound: bool
) -> Naming | None:
    """Return what makes the name of the lock of the arguments of a run.

    It is None for a task without a key, whose lock has the name of the task.

    Args:
        key: The option of that name.
        body: The function of the task.
        bound: Whether the body is given the task first, which is no argument of a run.

    Raises:
        InvalidLockName: The key wants arguments that the task does not take.
    """
    if key is None:
        return None
    itself = (None,) if bound else ()
    if isinstance(key, str):
        formatted = formatter(key, body)
        return lambda args, kwargs: formatted((*itself, *args), kwargs)
    signature = inspect.signature(body)
    by_name = _passed_by_name(key, list(signature.parameters.values())[len(itself) :])

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        passed = signature.bind(*itself, *args, **kwargs)
        passed.apply_defaults()
        if by_name is None:
            name = key(*passed.args[len(itself) :], **passed.kwargs)
        else:
            name = key(**{argument: passed.arguments[argument] for argument in by_name})
        return check_shared(check_name(name))

    return name_of


def _passed_by_name(
    key: Callable[..., str], parameters: list[inspect.Parameter]
) -> list[str] | None:
    """Return the arguments of the task that its key function is given, by name.

    None means that it is called as the task is: with all arguments, by position where possible.

    Args:
        key: The function.
        parameters: Those of the task.
    """
    shown = f"{getattr(key, '__qualname__', repr(key))}()"
    if inspect.iscoroutinefunction(key) or inspect.isgeneratorfunction(key):
        raise InvalidLockName(shown, "a key function returns a str, this one would not")
    try:
        signature = inspect.signature(key)
    except ValueError:  # Some builtins have none.
        return None
    kinds = {one.name: one.kind for one in parameters if one.kind not in _VARIADIC}
    # 1. The arguments of the task that the function names, if these are all that it needs.
    if not any(one.kind in _VARIADIC for one in signature.parameters.values()):
        shared = [name for name in signature.parameters if name in kinds]
        if (shared or not signature.parameters) and _accepts(signature, (), shared):
            return shared
    # 2. All of them, as they are passed to the task. Whether that is possible is not known if the
    # task itself takes *args or **kwargs.
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
