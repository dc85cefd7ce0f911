"""One run of a single-instance task: the lock around its body, and what happens without it."""

from __future__ import annotations

import inspect
import logging
import os
import time
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.exceptions import Ignore

from django_redislock import signals, task_runs
from django_redislock.activity import Activity, busy_with
from django_redislock.celery import permits
from django_redislock.celery.defer import (
    ComesAgain,
    can_defer,
    carry,
    defer,
    has_result,
    notes,
    visibility_timeout,
)
from django_redislock.celery.queued import requeue, withdraw
from django_redislock.exceptions import LockTimeout, LockUnavailable
from django_redislock.lease import Lease
from django_redislock.lock import Lock
from django_redislock.rules.flows import Done, Finished, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from celery import Task

    from django_redislock.celery.lock_name import Naming
    from django_redislock.celery.options import SingleInstance
    from django_redislock.rules.flows import Busy

logger = logging.getLogger("django_redislock.celery")

# Seconds for which a finished run is recognised, on top of the visibility timeout.
REMEMBERED = 86_400.0
# Seconds after its success within which a run is expected to have reported it.
REPORTS_WITHIN = 10.0


class _Current(NamedTuple):
    """The run whose body this thread, greenlet or asyncio task is in."""

    request: object
    lease: Lease | None
    abort_on_lost: bool


_current: ContextVar[_Current | None] = ContextVar("redislock_run", default=None)


def current_lease() -> Lease | None:
    """The lease under which the current task's body runs; None outside of one.

    Raises:
        LockLost: The task has abort_on_lost, and its lease is lost.
    """
    current = _current.get()
    if current is None or current.lease is None:
        return None
    if current.abort_on_lost:
        current.lease.ensure_held()
    return current.lease


class _Retried(Exception):
    """To the lock: the body has returned *result*, but asked for its retry, so it is no success."""

    def __init__(self, result: object) -> None:
        super().__init__(result)
        self.result = result


def note_published_retry(request: Any) -> None:
    """The run of *request* has published its own retry; one that was called directly cannot."""
    request.redislock_retried = not request.called_directly


def _has_published_retry(request: Any) -> bool:
    return getattr(request, "redislock_retried", False)


@dataclass(frozen=True)
class Conflict:
    """What a function given as on_conflict is told. Its return value is the task's result."""

    task: Task
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lock: str  # The lock's name.
    holder: str  # Who holds it, as "host:pid task-id".
    expires_in: float  # Seconds until the holder's lease ends unless renewed.


def function_of(run: Any) -> tuple[Callable[..., Any], bool]:
    """The function behind a task class's ``run``, and whether it is given the task."""
    bound = not isinstance(run, staticmethod)
    return inspect.unwrap(run if bound else run.__func__), bound


def guarded(
    run: Any,
    options: SingleInstance,
    named: Naming | None,
) -> Callable[..., Any]:
    """The method ``run`` of a task class, with the lock around it."""
    function, bound = function_of(run)

    def guarded_run(task: Task, *args: Any, **kwargs: Any) -> Any:
        body = run.__get__(task, type(task))
        current = _current.get()
        inherited = type(task).run is not guarded_run
        if inherited and current is not None and current.request is task.request:
            return body(*args, **kwargs)  # Called by super().run() of a subclass.
        name = named(args, kwargs) if named else task.name
        return _Attempt(task, args, kwargs, name, options).run(body)

    guarded_run.unguarded = run  # type: ignore[attr-defined]
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


