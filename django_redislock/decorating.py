"""Objects that a lock cannot decorate, and the line to write instead."""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asgiref.sync import iscoroutinefunction

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# Arguments of other libraries, and their names here.
_CALLED_HERE = {
    "timeout": "ttl=, how long the lease lasts unless renewed, or wait=, how long to wait for it",
    "expire": "ttl=, how long the lease lasts unless renewed",
    "name": "the name by position, as in distributed_lock('report')",
    "blocking": "wait=, how long to wait for it; 0 tries once",
    "blocking_timeout": "wait=, how long to wait for it; 0 tries once",
}


# Queues whose tasks are objects of their own, by module, and the decorator that makes them.
_TASKS = {
    "dramatiq": ("an actor of dramatiq", "@dramatiq.actor"),
    "huey": ("a task of huey", "@huey.task()"),
    "procrastinate": ("a task of procrastinate", "@app.task"),
}


def misspelt(of: str, known: list[str], args: tuple[object, ...], kwargs: Any) -> str:
    """What is wrong with the arguments of a decorator; "" if that is not known.

    Args:
        of: The name of the decorator.
        known: The names of its parameters.
        args: Its arguments by position.
        kwargs: Its arguments by name.
    """
    unknown = next((name for name in kwargs if name not in known), "")
    if len(args) > 1 and not unknown:
        return (
            f"{of} takes only names by position: say what the other arguments are, as"
            f" in {of}('report', ttl=30, wait=5)."
        )
    here = _CALLED_HERE.get(unknown, f"one of {', '.join(known[1:])}")
    return unknown and f"{of} takes no argument {unknown!r}; pass {here}."


def is_decorated(first: object) -> bool:
    """Whether the first argument of a decorator is the decorated object, and not the name."""
    is_one = callable(first) or isinstance(first, classmethod | property)
    return is_one or _is_task_of_django(first)


def _is_task_of_django(one: object) -> bool:
    return type(one).__module__.startswith(("django.tasks.", "django_tasks."))


def nameless(function: object) -> TypeError:
    """The error for @distributed_lock without a name."""
    name = getattr(function, "__name__", "name")
    line = f"@distributed_lock({name!r})"
    check_decorated(function, line)
    return TypeError(
        f"@distributed_lock needs the name of the lock: write {line} above def {name}(...). The"
        " name may have arguments in it, as in 'report:{report_id}'."
    )


def check_decorated(function: object, line: str) -> None:
    """Refuse an object that would not run under the lock if *line* stood above it."""
    of = _decorator_of(line)
    # Look at nothing but the class, or Celery would set its application up.
    modules = {cls.__module__.partition(".")[0] for cls in type(function).__mro__}
    if "celery" in modules:
        raise TypeError(
            f"{of} was given a Celery task, and workers would run it without the lock."
            f" Write @shared_task above {line}, or @single_instance_task in their place."
        )
    what, above = "a task of Django", "@task"
    if queue := next((one for one in _TASKS if one in modules), ""):
        what, above = _TASKS[queue]
    if queue or _is_task_of_django(function):
        raise TypeError(
            f"{of} was given {what}, and workers would run it without the lock. Write {above} above"
            f" {line}."
        )
    if inspect.isclass(function):
        raise TypeError(
            f"{of} was given the class {function.__qualname__}, and only the making of"
            f" objects would be under the lock. Write {line} above a method; for a view,"
            f' @method_decorator({line[1:]}, name="dispatch") above the class.'
        )
    if isinstance(function, staticmethod | classmethod | property) or not callable(function):
        cure = f"; write @{type(function).__name__} above {line}" * hasattr(function, "__get__")
        raise TypeError(f"{of} decorates functions, not {function!r}{cure}.")
    if generates(function):
        raise _runs_too_late(function, line)


def _decorator_of(line: str) -> str:
    return line.removeprefix("@").partition("(")[0]


