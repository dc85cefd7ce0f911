"""@single_instance: a function of which only one run happens at a time, anywhere."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from asgiref.sync import AsyncToSync

from django_redislock.holder import Activity
from django_redislock.jobs.options import JobArguments, JobOptions
from django_redislock.jobs.run import JobRun, Named
from django_redislock.misuse import (
    check_decorated,
    finished,
    is_awaited,
    is_decorated,
    without_transaction,
)
from django_redislock.options import taking
from django_redislock.rules.limit import all_makers
from django_redislock.rules.names import Written, check_name, formatter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from django_redislock.jobs.options import Skipped
    from django_redislock.jobs.run import NameOf

Parameters = ParamSpec("Parameters")
Inner = ParamSpec("Inner")
Returned = TypeVar("Returned")
Returned_co = TypeVar("Returned_co", covariant=True)


class SingleInstanceFunction(Protocol[Parameters, Returned_co]):
    """A function under @single_instance: the same, under a lock."""

    __wrapped__: Callable[Parameters, Any]

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned_co:
        """Run it, or skip it."""

    def lock_name(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> str:
        """The name of the lock of a call with these arguments."""

    @overload
    def __get__(
        self, instance: None, owner: Any = None
    ) -> SingleInstanceFunction[Parameters, Returned_co]: ...
    @overload
    def __get__(
        self: SingleInstanceFunction[Concatenate[Any, Inner], Any],
        instance: object,
        owner: Any = None,
    ) -> Callable[Inner, Returned_co]: ...


class Decorator(Protocol):
    """The result of single_instance(): it makes a job of a function."""

    @overload
    def __call__(
        self, function: Callable[Parameters, Coroutine[Any, Any, Returned]], /
    ) -> SingleInstanceFunction[Parameters, Coroutine[Any, Any, Returned | Skipped]]: ...
    @overload
    def __call__(
        self, function: Callable[Parameters, Returned], /
    ) -> SingleInstanceFunction[Parameters, Returned | Skipped]: ...


@overload
def single_instance(
    function: Callable[Parameters, Coroutine[Any, Any, Returned]], /
) -> SingleInstanceFunction[Parameters, Coroutine[Any, Any, Returned | Skipped]]: ...
@overload
def single_instance(
    function: Callable[Parameters, Returned], /
) -> SingleInstanceFunction[Parameters, Returned | Skipped]: ...
@overload
def single_instance(name: str | None = None, **options: Unpack[JobArguments]) -> Decorator: ...


@taking(JobArguments)
def single_instance(name: Any = None, **options: Any) -> Any:
    """Let one run of a function happen at a time, anywhere; other runs meanwhile are skipped.

    For functions, coroutine functions and methods: ``@single_instance`` or
    ``@single_instance("import:{source}", ttl=60)``. A skipped run returns Skipped, which is false.
    In the body, ``django_redislock.jobs.current_lease()`` is the lease. Durations are seconds or a
    timedelta; None means the setting in REDISLOCK.

    The function gets two attributes: ``lock_name(...)`` returns the name of the lock for these
    arguments, and ``__wrapped__`` is the function without the lock.

    Args:
        name: Name of the lock: a format string over the function's arguments, defaults applied.
            Default: the module and qualified name of the function, whatever its arguments are.
        {options}

    Raises:
        TypeError, ValueError: An argument is unknown, of the wrong type, out of range or useless
            with the others; or the decorated object is no function, or its body runs only after the
            call, or the lock would be named after a class or a lambda.
        InvalidLockName: The name cannot be a lock's name, or uses an argument that the function
            does not take.
    """
    if name is not None and not (isinstance(name, str) or is_decorated(name)):
        check_name(name)  # Its error says that the name is no string.
    how = JobOptions(**options)
    if is_decorated(name):
        return _make_job(name, None, how)
    return lambda function: _make_job(function, name, how)


def _make_job(function: Callable[..., Any], name: str | None, options: JobOptions) -> Any:
    line = "@single_instance" + (f"({name!r})" if name else "")
    check_decorated(function, line)
    job = full_name(function)
    if name is None and not options.limits:
        _check_named(function)
    named = namings(name, options, function, job)
    activity = Activity(task=job)
    body = finished(function, line)
    options.check_answered(awaited=is_awaited(function))

    if is_awaited(function):
        if options.atomic is not None:
            raise without_transaction(function, line)

        @functools.wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            of_call = JobRun(activity, options, named, args, kwargs, sender=arun)
            return await of_call.aexecute(body)

        return _with_name(arun, named.name_of)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        of_call = JobRun(activity, options, named, args, kwargs, sender=run)
        return of_call.execute(body)

    return _with_name(run, named.name_of)


def full_name(function: Callable[..., Any]) -> str:
    """Module and qualified name of a function: the job, as operators see it."""
    function = _underlying(function)
    own = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{_module_of(function)}.{own}"


def _module_of(function: Callable[..., Any]) -> str:
    """Where it is defined. To Python, all scripts that run have one name.

    So ``python -m shop.nightly`` has the name by which others import it, and ``python nightly.py``
    that of its file. A child that multiprocessing has spawned calls its parent's script otherwise.
    """
    module = function.__module__
    if module not in {"__main__", "__mp_main__"}:
        return module
    # Its own globals: of a script that a profiler runs, sys.modules has the profiler.
    script = getattr(inspect.unwrap(function), "__globals__", {})
    if script.get("__name__") != module:
        script = vars(sys.modules[module]) if module in sys.modules else {}
    if (spec := script.get("__spec__")) is not None and spec.name != "__main__":
        return str(spec.name)
    file = PurePath(script.get("__file__", "__main__"))
    return (file.parent.stem if file.stem == "__main__" else file.stem) or "__main__"


def _underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that is called in the end, if objects that have no name of their own call it."""
    while isinstance(function, functools.partial | AsyncToSync):
        function = function.func if isinstance(function, functools.partial) else function.awaitable
    return function


