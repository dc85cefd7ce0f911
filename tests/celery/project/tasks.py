"""Tasks that do nothing but say so, each under another kind of lock.

All take a *key*, which is the name of their lock, so that tests do not meet.
"""

from __future__ import annotations

import os
import signal
import time
from types import FunctionType
from typing import Any

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
    """The body of most tasks."""
    return work(key, **how)


def working(name, *, body=do_work, **options):
    """A task of this name, under a lock with these options."""
    run = FunctionType(body.__code__, globals(), name, body.__defaults__)
    run.__qualname__ = name
    return single_instance_task(**{"key": "{key}", **options})(run)


@shared_task
def plain(key: str, *, hold: bool = False) -> None:
    """Take a lock by itself."""
    with distributed_lock(key):
        note(key, "start")
        if hold:
            wait_at_gate(key)


skipping = working("skipping")  # Skip when busy.
# Skip when busy; acknowledged when it ends, so that it survives its worker.
late = working("late", acks_late=True, ttl=6)
# As late, with a lease for whose end nobody waits: what frees the lock is a release.
lengthy = working("lengthy", acks_late=True, ttl=30)


@single_instance_task(key="{key}", acks_late=True, ttl=6, bind=True)
def calling_itself(self: Any, key: str, *, by: str) -> list[Any]:
    """Call itself, by its name or by the attribute *by*."""
    note(key, "start")
    again = getattr(self, by) if by else self
    return [f"did {key}", again(key, by=by)]


brisk = working("brisk", ttl=6)  # Skip when busy; its lease is short.
brief = working("brief", ttl=6)  # As late, but acknowledged when it starts, as is Celery's default.
# As late, with a lease that outlasts a short visibility timeout by far.
lasting = working("lasting", acks_late=True, ttl=9)
# As late, and back in the queue at once when its process dies.
rejecting = working("rejecting", acks_late=True, ttl=6, reject_on_worker_lost=True)


def end_as_told(key, *ends):
    """The body of those below: each start ends as the next of *ends* says, or kills its process."""
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
AGAIN = {"key": "{key}", "acks_late": True, "reject_on_worker_lost": True, "ttl": 0.5}


@single_instance_task(
    **AGAIN,
    give_up_after=3,
    autoretry_for=(Exception,),
    retry_kwargs={"countdown": 0, "max_retries": 5},
)
def deadly(key: str, *ends: str) -> str:
    """Kill its process, three times at most."""
    return end_as_told(key, *ends)


@single_instance_task(**AGAIN, give_up_after=2, limit=2, on_conflict="retry", unique_queued=True)
def deadly_limited(key: str, *ends: str) -> str:
    """Kill its process, twice at most, with one of two permits."""
    return end_as_told(key, *ends)


@single_instance_task(**AGAIN, give_up_after=1, on_unavailable="retry")
def deadly_once(key: str, *ends: str) -> str:
    """Kill its process once."""
    return end_as_told(key, *ends)


@single_instance_task(**AGAIN, give_up_after=2, acks_on_failure_or_timeout=False)
def overrunning(key: str) -> str:
    """Go beyond its hard time limit, twice at most, and come back each time."""
    return end_as_told(key, *["overrun"] * 10)


def note_abandoned(name, **news):
    """A call was abandoned."""
    note(name, "abandoned", task_id=news["task_id"], starts=news["starts"])


if "TESTS_JOURNAL" in os.environ:  # Not in the tests' own process, which imports this too.
    signals.task_abandoned.connect(note_abandoned)


quiet = working("quiet", ignore_result=True, acks_late=True)  # Has no result.
raising = working("raising", on_conflict="raise")  # Fail when busy.
# Fail when busy, and let Celery retry.
insisting = working(
    "insisting",
    on_conflict="raise",
    autoretry_for=(LockTimeout,),
    retry_kwargs={"countdown": 0.2, "max_retries": 100},
)
# Fail when busy, and let Celery retry twice.
resigning = working(
    "resigning",
    on_conflict="raise",
    autoretry_for=(LockTimeout,),
    retry_kwargs={"countdown": 0.1, "max_retries": 2},
)


