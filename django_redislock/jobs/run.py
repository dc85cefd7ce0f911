"""One run of a job: its body under the lock, or what happens instead.

A job has one run at a time: a function, a management command, a command of a shell, a Celery task.
All of them run like this; celery/run.py adds what a broker makes possible. Blocking and awaiting
differ only in how the lock is asked for and released.
"""

from __future__ import annotations

import inspect
import logging
import math
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from django_redislock import clock, fencing, logs, process, signals, task_runs
from django_redislock.exceptions import LockLost, LockTimeout, LockUnavailable
from django_redislock.holder import Activity, current_activity, within
from django_redislock.humanize import duration
from django_redislock.jobs.options import DATABASE, Conflict, JobOptions, Skipped
from django_redislock.lease import Lease
from django_redislock.lock import JointLock, Lock
from django_redislock.misuse import UNSTARTED, called, unstarted
from django_redislock.monitors import CheckIns
from django_redislock.process import cached_property
from django_redislock.rules.arguments import text
from django_redislock.rules.flows import Busy, Done, Finished, RunMarker
from django_redislock.rules.names import Written, check_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from django_redislock.rules.limit import Limit
    from django_redislock.rules.options import Options

    LimitsOf = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Limit, ...]]
    NameOf = Callable[[tuple[Any, ...], Mapping[str, Any]], str]

Result = TypeVar("Result")

# Seconds for which duplicates of a finished run are recognised, beyond the visibility timeout.
RECOGNISED_FOR = 86_400.0
NO_DUPLICATES = RunMarker("", RECOGNISED_FOR)  # Only a broker makes some.
# Skips that somebody wanted, so they are no warning.
EXPECTED_SKIPS = ("cooling", "done", "paused")

# How a run ends once its body has begun. "lost": its lease was lost, however the body ended.
# "interrupted": an exception from outside ended it, such as Ctrl-C or a cancellation. The last four
# are of Celery tasks, which end by retry(), replace(), Ignore or Reject.
RunOutcome = Literal[
    "success", "failure", "lost", "interrupted", "retry", "replaced", "ignored", "rejected"
]

NO_TRANSACTION = nullcontext()

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


class Named(NamedTuple):
    """How the locks of a job are named."""

    name_of: NameOf  # Makes the name from the arguments of a run.
    template: str  # The name as it was written.
    limits_of: LimitsOf | None = None  # Makes the limits from them, if it has several.


class _CompletedBefore(Exception):
    """Leaves the transaction before the body: the database has *found* that it is done."""

    def __init__(self, found: Done | Finished) -> None:
        super().__init__(found)
        self.found = found


