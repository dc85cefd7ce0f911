"""How a function becomes a task whose runs exclude each other."""

from __future__ import annotations

import functools
import inspect
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, overload

from celery import Task
from celery._state import _get_active_apps, connect_on_app_finalize  # See _make_task().
from celery.app import app_or_default
from celery.exceptions import Ignore, Retry
from celery.local import Proxy

from django_redislock.celery.message import (
    call_of_id,
    carried,
    carrying,
    delay_of,
    visibility_timeout,
)
from django_redislock.celery.options import (
    NEWEST,
    SingleInstance,
    TaskArguments,
    inherited,
    merge,
    naming,
    refuse_attributes,
    split,
    validation_of,
)
from django_redislock.celery.queued import (
    QueuedResult,
    debounced,
    hear_ends,
    is_exempt,
    packed,
    publish_once,
)
from django_redislock.celery.run import (
    TaskRun,
    check_baton,
    is_running,
    note_published_retry,
    replace_after_commit,
)
from django_redislock.exceptions import RunAbandoned
from django_redislock.jobs.run import RECOGNISED_FOR, current_lease
from django_redislock.lease import Baton
from django_redislock.misuse import runs_later
from django_redislock.options import taking
from django_redislock.process import cached_property
from django_redislock.rules.limit import all_makers
from django_redislock.rules.names import Written, check_name, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Concatenate, Generic, ParamSpec, TypeVar

    from celery import Celery
    from celery.canvas import Signature
    from celery.result import AsyncResult as Result  # SingleInstanceTask has a method of that name.

    from django_redislock.celery.options import TaskOptions
    from django_redislock.jobs.options import Skipped
    from django_redislock.lease import Lease
    from django_redislock.options import Seconds

    Parameters = ParamSpec("Parameters")
    Returned = TypeVar("Returned")


# Where Celery's own tasks are, such as those of chords and map(). Many of them run at a time.
_OF_CELERY = "celery.app.builtins"