@single_instance_task(key="{key}", on_conflict="retry", bind=True)
def retrying(self: Task, key: str, tags: frozenset[str] = frozenset(), **how: Any) -> str:
    """Come back when busy; tell how the message came."""
    request = self.request
    note(
        key,
        "request",
        tags=sorted(tags),
        priority=request.delivery_info["priority"],
        timelimit=request.timelimit,
        expires=request.expires,
        headers=request.headers,
        retries=request.retries,
    )
    return work(key, **how)


# Come back when busy, for a second.
hurried = working("hurried", on_conflict="retry", conflict_deadline=1)
waiting = working("waiting", on_conflict="wait", wait=20)  # Wait when busy.
impatient = working("impatient", on_conflict="wait", wait=0.2)  # Wait a moment when busy.


def answer(conflict):
    """What answering says when busy."""
    return {"sorry": conflict.kwargs, "key": conflict.args[0], "holder": conflict.holder}


answering = working("answering", on_conflict=answer)  # Call a function when busy.


def ask_again(conflict):
    """Have Celery retry, twice; then this raises MaxRetriesExceededError."""
    note(conflict.lock, "conflict", retries=conflict.task.request.retries)
    raise conflict.task.retry(countdown=0.1, max_retries=2)


pleading = working("pleading", on_conflict=ask_again)  # Call a function when busy, which retries.
once = working("once", once=3600)  # Succeed once.


@single_instance_task(key="{key}", atomic=True, once="database", acks_late=True, ignore_result=True)
def completing(key: str, *, hold: bool = False) -> str:
    """Succeed once and for all; with *hold*, stand still between the commit and the release."""

    def stand_still():
        note(key, "committed")
        wait_at_gate(key)

    if hold:
        transaction.on_commit(stand_still)
    return work(key)


cooling = working("cooling", min_hold=3600, acks_late=True)  # Keep the lock after a success.
limited = working("limited", limit=3, ttl=6, acks_late=True)  # Run three times at a time.
# Run twice at a time; keep the permit after a success.
limited_cooling = working("limited_cooling", limit=2, min_hold=3600)


@single_instance_task(
    limits=[Limit("{key}:{tenant}", lambda tenant: int(tenant[-1])), Limit("{key}", 3)],
    on_conflict="retry",
    acks_late=True,
    bind=True,
)
def exporting(self: Task, key: str, tenant: str, **how: Any) -> str:
    """Run as often at a time as the tenant's plan says, three times in all; come back when busy."""
    return work(key, **how)


# Run twice at a time; wait when both permits are taken.
sharing = working("sharing", limit=2, on_conflict="wait", wait=20)
# Run twice at a time; wait a while when both permits are taken.
sharing_impatiently = working("sharing_impatiently", limit=2, on_conflict="wait", wait=2.5)
queued = working("queued", unique_queued=True)  # Wait in the queue once.


@single_instance_task(key="{key}", unique_queued="newest", on_conflict="retry")
def queued_of_tenant(key: str, what: str) -> str:
    """Wait in the queue once, with what the last call says, and say in which schema it runs."""
    note(key, "what", what=what, schema=schema.get())
    return f"did {key}"


def key_in_schema(key, what):
    """A key for each tenant."""
    return f"{schema.get()}:{key}"


@single_instance_task(key=key_in_schema, unique_queued="newest", on_conflict="retry")
def queued_in_schema(key: str, what: str) -> str:
    """As queued_of_tenant, with a lock for each tenant."""
    return str(queued_of_tenant.run.unguarded(key, what))


# Wait in the queue once, and have no result.
queued_quiet = working("queued_quiet", unique_queued=True, ignore_result=True)