class JobRun:
    """One run of a job.

    Attributes:
        lease: The lease while the body runs; None if it runs without the lock.
    """

    logger = logs.logger("django_redislock.jobs")
    marker = NO_DUPLICATES
    lease: Lease | None = None
    _asked = 0.0  # When it asked for the lock first.
    _began: float | None = None  # When its body did.
    _begun_in: process.Process | None = None  # Where.
    baton = ""  # If it is to take up a lease: see lease.py.
    _lock: Lock | None = None  # The one that was asked last.
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

    def __str__(self) -> str:
        return self.activity.task

    @property
    def has_begun(self) -> bool:
        """Whether the body was executed, or is."""
        return self._began is not None

    @property
    def aborts_on_lost(self) -> bool:
        """Whether the body ends at its next look at a lease that is lost."""
        return False

    @cached_property
    def name(self) -> str:
        """The name of the lock."""
        return self.named.name_of(self.args, self.kwargs)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """All limits of a run with several. The first one is its lock, for records."""
        return self.named.limits_of(self.args, self.kwargs) if self.named.limits_of else ()

    def _new_lock(self, how: Options) -> Lock:
        if self.named.limits_of is None:
            return Lock(self.name, how, self.marker, template=self.template)
        written = zip(self.limits, self.options.limits or (), strict=True)
        templates = {limit.name: Written(of.name) for limit, of in written}
        return JointLock(self.limits, how, self.marker, templates=templates)

    # --- under the lock -----------------------------------------------------------------------

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
        was_busy_with = current_activity.set(within(self.activity))
        try:
            result = self._execute(body)
        except BaseException as error:
            self._tell_end(error)
            raise
        else:
            if self._check_ins is not None or signals.run_ended.receivers:
                self._tell_end(None)
            return result
        finally:
            current_activity.reset(was_busy_with)

    async def aexecute(self, body: Callable[..., Awaitable[Any]]) -> Any:
        """See execute(); without a transaction, since Django has no asynchronous ones."""
        was_busy_with = current_activity.set(within(self.activity))
        try:
            result = await self._aexecute(body)
        except GeneratorExit as error:  # Nothing can be awaited any more.
            if self._check_ins is not None and self._ends_here:
                self._check_ins.end(self._outcome_of(error), error)
            raise
        except BaseException as error:
            await self._atell_end(error)
            raise
        else:
            await self._atell_end(None)
            return result
        finally:
            with suppress(ValueError):  # The coroutine is closed outside of its task.
                current_activity.reset(was_busy_with)

    def _check_in(self) -> None:
        """Tell the monitors that the body begins."""
        run = (self.activity.task, self.name, self.activity.task_id)
        self._check_ins = CheckIns(self.options.monitor, *run)

    def _tell_end(self, error: BaseException | None) -> None:
        """Tell how the run has ended, after its release; *error* is the exception of execute()."""
        if not self._ends_here:
            return
        try:
            if signals.run_ended.receivers:
                signals.run_ended.send_robust(**self._news_of_end(error))
        finally:
            if self._check_ins is not None:
                self._check_ins.end(self._outcome_of(error), error)
                with suppress(Exception):  # A time limit that comes now does not concern the work.
                    self._check_ins.wait(self._patience)

    async def _atell_end(self, error: BaseException | None) -> None:
        if not self._ends_here:
            return
        try:
            if signals.run_ended.receivers:
                await signals.run_ended.asend_robust(**self._news_of_end(error))
        finally:
            if self._check_ins is not None:
                self._check_ins.end(self._outcome_of(error), error)
                with suppress(Exception):  # Of a monitor that is wrong.
                    await self._check_ins.await_told()

    @property
    def _ends_here(self) -> bool:
        """Whether this process is the one in which the body began, not a child forked there."""
        return self._begun_in is process.this()

    @property
    def _patience(self) -> float:
        """How many seconds a run that is over may wait for its monitors."""
        return math.inf

    def _news_of_end(self, error: BaseException | None) -> dict[str, Any]:
        assert self._began is not None  # See _ends_here.
        took = clock.now() - self._began
        return self._news(lease=self.lease, outcome=self._outcome_of(error), took=took)

    def _outcome_of(self, error: BaseException | None) -> RunOutcome:
        """The outcome of a body that has begun; *error* is the exception of execute()."""
        if self.lease is not None and self.lease.lost_reason:
            return "lost"
        if error is None:
            return "success"
        return "failure" if isinstance(error, Exception) else "interrupted"

    def _execute(self, body: Callable[..., Any]) -> Any:
        self._asked = clock.now()
        with ExitStack() as locks:
            if self.options.atomic is not None:
                fencing.check_outermost(self.name, self.options.atomic, of_task=True)
            try:
                # The database is asked first: a run that is done need not wait for the lock.
                found = self._completed() if self.options.once == DATABASE else None
                outcome: Any = found or self._ask_for_lock(locks)
                if isinstance(outcome, Busy):
                    outcome = self._ask_again(outcome, locks)
            except LockUnavailable as error:
                if not self._runs_unlocked(error):
                    raise
                outcome = None
            if outcome is None:  # Not in the handler above: the error is none of the body's.
                return self._run_body(body, None)
            if isinstance(outcome, Lease):
                try:
                    return self._run_body(body, outcome)
                except _CompletedBefore as completed:
                    self._give_back(outcome)
                    outcome = completed.found
            return self._decide(outcome)

    async def _aexecute(self, body: Callable[..., Awaitable[Any]]) -> Any:
        self._asked = clock.now()
        async with AsyncExitStack() as locks:
            try:
                outcome: Any = await self._aask_for_lock(locks)
            except LockUnavailable as error:
                if not self._runs_unlocked(error):
                    raise
                outcome = None
            if outcome is None or isinstance(outcome, Lease):
                return await self._arun_body(body, outcome)
            return await self._adecide(outcome)

    def _ask_again(self, busy: Busy, locks: ExitStack) -> Lease | Busy | Done | Finished:
        """Ask for a busy lock in other ways, if there are any."""
        return busy

    def _ask_for_lock(
        self, locks: ExitStack, wait: float | None = None, since: float | None = None
    ) -> Lease | Busy | Done | Finished:
        """Ask for the lock.

        Args:
            locks: Its end releases the lock. It gets the lock before the request, since a soft time
                limit may be raised right after the grant. Without a grant, its end does nothing.
            wait: Seconds to wait; None: as on_conflict says.
            since: When the run first asked, if it asked before.
        """
        if self.baton and (outcome := self._take_up(locks)):
            return outcome
        how = self.options.lock
        if wait is not None:
            how = how._replace(wait=wait)
        lock = self._lock = self._new_lock(how)
        locks.push(lock)
        return lock.attempt(since=since)

    async def _aask_for_lock(self, locks: AsyncExitStack) -> Lease | Busy | Done | Finished:
        lock = self._new_lock(self.options.lock)
        locks.push_async_exit(lock)
        return await lock.aattempt()

    def _take_up(self, locks: ExitStack) -> Lease | Busy | Done | Finished | None:
        """Go on with the lease of its baton; None if that is over. Only messages carry one."""
        return None

    def _run_body(self, body: Callable[..., Any], lease: Lease | None) -> Any:
        self.lease = lease
        before = running.set(self)
        try:
            result = None  # Of a body that has replaced itself.
            with self._transaction() if self.options.atomic is not None else NO_TRANSACTION:
                self._began, self._begun_in = clock.now(), process.current  # See this().
                if self.options.monitor:
                    self._check_in()
                if signals.run_started.receivers:
                    signals.run_started.send_robust(**self._news(lease=lease))
                result = body(*self.args, **self.kwargs)
                if isinstance(result, UNSTARTED):  # The body of a task, say.
                    raise unstarted(self, result)
            return self._end(result)
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
                await signals.run_started.asend_robust(**self._news(lease=lease))
            return await body(*self.args, **self.kwargs)
        finally:
            with suppress(ValueError):  # See aexecute().
                running.reset(before)

    def _end(self, result: Any) -> Any:
        """The body has returned, and its transaction is committed; the lock is still held."""
        return result

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
            with self._judging_end():
                yield
            if self.options.once == DATABASE and not self._goes_on:
                from django_redislock import completed_runs

                completed_runs.note(lease, database)

    def _judging_end(self) -> AbstractContextManager[None]:
        """Decide what commits the transaction: here every body that returns, and no other."""
        return NO_TRANSACTION

    @property
    def _goes_on(self) -> bool:
        """Whether the work goes on in another run, although the body has returned."""
        return False

    def _completed(self) -> Done | Finished | None:
        """The completed run under this lock, if the database has one."""
        assert self.options.atomic is not None  # See options.py: once="database" needs it.
        from django_redislock import completed_runs

        run = completed_runs.find(self.name, self.options.atomic)
        if run is None:
            return None
        task_id = self.activity.task_id
        return Finished(run.ago) if task_id and run.task_id == task_id else Done(run.by, run.ago)

    def _give_back(self, lease: Lease) -> None:
        """End the lease of a run whose body was not executed: neither a success nor a failure."""
        assert self._lock is not None  # The lease is of this lock.
        self._lock.undo()
        with self._noting("end"):
            task_runs.forget_start(self.name, lease, using=self.options.using)

    # --- without the lock ---------------------------------------------------------------------

    def _decide(self, found: Busy | Done | Finished) -> Any:
        """Decide what a run does that found the lock not free."""
        skipped = self._skipped_by(found)
        self._tell(skipped)
        return self._answer(found, skipped)

    async def _adecide(self, found: Busy | Done | Finished) -> Any:
        skipped = self._skipped_by(found)
        with self._noting("skip"):
            why, by = _noted(skipped)
            await task_runs.anote_skip(self.name, why, by, using=self.options.using)
        await signals.task_skipped.asend_robust(**self._news(result=skipped))
        answer = self._answer(found, skipped)
        return await answer if inspect.isawaitable(answer) else answer

    def _skipped_by(self, found: Busy | Done | Finished) -> Skipped:
        """The skip of this run; it is logged. No other place decides a skip.

        Raises:
            LockTimeout: Somebody else has the lock, and on_conflict is "raise".
        """
        if isinstance(found, Finished):
            task_id = self.activity.task_id
            by = found.by or task_id
            return self._skip("duplicate", f"duplicate, of {task_id}", by=by, ago=found.ago)
        if isinstance(found, Done):
            return self._skip("done", f"done, by {found.by}", by=found.by, ago=found.ago)
        holder, using = found.holder, self.options.using
        if self.options.on_conflict == "raise":
            raise LockTimeout(
                found.name, holder, found.expires_in, found.cooling, using, found.reason
            )
        reason = found.reason or self._reason
        if not reason and found.name != self.name:
            reason = f"of its limits, {found.name!r} is taken"
        if found.cooling:
            left = found.expires_in
            return self._skip(
                "cooling", str(found), ago=found.ago, expires_in=left, reason=reason, by=holder
            )
        why = "busy" if found.reason is None else "paused"
        return self._skip(why, str(found), reason=reason, holder=holder)

    @property
    def _reason(self) -> str:
        """A remark about a skip, or ""."""
        return ""

    def _skip(
        self,
        why: str,
        says: str,
        *,
        ago: float | None = None,
        expires_in: float | None = None,
        reason: str = "",
        **who: str,
    ) -> Skipped:
        """Make the result of a skip, and log it.

        Args:
            why: The reason, for the result.
            says: The state of the lock, for the log.
            ago: For how many seconds it has been so.
            expires_in: In how many seconds a cooling lock is free.
            reason: A remark, or "".
            who: ``holder``, or ``by``: the owner that did the work or held the lock last.
        """
        skipped = Skipped(skipped=why, lock=self.name, **who)
        if reason:
            skipped["reason"] = reason
        if ago is not None:
            skipped["ago"] = round(ago, 3)
            says += f", {duration(ago)} ago"
        if expires_in is not None:
            skipped["expires_in"] = round(expires_in, 3)
        level = logging.INFO if why in EXPECTED_SKIPS else logging.WARNING
        extra = {**self._said(reason=why), "data": skipped}
        self.logger.log(level, "Skipped %s: lock %r is %s", self, self.name, says, extra=extra)
        return skipped

    def _tell(self, skipped: Skipped) -> None:
        """Note a skip, and send its signal."""
        with self._noting("skip"):
            self._note_skip(skipped)
        signals.task_skipped.send_robust(**self._news(result=skipped))

    def _news(self, **more: Any) -> dict[str, Any]:
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

    def _said(self, **more: Any) -> Mapping[str, Any]:
        """The fields of each log record about a run; see logs.FIELDS."""
        activity = self.activity
        known: dict[str, Any] = {"job": activity.task, "task_id": activity.task_id or None}
        if self._began is None:
            known["waited"] = round(clock.now() - self._asked, 3)
        known |= {"lock": self.name, "alias": self.options.using, **more}
        return logs.of(self.lease, **known)

    def _answer(self, found: Busy | Done | Finished, skipped: Skipped) -> Any:
        """The result of a skipped run: that of on_conflict, if it is a function."""
        policy = self.options.on_conflict
        if isinstance(found, Busy) and callable(policy):
            return policy(self._conflict(found))
        return skipped

    def _conflict(self, busy: Busy) -> Conflict:
        return Conflict(
            job=self.activity.task,
            args=self.args,
            kwargs=self.kwargs,
            lock=self.name,
            holder=busy.holder,
            expires_in=busy.expires_in,
            cooling=busy.cooling,
        )

    def _runs_unlocked(self, error: LockUnavailable) -> bool:
        """Whether the body is to run without the lock, since Redis cannot answer."""
        if self.options.on_unavailable != "run":
            return False
        says = "%s runs WITHOUT its lock, as on_unavailable says: %s"
        self.logger.error(says, self, error, extra=self._said(reason=error.reason))
        return True

    # --- records ------------------------------------------------------------------------------

    def _note_skip(self, skipped: Skipped) -> None:
        why, by = _noted(skipped)
        task_runs.note_skip(self.name, why, by, using=self.options.using)

    def _still_has(self, lease: Lease) -> bool:
        """Whether the run still has its lock at its end. Asks the server if need be."""
        with self._noting("end"), suppress(LockLost):
            lease.ensure_held()
            return True
        return False

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Log a record that Redis does not take, and go on."""
        try:
            yield
        except LockUnavailable as error:
            extra = self._said(reason=error.reason)
            self.logger.warning("The %s of %s is not noted: %s", what, self, error, extra=extra)


def _noted(skipped: Skipped) -> tuple[str, str]:
    """What the records say of a skip: why, and because of whom."""
    why = skipped["skipped"]
    # A duplicate is the same run.
    by = "" if why == "duplicate" else skipped.get("holder") or skipped.get("by") or ""
    return why, by


def run_job(
    job: str, name: str, body: Callable[[], Result], options: JobOptions | None = None
) -> Result | Skipped:
    """Run *body* under the lock *name*, with the records of the job *job*; or skip it.

    For a job that is neither a function of a module nor a task, such as a command of a shell.

    Args:
        job: The full name of the job, as operators will read it.
        name: The lock.
        body: What to do. If it raises, the run has failed.
        options: Those of a job, but no limits.

    Raises:
        TypeError: *body* is no function, or its work runs only after the call; or *options* are
            no JobOptions.
        ValueError: An option is of the wrong type, out of range or useless with the others, or
            there are limits; or the name of the job is empty.
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
    if options.limits:
        raise ValueError(
            "run_job() takes one lock, by its name: leave limits out, or decorate a function with"
            " @single_instance(limits=...)."
        )
    work = called(body, "run_job()")
    activity = Activity(task=text(job, "job"), command=current_activity.get().command)
    named = Named(lambda args, kwargs: checked, checked)
    run = JobRun(activity, options, named)
    result: Result | Skipped = run.execute(work)
    return result
