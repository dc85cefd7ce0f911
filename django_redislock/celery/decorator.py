"""How a function becomes a task whose runs exclude each other."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery import Task
from celery._state import _get_active_apps, connect_on_app_finalize, get_current_app
from celery.local import Proxy

from django_redislock.celery.options import SingleInstance, split
from django_redislock.celery.run import current_lease, guarded, name_of
from django_redislock.conf import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from celery import Celery

    from django_redislock.lease import Lease

Function = TypeVar("Function", bound="Callable[..., Any]")


class SingleInstanceTask(Task):  # type: ignore[misc] # Celery has no types
    """A task class whose runs exclude each other; see single_instance_task.

    For those who own the app: ``@app.task(base=SingleInstanceTask, single_instance={...})``.
    """

    abstract = True
    single_instance: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Celery makes a class of each task, with the function as `run`. The lock belongs around
        # that, so that it is within autoretry, and outside of nothing but the body.
        if "run" in vars(cls):
            cls.run = guarded(vars(cls)["run"], SingleInstance.parse(cls.single_instance))

    @property
    def lease(self) -> Lease | None:
        """The lease of the current run; the same as current_lease()."""
        return current_lease()


@overload
def single_instance_task(function: Function, /) -> Function: ...


@overload
def single_instance_task(
    ttl: float | timedelta | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    renew: bool | None = None,
    max_hold: float | timedelta | None = None,
    min_hold: float | timedelta = 0,
    once: float | timedelta = 0,
    on_conflict: str = "skip",
    using: str = DEFAULT_ALIAS,
    **task_options: Any,
) -> Callable[[Function], Function]: ...


def single_instance_task(first: Any = None, /, **options: Any) -> Any:
    """Make a Celery task of which one run happens at a time. Stands where @shared_task stands.

    All options of @shared_task work too (bind, queue, acks_late, autoretry_for, …). A first
    positional number is the ttl. Durations are seconds or a timedelta; None means the setting.

    Args:
        key: Name of the lock: a format string over the task's arguments, defaults applied, or a
            function that is given them. Default: the task's full name.
        ttl: How long the lease lasts unless renewed: a dead worker blocks others no longer.
        renew: Whether the lease is renewed, every ttl/3, while the body runs.
        max_hold: The lease is renewed at most this long.
        min_hold: After a success the lock stays taken at least this long, counted from when it
            was granted, so that a server whose clock is late does not run the job again. After
            a failure it is free at once.
        once: After a success, later runs are skipped for this long. A failure leaves it free.
        on_conflict: What a run does that finds another one: "skip" returns a marked value,
            ``{"skipped": "busy", "lock": name, "holder": "host:pid task-id"}``; "raise" raises
            LockTimeout.
        using: Alias in REDISLOCK.

    Raises:
        TypeError, ValueError: An option is unknown, of the wrong type or out of range.
        InvalidLockName: The key names an argument that the task does not take.
    """
    if callable(first):
        return _make_task(first, {})
    if first is not None:
        if "ttl" in options:
            raise TypeError("single_instance_task got ttl twice: by position and by name.")
        options["ttl"] = first
    return lambda function: _make_task(function, options)


def _make_task(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    if isinstance(function, Task):
        raise TypeError(_in_the_wrong_place(function, options))
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{function.__qualname__}() cannot be a task: Celery would not wait for its body, and"
            " so the lock would not last as long. Make it an ordinary function."
        )
    ours, theirs = split(options)
    # Checked now, at the line that is wrong, and not when the app is set up.
    SingleInstance.parse(ours)
    name_of(ours.get("key"), function, bound=bool(theirs.get("bind")))
    base = theirs.pop("base", None)

    def register(app: Celery) -> Task:
        return app.task(
            function,
            base=_with_lock(base or app.Task),
            single_instance=ours,
            shared=False,
            lazy=False,
            **theirs,
        )

    # As shared_task does; but an app's own class for tasks, such as the one with delay_on_commit
    # in Django projects, is known to the app alone.
    connect_on_app_finalize(register)
    for app in _get_active_apps():
        if app.finalized:
            register(app)
    name = theirs.get("name")

    def task_of_current_app() -> Task:
        app = get_current_app()
        return app.tasks[name or app.gen_task_name(function.__name__, function.__module__)]

    return Proxy(task_of_current_app)


def _with_lock(base: type[Task]) -> type[Task]:
    """The class of a task, made one of ours."""
    if issubclass(base, SingleInstanceTask):
        return base
    return type(base.__name__, (SingleInstanceTask, base), {"abstract": True})


def _in_the_wrong_place(task: Task, options: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    name = task.name.rpartition(".")[2]
    return (
        f"single_instance_task was given a task that is made already, {task.name}. It stands in"
        " the place of @shared_task and @app.task, and takes their options too. Write this line"
        f" alone above the function:\n\n    @single_instance_task({given})\n    def {name}(...):"
    )
