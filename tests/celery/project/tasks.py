"""Tasks that do nothing but say so, each under another kind of lock.

All take a *key*, which is the name of their lock, so that tests do not meet.
"""

import os
import signal
import time
from types import FunctionType

from celery import Task, current_task, group, shared_task
from celery.exceptions import Ignore, Reject
from django.db import transaction

import django_redislock
from django_redislock import (
    Limit,
    LockLost,
    LockTimeout,
    LockUnavailable,
    distributed_lock,
    held,
    signals,
)
from django_redislock import single_instance_task as the_real_one
from django_redislock.celery import current_lease
from tests.celery.project.app import schema
from tests.celery.project.journal import PATIENCE, note, server, wait_at_gate
from tests.celery.project.naive import single_instance_task as the_naive_one

single_instance_task = the_naive_one if "TESTS_NAIVE" in os.environ else the_real_one


def work(key, *, hold=False, seconds=0.0, fail=False):
    """The body of all tasks: note the start and the end, and in between do as asked."""
    lease = current_lease()
    note(key, "start", fence=lease and lease.fence)
    try:
        if hold:
            wait_at_gate(key)
        time.sleep(seconds)
    except BaseException:  # A time limit, or the end of the worker.
        note(key, "interrupted")
        raise
    if fail:
        note(key, "failure")
        raise ValueError("as asked")
    note(key, "end")
    return f"did {key}"


def do_work(key, **how):
    return work(key, **how)


def working(name, body=do_work, **options):
    """A task of this name, under a lock with these options."""
    run = FunctionType(body.__code__, globals(), name, body.__defaults__)
    run.__kwdefaults__ = body.__kwdefaults__
    run.__qualname__ = name
    return single_instance_task(**{"key": "{key}", **options})(run)


def make(body=do_work, /, **tasks):
    """Tasks with this body: their names, and the options of each."""
    for name, options in tasks.items():
        working(name, body, **options)


# --- what most of the tests run -------------------------------------------------------------------

LATE = {"acks_late": True}
SHORT = {"ttl": 6}
AUTORETRY = {"on_conflict": "raise", "autoretry_for": (LockTimeout,)}

skipping = working("skipping")
late = working("late", **LATE, **SHORT)
make(
    lengthy={**LATE, "ttl": 30},  # For the end of its lease nobody waits: what frees is a release.
    lasting={**LATE, "ttl": 9},  # Outlasts a short visibility timeout by far.
    brisk=SHORT,
    brief=SHORT,  # Acknowledged when it starts, as is Celery's default.
    rejecting={**LATE, **SHORT, "reject_on_worker_lost": True},
    quiet={**LATE, "ignore_result": True},
    insisting={**AUTORETRY, "retry_kwargs": {"countdown": 0.2, "max_retries": 100}},
    resigning={**AUTORETRY, "retry_kwargs": {"countdown": 0.1, "max_retries": 2}},
    retrying={"on_conflict": "retry"},
    hurried={"on_conflict": "retry", "conflict_deadline": 1},
    waiting={"on_conflict": "wait", "wait": 20},
    impatient={"on_conflict": "wait", "wait": 0.2},
    once={"once": 3600},
    cooling={**LATE, "min_hold": 3600},
    draw_late={**LATE, **SHORT, "min_hold": 30},
    limited={**LATE, **SHORT, "limit": 3},
    limited_cooling={"limit": 2, "min_hold": 3600},
    sharing={"limit": 2, "on_conflict": "wait", "wait": 20},
    hopeful={"on_unavailable": "retry"},
    careless={"on_unavailable": "run"},
)


@shared_task
def plain(key, *, hold=False):
    """Take a lock by itself."""
    with distributed_lock(key):
        note(key, "start")
        if hold:
            wait_at_gate(key)


@single_instance_task(key="{key}", bind=True, **LATE, **SHORT)
def calling_itself(self, key, *, by):
    """Call itself, by its name or by the attribute *by*."""
    note(key, "start")
    again = getattr(self, by) if by else self
    return [f"did {key}", again(key, by=by)]


def answer(conflict):
    """What answering says when busy."""
    return {"sorry": conflict.kwargs, "key": conflict.args[0], "holder": conflict.holder}