@single_instance_task(
    key="{key}",
    unique_queued="newest",
    on_conflict="retry",
    acks_late=True,
    ttl=6,
)
def queued_newest(
    key: str,
    what: str,
    *,
    fail: bool = False,
    reject: bool = False,
    crash: bool = False,
    **how: Any,
) -> str:
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


def note_what(key, what):
    """The body of those below: note what it was called with."""
    note(key, "what", what=what)
    return work(key)


# As queued_newest, but wait in the worker when busy.
queued_newest_waiting = working(
    "queued_newest_waiting",
    unique_queued="newest",
    on_conflict="wait",
    wait=60,
    acks_late=True,
    body=note_what,
)
# As queued_newest, but have Celery retry when busy, or without Redis.
queued_newest_raising = working(
    "queued_newest_raising",
    unique_queued="newest",
    on_conflict="raise",
    autoretry_for=(LockTimeout, LockUnavailable),
    retry_kwargs={"countdown": 0.1, "max_retries": None},
    acks_late=True,
    body=note_what,
)


def plead(conflict):
    """Have Celery retry."""
    raise conflict.task.retry(countdown=0.1, max_retries=None)


# As queued_newest, but call a function when busy, which retries.
queued_newest_pleading = working(
    "queued_newest_pleading", unique_queued="newest", on_conflict=plead, body=note_what
)


def wait_for_leave(conflict):
    """Note the conflict, and return when the gate is opened."""
    note(conflict.lock, "conflict")
    wait_at_gate(conflict.lock)
    return "skipped"


# Wait in the queue once; call a function when busy, which takes its time.
queued_leaving = working("queued_leaving", unique_queued=True, on_conflict=wait_for_leave)


def by_type(key, what):
    """A key that is another one in the worker, where an object has become a dictionary."""
    return f"{key}:dictionary" if isinstance(what, dict) else key


@single_instance_task(
    limits=[Limit("{key}", 1), Limit("{key}:{what}", lambda number=1: number)],
    unique_queued="newest",
)
def queued_newest_limited(key: str, what: str, number: int = 1, more: str = "") -> str:
    """Wait in the queue once, and run with what the last call with the same limits says."""
    locks = sorted(lock.name for lock in held.list() if lock.name.startswith(key))
    note(key, "what", what=[what, number, more], locks=locks)
    return work(key)


@single_instance_task(
    limits=[Limit("{key}", 1), Limit("{key}:{what}", 1)],
    unique_queued="newest",
)
def queued_fickle_limited(key: str, what: Any) -> str:
    """As queued_fickle, but it is another limit that is another one in the worker."""
    return work(key)


@single_instance_task(key=by_type, unique_queued="newest")
def queued_fickle(key: str, what: Any) -> str:
    """Wait in the queue once, and run with what the last call says, if it has the same key."""
    return work(key)


# Wait in the queue once, for six seconds.
queued_briefly = working("queued_briefly", unique_queued=True, queued_ttl=6)
# Wait in the queue once, in a message that expires after six seconds.
queued_perishable = working("queued_perishable", unique_queued=True, expires=6)


class Order:
    """An order that becomes a dictionary on its way through the broker."""

    def __init__(self, pk):
        self.pk = pk

    def __str__(self):
        return self.pk

    def __json__(self):
        return vars(self)


@single_instance_task(key=lambda order: order.pk, unique_queued=True)
def queued_order(order: Any) -> None:
    """Wait in the queue once, under a key that cannot be made of what comes out of it."""


class Refusing(Task):
    """Fails before its run."""

    def before_start(self, *args):
        """Called by Celery."""
        raise ValueError("as asked")


# Wait in the queue once, and fail before the run.
queued_refusing = working("queued_refusing", base=Refusing, unique_queued=True)


@single_instance_task(base=Refusing, key="{key}", unique_queued="newest", acks_late=True)
def queued_newest_refusing(key: str, what: str) -> None:
    """As queued_refusing, with what the last call says."""