@dataclass(frozen=True)
class _Attempt:
    """A task wants to run under its lock."""

    task: Task
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    options: SingleInstance

    def run(self, body: Callable[..., Any]) -> Any:
        """Run *body*, or do what is done instead, and return the result."""
        try:
            with self._waiting_in_queue():
                return self._run_or_not(body)
        except _Retried as retried:
            return retried.result

    def _run_or_not(self, body: Callable[..., Any]) -> Any:
        # A lock is left by the stack from before it is asked for: Celery's soft time limit may hit
        # between the grant and the body.
        with busy_with(Activity(task=self.task.name, task_id=self._id)), ExitStack() as held:
            try:
                outcome = self._take(held)
            except LockUnavailable as error:
                return self._unavailable(error, body)
            match outcome:
                case Lease():
                    return self._run_under(outcome, body)
                case Finished():
                    return self._duplicate(outcome.ago)
                case Done():
                    return self._skip("done", outcome.by)
                case _:
                    return self._conflict(outcome)

    @property
    def _id(self) -> str:
        return self.task.request.id or ""

    @property
    def _shown(self) -> str:
        """For the log: the task, and its id unless it is called directly."""
        return f"{self.task.name}[{self._id}]" if self._id else str(self.task.name)

    @property
    def _notes(self) -> dict[str, Any]:
        return notes(self.task.request.headers)

    @property
    def _this_run(self) -> Run:
        request = self.task.request
        which = f":{request.replaced_task_nesting or 0}.{request.retries or 0}"
        run = self._id and self._id + which
        return Run(run, visibility_timeout(self.task.app) + REMEMBERED)

    @property
    def _queued_as(self) -> str | None:
        # The name that it was announced under: arguments may look different after their way
        # through the broker, which makes lists of tuples.
        return self._notes.get("queued") if can_defer(self.task) else None

    @contextmanager
    def _waiting_in_queue(self) -> Iterator[None]:
        """It counts as waiting until its body starts, or it ends for good without that."""
        try:
            yield
        except ComesAgain:
            raise
        except BaseException:
            self._leave_queue()
            raise
        self._leave_queue()

    def _leave_queue(self) -> None:
        if name := self._queued_as:
            withdraw(self.task, name, self._id, self.options)
            carry(self.task, queued=None)

    def _take(self, held: ExitStack) -> Lease | Busy | Done | Finished:
        options = self.options.lock_options
        if self.options.limit > 1:
            return permits.take(self.name, self.options.limit, options, self._this_run, held)
        lock = Lock(self.name, options, self._this_run)
        held.push(lock)
        return lock.attempt()

    def _run_under(self, lease: Lease | None, body: Callable[..., Any]) -> Any:
        self._leave_queue()
        if can_defer(self.task):
            # What is put off later, by a retry, is put off for the first time again.
            carry(self.task, tries=None, since=None, raised=None)
        with ExitStack() as stack:
            if lease is not None and self.options.limit > 1:
                stack.push(self._note_end_of(lease))
                self._note_start_of(lease)
            current = _Current(self.task.request, lease, self.options.abort_on_lost)
            stack.callback(_current.reset, _current.set(current))
            self._report_start()
            result = body(*self.args, **self.kwargs)
            if _has_published_retry(self.task.request) and (lease is None or lease.held):
                self._note_retried()
                raise _Retried(result)
            return result

    def _report_start(self) -> None:
        """In place of Celery; see SingleInstanceTask.reports_start."""
        if self.task.reports_start and can_defer(self.task) and has_result(self.task):
            meta = {"pid": os.getpid(), "hostname": self.task.request.hostname}
            self.task.backend.store_result(
                self._id, meta, states.STARTED, request=self.task.request
            )

    def _note_retried(self) -> None:
        try:
            task_runs.note_retried(self.name, self._this_run, using=self.options.using)
        except LockUnavailable as error:
            self._warn_not_noted(error)

    def _warn_not_noted(self, error: LockUnavailable) -> None:
        logger.warning("The end of %s is not noted: %s", self._shown, error)

    def _note_start_of(self, lease: Lease) -> None:
        """Note that a run under a permit begins."""
        try:
            task_runs.note_start(self.name, lease, using=self.options.using)
        except LockUnavailable as error:
            logger.warning("The start of %s is not noted: %s", self._shown, error)

    def _note_end_of(self, lease: Lease) -> Callable[..., None]:
        """Note the end of a run under a permit, before the permit is given back."""
        began = time.monotonic()

        def note(exc_type: object, *exc_info: object) -> None:
            if not lease.held:
                return
            try:
                task_runs.note_end(
                    self.name,
                    self._this_run,
                    lease,
                    success=exc_type is None,
                    lasted=time.monotonic() - began,
                    using=self.options.using,
                )
            except LockUnavailable as error:
                self._warn_not_noted(error)

        return note

    def _unavailable(self, error: LockUnavailable, body: Callable[..., Any]) -> Any:
        policy = self.options.on_unavailable
        if policy == "run":
            logger.error(
                "%s runs WITHOUT its lock, as on_unavailable says: %s",
                self._shown,
                error,
            )
            return self._run_under(None, body)
        if policy == "retry" and (until := self._deadline()) is not None:
            logger.warning("Put off %s: %s", self._shown, error)
            defer(self.task, self.options.conflict_deadline, until=until)
        raise error

    def _deadline(self, asked: float | None = None) -> float | None:
        """Until when this run may be put off, in seconds since the epoch; None if no longer.

        Args:
            asked: How many seconds ago it last stood for another call, which has time from then.
        """
        if not can_defer(self.task):
            return None
        now = time.time()
        since = float(self._notes.get("since", now))
        if asked is not None:
            since = max(since, now - asked)
        deadline = since + self.options.conflict_deadline
        return deadline if now < deadline else None

    def _conflict(self, busy: Busy) -> Any:
        task, policy = self.task, self.options.on_conflict
        holding = busy.holding
        if can_defer(task):
            if holding.owner.task_id == self._id:
                # Delivered twice, or again after a crash; or a retry that was published before
                # its first try let go. Skipping would acknowledge the only copy of the work.
                if holding.state == "cooling":
                    return self._duplicate(REPORTS_WITHIN)
                # Its body has started, so this copy cannot stand for calls that come now.
                self._leave_queue()
                self._put_off("its own earlier delivery holds it", busy)
            if task.request.retries and not (policy == "raise" and self._notes.get("raised")):
                # Work that has begun is not dropped because somebody else got in between.
                self._put_off("a retry finds it held", busy)
        if policy == "raise":
            carry(task, raised=True)
            raise LockTimeout(self.name, busy.holder, busy.expires_in)
        if policy == "retry" and (until := self._deadline(self._keep_waiting())) is not None:
            self._put_off("on_conflict is 'retry'", busy, until=until)
        result = self._skip("busy", busy.holder)
        if not callable(policy):
            return result
        return policy(
            Conflict(task, self.args, self.kwargs, self.name, busy.holder, busy.expires_in)
        )

    def _keep_waiting(self) -> float | None:
        """It goes on waiting; returns how many seconds ago it last stood for another call."""
        if name := self._queued_as:
            return requeue(self.task, name, self._id, self.options)
        return None

    def _put_off(self, why: str, busy: Busy, until: float | None = None) -> None:
        logger.info(
            "Put off %s: lock %r is busy, held by %s, and %s",
            self._shown,
            self.name,
            busy.holder,
            why,
        )
        defer(self.task, busy.expires_in, until=until)

    def _duplicate(self, ago: float) -> Any:
        """This task id has succeeded already: never run it again, and leave its result alone."""
        if can_defer(self.task) and has_result(self.task):
            if self.task.backend.get_state(self._id) in states.READY_STATES:
                raise Ignore
            if ago < REPORTS_WITHIN:
                self._leave_queue()  # It has run, so it cannot stand for calls that come now.
                # Between its release and its report are milliseconds; a crash there is rare.
                defer(self.task, REPORTS_WITHIN - ago)
        return self._skip("duplicate", self._id)

    def _skip(self, why: str, holder: str) -> dict[str, str]:
        """Finish this run without running it, visibly: a canvas goes on with the marked value."""
        result = {"skipped": why, "lock": self.name, "holder": holder}
        logger.warning(
            "Skipped %s: lock %r is %s, held by %s",
            self._shown,
            self.name,
            why,
            holder,
            extra={"data": result},
        )
        try:
            task_runs.note_skip(self.name, why, using=self.options.using)
        except LockUnavailable as error:
            logger.warning("The skip is not in the records: %s", error)
        signals.task_skipped.send_robust(
            sender=self.task, result=result, task_id=self.task.request.id
        )
        return result
