"""@single_instance: a function of which only one run happens at a time, anywhere."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from asgiref.sync import AsyncToSync

from django_redislock.holder import Activity
from django_redislock.jobs.options import JobOptions
from django_redislock.jobs.run import JobRun, Named
from django_redislock.lock import explaining
from django_redislock.misuse import (
    check_decorated,
    finished,
    is_awaited,
    is_decorated,
    without_transaction,
)
from django_redislock.rules.limit import all_makers
from django_redislock.rules.names import Written, check_name, formatter
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from datetime import timedelta

    from django_redislock.jobs.options import Conflict, Skipped
    from django_redislock.jobs.run import NameOf
    from django_redislock.monitors import Monitor
    from django_redislock.rules.limit import Limit

    Seconds = float | timedelta
    OnConflict = Literal["skip", "raise", "wait"]
    OnUnavailable = Literal["raise", "run"]

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
def single_instance(
    name: str | None = None,
    *,
    ttl: Seconds | None = None,
    renew: bool | None = None,
    max_hold: Seconds | None = None,
    min_hold: Seconds = 0,
    once: Seconds | Literal["database"] = 0,
    atomic: bool | str = False,
    limit: int | None = None,
    limits: Sequence[Limit] | None = None,
    wait: Seconds | None = None,
    using: str = DEFAULT_ALIAS,
    on_conflict: OnConflict | Callable[[Conflict], Any] = "skip",
    on_unavailable: OnUnavailable = "raise",
    monitor: Monitor | Sequence[Monitor] | None = None,
) -> Decorator: ...


@explaining
def single_instance(
    name: Any = None,
    *,
    ttl: Seconds | None = None,
    renew: bool | None = None,
    max_hold: Seconds | None = None,
    min_hold: Seconds = 0,
    once: Seconds | Literal["database"] = 0,
    atomic: bool | str = False,
    limit: int | None = None,
    limits: Sequence[Limit] | None = None,
    wait: Seconds | None = None,
    using: str = DEFAULT_ALIAS,
    on_conflict: OnConflict | Callable[[Conflict], Any] = "skip",
    on_unavailable: OnUnavailable = "raise",
    monitor: Monitor | Sequence[Monitor] | None = None,
) -> Any:
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
        ttl: How long the lease lasts unless renewed. If the process dies, the lock is free by then.
        renew: Whether the lease is renewed, every ttl/3, while the body runs.
        max_hold: How long the lease is renewed at most.
        min_hold: After a success the lock stays taken at least this long, counted from the grant,
            so that a host whose clock is late does not run the job again.
        once: After a success, later runs are skipped for this long. A failure leaves it free.
            "database" commits a row together with the writes of the body, and skips later runs
            until that row is deleted; it needs atomic.
        atomic: Whether the body is a transaction too, see Lease.atomic(); a string is the alias in
            DATABASES. The commit comes before the release. Not for coroutine functions.
        limit: How many runs may happen at a time, first come first served. Each has a permit with a
            number, current_lease().permit.
        limits: In place of a name and a limit: a list of Limit, the narrowest first; see
            distributed_lock(). A run takes all or none. The first one names the lock, for records.
        wait: How long to queue for the lock with on_conflict="wait"; math.inf waits for ever.
        using: Alias in REDISLOCK.
        on_conflict: What a run does if the lock is not free. "skip" returns Skipped. "raise" raises
            LockTimeout. "wait" queues for the lock, then skips. A function gets a Conflict, and its
            return value is the result.
        on_unavailable: What a run does if Redis cannot answer: "raise" raises LockUnavailable,
            "run" runs without the lock.
        monitor: A Monitor of django_redislock.monitors, or a list of them, such as
            ``Ping(url)`` or ``Sentry("nightly")``. It is told of the start and end of each run
            that is not skipped; the lock does not wait for it.

    Raises:
        TypeError, ValueError: An argument is unknown, of the wrong type, out of range or useless
            with the others; or the decorated object is no function, or its body runs only after the
            call, or the lock would be named after a class or a lambda.
        InvalidLockName: The name cannot be a lock's name, or uses an argument that the function
            does not take.
    """
    given = {argument: value for argument, value in locals().items() if argument != "name"}
    if name is not None and not (isinstance(name, str) or is_decorated(name)):
        check_name(name)  # Its error says that the name is no string.
    options = JobOptions.parse(given)
    if is_decorated(name):
        return _make_job(name, None, options)
    return lambda function: _make_job(function, name, options)


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
        return Named(naming(name, function, job), Written(name or job))
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