class Ignoring(Task):
    """Ends before its run, without a result."""

    def before_start(self, *args):
        """Called by Celery."""
        raise Ignore


# Wait in the queue once, and end before the run.
queued_ignoring = working("queued_ignoring", base=Ignoring, unique_queued=True)


class Rejecting(Task):
    """Asks the broker for another delivery before its run; too late without acks_late."""

    def before_start(self, *args):
        """Called by Celery."""
        raise Reject("as asked", requeue=True)


# Wait in the queue once, and be lost before the run.
queued_rejecting = working("queued_rejecting", base=Rejecting, unique_queued=True)


class Exiting(Task):
    """Ends its process before its run."""

    def before_start(self, *args):
        """Called by Celery."""
        raise SystemExit


# Wait in the queue once, and be lost with the process before the run.
queued_exiting = working("queued_exiting", base=Exiting, unique_queued=True)
# As queued_exiting, but the message is still at the broker.
queued_exiting_late = working(
    "queued_exiting_late", base=Exiting, unique_queued=True, acks_late=True
)


class Answering(Task):
    """Has its result before its run."""

    def __call__(self, *args, **kwargs):
        """Called by Celery."""
        return "answered"


# Wait in the queue once, and have a result before the run.
queued_answering = working("queued_answering", base=Answering, unique_queued=True)


@single_instance_task(key="{key}:{parts}", unique_queued=True)
def queued_parts(key: str, parts: tuple[int, ...]) -> str:
    """Wait in the queue once, under a key that looks different after the way through it."""
    return work(key)


# Wait in the queue once; come back when busy.
queued_retrying = working(
    "queued_retrying", unique_queued=True, on_conflict="retry", acks_late=True
)
# As queued_retrying, if something is heard of it within ten seconds.
queued_retrying_briefly = working(
    "queued_retrying_briefly", unique_queued=True, on_conflict="retry", queued_ttl=10
)
# As queued_retrying, for six seconds.
queued_hurried = working(
    "queued_hurried", unique_queued=True, on_conflict="retry", conflict_deadline=6
)
# Wait in the queue once; wait in the worker when busy.
queued_waiting = working("queued_waiting", unique_queued=True, on_conflict="wait", wait=20)
# Wait in the queue once; wait a moment in the worker when busy.
queued_impatient = working("queued_impatient", unique_queued=True, on_conflict="wait", wait=0.2)
# Wait in the queue once; fail when busy.
queued_raising = working("queued_raising", unique_queued=True, on_conflict="raise")
# Wait in the queue once; come back when Redis does not answer.
queued_hopeful = working("queued_hopeful", unique_queued=True, on_unavailable="retry")
hopeful = working("hopeful", on_unavailable="retry")  # Come back when Redis does not answer.
# Run without a lock when Redis does not answer.
careless = working("careless", on_unavailable="run")


@single_instance_task(key="{key}", ttl=9, abort_on_lost=True)
def aborting(key: str) -> str:
    """Look at the lease between steps."""
    lease = current_lease()
    lease.on_lost(lambda lost: note(key, "lost", reason=lost.lost_reason))
    note(key, "start")
    wait_at_gate(key)
    current_lease()
    note(key, "step")
    return f"did {key}"


@single_instance_task(key="{key}", bind=True, max_retries=1)
def flaky(self: Task, key: str, pause: float = 0.0, hold: bool = False) -> str:
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
    """The body of those below: publish a retry, and end well all the same."""
    note(key, "start", retries=self.request.retries)
    if self.request.retries == 0:
        self.retry(countdown=pause, throw=False)
    if hold:
        wait_at_gate(key)
    note(key, "end")
    return f"tried {self.request.retries + 1}"


