"""@single_instance_task: a Celery task of which only one run happens at a time, anywhere.

The lock is taken around the task's body, by the process that runs it. So a worker, eager mode, a
direct call, beat, ``send_task`` and every canvas behave alike; a lock that is taken when a task
is published, or in a Celery signal, guards none of them.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery import Task, shared_task

from django_redislock import signals
from django_redislock.conf import DEFAULT_ALIAS, SHORTEST_TTL, flag, seconds
from django_redislock.exceptions import LockTimeout
from django_redislock.flows import Done
from django_redislock.lease import Lease
from django_redislock.lock import Lock, Options, done_by, holder_of
from django_redislock.names import check_name, formatter
from django_redislock.owner import Activity, busy_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from django_redislock.flows import Busy

logger = logging.getLogger("django_redislock.celery")

Function = TypeVar("Function", bound="Callable[..., Any]")

CONFLICT_POLICIES = ("skip", "raise")

_current_lease: ContextVar[Lease | None] = ContextVar("redislock_task_lease", default=None)


def current_lease() -> Lease | None:
    """The lease under which the current task's body runs; None outside of one."""
    return _current_lease.get()


@dataclass(frozen=True, kw_only=True)
class SingleInstance:
    """The options of single_instance_task, checked. Durations are seconds."""

    key: str | Callable[..., str] | None = None
    ttl: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    once: float = 0.0
    on_conflict: str = "skip"
    using: str = DEFAULT_ALIAS

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SingleInstance:
        """Check the options, as given by hand.

        Raises:
            TypeError: An option is not known.
            ValueError: One is of the wrong type or out of range; the message names it.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(raw) - set(known)):
            raise TypeError(
                f"single_instance has unknown options: {', '.join(unknown)}."
                f" Known are: {', '.join(known)}."
            )
        options = dict(raw)
        for name in ("ttl", "max_hold"):
            if options.get(name) is not None:
                options[name] = seconds(options[name], name, least=SHORTEST_TTL)
        for name in ("min_hold", "once"):
            if name in options:
                options[name] = seconds(options[name] or 0, name)
        if options.get("renew") is not None:
            flag(options["renew"], "renew")
        key = options.get("key")
        if not (key is None or isinstance(key, str) or callable(key)):
            raise ValueError(
                f"key must be a format string over the task's arguments, or a function of them,"
                f" not {key!r}."
            )
        policy = options.get("on_conflict", "skip")
        if policy not in CONFLICT_POLICIES:
            choices = ", ".join(map(repr, CONFLICT_POLICIES))
            raise ValueError(f"on_conflict must be one of {choices}, not {policy!r}.")
        return cls(**options)


_OPTIONS = frozenset(field.name for field in fields(SingleInstance))


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
            cls.run = _guarded(vars(cls)["run"], SingleInstance.parse(cls.single_instance))

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
        raise TypeError(
            f"@single_instance_task stands in the place of @shared_task: write it alone above"
            f" {function.name.rpartition('.')[2]}(), and give it the options of both."
        )
    locking = {name: options[name] for name in options if name in _OPTIONS}
    for_celery = {name: options[name] for name in options if name not in _OPTIONS}
    base = for_celery.pop("base", Task)
    if not issubclass(base, SingleInstanceTask):
        base = type(base.__name__, (SingleInstanceTask, base), {"abstract": True})
    SingleInstance.parse(locking)  # Now, at the line that is wrong; not when the app is set up.
    _name_of(locking.get("key"), function, bound=bool(for_celery.get("bind")))
    return shared_task(base=base, single_instance=locking, **for_celery)(function)


def _name_of(
    key: str | Callable[..., str] | None, function: Callable[..., Any], *, bound: bool
) -> Callable[..., str] | None:
    """How to name the lock of a run from the task's arguments; None for the task's own name."""
    if key is None:
        return None
    if callable(key):
        return lambda args, kwargs: check_name(key(*args, **kwargs))
    if bound:
        # The task itself is no argument of a run.
        name_of = formatter(key, function)
        return lambda args, kwargs: name_of((None, *args), kwargs)
    return formatter(key, function)


def _guarded(run: Any, options: SingleInstance) -> Callable[..., Any]:
    bound = not isinstance(run, staticmethod)
    function = inspect.unwrap(run.__func__ if isinstance(run, staticmethod) else run)
    name_of = _name_of(options.key, function, bound=bound)

    def guarded(task: SingleInstanceTask, *args: Any, **kwargs: Any) -> Any:
        name = name_of(args, kwargs) if name_of else task.name
        body = run.__get__(task, type(task))
        return _run_alone(task, name, options, lambda: body(*args, **kwargs))

    # Celery reads the signature of run to check a call's arguments before it is published.
    guarded.__wrapped__ = function  # type: ignore[attr-defined]
    guarded.__name__, guarded.__doc__ = function.__name__, function.__doc__
    if not bound:
        guarded.__signature__ = _with_self(function)  # type: ignore[attr-defined]
    return guarded


def _with_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [
        # Nothing may follow a positional-only parameter that comes before it in kind.
        itself if "self" not in signature.parameters else itself.replace(name="_task"),
        *signature.parameters.values(),
    ]
    return signature.replace(parameters=parameters)


def _run_alone(
    task: SingleInstanceTask, name: str, options: SingleInstance, body: Callable[[], Any]
) -> Any:
    lock = Lock(
        name,
        Options(
            ttl=options.ttl,
            wait=0.0,
            renew=options.renew,
            max_hold=options.max_hold,
            min_hold=options.min_hold,
            using=options.using,
            once=options.once,
        ),
    )
    activity = Activity(task=task.name, task_id=task.request.id or "")
    with busy_with(activity), ExitStack() as stack:
        outcome = lock.attempt()
        if not isinstance(outcome, Lease):
            return _conflict(task, name, options, outcome)
        stack.push(lock)
        reset = _current_lease.set(outcome)
        stack.callback(_current_lease.reset, reset)
        return body()


def _conflict(
    task: SingleInstanceTask, name: str, options: SingleInstance, outcome: Busy | Done
) -> Any:
    if isinstance(outcome, Done):
        return _skip(task, "done", name, done_by(outcome))
    holder = holder_of(outcome)
    if options.on_conflict == "raise":
        raise LockTimeout(name, holder, outcome.expires_in)
    return _skip(task, "busy", name, holder)


def _skip(task: SingleInstanceTask, why: str, name: str, holder: str) -> dict[str, str]:
    """Finish this run without running it, visibly: a canvas goes on with the marked value."""
    result = {"skipped": why, "lock": name, "holder": holder}
    logger.warning(
        "Skipped %s[%s]: lock %r is %s, held by %s",
        task.name,
        task.request.id,
        name,
        why,
        holder,
        extra={"data": result},
    )
    signals.task_skipped.send_robust(sender=task, result=result, task_id=task.request.id)
    return result