def ask_twice(conflict):
    """Have Celery retry, twice; then this raises MaxRetriesExceededError."""
    note(conflict.lock, "conflict", retries=conflict.task.request.retries)
    raise conflict.task.retry(countdown=0.1, max_retries=2)


make(answering={"on_conflict": answer}, pleading={"on_conflict": ask_twice})


@single_instance_task(key="{key}", atomic=True, once="database", ignore_result=True, **LATE)
def completing(key, *, hold=False):
    """Succeed once and for all; with *hold*, stand still between the commit and the release."""

    def stand_still():
        note(key, "committed")
        wait_at_gate(key)

    if hold:
        transaction.on_commit(stand_still)
    return work(key)


@single_instance_task(
    limits=[Limit("{key}:{tenant}", lambda tenant: int(tenant[-1])), Limit("{key}", 3)],
    on_conflict="retry",
    **LATE,
)
def exporting(key, tenant, **how):
    """Run as often at a time as the tenant's plan says, three times in all; come back when busy."""
    return work(key, **how)


@single_instance_task(key="{key}", ttl=9, abort_on_lost=True)
def aborting(key):
    """Look at the lease between steps."""
    lease = current_lease()
    lease.on_lost(lambda lost: note(key, "lost", reason=lost.lost_reason))
    note(key, "start")
    wait_at_gate(key)
    current_lease()
    note(key, "step")
    return f"did {key}"


def draw(key, noon, seconds=0.02):
    note(key, "draw", noon=noon)
    time.sleep(seconds)
    return noon


make(draw, lottery={"min_hold": 4}, hasty_lottery={})


# Beat sends it ten times a second. A result that Celery keeps unsubscribes in its destructor, where
# Python would drop the SystemExit by which Celery ends a beat on SIGTERM.
@single_instance_task(key="{key}", min_hold=5, ignore_result=True)
def at_noon(key):
    """Draw, at most every five seconds."""
    note(key, "draw")


# --- calls that end their process -----------------------------------------------------------------


def end_as_told(key, *ends):
    """Each start ends as the next of *ends* says, or kills its process."""
    start = sum(b'"start"' in event for event in server().lrange(f"journal:{key}", 0, -1))
    note(key, "start")
    match [*ends, "kill"][min(start, len(ends))]:
        case "fail":
            raise ValueError("as asked")
        case "hold":
            wait_at_gate(key)
        case "retry":
            wait_at_gate(key)
            raise current_task.retry(countdown=0)
        case "overrun":
            time.sleep(PATIENCE)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return f"did {key}"


# What has the broker deliver a call again that has killed its process.
AGAIN = {**LATE, "reject_on_worker_lost": True, "ttl": 0.5}
TWICE = {**AGAIN, "give_up_after": 2}
make(
    end_as_told,
    deadly={
        **AGAIN,
        "give_up_after": 3,
        "autoretry_for": (Exception,),
        "retry_kwargs": {"countdown": 0, "max_retries": 5},
    },
    deadly_limited={**TWICE, "limit": 2, "on_conflict": "retry", "unique_queued": True},
    deadly_once={**AGAIN, "give_up_after": 1, "on_unavailable": "retry"},
    overrunning={**TWICE, "acks_on_failure_or_timeout": False},
)


def note_abandoned(name, **news):
    """A call was abandoned."""
    note(name, "abandoned", task_id=news["task_id"], starts=news["starts"])


if "TESTS_JOURNAL" in os.environ:  # Not in the tests' own process, which imports this too.
    signals.task_abandoned.connect(note_abandoned)


# --- one call in the queue ------------------------------------------------------------------------

QUEUED = {"unique_queued": True}
QUEUED_RETRYING = {**QUEUED, "on_conflict": "retry"}
NEWEST = {"unique_queued": "newest"}
NEWEST_RETRYING = {**NEWEST, "on_conflict": "retry"}


def wait_for_leave(conflict):
    """Note the conflict, and return when the gate is opened."""
    note(conflict.lock, "conflict")
    wait_at_gate(conflict.lock)
    return "skipped"