asking_again = single_instance_task(
    key="{key}", bind=True, acks_late=True, name="tests.celery.project.tasks.asking_again"
)(ask_again)
asking_again_once = single_instance_task(
    key="{key}", bind=True, once=3600, name="tests.celery.project.tasks.asking_again_once"
)(ask_again)
asking_again_cooling = single_instance_task(
    key="{key}", bind=True, min_hold=3600, name="tests.celery.project.tasks.asking_again_cooling"
)(ask_again)
asking_again_limited = single_instance_task(
    key="{key}", bind=True, limit=2, name="tests.celery.project.tasks.asking_again_limited"
)(ask_again)


@single_instance_task(key="{key}", bind=True)
def replacing(self: Task, key: str) -> Any:
    """Replace itself by another task."""
    note(key, "start")
    raise self.replace(skipping.si(key))


@single_instance_task(key="{key}", bind=True, acks_late=True)
def polling(self: Task, key: str, times: int, headers: bool = False) -> str:
    """Call itself again under its own id, and with its headers if asked to."""
    if times > 1:
        how = {"headers": self.request.headers} if headers else {}
        self.apply_async((key, times - 1, headers), task_id=self.request.id, **how)
    return work(key)


def draw(key, noon, seconds=0.02):
    """Draw."""
    note(key, "draw", noon=noon)
    time.sleep(seconds)
    return noon


lottery = working("lottery", min_hold=4, body=draw)


# Draw; acknowledged when it is done.
draw_late = working("draw_late", ttl=6, min_hold=30, acks_late=True)


# Beat sends it ten times a second. A result that Celery keeps unsubscribes in its destructor, where
# Python would drop the SystemExit by which Celery ends a beat on SIGTERM.
@single_instance_task(key="{key}", min_hold=5, ignore_result=True)
def at_noon(key: str) -> None:
    """Draw, at most every five seconds."""
    note(key, "draw")


# Draw, under a lock that is free again as soon as the draw is done.
hasty_lottery = working("hasty_lottery", body=draw)


@shared_task
def collect(results: Any) -> Any:
    """What comes after in a canvas."""
    return results


@shared_task
def note_error(request: Any, error: Exception, traceback: Any, key: str) -> None:
    """What is called if a canvas fails."""
    note(key, "error", says=str(error))


@shared_task
def append(result: Any, more: Any) -> list[Any]:
    """What comes next in a chain."""
    return [result, more]


@shared_task
def publish_canvas(key: str, task_id: str) -> None:
    """Publish a canvas whose only member has an id that somebody has chosen."""
    group([late.si(key).set(task_id=task_id)]).apply_async()


# The version before this one, which tests/upgrades runs, knows none of these.
if hasattr(django_redislock, "Rate"):
    from django_redislock import Rate

    # The newest call wins.
    REPLACING = {"on_conflict": "replace", "acks_late": True, "ttl": 6}
    newest_wins_late = working("newest_wins_late", replace_within=20, **REPLACING)

    @single_instance_task(
        key="{key}",
        replace_within=1,
        autoretry_for=(LockLost,),
        retry_kwargs={"countdown": 0.1},
        **REPLACING,
    )
    def newest_wins(key: str, *, hold: bool = False, looks: bool = False) -> str:
        """Hold the lock until told; with *looks*, until a newer call comes."""
        if looks:
            note(key, "start")
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                current_lease().ensure_held()
                time.sleep(0.01)
        return work(key, hold=hold)

    @single_instance_task(
        limits=[Rate("{key}", lambda rate: rate)], on_conflict="retry", acks_late=True
    )
    def rated(key: str, rate: str = "20/s", **how: Any) -> str:
        """Start as often as the rate says; come back when a start is due."""
        return work(key, **how)

    def debounced_body(key, what, hold=False):
        """Note what it was called with."""
        note(key, "what", what=what)
        return work(key, hold=hold)

    # Run once, a while after the last of many calls; the second is soon taken for lost.
    debounced = working(
        "debounced", debounce=1, debounce_max=3, acks_late=True, body=debounced_body
    )
    debounced_briefly = working(
        "debounced_briefly", debounce=0.2, queued_ttl=1, body=debounced_body
    )