class SingleInstanceTask(Task):  # type: ignore[misc] # Celery has no types
    """A task class whose runs exclude each other; see single_instance_task.

    If you own the app: ``@app.task(base=SingleInstanceTask, single_instance={...})``.
    """

    abstract = True
    single_instance: Mapping[str, Any] = {}

    # Whether to report STARTED. Celery's own track_started is switched off: it would report before
    # the lock is asked for, and overwrite the result of a finished run that is delivered again.
    reports_start = False

    single_instance_options: ClassVar[SingleInstance] = SingleInstance()  # The same, checked.
    _naming: ClassVar[Any] = None  # See naming().
    limits_of: ClassVar[Any] = None  # Makes the limits of a run, if it has several.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Celery makes a class of each task, with the function as `run`, and then wraps autoretry
        # around `run`. The lock is wrapped first, so that autoretry sees a LockTimeout.
        run = inspect.getattr_static(cls, "run")
        unguarded = getattr(run, "unguarded", run)
        body, bound = _function_of(unguarded)
        refuse_attributes(cls, body)
        if run is Task.run or body.__module__ == _OF_CELERY:
            return  # It is abstract; or one of Celery's own tasks, of an app with our class.
        _check_body(body)
        options = cls.single_instance_options = SingleInstance(**inherited(cls))
        options.check_redelivered(vars(cls))
        how = partial(naming, run=body, bound=bound, validation=validation_of(unguarded))
        named = how(options.limits[0].name if options.limits else options.key)
        if options.durable:
            for name in ("acks_late", "reject_on_worker_lost"):
                if getattr(cls, name) is None:
                    setattr(cls, name, True)
        if options.limits:
            function = partial(body, None) if bound else body
            cls.limits_of = staticmethod(all_makers(options.limits, function, how))
        cls._naming = None if named is None else staticmethod(named)
        if run is unguarded:  # Otherwise it is inherited, with the lock.
            cls.run = _guarded(run)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Called by Celery when the task is bound to its app, and so to the settings."""
        super().on_bound(app)
        if cls.track_started:
            cls.reports_start, cls.track_started = True, False
        if cls.single_instance_options.unique_queued:
            hear_ends()

    def retry(self, *args: Any, **options: Any) -> Retry:
        """As Celery's. A run that has published its retry is no success, however it ends.

        The retry keeps the caller's argsrepr and kwargsrepr, which hide arguments. An abandoned run
        is not retried, whatever autoretry_for says.
        """
        if isinstance(options.get("exc"), RunAbandoned):
            raise options["exc"]
        if "headers" in options:
            # They replace the message's headers; keep those of ours.
            options = carrying(options, **carried(self.request.headers))
        if not args and "args" not in options and "kwargs" not in options:
            hidden = {name: vars(self.request).get(name) for name in ("argsrepr", "kwargsrepr")}
            options = {name: shown for name, shown in hidden.items() if shown} | options
        try:
            retry = super().retry(*args, **options)
        except Retry:
            note_published_retry(self.request)
            raise
        note_published_retry(self.request)
        return retry

    def on_replace(self, sig: Any) -> Any:
        """As Celery's, but if the body is a transaction, after its commit."""
        replace = super().on_replace
        if replace_after_commit(self, lambda: replace(sig)):
            raise Ignore("Replaced by new task")
        return replace(sig)

    @cached_property
    def redelivered_after(self) -> float:
        """Seconds after which the broker delivers an unacknowledged message again."""
        return visibility_timeout(self.app)

    @cached_property
    def recognised_for(self) -> float:
        """Seconds for which a second delivery of a message is recognised."""
        return self.redelivered_after + RECOGNISED_FOR

    @cached_property
    def _own_name(self) -> str:
        return check_name(self.name)

    @cached_property
    def lock_template(self) -> Written:
        """The key as it was written; if it is a function or missing, the task's name."""
        options = self.single_instance_options
        key = options.limits[0].name if options.limits else options.key
        return Written(key if isinstance(key, str) else self._own_name)

    @property
    def lease(self) -> Lease | None:
        """The lease of the current run; the same as current_lease()."""
        return current_lease()

    def lock_name(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: float | None = None
    ) -> str:
        """The name of the lock of a run with these arguments.

        With once_per, it is that for the period of a call made *at* so many seconds since the
        epoch. Default: now.
        """
        name = self._naming(tuple(args), kwargs) if self._naming else self._own_name
        return self.single_instance_options.in_period(name, at)

    def AsyncResult(self, task_id: str, **how: Any) -> Result:  # noqa: N802 # Celery's name
        """As Celery's; with unique_queued, delay() returns one that tells of its call."""
        if not self.single_instance_options.unique_queued:
            return super().AsyncResult(task_id, **how)
        known = {"backend": self.backend, "task_name": self.name, "app": self._get_app()}
        return QueuedResult(task_id, **known, **how)

    def _carrying_baton(
        self, args: Any, kwargs: Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The keyword arguments of a call, without the baton, and the options that carry it.

        Both are unchanged if it is an argument of the task: by its name, or as one of its
        **kwargs, if it is no baton.

        Raises:
            LockMisuse: The baton is of another lock.
            ValueError: It is no baton, and no argument of the task.
        """
        parameters = signature_of(self.run).parameters
        if "baton" in parameters:
            return kwargs, options
        try:
            baton = Baton.read(kwargs["baton"])
        except ValueError:
            if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                return kwargs, options
            raise
        others = {name: value for name, value in kwargs.items() if name != "baton"}
        at = carried(options.get("headers")).get("at")
        name = self.lock_name(tuple(args or ()), others, at)
        check_baton(baton, name, self.single_instance_options)
        return others, carrying(options, baton=kwargs["baton"])

    def apply(self, args: Any = None, kwargs: Any = None, *others: Any, **options: Any) -> Any:
        """As Celery's; it takes a baton as apply_async() does, for canvases in eager mode."""
        if kwargs and "baton" in kwargs:
            kwargs, options = self._carrying_baton(args, kwargs, options)
        result = super().apply(args, kwargs, *others, **options)
        result.published = True  # In eager mode apply_async() returns it.
        return result

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Result:
        """As Celery's; with unique_queued only if no call with the same key waits in the queue.

        A keyword argument ``baton``, unless the task has one itself, is a baton from
        ``hand_over()``: the run goes on with that lease.

        Raises:
            LockMisuse: The baton is of another lock.
            ValueError: It is no valid baton; or debounce does not take a baton, or the call's own
                countdown, eta or expires.
            ImproperlyConfigured: unique_queued is "newest", and a majority of servers decides.
        """
        at = None
        if self.single_instance_options.once_per or self.single_instance_options.lock.replace:
            # A retry goes on in the period of its call.
            at = carried(options.get("headers")).get("at") or time.time() + delay_of(options)
            options = carrying(options, at=at)
        given = options
        if kwargs and "baton" in kwargs:
            kwargs, options = self._carrying_baton(args, kwargs, options)
        has_baton = options is not given
        task_id = task_id and str(task_id)  # Celery takes a UUID too.
        if task_id and (call := call_of_id(options)):
            options = carrying(options, call=call)

        # By name: many task classes have apply_async(args, kwargs, **options).
        named = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}

        def publish(task_id: str | None, how: Mapping[str, Any] = options) -> Result:
            return super(SingleInstanceTask, self).apply_async(
                args, kwargs, task_id=task_id, **named, **how
            )

        depends = {**options, "task_id": task_id, "link": link, "link_error": link_error}
        is_unique = self.single_instance_options.unique_queued
        if has_baton and self.single_instance_options.debounce is not None:
            raise ValueError(
                f"A call of {self.name} cannot take a baton: it would go on with the lease at once,"
                " and debounce puts it off. Leave baton out, or call a task without debounce."
            )
        if not is_unique or has_baton or is_exempt(self, depends):
            return publish(task_id)
        if self.single_instance_options.debounce is not None:
            options = debounced(self, options)
        name = self.lock_name(tuple(args or ()), kwargs or {}, at)
        arguments, of = b"", self.name
        if self.single_instance_options.unique_queued == NEWEST:
            arguments = packed(self, args, kwargs, options)
            if self.limits_of:
                # The run that waits takes its own limits, so they must be those of this call too.
                limits = self.limits_of(tuple(args or ()), kwargs or {})
                of = "|".join([of, *(f"{limit.name}#{limit.value}" for limit in limits)])
        return publish_once(self, name, publish, options, arguments, of=of)