def ends_by(error):
    """A class of tasks that end before their run."""

    def before_start(self, *args):
        raise error

    return type("Ending", (Task,), {"before_start": before_start})


class Answering(Task):
    """Has its result before its run."""

    def __call__(self, *args, **kwargs):
        """Called by Celery."""
        return "answered"


Refusing = ends_by(ValueError("as asked"))
Exiting = ends_by(SystemExit())
make(
    queued=QUEUED,
    queued_quiet={**QUEUED, "ignore_result": True},
    queued_briefly={**QUEUED, "queued_ttl": 6},
    queued_perishable={**QUEUED, "expires": 6},
    queued_retrying={**QUEUED_RETRYING, **LATE},
    queued_retrying_briefly={**QUEUED_RETRYING, "queued_ttl": 10},
    queued_hurried={**QUEUED_RETRYING, "conflict_deadline": 6},
    queued_waiting={**QUEUED, "on_conflict": "wait", "wait": 20},
    queued_impatient={**QUEUED, "on_conflict": "wait", "wait": 0.2},
    queued_raising={**QUEUED, "on_conflict": "raise"},
    queued_hopeful={**QUEUED, "on_unavailable": "retry"},
    queued_leaving={**QUEUED, "on_conflict": wait_for_leave},
    queued_refusing={**QUEUED, "base": Refusing},
    queued_ignoring={**QUEUED, "base": ends_by(Ignore())},
    # Too late for another delivery, without acks_late.
    queued_rejecting={**QUEUED, "base": ends_by(Reject("as asked", requeue=True))},
    queued_exiting={**QUEUED, "base": Exiting},
    queued_exiting_late={**QUEUED, "base": Exiting, **LATE},
    queued_answering={**QUEUED, "base": Answering},
)


@single_instance_task(key="{key}", **NEWEST_RETRYING, **LATE, **SHORT)
def queued_newest(key, what, *, fail=False, reject=False, crash=False, **how):
    """Wait in the queue once, and run with what the last call says."""
    request = queued_newest.request
    shown = request.argsrepr, request.kwargsrepr
    note(key, "what", what=what, args=request.args, kwargs=request.kwargs, shown=shown)
    if fail and not request.retries:
        raise queued_newest.retry(countdown=0)
    if reject and not request.delivery_info["redelivered"]:
        raise Reject("as asked", requeue=True)
    result = work(key, **how)
    if crash and not request.delivery_info["redelivered"]:
        raise ValueError("as asked")
    return result


def note_what(key, what, hold=False):
    """Note what it was called with."""
    note(key, "what", what=what, schema=schema.get())
    return work(key, hold=hold)


def plead(conflict):
    """Have Celery retry."""
    raise conflict.task.retry(countdown=0.1, max_retries=None)


def key_in_schema(key, what, hold=False):
    """A key for each tenant."""
    return f"{schema.get()}:{key}"


def by_type(key, what, hold=False):
    """A key that is another one in the worker, where an object has become a dictionary."""
    return f"{key}:dictionary" if isinstance(what, dict) else key


make(
    note_what,
    queued_of_tenant=NEWEST_RETRYING,
    queued_in_schema={**NEWEST_RETRYING, "key": key_in_schema},
    queued_newest_waiting={**NEWEST, "on_conflict": "wait", "wait": 60, **LATE},
    # Have Celery retry when busy, or without Redis.
    queued_newest_raising={
        **NEWEST,
        **LATE,
        "on_conflict": "raise",
        "autoretry_for": (LockTimeout, LockUnavailable),
        "retry_kwargs": {"countdown": 0.1, "max_retries": None},
    },
    queued_newest_pleading={**NEWEST, "on_conflict": plead},
    queued_newest_refusing={**NEWEST, **LATE, "base": Refusing},
    queued_fickle={**NEWEST, "key": by_type},
    # Another limit is another one in the worker.
    queued_fickle_limited={
        **NEWEST,
        "key": None,
        "limits": [Limit("{key}", 1), Limit("{key}:{what}", 1)],
    },
)


@single_instance_task(
    limits=[Limit("{key}", 1), Limit("{key}:{what}", lambda number=1: number)], **NEWEST
)
def queued_newest_limited(key, what, number=1, more=""):
    """Wait in the queue once, and run with what the last call with the same limits says."""
    locks = sorted(lock.name for lock in held.list() if lock.name.startswith(key))
    note(key, "what", what=[what, number, more], locks=locks)
    return work(key)


