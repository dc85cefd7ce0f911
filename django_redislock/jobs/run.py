"""One run of a job: its body under the lock, or what happens instead.

A job has one run at a time: a function, a management command, a command of a shell, a Celery task.
A run is an outcome: it has run, or it found its lock not free, or nobody could say. What becomes of
that is decided here for functions and commands, and in celery/run.py for tasks.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from django_redislock import clock, fencing, logs, process, signals, task_runs
from django_redislock.exceptions import LockLost, LockUnavailable, StaleFence
from django_redislock.holder import Activity, current_activity, within
from django_redislock.humanize import duration
from django_redislock.jobs.options import DATABASE, Conflict, JobOptions, Skipped
from django_redislock.jobs.replaced import told_when_replaced
from django_redislock.lease import Lease
from django_redislock.lock import JointLock, Lock
from django_redislock.misuse import UNSTARTED, called, unstarted
from django_redislock.monitors import CheckIns
from django_redislock.process import cached_property
from django_redislock.rules.arguments import text
from django_redislock.rules.flows import Busy, Done, Finished, Replaced, RunMarker
from django_redislock.rules.names import Written, check_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from django_redislock.rules.limit import Limit, Rate

    LimitsOf = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Limit | Rate, ...]]
    NameOf = Callable[[tuple[Any, ...], Mapping[str, Any]], str]

Result = TypeVar("Result")

# Seconds for which duplicates of a finished run are recognised, beyond the visibility timeout.
RECOGNISED_FOR = 86_400.0
NO_DUPLICATES = RunMarker("", RECOGNISED_FOR)  # Only a broker makes some.
# Skips that somebody wanted, so they are no warning.
EXPECTED_SKIPS = ("cooling", "done", "paused", "replaced")

# How a run ends once its body has begun. "lost": its lease was lost, however the body ended.
# "interrupted": an exception from outside ended it, such as Ctrl-C or a cancellation. The last four
# are of Celery tasks, which end by retry(), replace(), Ignore or Reject.
RunOutcome = Literal[
    "success", "failure", "lost", "interrupted", "retry", "replaced", "ignored", "rejected"
]

NO_TRANSACTION = nullcontext()

# A run is over at least so many seconds before a time limit, also if a monitor was not told yet.
TIME_TO_REPORT = 1.0

# The run whose body this thread, greenlet or asyncio task is in.
running: ContextVar[JobRun | None] = ContextVar("redislock_run", default=None)


def current_lease() -> Lease | None:
    """The lease under which the body of the current run is executed; None outside of one.

    Raises:
        LockLost, LockUnavailable: The job is a task with abort_on_lost; see Lease.ensure_held().
    """
    run = running.get()
    if run is None or run.lease is None:
        return None
    if run.aborts_on_lost:
        run.lease.ensure_held()
    return run.lease


def milliseconds_of(at: float) -> str:
    """A time in seconds since the epoch, in ms, as RunMarker.called has it."""
    return str(int(at * 1000))


class Named(NamedTuple):
    """How the locks of a job are named."""

    name_of: NameOf  # Makes the name from the arguments of a run.
    template: str  # The name as it was written.
    limits_of: LimitsOf | None = None  # Makes the limits from them, if it has several.


class Ran(NamedTuple):
    """The outcome of a run whose body was executed."""

    result: Any


class Unavailable(NamedTuple):
    """The outcome of a run that cannot know whether its lock is free."""

    error: LockUnavailable


Refusal = Busy | Done | Finished | Replaced  # What a run found in place of its lock.
Outcome = Ran | Unavailable | Refusal


class _CompletedBefore(Exception):
    """Leaves the transaction before the body: the database has *found* that it is done."""

    def __init__(self, found: Done | Finished) -> None:
        super().__init__(found)
        self.found = found


class JobRun:
    """One run of a job. Whoever runs it decides by a match what becomes of the outcome.

    It is a context: of its activity, and for those who are told of its end.

    Attributes:
        lease: The lease while the body runs; None if it runs without the lock.
        ending: How it ends, if neither by a success nor a failure nor by a loss.
        goes_on: Whether the work goes on in another run, although the body has returned.
        time_limit: Seconds after which somebody else ends it, from when it asks for its lock.
        aborts_on_lost: Whether the body ends at its next look at a lease that is lost.
    """

    logger = logs.logger("django_redislock.jobs")
    marker = NO_DUPLICATES
    lease: Lease | None = None
    ending: RunOutcome | None = None
    goes_on = False
    reserved: dict[str, str] | None = None  # Its reserved starts, see joint_handle.RatePart.
    time_limit = math.inf
    aborts_on_lost = False
    asked_at = 0.0  # When it asked for a lock first.
    asked_lock: Lock  # The one that it asked for last.
    _began: float | None = None  # When its body did.
    _begun_in: process.Process | None = None  # Where.
    _check_ins: CheckIns | None = None  # Once its body has begun.

    def __init__(
        self,
        activity: Activity,
        options: JobOptions,
        named: Named,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        sender: object = None,
    ) -> None:
        """A run that execute() or aexecute() begins.

        Args:
            activity: The full name of the job, as its task.
            options: Those of the job.
            named: How its locks are named.
            args: The arguments of the run by position.
            kwargs: Those by name.
            sender: Of signals.
        """
        self.activity = activity
        self.options = options
        self.named = named
        self.template = named.template  # The name of the lock as it was written.
        self.args = args
        self.kwargs = kwargs or {}
        self.sender = sender
        if options.lock.replace:
            self.marker = self.marker._replace(called=milliseconds_of(time.time()))

    def __str__(self) -> str:
        return self.activity.task

    @property
    def has_begun(self) -> bool:
        """Whether the body was executed, or is."""
        return self._began is not None

    @cached_property
    def name(self) -> str:
        """The name of the lock."""
        return self.named.name_of(self.args, self.kwargs)

    @cached_property
    def limits(self) -> tuple[Limit | Rate, ...]:
        """All limits of a run with several. The first one is its lock, for records."""
        return self.named.limits_of(self.args, self.kwargs) if self.named.limits_of else ()

    def lock(self, wait: float | None = None) -> Lock:
        """A handle on its lock, or on those of its limits; *wait* overrides the option."""
        how = self.options.lock if wait is None else self.options.lock._replace(wait=wait)
        if self.named.limits_of is None:
            return Lock(self.name, how, self.marker, template=self.template)
        written = zip(self.limits, self.options.limits or (), strict=True)
        templates = {limit.name: Written(of.name) for limit, of in written}
        return JointLock(self.limits, how, self.marker, templates=templates, reserved=self.reserved)

    # --- for functions and commands -----------------------------------------------------------

    def execute(self, body: Callable[..., Any]) -> Any:
        """Execute *body* under the lock, or do what happens instead; return the result.

        If the body did not run because of the lock, the result is Skipped. A body that raises has
        failed.

        Raises:
            LockTimeout: The lock is not free, and on_conflict is "raise".
            LockUnavailable: The server did not or could not answer, and on_unavailable is "raise".
            LockLost: The lease was lost while the body ran, and the body did not raise.
            LockMisuse, StaleFence: See Lock.acquire() and Lease.atomic().
        """
        with self:
            match self.attempt(partial(self.run_body, body)):
                case Ran(result):
                    return result
                case Unavailable(error):
                    self.check_unlocked(error)
                    return self.run_body(body, None)
                case found:
                    skipped = self.skip(found)
                    self.tell_skip(skipped)
                    return self.answer(found, skipped)

    async def aexecute(self, body: Callable[..., Awaitable[Any]]) -> Any:
        """See execute(); without a transaction, since Django has no asynchronous ones."""
        async with self:
            match await self._aattempt(body):
                case Ran(result):
                    return result
                case Unavailable(error):
                    self.check_unlocked(error)
                    return await self._arun_body(body, None)
                case found:
                    skipped = self.skip(found)
                    with self.noting("skip"):
                        await task_runs.anote_skip(self.name, **self._noted(skipped))
                    await signals.task_skipped.asend_robust(**self.news(result=skipped))
                    answer = self.answer(found, skipped)
                    return await answer if inspect.isawaitable(answer) else answer

    def check_unlocked(self, error: LockUnavailable) -> None:
        """Let the body run without the lock, since Redis cannot answer; or raise the *error*."""
        if self.options.on_unavailable != "run":
            raise error
        says = "%s runs WITHOUT its lock, as on_unavailable says: %s"
        self.logger.error(says, self, error, extra=self.log_fields(reason=error.reason))

    # --- under the lock -----------------------------------------------------------------------

    def attempt(
        self,
        work: Callable[[Lease], Any],
        wait: float | None = None,
        since: float | None = None,
        take_up: Callable[[ExitStack], Lease | Refusal | None] | None = None,
    ) -> Outcome:
        """Ask for the lock, do the *work* under it, and release it; or say what was found instead.

        Args:
            work: What to do with the lease.
            wait: Seconds to wait for the lock, if not as the options say.
            since: When the run first asked, if it asked before.
            take_up: Asks in another way first. It returns None if that is of no avail.
        """
        # Its end releases a lock. It gets a lock before that is asked for, since a soft time limit
        # may be raised right after the grant. Without a grant, its end does nothing.
        try:
            with ExitStack() as locks:
                if self.options.atomic is not None:
                    fencing.check_outermost(self.name, self.options.atomic, of_task=True)
                try:
                    # The database is asked first: a run that is done need not wait for the lock.
                    outcome: Lease | Refusal | None
                    outcome = self._completed() if self.options.once == DATABASE else None
                    if outcome is None and take_up is not None:
                        outcome = take_up(locks)
                    if outcome is None:
                        lock = self.asked_lock = self.lock(wait)
                        locks.push(lock)
                        outcome = lock.attempt(since=since)
                except LockUnavailable as error:
                    return Unavailable(error)
                if not isinstance(outcome, Lease):
                    return outcome
                try:
                    if self.options.lock.replace:
                        locks.enter_context(told_when_replaced(outcome))
                    return Ran(work(outcome))
                except _CompletedBefore as completed:
                    self.give_back(outcome)
                    return completed.found
                except Exception as error:
                    outcome.gave_way = self._replaced(error) is not None
                    raise
        except Exception as error:
            if (found := self._replaced(error)) is None:
                raise
            self.ending = "lost"
            self._forget_start()
            return found

    def _replaced(self, error: Exception) -> Replaced | None:
        """What a run has found that ended by *error*, if a newer call has replaced it; else None.

        A body that ends well in its time is a success: the lock was its own until then.
        """
        lease = self.lease
        if lease is None or lease.lost_reason != "replaced" or not self.ends_replaced(error):
            return None
        return Replaced(lease.replaced_by or "")

    def _forget_start(self) -> None:
        """Forget that the body of a replaced run has begun, unless its release has forgotten it."""
        assert self.lease is not None  # See _replaced().
        if self.lease.is_lost:
            with self.noting("end"):
                task_runs.forget_start(self.name, self.lease, using=self.options.using)

    async def _aforget_start(self) -> None:
        assert self.lease is not None
        if self.lease.is_lost:
            with self.noting("end"):
                await task_runs.aforget_start(self.name, self.lease, using=self.options.using)

    def ends_replaced(self, error: Exception) -> bool:
        """Whether *error* says no more than that the run is replaced."""
        if isinstance(error, ExceptionGroup):  # Of an asyncio.TaskGroup, say.
            return all(map(self.ends_replaced, error.exceptions))
        return isinstance(error, LockLost | StaleFence) and error.name == self.name

    async def _aattempt(self, body: Callable[..., Awaitable[Any]]) -> Outcome:
        try:
            async with AsyncExitStack() as locks:
                lock = self.lock()
                locks.push_async_exit(lock)
                try:
                    outcome = await lock.aattempt()
                except LockUnavailable as error:
                    return Unavailable(error)
                if isinstance(outcome, Lease):
                    if self.options.lock.replace:
                        locks.enter_context(told_when_replaced(outcome))
                    try:
                        return Ran(await self._arun_body(body, outcome))
                    except Exception as error:
                        outcome.gave_way = self._replaced(error) is not None
                        raise
                return outcome
        except Exception as error:
            if (found := self._replaced(error)) is None:
                raise
            self.ending = "lost"
            await self._aforget_start()
            return found

    def run_body(self, body: Callable[..., Any], lease: Lease | None) -> Any:
        """Execute *body*, with the option atomic in a transaction."""
        self.lease = lease
        before = running.set(self)
        try:
            result = None  # Of a body that has replaced itself.
            with self._transaction() if self.options.atomic is not None else NO_TRANSACTION:
                self._began, self._begun_in = clock.now(), process.current  # See this().
                if self.options.monitor:
                    self._check_in()
                if signals.run_started.receivers:
                    signals.run_started.send_robust(**self.news(lease=lease))
                result = body(*self.args, **self.kwargs)
                if isinstance(result, UNSTARTED):  # The body of a task, say.
                    raise unstarted(self, result)
            return result
        finally:
            running.reset(before)

    async def _arun_body(self, body: Callable[..., Awaitable[Any]], lease: Lease | None) -> Any:
        self.lease = lease
        before = running.set(self)
        try:
            self._began, self._begun_in = clock.now(), process.current
            if self.options.monitor:
                self._check_in()
            if signals.run_started.receivers:
                await signals.run_started.asend_robust(**self.news(lease=lease))
            return await body(*self.args, **self.kwargs)
        finally:
            with suppress(ValueError):  # See __aexit__().
                running.reset(before)

    def _check_in(self) -> None:
        """Tell the monitors that the body begins."""
        run = (self.activity.task, self.name, self.activity.task_id)
        self._check_ins = CheckIns(self.options.monitor, *run)

    # --- a body that is a transaction ---------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The transaction of the option atomic, with the body in it.

        With once="database" it ends at once if the database has a completed run under this lock;
        else it notes at its end that this run is completed.
        """
        lease, database = self.lease, self.options.atomic
        # See options.py: atomic excludes a run without its lock.
        assert lease is not None
        assert database is not None
        with lease.atomic(database):
            # The first look was before the lock was granted, so another run may have been completed
            # since. From here on none can be: the fence is claimed.
            if self.options.once == DATABASE and (found := self._completed()):
                raise _CompletedBefore(found)
            yield
            if self.options.once == DATABASE and not self.goes_on:
                from django_redislock import completed_runs

                completed_runs.note(lease, database)

    def _completed(self) -> Done | Finished | None:
        """The completed run under this lock, if the database has one."""
        assert self.options.atomic is not None  # See options.py: once="database" needs it.
        from django_redislock import completed_runs

        run = completed_runs.find(self.name, self.options.atomic)
        if run is None:
            return None
        task_id = self.activity.task_id
        return Finished(run.ago) if task_id and run.task_id == task_id else Done(run.by, run.ago)

    def give_back(self, lease: Lease) -> None:
        """End the lease of a run whose body was not executed: neither a success nor a failure."""
        self.asked_lock.undo()  # The lease is of this lock.
        with self.noting("end"):
            task_runs.forget_start(self.name, lease, using=self.options.using)

    # --- without the lock ---------------------------------------------------------------------

    def skip(self, found: Refusal, remark: str = "") -> Skipped:
        """The skip of this run; it is logged. No other place decides a skip.

        Raises:
            LockTimeout: Somebody else has the lock, and on_conflict is "raise".
        """
        known: dict[str, Any] = {}
        says, ago, left = str(found), found.ago, None
        match found:
            case Finished(by=by):
                why, says = "duplicate", f"duplicate, of {self.activity.task_id}"
                known["by"] = by or self.activity.task_id
            case Replaced(by=by):
                why, says, known["by"] = "replaced", f"replaced, by {by or 'a newer call'}", by
            case Done(by=by):
                why, says, known["by"] = "done", f"done, by {by}", by
            case Busy(name=name, cooling=cooling, holder=holder):
                if self.options.on_conflict == "raise":
                    raise found.timeout(self.options.using)
                why = "cooling" if cooling else "busy" if found.reason is None else "paused"
                if not found.of_rate:
                    known["by" if cooling else "holder"] = holder
                remark = found.reason or remark
                if not remark and name != self.name:
                    remark = f"of its limits, {name!r} is {found if found.of_rate else 'taken'}"
                if remark:
                    known["reason"] = remark
                ago = ago if cooling else None
                left = found.expires_in if cooling or found.of_rate else None
        if ago is not None:
            known["ago"] = ago = round(ago, 3)
            says += f", {duration(ago)} ago"
        if left is not None:
            known["expires_in"] = round(left, 3)
        skipped = Skipped(skipped=why, lock=self.name, **known)
        level = logging.INFO if why in EXPECTED_SKIPS else logging.WARNING
        extra = {**self.log_fields(reason=why), "data": skipped}
        self.logger.log(level, "Skipped %s: lock %r is %s", self, self.name, says, extra=extra)
        return skipped

    def tell_skip(self, skipped: Skipped) -> None:
        """Note a skip, and send its signal."""
        with self.noting("skip"):
            task_runs.note_skip(self.name, **self._noted(skipped))
        signals.task_skipped.send_robust(**self.news(result=skipped))

    def _noted(self, skipped: Skipped) -> dict[str, str]:
        """What the records say of a skip: why, and because of whom."""
        why = skipped["skipped"]
        # A duplicate is the same run.
        by = "" if why == "duplicate" else skipped.get("holder") or skipped.get("by") or ""
        return {"why": why, "by": by, "using": self.options.using}

    def answer(self, found: Refusal, skipped: Skipped, kind: Any = Conflict, **more: Any) -> Any:
        """The result of a skipped run: that of on_conflict, if it is a function.

        Args:
            found: What it found in place of the lock.
            skipped: The skip.
            kind: The class of the function's argument.
            more: What that has besides.
        """
        policy = self.options.on_conflict
        if not isinstance(found, Busy) or not callable(policy):
            return skipped
        return policy(
            kind(
                job=self.activity.task,
                args=self.args,
                kwargs=self.kwargs,
                lock=self.name,
                holder=found.holder,
                expires_in=found.expires_in,
                cooling=found.cooling,
                **more,
            )
        )

    # --- the end ------------------------------------------------------------------------------

    def __enter__(self) -> None:
        self.asked_at = clock.now()
        self._was_busy_with = current_activity.set(within(self.activity))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None or self._check_ins is not None or signals.run_ended.receivers:
                self._tell_end(error)
        finally:
            current_activity.reset(self._was_busy_with)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_open = not isinstance(error, GeneratorExit)  # Else nothing can be awaited any more.
        try:
            if not self._ends_here:
                return
            if is_open and signals.run_ended.receivers:
                await signals.run_ended.asend_robust(**self._news_of_end(error))
        finally:
            if self._check_ins is not None and self._ends_here:
                self._check_ins.end(self._outcome_of(error), error)
                if is_open:
                    with suppress(Exception):  # Of a monitor that is wrong.
                        await self._check_ins.await_told()
            with suppress(ValueError):  # The coroutine is closed outside of its task.
                current_activity.reset(self._was_busy_with)

    def _tell_end(self, error: BaseException | None) -> None:
        """Tell how the run has ended, after its release; *error* has ended it."""
        if not self._ends_here:
            return
        try:
            if signals.run_ended.receivers:
                signals.run_ended.send_robust(**self._news_of_end(error))
        finally:
            if self._check_ins is not None:
                self._check_ins.end(self._outcome_of(error), error)
                with suppress(Exception):  # A time limit that comes now does not concern the work.
                    left = self.time_left(self.time_limit) - TIME_TO_REPORT
                    self._check_ins.wait(max(0.0, left))

    @property
    def _ends_here(self) -> bool:
        """Whether this process is the one in which the body began, not a child forked there."""
        return self._begun_in is process.this()

    def time_left(self, time_limit: float) -> float:
        """Seconds until a *time_limit*, give or take TIME_TO_REPORT."""
        # It counts from about when the run began to ask for its lock.
        return time_limit - (clock.now() - self.asked_at)

    def _outcome_of(self, error: BaseException | None) -> RunOutcome:
        """The outcome of a body that has begun; *error* has ended its run."""
        reason = None if self.lease is None else self.lease.lost_reason
        if reason and reason != "replaced":
            return "lost"
        if self.ending is not None:
            return self.ending
        if error is None:
            return "success"
        return "failure" if isinstance(error, Exception) else "interrupted"

    # --- what others are told -----------------------------------------------------------------

    def _news_of_end(self, error: BaseException | None) -> dict[str, Any]:
        assert self._began is not None  # See _ends_here.
        took = clock.now() - self._began
        return self.news(lease=self.lease, outcome=self._outcome_of(error), took=took)

    def news(self, **more: Any) -> dict[str, Any]:
        """The arguments of each signal about a run."""
        return {
            "sender": self.sender,
            "job": self.activity.task,
            "name": self.name,
            "template": self.template,
            "using": self.options.using,
            "task_id": self.activity.task_id or None,
            **more,
        }

    def log_fields(self, **more: Any) -> Mapping[str, Any]:
        """The fields of each log record about a run; see logs.FIELDS."""
        activity = self.activity
        known: dict[str, Any] = {"job": activity.task, "task_id": activity.task_id or None}
        if self._began is None:
            known["waited"] = round(clock.now() - self.asked_at, 3)
        known |= {"lock": self.name, "alias": self.options.using, **more}
        return logs.of(self.lease, **known)

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Log a record that Redis does not take, and go on."""
        try:
            yield
        except LockUnavailable as error:
            extra = self.log_fields(reason=error.reason)
            self.logger.warning("The %s of %s is not noted: %s", what, self, error, extra=extra)


def run_job(
    job: str, name: str, body: Callable[[], Result], options: JobOptions | None = None
) -> Result | Skipped:
    """Run *body* under the lock *name*, with the records of the job *job*; or skip it.

    For a job that is neither a function of a module nor a task, such as a command of a shell.

    Args:
        job: The full name of the job, as operators will read it.
        name: The lock.
        body: What to do. If it raises, the run has failed.
        options: Those of a job; of limits, only one of that name.

    Raises:
        TypeError: *body* is no function, or its work runs only after the call; or *options* are
            no JobOptions.
        ValueError: An option is of the wrong type, out of range or useless with the others, or
            there are other limits; or the name of the job is empty.
        LockTimeout, LockUnavailable, LockLost, LockMisuse, StaleFence: See JobRun.execute().
        InvalidLockName: The name cannot be a lock's name.
    """
    checked = check_name(name)
    if options is None:
        options = JobOptions()
    if not isinstance(options, JobOptions):
        raise TypeError(
            "run_job() takes its options as one object, such as JobOptions(ttl=60), not"
            f" {options!r}."
        )
    options.check_answered()
    options.check_named(checked)
    limits = options.limits
    if limits and [one.name for one in limits] != [checked]:
        raise ValueError(
            "run_job() takes one lock, by its name: leave limits out, or decorate a function with"
            " @single_instance(limits=...)."
        )
    work = called(body, "run_job()")
    activity = Activity(task=text(job, "job"), command=current_activity.get().command)
    limits_of = (lambda args, kwargs: limits) if limits else None
    named = Named(options.in_periods(lambda args, kwargs: checked), checked, limits_of)
    run = JobRun(activity, options, named)
    result: Result | Skipped = run.execute(work)
    return result
