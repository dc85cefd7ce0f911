"""What cannot be under a lock, and which line to write instead."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# What an argument of other libraries is called here.
_CALLED_HERE = {
    "timeout": "ttl=, how long the lease lasts unless renewed, or wait=, how long to wait for it",
    "expire": "ttl=, how long the lease lasts unless renewed",
    "blocking": "wait=, how long to wait for it; 0 tries once",
    "blocking_timeout": "wait=, how long to wait for it; 0 tries once",
}


def explained(
    error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], known: Collection[str]
) -> Exception:
    """What to say of a call of distributed_lock() that cannot be right: which line to write.

    Args:
        error: What it has raised.
        args: Its arguments by position.
        kwargs: Those by name.
        known: The names of those that there are.
    """
    if args and (callable(args[0]) or isinstance(args[0], classmethod | property)):
        return _nameless(args[0])
    if len(args) > 1:
        return TypeError(
            "distributed_lock takes only the name by position: say what the other"
            " arguments are, as in distributed_lock('report', ttl=30, wait=5)."
        )
    if unknown := [name for name in kwargs if name not in known]:
        here = _CALLED_HERE.get(unknown[0], f"one of {', '.join(list(known)[1:])}")
        return TypeError(f"distributed_lock takes no argument {unknown[0]!r}; pass {here}.")
    return error


def _nameless(function: object) -> TypeError:
    name = getattr(function, "__name__", "name")
    line = f"@distributed_lock({name!r})"
    check_decorated(function, line)
    return TypeError(
        f"@distributed_lock needs the name of the lock: write {line} above def {name}(...). The"
        " name may have arguments in it, as in 'report:{report_id}'."
    )


def check_decorated(function: object, line: str) -> None:
    """Refuse whatever would not run under the lock if *line* stood above it."""
    if any(cls.__module__.partition(".")[0] == "celery" for cls in type(function).__mro__):
        # Not looked at in any other way, or Celery would set its application up.
        raise TypeError(
            "distributed_lock was given a Celery task, and workers would run it without the lock."
            f" Write @shared_task above {line}, or @single_instance_task in their place."
        )
    if inspect.isclass(function):
        raise TypeError(
            f"distributed_lock was given the class {function.__qualname__}, and only the making of"
            f" objects would be under the lock. Write {line} above a method; for a view,"
            f' @method_decorator({line[1:]}, name="dispatch") above the class.'
        )
    if isinstance(function, staticmethod | classmethod | property) or not callable(function):
        cure = f"; write @{type(function).__name__} above {line}" * hasattr(function, "__get__")
        raise TypeError(f"distributed_lock decorates functions, not {function!r}{cure}.")
    if _generates(function):
        raise runs_too_late(function)


def is_awaited(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    # asgiref knows coroutine functions that were marked as such, too.
    if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
        return True
    # dispatch() of an asynchronous view is a plain function, and returns a coroutine.
    method = function.func if isinstance(function, functools.partial) else function
    view = getattr(method, "__self__", None)
    return getattr(method, "__name__", "") == "dispatch" and getattr(view, "view_is_async", False)


def _generates(function: Callable[..., Any]) -> bool:
    """Whether calling it runs nothing of its body; also with contextlib.contextmanager over it."""
    if getattr(function, "__globals__", {}).get("__name__") == "contextlib":
        function = inspect.unwrap(function)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def without_transaction(function: Callable[..., Any]) -> TypeError:
    name = getattr(function, "__qualname__", function)
    return TypeError(
        f"distributed_lock with atomic cannot decorate the coroutine function {name}(): Django has"
        " no asynchronous transactions. Decorate the function that writes, without `async`, and"
        " call it with `await sync_to_async(function)(...)`."
    )


def runs_too_late(function: Callable[..., Any]) -> TypeError:
    what = "the generator function " if _generates(function) else ""
    return TypeError(
        f"distributed_lock cannot decorate {what}{getattr(function, '__qualname__', function)}():"
        " its body runs after the call has returned, when the lock is released. Use `with` within"
        " the body, or decorate the coroutine function itself."
    )