def finished(function: Callable[Parameters, Returned], line: str) -> Callable[Parameters, Returned]:
    """The same function, but its result must not have work left to do after the release."""

    def check(result: Returned) -> Returned:
        is_generator = inspect.isgenerator(result) or inspect.isasyncgen(result)
        if is_generator or inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # Or Python would say that it was never awaited.
            raise _runs_too_late(function, line)
        return result

    if is_awaited(function):

        @functools.wraps(function)
        async def afinished_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return check(await function(*args, **kwargs))  # type: ignore[misc] # see above

        return afinished_call  # type: ignore[return-value] # it is the coroutine that is returned

    @functools.wraps(function)
    def finished_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        return check(function(*args, **kwargs))

    return finished_call


def called(body: Callable[[], Returned], line: str) -> Callable[[], Returned]:
    """As finished(), for what is called at once by *line*, and not decorated.

    Raises:
        TypeError: It is no function, or its body would run after the call.
    """
    if not callable(body):
        raise TypeError(f"{line} calls a function, not {body!r}.")
    if runs_later(body):
        raise _runs_too_late(body, line)
    return finished(body, line)


# The results of calls that have run nothing of a body yet.
UNSTARTED = CoroutineType, GeneratorType, AsyncGeneratorType


def unstarted(run: object, result: object) -> TypeError:
    """The error for the body of a run that has returned one of these."""
    if inspect.iscoroutine(result):
        result.close()  # See above.
    kind = type(result).__name__.replace("_", " ")
    return TypeError(
        f"{run} has returned, but its {kind} would run when the lock is released. Do the work"
        " before: call asyncio.run() for a coroutine, and list() for a generator."
    )


def runs_later(function: Callable[..., Any]) -> bool:
    """Whether its body runs only after the call."""
    return is_awaited(function) or generates(function)


def check_callback(callback: object, of: str) -> None:
    """Refuse a callback that cannot be called, or whose call would run nothing of its body.

    Raises:
        TypeError: It is such a callback.
    """
    if not callable(callback):
        raise TypeError(f"{of} takes a function to call, not {callback!r}.")
    if runs_later(callback):
        name = getattr(callback, "__qualname__", callback)
        raise TypeError(
            f"{of} calls a plain function, in a thread. It would run nothing of {name}(), which is"
            " a coroutine function or a generator function. Pass a function that hands the work to"
            " your event loop: `lambda lease: asyncio.run_coroutine_threadsafe(work(), loop)`."
        )


def is_awaited(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    # asgiref knows coroutine functions that were marked as such, too.
    if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
        return True
    # dispatch() of an asynchronous view is a plain function, and returns a coroutine.
    method = function.func if isinstance(function, functools.partial) else function
    view = getattr(method, "__self__", None)
    return getattr(method, "__name__", "") == "dispatch" and getattr(view, "view_is_async", False)


def generates(function: Callable[..., Any]) -> bool:
    """Whether a call runs nothing of its body; also if contextlib.contextmanager is over it."""
    # Only a wrapper of contextlib: another one may call list(), and return when all is done.
    while getattr(function, "__globals__", {}).get("__name__") == "contextlib":
        if not hasattr(function, "__wrapped__"):  # One of its own functions.
            break
        function = function.__wrapped__
    return any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one)
        for one in (function, type(function).__call__)
    )


def without_transaction(function: Callable[..., Any], line: str) -> TypeError:
    name = getattr(function, "__qualname__", function)
    return TypeError(
        f"{_decorator_of(line)} with atomic cannot decorate the coroutine function {name}(): Django"
        " has no asynchronous transactions. Decorate the function that writes, without `async`, and"
        " call it with `await sync_to_async(function)(...)`."
    )


def _runs_too_late(function: Callable[..., Any], line: str) -> TypeError:
    what = "the generator function " if generates(function) else ""
    name = getattr(function, "__qualname__", function)
    verb, cure = "decorate", "Use `with` within the body, or decorate the coroutine function itself"
    if not line.startswith("@"):
        verb, cure = "run", "Decorate a coroutine function with @single_instance"
    return TypeError(
        f"{_decorator_of(line)} cannot {verb} {what}{name}(): its body runs after the call has"
        f" returned, when the lock is released. {cure}."
    )