class Order:
    """An order that becomes a dictionary on its way through the broker."""

    def __init__(self, pk):
        self.pk = pk

    def __str__(self):
        return self.pk

    def __json__(self):
        return vars(self)


@single_instance_task(key=lambda order: order.pk, **QUEUED)
def queued_order(order):
    """Wait in the queue once, under a key that cannot be made of what comes out of it."""


@single_instance_task(key="{key}:{parts}", **QUEUED)
def queued_parts(key, parts):
    """Wait in the queue once, under a key that looks different after the way through it."""
    return work(key)


# --- retries, and parts of a canvas ---------------------------------------------------------------


@single_instance_task(key="{key}", bind=True, max_retries=1)
def flaky(self, key, pause=0.0, hold=False):
    """Retry once within the body; the retry is published while the lock is still held."""
    note(key, "start", retries=self.request.retries)
    if self.request.retries == 0:
        retry = self.retry(countdown=pause, throw=False)
        if hold:
            wait_at_gate(key)
        raise retry
    note(key, "end")
    return f"did {key}"


def ask_again(self, key, pause=0.0, hold=False):
    """Publish a retry, and end well all the same."""
    note(key, "start", retries=self.request.retries)
    if self.request.retries == 0:
        self.retry(countdown=pause, throw=False)
    if hold:
        wait_at_gate(key)
    note(key, "end")
    return f"tried {self.request.retries + 1}"


make(
    ask_again,
    asking_again={"bind": True, **LATE},
    asking_again_once={"bind": True, "once": 3600},
    asking_again_cooling={"bind": True, "min_hold": 3600},
    asking_again_limited={"bind": True, "limit": 2},
)


@single_instance_task(key="{key}", bind=True)
def replacing(self, key):
    """Replace itself by another task."""
    note(key, "start")
    raise self.replace(skipping.si(key))


@single_instance_task(key="{key}", bind=True, **LATE)
def polling(self, key, times, headers=False):
    """Call itself again under its own id, and with its headers if asked to."""
    if times > 1:
        how = {"headers": self.request.headers} if headers else {}
        self.apply_async((key, times - 1, headers), task_id=self.request.id, **how)
    return work(key)


@shared_task
def collect(results):
    """What comes after in a canvas."""
    return results


@shared_task
def note_error(request, error, traceback, key):
    """What is called if a canvas fails."""
    note(key, "error", says=str(error))


@shared_task
def append(result, more):
    """What comes next in a chain."""
    return [result, more]


@shared_task
def publish_canvas(key, task_id):
    """Publish a canvas whose only member has an id that somebody has chosen."""
    group([late.si(key).set(task_id=task_id)]).apply_async()


# The version before this one, which tests/upgrades runs, knows none of these.
if hasattr(django_redislock, "Rate"):
    from django_redislock import Rate

    def hold_or_look(key, *, hold=False, looks=False):
        """Hold the lock until told; with *looks*, until a newer call comes."""
        if looks:
            note(key, "start")
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                current_lease().ensure_held()
                time.sleep(0.01)
        return work(key, hold=hold)

    # The newest call wins.
    REPLACING = {"on_conflict": "replace", **LATE, **SHORT}
    make(
        hold_or_look,
        newest_wins_late={**REPLACING, "replace_within": 20},
        newest_wins={
            **REPLACING,
            "replace_within": 1,
            "autoretry_for": (LockLost,),
            "retry_kwargs": {"countdown": 0.1},
        },
    )
    # Run once, a while after the last of many calls; the second is soon taken for lost.
    make(
        note_what,
        debounced={"debounce": 1, "debounce_max": 3, **LATE},
        debounced_briefly={"debounce": 0.2, "queued_ttl": 1},
    )

    @single_instance_task(
        limits=[Rate("{key}", lambda rate: rate)], on_conflict="retry", acks_late=True
    )
    def rated(key, rate="20/s", **how):
        """Start as often as the rate says; come back when a start is due."""
        return work(key, **how)
