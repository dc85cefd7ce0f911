"""One run of a single-instance task: its body under the lock, or what happens instead.

There is one each time that Celery starts the task: for a message that a broker delivered, in eager
mode, or in a direct call. It executes its body, or is skipped, or is deferred to a later delivery.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery._state import _task_stack  # It has no public name; see TaskRun._item_of.
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate

from django_redislock import clock, logs, process, signals, task_runs
from django_redislock.backends.registry import backends
from django_redislock.celery import queued
from django_redislock.celery.defer import (
    SHORTEST_PAUSE,
    Deferred,
    defer,
    leave,
    put_off,
    stand,
    time_in_slot,
)
from django_redislock.celery.message import (
    acks_late,
    carried,
    carry,
    is_delivered,
    seconds_left,
    shows_results,
    stores_result,
    time_limits,
)
from django_redislock.celery.options import NEWEST, Conflict
from django_redislock.celery.queued import unpacked
from django_redislock.exceptions import LockLost, LockMisuse, LockUnavailable, RunAbandoned
from django_redislock.holder import Activity
from django_redislock.jobs.run import (
    TIME_TO_REPORT,
    JobRun,
    Named,
    Ran,
    Unavailable,
    milliseconds_of,
    running,
)
from django_redislock.lease import Baton, Lease
from django_redislock.lock import TakingUp
from django_redislock.process import cached_property, chain_of
from django_redislock.rules.flows import Busy, Done, Finished, Replaced, RunMarker
from django_redislock.rules.limit import Limit
from django_redislock.rules.stored import LONGEST_FIELD, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery import Task

    from django_redislock.celery.defer import Turn
    from django_redislock.celery.options import SingleInstance
    from django_redislock.jobs.run import Outcome, Refusal, RunOutcome

# Seconds that a run has after its success to store its result.
REPORTS_WITHIN = 10.0

LATEST = 2.0**37  # Seconds since the epoch that a calendar knows.

# Seconds. A run comes back so long before its start is due, since brokers and workers are late; and
# so near to it, it waits in its worker slot.
EARLY = 0.2
SOON = 0.5

SHORTEST_PUT_OFF = 0.02  # Seconds by which a debounced run may come too early.

UNCOUNTED_AGAIN_AFTER = 1.0  # Seconds, see TaskRun._uncount_start().

# Celery's own tasks that call another one for each item of their message.
_CALL_FOR_ITEMS = {"celery.map", "celery.starmap"}


def check_baton(baton: Baton, name: str, options: SingleInstance) -> None:
    """Refuse a baton of another lock than the run's, or with another limit.

    Raises:
        LockMisuse: The baton is of another lock.
    """
    is_of_run = (baton.alias, baton.name, baton.limit) == (options.using, name, options.limit)
    if options.limits or not is_of_run:
        raise LockMisuse(
            name,
            f"the baton is of lock {baton.name!r} of {baton.alias!r}, so a run under this one of"
            f" {options.using!r} cannot go on with it. Hand over a lease of the lock that the task"
            " takes, by the same limit; or give the baton to an argument, and call take_up().",
        )


def is_running(request: Any) -> bool:
    """Whether the body of the run of *request* is under way here."""
    run = running.get()
    return isinstance(run, TaskRun) and run.request is request


def note_published_retry(request: Any) -> None:
    """Note that a run has published its retry. One that is called directly cannot."""
    request.redislock_retried = not request.called_directly


def replace_after_commit(task: Task, replace: Callable[[], Any]) -> bool:
    """Have *replace*, which publishes the replacement of a run, called after its commit.

    Returns:
        Whether there is a transaction, so that it will be called.
    """
    run = running.get()
    if not isinstance(run, TaskRun) or run.request is not task.request:
        return False
    if run.options.atomic is None:
        return False
    run.publish_replacement = replace
    return True


def _deferred(request: Any) -> str:
    """How often a run was deferred, as Owner.deferred has it; "" if it was not."""
    said = carried(request.headers).get("deferred")
    return said if isinstance(said, str) else ""


def _deferred_again(request: Any, by: str = "") -> str:
    """The same, with one more because of *by*, the lock's holder; "" if it was another reason."""
    count, _, rest = _deferred(request).partition(" ")
    since = rest.partition(" ")[0] or str(int(time.time()))
    return f"{int(count) + 1 if count and is_number(count) else 1} {since} {by}".rstrip()[
        :LONGEST_FIELD
    ]


