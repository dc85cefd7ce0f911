"""Calls that a lock refuses since they could not end well, and what to write instead."""

from __future__ import annotations

import asyncio
import functools
import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asgiref.sync import iscoroutinefunction

from django_redislock.exceptions import LockMisuse
from django_redislock.holder import running_loop, this_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from django_redislock.rules.circles import Circle


# --- objects that a lock cannot decorate, and the line to write instead ---------------------------

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# Queues whose tasks are objects of their own, by module, and the decorator that makes them.
_TASKS = {
    "dramatiq": ("an actor of dramatiq", "@dramatiq.actor"),
    "huey": ("a task of huey", "@huey.task()"),
    "procrastinate": ("a task of procrastinate", "@app.task"),
}


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


def needs_a_block(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "with atomic, the lock needs a block that ends its transaction. Write `with`; or"
        " leave atomic out, and write `with lock.lease.atomic():` between acquire() and"
        " release().",
    )


def has_no_transactions(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "Django has no asynchronous transactions. Call a function through sync_to_async,"
        " and write `with` in that.",
    )


def awaits_a_commit(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "release_on_commit=True is for blocking code, since Django has no asynchronous"
        " transactions. Use `with` in the function that opens the transaction, and call that by"
        " `await sync_to_async(function)()`.",
    )


def blocks_the_loop(name: str, instead: str) -> LockMisuse:
    return LockMisuse(
        name,
        "blocking code asks for it in a thread whose event loop runs, so all its"
        f" tasks would stand still. Use {instead}; or call it in another thread, as"
        " sync_to_async does.",
    )


def is_patched_late(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "gevent or eventlet has patched `threading` after this package was imported. All greenlets"
        " would be one holder, and wait for each other's mutexes for ever. Patch before Django is"
        " imported; of `gunicorn --preload`, that is `from gevent import monkey;"
        " monkey.patch_all()` in gunicorn.conf.py.",
    )


def shares_a_thread(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "another asyncio task holds it by the thread that sync_to_async lends to both, and"
        " waiting would block that thread. Write `async with"
        f" distributed_lock({name!r})` in the tasks.",
    )


def mixes_limits(name: str, limit: int | None) -> LockMisuse:
    now, before = "with a limit", "without one"
    if limit is None:
        now, before = "without a limit", "with one"
    return LockMisuse(
        name,
        f"it is asked for {now} here, and was {before} elsewhere in this process. Write the same"
        " limit wherever the lock is taken.",
    )


def waits_for_itself(
    name: str,
    holder: object,
    me: object,
    *,
    blocking: bool,
    of_job: bool = False,
    limit: int = 1,
) -> LockMisuse | None:
    """The error if the wait of *me* for *holder* would never end; None if it may.

    Args:
        name: The lock.
        holder: The thread or asyncio task of this process that holds it.
        me: The one that asks for it.
        blocking: Whether the wait blocks the thread.
        of_job: Whether it is asked for by the run of a job.
        limit: How many permits it has; the error is for a holder of all of them.
    """
    it = "it" if limit == 1 else f"all of its {limit} permits"
    if holder is me:
        who = "asyncio task" if isinstance(me, asyncio.Task) else "thread"
        cure = (
            "Call the work without the lock: of a function with @single_instance, that is its"
            " `__wrapped__`."
            if of_job
            else "Pass reentrant=True to nest, or release it first."
        )
        return LockMisuse(
            name, f"this {who} holds {it} already, so waiting for it would never end. {cure}"
        )
    if isinstance(me, asyncio.Task) and holder is this_thread():
        return LockMisuse(
            name,
            "blocking code of this thread holds it, beneath the event loop, and cannot release"
            " it before the loop has ended.",
        )
    if blocking and isinstance(holder, asyncio.Task) and holder.get_loop() is running_loop():
        return LockMisuse(
            name,
            "a task of this thread's event loop holds it, and cannot release it while this"
            " call blocks the loop. Use `async with`.",
        )
    return None


def waits_in_a_circle(
    name: str, circle: Circle, me: object, with_limit: Mapping[str, bool]
) -> LockMisuse:
    """The error of a wait that can never end, and was the last to begin.

    Args:
        name: The lock that is waited for.
        circle: The circle that the wait is in.
        me: The thread or asyncio task that waits.
        with_limit: Of the locks of this process, whether each is taken with a limit, maybe of 1.
    """
    who = "this asyncio task" if isinstance(me, asyncio.Task) else "this thread"
    cure = "Take these locks in one order everywhere."
    if len({(link.wanted_by.alias, link.wanted_by.name) for link in circle.links}) == 1:
        cure = "Wait for no second permit of a lock while you hold one."
    elif wanted := circle.wanted:
        together = ", ".join(map(repr, wanted))
        if any(limit > 1 or with_limit.get(one) for one, limit in wanted.items()):
            limits = ", ".join(f"Limit({one!r}, {limit})" for one, limit in wanted.items())
            together = f"limits=[{limits}]"
        cure = f"Take them together, by distributed_lock({together}), or in one order everywhere."
    return LockMisuse(name, f"this wait would never end: {circle.told(who)}. {cure}")


def holds_several(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "this handle holds several leases, and none of them is of this thread or asyncio"
        " task, so it is not known which one to release.",
    )


def holds_none(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "this thread or asyncio task holds no lease by this handle, so there is none to release."
        " Call release() only after acquire() has returned True. A block's lease is released by its"
        " end, or by whoever entered it.",
    )


def hands_nothing_over(alias: str, name: str) -> LockMisuse:
    return LockMisuse(
        name,
        f"the servers of REDISLOCK[{alias!r}] cannot hand a lease over, since none of them decides"
        " alone who has a lock. Release it, and let the task wait for it; or keep the lock on"
        " another backend.",
    )


def keeps_no_rates(alias: str, name: str) -> LockMisuse:
    return LockMisuse(
        name,
        f"REDISLOCK[{alias!r}] is a quorum, where no server alone counts starts. Keep the Rate on"
        " an alias with one server, by `using`.",
    )


def counts_arguments(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "the number of its limit, or its rate, is a function of arguments, and a block has none."
        " Write the value there; or write @distributed_lock(limits=[...]) above a function that"
        " takes them.",
    )


def is_joint(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "the lease of several locks cannot be handed over as one. Take each lock by a"
        " distributed_lock() of its own, and hand over each lease.",
    )


def is_of_run(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "its lease is that of the run of a job. The run needs it to note its end, so it cannot be"
        " handed over. Let the next run wait for the lock; or take another lock by"
        " distributed_lock(), and hand that over.",
    )


def is_held_further(name: str, *, by_transaction: bool) -> LockMisuse:
    if by_transaction:
        return LockMisuse(
            name,
            "a transaction is open, so the lease cannot be handed over: its next holder would not"
            " see what is written. Call hand_over() in transaction.on_commit(), and hold the lock"
            " until then by release_on_commit=True.",
        )
    return LockMisuse(
        name,
        "its lease is held by a reentrant acquire too, so it cannot be handed over. Call"
        " hand_over() when only the outermost acquire is left.",
    )


def belongs_to_the_parent(name: str) -> LockMisuse:
    return LockMisuse(name, "its lease belongs to the parent process; only that may release it.")