def _function_of(run: Any) -> tuple[Callable[..., Any], bool]:
    """The function behind a task class's ``run``, and whether it gets the task."""
    bound = not isinstance(run, staticmethod)
    function = run if bound else run.__func__
    # Decorators of the function are a part of it: they may change what it takes and returns.
    return (function if validation_of(run) is None else function.__wrapped__), bound


def _guarded(run: Any) -> Callable[..., Any]:
    """The method ``run`` of a task class, with the lock around it."""
    function, bound = _function_of(run)

    @functools.wraps(function)
    def guarded_run(task: Task, /, *args: Any, **kwargs: Any) -> Any:
        body = run.__get__(task, type(task))
        if type(task).run is not guarded_run and is_running(task.request):
            return body(*args, **kwargs)  # Called by super().run() of a subclass.
        return TaskRun(task, args, kwargs).execute(body)

    guarded_run.unguarded = run  # type: ignore[attr-defined]
    if not bound:  # The method gets the task, also if its body does not.
        guarded_run.__signature__ = _with_self(function)  # type: ignore[attr-defined]
    return guarded_run


def _with_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = signature_of(function)
    # No two parameters may have the same name.
    name = "_task" if "self" in signature.parameters else "self"
    itself = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[itself, *signature.parameters.values()])


if TYPE_CHECKING:

    class TaskOf(SingleInstanceTask, Generic[Parameters, Returned]):
        """A function under single_instance_task: a task that takes its arguments."""

        def __call__(
            self, *args: Parameters.args, **kwargs: Parameters.kwargs
        ) -> Returned | Skipped: ...

        @overload
        def delay(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result: ...
        @overload
        def delay(self, *args: Any, baton: str, **kwargs: Any) -> Result: ...
        def delay(self, *args: Any, **kwargs: Any) -> Result: ...

        def delay_on_commit(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None: ...

        def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None: ...

        # A chain may add the arguments that are missing.
        def s(self, *args: Any, **kwargs: Any) -> Signature: ...

        def si(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Signature: ...


@overload
def single_instance_task(
    function: Callable[Parameters, Returned], /
) -> TaskOf[Parameters, Returned]: ...


@overload
def single_instance_task(
    first: Seconds | None = None, /, *, bind: Literal[True], **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[Any, Parameters], Returned]], TaskOf[Parameters, Returned]]: ...


@overload
def single_instance_task(
    first: Seconds | None = None, /, *, bind: Literal[False] = False, **options: Unpack[TaskOptions]
) -> Callable[[Callable[Parameters, Returned]], TaskOf[Parameters, Returned]]: ...


# Options of its own may be those of its base class, so here they are not checked.
@overload
def single_instance_task(
    first: Seconds | None = None, /, *, base: type[Any], bind: Literal[True], **options: Any
) -> Callable[[Callable[Concatenate[Any, Parameters], Returned]], TaskOf[Parameters, Returned]]: ...


@overload
def single_instance_task(
    first: Seconds | None = None,
    /,
    *,
    base: type[Any],
    bind: Literal[False] = False,
    **options: Any,
) -> Callable[[Callable[Parameters, Returned]], TaskOf[Parameters, Returned]]: ...


@taking(TaskArguments)
def single_instance_task(first: Any = None, /, **options: Any) -> Any:
    """Make a Celery task of which one run happens at a time. Write it in place of @shared_task.

    All options of @shared_task work too (bind, queue, acks_late, autoretry_for, …). A first
    positional number is the ttl. Durations are seconds or a timedelta; None means the setting.

    Args:
        {options}

    Raises:
        TypeError, ValueError: An option is unknown, of the wrong type, out of range or useless with
            the others; or the decorated object is no function, or its body runs after the call.
        InvalidLockName: The key cannot be a lock's name, or uses an argument that the task does not
            take.
    """
    if callable(first) or isinstance(first, classmethod | property):
        return _make_task(first, {})
    if isinstance(first, str):
        raise TypeError(
            f"single_instance_task takes only ttl by position. Write key={first!r} if that is the"
            f" name of the lock, or name={first!r} if it is that of the task."
        )
    if first is not None:
        if "ttl" in options:
            raise TypeError("single_instance_task got ttl twice: by position and by name.")
        options["ttl"] = first
    return lambda function: _make_task(function, options)


def _make_task(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    if isinstance(function, Task):
        raise TypeError(_in_the_wrong_place(function, options))
    if inspect.isclass(function) or isinstance(function, staticmethod | classmethod | property):
        raise TypeError(
            f"single_instance_task makes a task of a function, not of {function!r}: a worker has no"
            " object and no class to call it on. Write it above a function of a module, which may"
            " call the method."
        )
    _check_body(function)
    ours, theirs = split(options)
    base = theirs.pop("base", None)
    # Check now, at the line that is wrong, not when the app is set up.
    checked = SingleInstance(**merge([inherited(base or Task), ours]))
    checked.check_redelivered(theirs)
    bound = bool(theirs.get("bind"))
    how = partial(naming, run=function, bound=bound)
    how(checked.key)
    all_makers(checked.limits or (), partial(function, None) if bound else function, how)

    def register(app: Celery) -> Task:
        return app.task(
            function,
            base=_with_lock(base or app.Task),
            single_instance=ours,
            shared=False,
            lazy=False,
            **theirs,
        )

    # As shared_task does, with the same two names from Celery's private module. We cannot call it:
    # each app needs another base class, since only the app knows its own class for tasks, such as
    # the one with delay_on_commit in Django projects.
    connect_on_app_finalize(register)
    for app in _get_active_apps():
        if app.finalized:
            register(app)
    name = theirs.get("name")

    def task_of_current_app() -> Task:
        app = app_or_default()
        return app.tasks[name or app.gen_task_name(function.__name__, function.__module__)]

    return Proxy(task_of_current_app)


def _check_body(function: Callable[..., Any]) -> None:
    if runs_later(function):
        name = getattr(function, "__qualname__", function)
        raise TypeError(
            f"{name}() cannot be a task: Celery would not wait for its body, and"
            " so the lock would not last as long. Make it an ordinary function."
        )


def _with_lock(base: type[Task]) -> type[Task]:
    """The class of a task, derived from ours too."""
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
