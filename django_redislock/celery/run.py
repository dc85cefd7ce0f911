"""One run of a single-instance task: the lock around its body, and what happens without it."""

from __future__ import annotations

import inspect
import logging
import re
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock import signals
from django_redislock.exceptions import InvalidLockName, LockTimeout
from django_redislock.flows import Done, Finished
from django_redislock.lease import Lease
from django_redislock.lock import Lock, Options, done_by, holder_of
from django_redislock.names import check_name, formatter
from django_redislock.owner import Activity, busy_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task

    from django_redislock.celery.options import SingleInstance
    from django_redislock.flows import Busy

logger = logging.getLogger("django_redislock.celery")


class _Run(NamedTuple):
    """The run whose body this thread, greenlet or asyncio task is in."""

    request: object
    lease: Lease


_current: ContextVar[_Run | None] = ContextVar("redislock_run", default=None)


def current_lease() -> Lease | None:
    """The lease under which the current task's body runs; None outside of one."""
    current = _current.get()
    return None if current is None else current.lease


def name_of(
    key: str | Callable[..., str] | None, function: Callable[..., Any], *, bound: bool
) -> Callable[..., str] | None:
    """How to name the lock of a run from the task's arguments; None for the task's own name."""
    if key is None:
        return None
    if callable(key):
        return lambda args, kwargs: _shared(check_name(key(*args, **kwargs)))
    named = formatter(key, function)
    # The task itself is no argument of a run.
    itself = (None,) if bound else ()
    return lambda args, kwargs: _shared(named((*itself, *args), kwargs))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


def _shared(name: str) -> str:
    """Refuse a name that no other process can arrive at."""
    if _ADDRESS.search(name):
        raise InvalidLockName(
            repr(name),
            "it shows an object's address in memory, which differs from process to process; name"
            " an attribute of the object in the key, such as {order.pk}",
        )
    return name


def guarded(run: Any, options: SingleInstance) -> Callable[..., Any]:
    """The method ``run`` of a task class, with the lock around it."""
    bound = not isinstance(run, staticmethod)
    function = inspect.unwrap(run.__func__ if isinstance(run, staticmethod) else run)
    named = name_of(options.key, function, bound=bound)

    def guarded_run(task: Task, *args: Any, **kwargs: Any) -> Any:
        body = run.__get__(task, type(task))
        current = _current.get()
        if current is not None and current.request is task.request:
            return body(*args, **kwargs)  # Called by super().run() of a subclass.
        name = named(args, kwargs) if named else task.name
        return _run_alone(task, name, options, lambda: body(*args, **kwargs))

    # Celery reads the signature of run to check a call's arguments before it is published.
    guarded_run.__wrapped__ = function  # type: ignore[attr-defined]
    guarded_run.__name__, guarded_run.__doc__ = function.__name__, function.__doc__
    if not bound:
        guarded_run.__signature__ = _with_self(function)  # type: ignore[attr-defined]
    return guarded_run


def _with_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [
        # Nothing may follow a positional-only parameter that comes before it in kind.
        itself if "self" not in signature.parameters else itself.replace(name="_task"),
        *signature.parameters.values(),
    ]
    return signature.replace(parameters=parameters)


def _run_alone(task: Task, name: str, options: SingleInstance, body: Callable[[], Any]) -> Any:
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
        reset = _current.set(_Run(task.request, outcome))
        stack.callback(_current.reset, reset)
        return body()


def _conflict(
    task: Task, name: str, options: SingleInstance, outcome: Busy | Done | Finished
) -> Any:
    if isinstance(outcome, Done):
        return _skip(task, "done", name, done_by(outcome))
    if isinstance(outcome, Finished):
        return _skip(task, "duplicate", name, "")
    holder = holder_of(outcome)
    if options.on_conflict == "raise":
        raise LockTimeout(name, holder, outcome.expires_in)
    return _skip(task, "busy", name, holder)


def _skip(task: Task, why: str, name: str, holder: str) -> dict[str, str]:
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