def _check_named(function: Callable[..., Any]) -> None:
    """Refuse a function after which no lock can be named, since others have its name, too.

    Raises:
        TypeError: It is such a function.
    """
    underlying = _underlying(function)
    if not hasattr(underlying, "__qualname__"):
        others = (
            f"Named after the class {type(underlying).__qualname__}, all its objects would share"
            " one lock."
        )
    elif underlying.__name__ == "<lambda>":
        others = "All lambdas of its module would share one lock."
    else:
        return
    raise TypeError(
        f"single_instance was given {function!r}, which has no name of its own. {others} Give the"
        " lock a name: single_instance('name')."
    )


def namings(name: str | None, options: JobOptions, function: Callable[..., Any], job: str) -> Named:
    """How a call gets the name of its lock, see naming(); and its limits, if it has several.

    Raises:
        ValueError: It has both a name and limits.
        InvalidLockName: The name is no string, or cannot be a lock's name.
    """
    if not options.limits:
        if name is not None:
            check_name(name, template=True)
        options.check_named(name or job)
        return Named(options.in_periods(naming(name, function, job)), Written(name or job))
    if name is not None:
        raise ValueError("limits say the names of the locks themselves: leave the name out.")
    makers = all_makers(options.limits, function, lambda one: naming(one, function, job))
    first = options.limits[0].name
    return Named(naming(first, function, job), Written(first), makers)


def naming(name: str | None, function: Callable[..., Any], job: str) -> NameOf:
    """A function that makes the name of the lock of a call of *function*.

    Args:
        name: A format string over the arguments; None is the job's own name.
        function: The function that is called.
        job: The full name of the job.
    """
    if name is not None:
        return formatter(name, function)
    own = check_name(job)
    return lambda args, kwargs: own


def _with_name(run: Any, name_of: NameOf) -> Any:
    run.lock_name = lambda *args, **kwargs: name_of(args, kwargs)
    return run