def _called_at(request: Any) -> float:
    """When the call of a run was made or due; its retries and deferrals carry that, too."""
    at = carried(request.headers).get("at")
    if not isinstance(at, int | float) or not 0 < at < LATEST:  # Not published by our class.
        at = time.time() + (seconds_left(request.eta) if request.eta else 0.0)
        carry(request, at=at)
    return at


class _GoesOn(Exception):
    """Tells the lock that the body is no success: it has returned *result*, and will be retried.

    Or it is committed, and will be replaced.
    """

    def __init__(self, result: object) -> None:
        super().__init__(result)
        self.result = result


# How a body ends by these exceptions, which are no failures to Celery.
_ENDINGS: tuple[tuple[type[Exception], RunOutcome], ...] = (
    (Retry, "retry"),
    (Ignore, "ignored"),
    (Reject, "rejected"),
)


class TaskRun(JobRun):
    """One run of a single-instance task."""

    logger = logs.logger("django_redislock.celery")
    options: SingleInstance

    def __init__(self, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        request = task.request
        self.task, self.request = task, request
        self.id = str(request.id or "")  # "" if it is called directly.
        deferred = _deferred(request) if request.headers else ""
        name_of = task.lock_name
        if task.single_instance_options.once_per:
            name_of = partial(name_of, at=_called_at(request))
        # execute() makes its name, and retracts the call if that fails: a key function may refuse
        # the arguments as the broker gives them back.
        super().__init__(
            Activity(task=task.name, task_id=self.id, deferred=deferred),
            task.single_instance_options,
            Named(name_of, task.lock_template, task.limits_of),
            args,
            kwargs,
            sender=task,
        )
        self.aborts_on_lost = self.options.abort_on_lost
        self._arguments_of: str | None = None  # The lock of which the server keeps its arguments.
        self._turn: Turn | None = None  # In the line of deferred runs, if it stands there.
        self.publish_replacement: Callable[[], Any] | None = None  # To be called after its commit.
        self.baton = ""  # If it is to take up a lease: see lease.py.
        if request.headers:
            self.baton = carried(request.headers).get("baton") or ""
        around = running.get()
        # A body that calls its own task is no other delivery of the message that it came with.
        calls_itself = isinstance(around, TaskRun) and around.id == self.id
        self.delivered = is_delivered(request) and not calls_itself
        self._most_starts: int | None = None  # How many starts may not end; None: not counted.
        self.call = ""  # Which of the calls under its id it is, if the caller chose the id.
        if self.delivered and (self._is_patient or self._body_has_started):
            reserved = carried(request.headers).get("reserved")
            self.reserved = dict(reserved) if isinstance(reserved, dict) else {}
        if self.delivered:
            self.call = carried(request.headers).get("call") or ""
            self._most_starts = self.options.give_up_after
            tries = f"{request.replaced_task_nesting or 0}.{request.retries or 0}"
            # Its duplicates are recognised by this, see lua/_task_of.lua.
            self.marker = RunMarker(f"{self.id}/{self.call}:{tries}", task.recognised_for)
            if self.options.lock.replace:
                redelivered = (request.delivery_info or {}).get("redelivered")
                self.marker = self.marker._replace(
                    called=milliseconds_of(_called_at(request)),
                    is_again=bool(
                        redelivered or request.retries or "since" in carried(request.headers)
                    ),
                )

    def __str__(self) -> str:
        return f"{self.task.name}[{self.id}]" if self.id else str(self.task.name)

    # --- under the lock -----------------------------------------------------------------------

    def execute(self, body: Callable[..., Any]) -> Any:
        """Execute *body* under the lock, or do what happens instead; return the result.

        Either it is skipped, or it is deferred, or it fails; or an earlier delivery has reported
        for it. The same as a table: docs/celery.md, "What happens to a run".
        """
        if self.options.monitor:
            self.time_limit = min(time_limits(self.task))
        work = partial(self._work, body)
        try:
            with self:
                try:
                    if self.options.debounce is not None:
                        self._await_last_call(self.options.debounce)
                    outcome = self.attempt(work, take_up=self._take_up if self.baton else None)
                    # With "replace" it has waited as long as it may.
                    if isinstance(outcome, Busy) and not self.options.lock.replace:
                        outcome = self._wait_here(outcome, work)
                    match outcome:
                        case Ran(result):
                            pass
                        case Unavailable(error):
                            self._come_back_later(error)
                            self.check_unlocked(error)
                            result = work(None)
                        case Busy():
                            result = self._end_as_busy(outcome)
                        case Done() | Finished() | Replaced():
                            result = self._end_as_over(outcome)
                except _GoesOn as end:
                    result = end.result
        except Deferred:
            raise  # Its call still waits in the broker's queue.
        except BaseException as error:
            if self.delivered and self._is_noted:
                self._waits_no_more(error=error)
            raise
        if self.delivered and self._is_noted:
            self._waits_no_more()
        return self.publish_replacement() if self.publish_replacement else result

    def _take_up(self, locks: ExitStack) -> Lease | Refusal | None:
        """Go on with the lease of its baton; None if that is over."""
        baton = Baton.read(self.baton)
        check_baton(baton, self.name, self.options)
        how = self.options.lock._replace(wait=0)
        lock = self.asked_lock = TakingUp(baton, how, self.marker, template=self.template)
        locks.push(lock)
        outcome = None
        try:
            outcome = lock.attempt()
        except LockLost as lost:
            # It comes too late, or again: it asks for the lock as any other run does.
            extra = self.log_fields(reason=lost.reason)
            self.logger.warning("%s does not go on with a lease: %s", self, lost, extra=extra)
        self.baton = ""
        carry(self.request, baton=None)
        return outcome

    def _decline(self) -> None:
        """End the lease of its baton at once: the database has said that the run is done."""
        with self.noting("end"), ExitStack() as locks:
            lease = self._take_up(locks)
            if isinstance(lease, Lease):
                self.give_back(lease)

    def _wait_here(self, busy: Busy, work: Callable[[Lease], Any]) -> Outcome:
        """Wait here for a busy lock if its turn is near, or if it cannot go back to the broker."""
        since = backends[self.options.using].clock()
        if busy.of_rate and self.reserved is not None:  # It has a start of its own.
            if busy.expires_in > SOON:
                return busy
            return self.attempt(work, busy.expires_in + SOON, since)
        # It is to be deferred until others have had their turn; see _end_as_busy().
        if (
            self.delivered
            and not self._is_own(busy)
            and (self._body_has_started or self._is_patient)
        ):
            self._turn = self._stand(busy)
            if self._turn is None or not self._turn.is_near:
                return busy
            outcome = self.attempt(work, time_in_slot(self.task), since)
            if isinstance(outcome, Busy):
                self._turn = self._stand(outcome)
            return outcome
        if not (self._is_patient and self._item_of):
            return busy
        self.logger.info(
            "%s waits in its worker slot: lock %r is %s, and it is an item of %s, whose message"
            " cannot go back to the broker",
            self,
            busy.name,
            busy,
            self._item_of,
            extra=self.log_fields(lock=busy.name, reason="busy"),
        )
        return self.attempt(work, self.options.conflict_deadline, since)

    def _is_own(self, busy: Busy) -> bool:
        """Whether an earlier delivery of this run has the lock, or keeps it by min_hold.

        A lock that cools down after another call under this id is a conflict like any other.
        """
        if not self.delivered:
            return False
        return busy.holding.owner.is_task(self.id) and not (busy.cooling and self.call)

    def _stand(self, busy: Busy) -> Turn | None:
        """Stand in the line of the lock that is busy, and in no other."""
        if self._line != busy.name and "ticket" in carried(self.request.headers):
            leave(self.task, self._line, self.id)
            carry(self.request, ticket=None)
        carry(self.request, line=busy.name if busy.name != self.name else None)
        numbers = [
            limit.number
            for limit in self.limits
            if isinstance(limit, Limit) and limit.name == busy.name
        ]
        permits = numbers[0] if numbers else self.options.limit
        return stand(self.task, busy, permits if isinstance(permits, int) else 1)

    @property
    def _line(self) -> str:
        """The lock in whose line it stands, if it stands in one."""
        return carried(self.request.headers).get("line") or self.name

    @cached_property
    def _item_of(self) -> str:
        """Celery's task that calls this one for an item of its message; "" if there is none.

        It is celery.map or celery.starmap, which serves chunks() too.
        """
        stack = [task.name for task in _task_stack.stack]
        called = self.request.called_directly and running.get() is None
        return stack[-2] if called and stack[-2:-1] and stack[-2] in _CALL_FOR_ITEMS else ""

    def _work(self, body: Callable[..., Any], lease: Lease | None) -> Any:
        """Execute the body under the lock, or without it if Redis does not answer."""
        # Without an answer Redis could not count it either.
        if self._most_starts and lease is not None and lease.fence is not None:
            return self._count_start(body, lease, self._most_starts)
        if self.delivered and self._is_noted:
            if self.options.debounce is not None:  # It may have waited for the lock in its slot.
                self._await_last_call(self.options.debounce, lease)
            self._waits_no_more(starts=True)
            # If the body publishes its retry, that has not been deferred yet.
            done = dict.fromkeys(("tries", "since", "raised", "deferred", "reserved"))
            carry(self.request, **done)
        result = self.run_body(partial(self._judge, body), lease)
        if not self.goes_on:
            return result
        if self.publish_replacement:
            self.ending = "replaced"
            raise _GoesOn(None)
        if lease is None or self._still_has(lease):
            with self.noting("end"):
                task_runs.note_retried(self.name, self.marker, using=self.options.using)
            self.ending = "retry"
            raise _GoesOn(result)
        return result

    def _judge(self, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Execute the body, and judge its end: whether it commits, and whether the work goes on.

        Every body that returns commits, and one that has replaced itself.
        """
        if self.task.reports_start:
            self._report_start()
        result = None
        try:
            result = body(*args, **kwargs)
        except TaskPredicate as end:
            self.ending = next((word for kind, word in _ENDINGS if isinstance(end, kind)), None)
            if not (self.publish_replacement and isinstance(end, Ignore)):
                self._tell_rollback(end)
                raise
        # A retry that it has published is none of a run that is called directly.
        retried = getattr(self.request, "redislock_retried", False)
        self.goes_on = retried or self.publish_replacement is not None
        return result

    def _tell_rollback(self, end: TaskPredicate) -> None:
        """Log that the transaction, if there is one, is rolled back.

        Celery does not call it an error, so nothing else logs it.
        """
        if self.options.atomic is None:
            return
        self.logger.log(
            logging.INFO if isinstance(end, Retry) else logging.WARNING,
            "%s ends by %s, so what it wrote to database %r is rolled back",
            self,
            type(end).__name__,
            self.options.atomic,
            extra=self.log_fields(),
        )

    def _still_has(self, lease: Lease) -> bool:
        """Whether the run still has its lock at its end. Asks the server if need be."""
        with self.noting("end"), suppress(LockLost):
            lease.ensure_held()
            return True
        return False

    def _count_start(self, body: Callable[..., Any], lease: Lease, most: int) -> Any:
        """Execute the body, and count it as a start until it ends; abandon one start too many."""
        unended, survives = 0, True
        try:
            with self.noting("start"):
                unended = task_runs.count_start(
                    self.name, self.marker, lease, using=self.options.using
                )
            if unended < most:
                self._most_starts = None  # It is counted.
                return self._work(body, lease)
        except BaseException as error:
            # At the hard time limit Celery ends the process, by a SystemExit if that suffices.
            hard, _ = time_limits(self.task)
            fails = all(isinstance(one, Exception) for one in chain_of(error))
            survives = fails or self.time_left(hard) > TIME_TO_REPORT
            raise
        finally:  # An abandoned run stays counted.
            if unended < most and survives:
                self._uncount_start(lease)
        raise self._abandon(lease, unended, most)

    def _uncount_start(self, lease: Lease) -> None:
        """Count the start no more: now, or once the server answers, if the process lives."""
        using = self.options.using
        uncount = partial(task_runs.uncount_start, self.name, self.marker, lease, using=using)
        is_done = False
        with self.noting("end"):
            uncount()
            is_done = True
        if is_done:
            return
        until = clock.now() + self.marker.recognised_for

        def uncount_later() -> None:
            while clock.now() < until:
                time.sleep(UNCOUNTED_AGAIN_AFTER)
                with suppress(LockUnavailable):
                    uncount()
                    return

        # One for each body under way when the server stopped answering: none starts until it does.
        thread = threading.Thread(target=uncount_later, name="redislock-uncount", daemon=True)
        with suppress(RuntimeError):  # No more threads, or the interpreter is shutting down.
            process.start(thread)

    def _abandon(self, lease: Lease, starts: int, most: int) -> Exception:
        """Give up a call with *starts* unended starts. Returns the exception to raise."""
        with self.noting("end"):
            self.give_back(lease)
        # The mark of an earlier delivery that was abandoned counts as a start.
        if starts > most and self._is_reported:
            says = "Ignored %s: an earlier delivery of it was abandoned"
            self.logger.info(says, self, extra=self.log_fields())
            ignored: Exception = Ignore()
            return ignored
        error = RunAbandoned(self.task.name, self.id, self.name, starts)
        self.logger.error("%s", error, extra=self.log_fields(reason="abandoned"))
        using = self.options.using
        with self.noting("end"):
            task_runs.note_abandoned(self.name, starts, using=using)
        signals.task_abandoned.send_robust(**self.news(starts=starts))
        return error

    def ends_replaced(self, error: Exception) -> bool:
        # Its retry comes back as a duplicate: see lua/acquire_replacing.lua.
        return isinstance(error, Retry) or super().ends_replaced(error)

    # --- without the lock ---------------------------------------------------------------------

    def _end_as_over(self, found: Done | Finished | Replaced) -> Any:
        """End a run whose work is done, or whose earlier delivery is."""
        if self.baton:
            self._decline()
        if isinstance(found, Finished):
            return self._end_as_duplicate(found)
        self._retract_call()
        return self._end_as_skip(found)

    def _end_as_busy(self, found: Busy) -> Any:
        """Skip a run that found the lock not free, defer it, or let it fail."""
        if self._is_own(found):
            if found.cooling:
                return self._end_as_duplicate(Finished(found.ago, found.holder))
            # Delivered twice, or again after a crash; or a retry that was published before its
            # first try let go. A skip would acknowledge the only copy of the work.
            # Its body has started, so it cannot stand for calls made now.
            self._retract_call(takes=True)
            raise self._defer("its own earlier delivery holds it", found, started=True)
        # Work that has started is not dropped because another run got in between.
        if self.delivered and self._body_has_started:
            raise self._defer("a retry finds it held", found)
        # A call that stands for others is not dropped because its wait is over.
        policy = self.options.on_conflict
        waits_for_others = policy == "wait" and self._announced_as is not None
        if self._is_patient or waits_for_others:
            if found.reason is not None:  # Paused: an operator decides for how long.
                carry(self.request, since=time.time())
            until = self._defer_until(self._requeue_call())
            if until is not None:
                raise self._defer(f"on_conflict is {policy!r}", found, until=until)
        # It stands for no call made from now on: the lock may be free for that one. What is raised
        # from here on may bring about a retry, by autoretry_for or by a function.
        self._retract_call(takes=policy == "raise" or callable(policy))
        carry(self.request, raised=True)
        return self._end_as_skip(found)

    def _end_as_skip(self, found: Refusal) -> Any:
        remark = ""
        if self._is_patient and self._item_of:
            remark = f"an item of {self._item_of} cannot go back to the broker"
        skipped = self.skip(found, remark)
        self.tell_skip(skipped)
        return self.answer(found, skipped, Conflict, task=self.task)

    def _come_back_later(self, error: LockUnavailable) -> None:
        """Defer a run that cannot know whether its lock is free, if that is wanted."""
        if self.options.on_unavailable == "retry" and (until := self._defer_until()) is not None:
            says = "Deferred %s: %s"
            self.logger.warning(says, self, error, extra=self.log_fields(reason=error.reason))
            carry(self.request, deferred=_deferred_again(self.request))
            raise defer(self.task, self.options.conflict_deadline, until=until)
        if self.options.on_unavailable != "run" and not self._body_has_started:
            carry(self.request, raised=True)

    @property
    def _is_patient(self) -> bool:
        return self.options.on_conflict == "retry"

    @property
    def _body_has_started(self) -> bool:
        """Whether this is a Celery retry of a body that was executed.

        If the lock kept the body from starting, the retry meets on_conflict as the first try did,
        so that max_retries bounds it.
        """
        return bool(self.request.retries) and not carried(self.request.headers).get("raised")

    def _end_as_duplicate(self, found: Finished) -> Any:
        """End a delivery of a run that has succeeded before. Its result is left alone."""
        ago = found.ago
        reports = self.delivered and stores_result(self.task)
        seen = reports and shows_results(self.task)
        is_reported = self._is_reported
        # Between its release and its report are milliseconds; a crash there is rare.
        if reports and not is_reported and ago is not None and ago < REPORTS_WITHIN:
            # Its body has ended, so it cannot stand for calls made now.
            self._retract_call(takes=True)
            raise defer(self.task, REPORTS_WITHIN - ago, started=True)
        self._retract_call()
        skipped = self.skip(found)
        self.tell_skip(skipped)
        # If nobody can look, there may be no report at all; that is rare, and better than two.
        if is_reported or (reports and not seen):
            raise Ignore
        return skipped

    @property
    def _is_reported(self) -> bool:
        """Whether an earlier delivery has stored a result, as far as this one can see."""
        if not (self.delivered and stores_result(self.task) and shows_results(self.task)):
            return False
        return self.task.backend.get_state(self.id) in states.READY_STATES

    def _defer_until(self, last_call_ago: float | None = None) -> float | None:
        """When this run must be back, in seconds since the epoch; None if it cannot be deferred.

        Args:
            last_call_ago: Seconds since another call was last merged into its own;
                conflict_deadline counts from then.
        """
        if not self.delivered:
            return None
        now = time.time()
        since = float(carried(self.request.headers).get("since", now))
        if last_call_ago is not None:
            since = max(since, now - last_call_ago)
        until = since + self.options.conflict_deadline
        return until if now < until else None

    def _defer(
        self, why: str, busy: Busy, *, until: float | None = None, started: bool = False
    ) -> Deferred:
        says = "Deferred %s: lock %r is %s, and %s"
        extra = self.log_fields(lock=busy.name, reason="busy")
        self.logger.info(says, self, busy.name, busy, why, extra=extra)
        turn = None if started else self._turn
        due = max(busy.expires_in - EARLY, SHORTEST_PAUSE) if busy.of_rate else None
        if self.reserved is not None:
            carry(self.request, reserved=self.reserved or None)
        carry(self.request, deferred=_deferred_again(self.request, busy.holding.owner.place))
        return defer(self.task, busy.expires_in, turn=turn, due=due, until=until, started=started)

    # --- its call in the broker's queue, see queued.py and line.py ----------------------------

    @property
    def _is_noted(self) -> bool:
        """Whether its call may be noted in the queue or the line; most messages say nothing."""
        return bool(self._turn or self._arguments_of or carried(self.request.headers))

    def _waits_no_more(self, *, starts: bool = False, error: BaseException | None = None) -> None:
        """Leave the broker's queue and the line: the body starts, or the run ends, by *error*."""
        # If it has failed before its body, Celery may retry it, and the call waits on. If not, then
        # queued._retract_ended() hears of it.
        fails = isinstance(error, Exception) and not isinstance(error, TaskPredicate)
        if not (fails and self._announced_as):
            self._retract_call(takes=starts, fails=error is not None)
        if self._turn or "ticket" in carried(self.request.headers):
            leave(self.task, self._line, self.id)
            carry(self.request, ticket=None, line=None)
            self._turn = None

    @property
    def _announced_as(self) -> str | None:
        # Not self.name: a key function may make another name of the arguments as the broker gives
        # them back, such as a list for a tuple.
        return carried(self.request.headers).get("queued") if self.delivered else None

    def _retract_call(self, *, takes: bool = False, fails: bool = False) -> None:
        """Let its call stand for no others.

        With acks_late the server keeps the last call's arguments while the broker may deliver the
        message again, which has those of the first one.

        Args:
            takes: Whether the run gets them: its body starts, or Celery may retry it.
            fails: Whether the run has ended by an exception, so that a second delivery is executed.
        """
        if not (name := self._announced_as or self._arguments_of):
            return
        keep = self.marker.recognised_for if (takes or fails) and acks_late(self.task) else 0.0
        last = queued.retract(self.task, name, self.id, keep=keep)
        if last is not None:  # Else the end of the run tries again, or its next delivery does.
            carry(self.request, queued=None)
            self._arguments_of = name if last and keep else None
        if last and takes:
            self._take(last)
        if last is None and takes and self.options.unique_queued == NEWEST:
            says = "%s runs with its own arguments, and not the last call's, if any"
            self.logger.error(says, self, extra=self.log_fields())

    def _take(self, last: bytes) -> None:
        """Run with the arguments of the last call, in place of the first one's.

        Raises:
            LockMisuse: They name another lock here, after the broker has changed them.
        """
        args, kwargs, shown = unpacked(self.task.app, last)
        limits = self.task.limits_of(tuple(args), kwargs) if self.task.limits_of else ()
        names = [limit.name for limit in limits] or [self.named.name_of(tuple(args), kwargs)]
        own = [limit.name for limit in self.limits] or [self.name]
        if other := [name for name in names if name not in own]:
            raise LockMisuse(
                self.name,
                f"the arguments of the last call name the lock {other[0]!r} in the worker, and"
                " those of the first one do not, though to the callers the key was the same. Make"
                " the key of values that look the same on both sides of the broker",
            )
        request = self.request
        # Celery's tracer passes the same list and dictionary to on_success() and the signals. With
        # pickle the list is a tuple, so these get the first call's arguments.
        if isinstance(request.args, list):
            request.args[:] = args
        else:
            request.args = tuple(args)
        request.kwargs.clear()
        request.kwargs.update(kwargs)
        request.update(shown)
        self.args, self.kwargs = tuple(args), kwargs
        says = "%s runs with the arguments of the last call with its key"
        self.logger.info(says, self, extra=self.log_fields())

    def _await_last_call(self, debounce: float, lease: Lease | None = None) -> None:
        """Put the run off until no call has been merged into its own for *debounce* seconds.

        Then it gives its *lease* back. Without an answer of the server, or if another call is
        announced by now, none has been.

        Raises:
            Deferred: It is too early.
        """
        if not self._announced_as:
            return  # A call that was published in any case, or a retry of the body.
        until_due = _called_at(self.request) - time.time()
        ago = self._requeue_call()
        pause = until_due if ago is None else max(until_due, debounce - ago)
        if self.options.debounce_max is not None:
            pause = min(pause, until_due - debounce + self.options.debounce_max)
        if pause > SHORTEST_PUT_OFF:
            says = "Put off %s by %.1f s: debounce counts from its last call"
            self.logger.debug(says, self, pause, extra=self.log_fields())
            if lease is not None:
                self.give_back(lease)
            raise put_off(self.task, pause)

    def _requeue_call(self) -> float | None:
        """Go on standing for others. Returns the seconds since the last one was merged into it."""
        if not (name := self._announced_as):
            return None
        return queued.requeue(self.task, name, self.id, expires=self.request.expires)

    # --- reports ------------------------------------------------------------------------------

    def _report_start(self) -> None:
        """Report STARTED in place of Celery; see SingleInstanceTask.reports_start."""
        if self.delivered and stores_result(self.task):
            meta = {"pid": os.getpid(), "hostname": self.request.hostname}
            self.task.backend.store_result(self.id, meta, states.STARTED, request=self.request)
